"""Experts of a table: further tables; the vector of a feature is a gated sum over the vectors in some of them."""

from dataclasses import dataclass, field, replace
from math import comb
from typing import TYPE_CHECKING

from recsys.config.bounds import bounded
from recsys.config.choices import UNPOOLED, Gate, IdMappingType, NullPolicy, Route
from recsys.errors import UserError, nearest

if TYPE_CHECKING:
    from recsys.config.schema import Config, TableConfig

_MOST_CHOICES = 2**16  # of experts by hash


@dataclass
class ExpertsConfig:
    """Section `tables.X.experts`: features of the table get a gated sum over its vectors and those of other tables.

    The id alone decides, when a batch is made, in which tables it is looked up. So the bytes read and sent are
    proportional to `active`. Mixture of experts: Shazeer et al. 2017, arXiv:1701.06538; mixed dimensions: Ginart et al.
    2019, arXiv:1909.11810.
    """

    others: list[str] = field(default_factory=list)  # further tables of the same model width, named by no feature
    by: Route = Route.frequency
    active: int = bounded(1, 1, 16)  # with `by: hash`: number of tables in which an id is looked up
    gate: Gate = Gate.table


def expert_tables(config: "Config", table: str) -> list[str]:
    """Return a table and its further experts, in order; only the table if it has none."""
    experts = config.tables[table].experts
    return [table, *(experts.others if experts else ())]


def experts_with(config: "Config", table: str) -> tuple[ExpertsConfig, list[str]] | None:
    """Return the section that makes a table an expert, and all experts of that section in order; None if none does."""
    for name, settings in config.tables.items():
        if settings.experts is not None and table in (names := expert_tables(config, name)):
            return settings.experts, names
    return None


def experts_by_id(config: "Config") -> set[str]:
    """Return the experts that are looked up id by id; pooled vectors would be sent even for rows without an id."""
    names = {expert for name, table in config.tables.items() if table.experts for expert in expert_tables(config, name)}
    return {name for name in names if config.tables[name].sharding_type in UNPOOLED}


def deciding_tables(config: "Config") -> set[str]:
    """Return the experts whose vocabulary decides which ids they hold; an id that it drops goes to another expert."""
    groups = (
        expert_tables(config, n) for n, t in config.tables.items() if t.experts and t.experts.by is Route.frequency
    )
    return {name for names in groups for name in names[:-1]}


def add_expert_features(config: "Config") -> None:
    """Add, to a checked config, a feature `FEATURE+TABLE` behind each feature for each further expert of its table.

    Under `nulls: reserved`, a null id has a row only in the first expert.
    """
    features = {}
    for name, feature in config.features.items():
        features[name] = feature
        for table in expert_tables(config, feature.table)[1:] if feature.table else ():
            nulls = NullPolicy.empty if feature.nulls is NullPolicy.reserved else feature.nulls
            column = feature.column or (None if feature.cross else name)
            features[f"{name}+{table}"] = replace(feature, column=column, table=table, nulls=nulls, expert_of=name)
    config.features = features


def check_experts(config: "Config") -> None:
    """Raise a UserError if the experts of a table do not fit each other, or the features and the model."""
    owner: dict[str, str] = {}
    for name in config.tables:
        for other in expert_tables(config, name)[1:]:
            key = f"config key 'tables.{name}.experts.others'"
            if other not in config.tables:
                hint = nearest(other, config.tables)
                raise UserError(f"{key}: there is no table '{other}'{hint} (known: {', '.join(config.tables)})")
            is_named = any(feature.table == other for feature in config.features.values())
            if owner.setdefault(other, name) != name or other == name or is_named or config.tables[other].experts:
                raise UserError(
                    f"{key}: table '{other}' is named by a feature, has experts itself, or is an expert elsewhere; "
                    f"an expert belongs to one table only"
                )
    for name, table in config.tables.items():
        if table.experts is not None:
            _check_tables(config, name, table.experts)
            _check_features(config, name, table.experts)


def _check_tables(config: "Config", name: str, experts: ExpertsConfig) -> None:
    key, names = f"config key 'tables.{name}.experts", expert_tables(config, name)
    tables = [config.tables[expert] for expert in names]
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{key}.others' must name other tables, each once, found {experts.others}")
    for expert, table in zip(names, tables, strict=True):
        if table.model_dim != tables[0].model_dim:
            raise UserError(
                f"{key}.others': vectors of tables.{expert} have width {table.model_dim}, but those of tables.{name} "
                f"{tables[0].model_dim}, and both are summed; set tables.{expert}.projected_dim={tables[0].model_dim}"
            )
        if table.pooling is not tables[0].pooling:
            raise UserError(
                f"{key}.others' must have the same pooling, found {table.pooling.name} in tables.{expert}, and "
                f"{tables[0].pooling.name} in tables.{name}; set tables.{expert}.pooling={tables[0].pooling.name}"
            )
    if experts.by is Route.hash:
        _check_mappings(key, names, tables, IdMappingType.hash, "by: hash")
        if experts.active > len(names) or comb(len(names), experts.active) > _MOST_CHOICES:
            raise UserError(
                f"{key}.active' must be at most the number of experts, {len(names)}, and leave {_MOST_CHOICES} choices "
                f"at most, found {experts.active}"
            )
        return
    _check_mappings(key, names[:-1], tables, IdMappingType.vocabulary, "by: frequency, all but the last")
    if experts.active > 1:
        raise UserError(f"{key}.active' must be 1 with by: frequency, found {experts.active}; drop it, or set by: hash")


def _check_mappings(
    key: str, names: list[str], tables: list["TableConfig"], mapping: IdMappingType, where: str
) -> None:
    for expert, table in zip(names, tables, strict=False):
        if table.mapping is not mapping:
            raise UserError(
                f"{key}.by' takes tables with mapping: {mapping.name} ({where}), found {table.mapping.name}; set "
                f"tables.{expert}.mapping={mapping.name}"
            )


def _check_features(config: "Config", name: str, experts: ExpertsConfig) -> None:
    key, needs = f"config key 'tables.{name}.experts", config.model.needs()
    for feature, settings in config.features.items():
        if settings.table != name:
            continue
        if feature in needs.sequences or feature in (needs.item_id, needs.log_shares_of):
            raise UserError(
                f"{key}': model {config.model.name} needs one row for each id of feature '{feature}', but "
                f"experts work with features whose lists are summed; give it a table without experts"
            )
        if experts.gate is Gate.features and not gate_inputs(config, feature):
            raise UserError(
                f"{key}.gate' is learned from other features, but '{feature}' is the only one; use gate: table"
            )


def gate_inputs(config: "Config", feature: str) -> list[str]:
    """Return the id features whose vectors are the input of the gates of a feature: the others on its side."""
    needs = config.model.needs()
    others = (
        name
        for name, settings in config.features.items()
        if settings.table and settings.expert_of is None and name != feature and name not in needs.sequences
    )
    return [name for name in others if (name in needs.item_features) == (feature in needs.item_features)]
