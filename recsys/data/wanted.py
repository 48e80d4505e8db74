"""What the config and its model need from each dataset: columns, and how they become labels and numbers."""

from contextlib import AbstractContextManager, nullcontext

import pyarrow as pa

from recsys.config import Config, FeatureConfig, NullPolicy
from recsys.config.choices import LabelNulls
from recsys.config.features import float_features, with_experts
from recsys.data.conditions import KEY as FILTER_KEY
from recsys.data.conditions import Condition
from recsys.data.facts import Facts
from recsys.data.figures import FloatFacts
from recsys.data.filters import parse_filter
from recsys.data.made import Made
from recsys.data.spec import FloatColumn, Hidden, Transform
from recsys.errors import in_words
from recsys.runtime.counter_random import make_key

# Datasets of a retrieval model that hold users without items; for `queries`, only the users' vectors are computed.
_OF_USERS = ("valid", "test", "users", "queries")


def role_features(config: Config, role: str) -> list[str]:
    """Return the features that batches of this role have; the others stay empty in them."""
    needs = config.model.needs()
    if needs.item_id is not None and role == "items":
        return with_experts(config, needs.item_features)
    features = [name for name in config.features if role == "train" or name not in needs.training_features]
    without_items = _OF_USERS if needs.items_in_rows else (*_OF_USERS, "train")
    if needs.item_id is not None and role in without_items:
        items = with_experts(config, needs.item_features)
        return [name for name in features if name not in items]
    return features


def read_features(config: Config, role: str) -> list[str]:
    """Return the `role_features` whose columns are read: hidden ones are null in all data but data.train."""
    return [name for name in role_features(config, role) if role == "train" or config.features[name].hidden is None]


def hidden_rows(config: Config, feature: str) -> Hidden | None:
    """Return which rows of data.train have null in place of a feature, if it is hidden."""
    settings = config.features[feature]
    if settings.hidden is None:
        return None
    return Hidden(settings.hidden, make_key(config.seed, "hidden", settings.expert_of or feature))


def role_lists(config: Config, role: str) -> dict[str, tuple[str, str]]:
    """Return the lists of corpus positions that evaluation needs, as name → (column, config key)."""
    item_id = config.model.needs().item_id
    if item_id is None or role == "queries":
        return {}
    if role == "items":
        return {"position": (column_of(config, item_id), f"features.{item_id}.column")}
    columns = {"targets": None if role == "users" else config.data.targets_column, "seen": config.data.seen_column}
    if role == "users":
        columns["candidates"] = config.data.candidates_column
    named = columns.items() if role in _OF_USERS else ()
    # Where a feature splits the texts of the same column, they are lists here too.
    split = {columns_of(config, name)[0]: column_of(config, name) for name in with_separators(config, role)}
    return {name: (split.get(column, column), f"data.{name}_column") for name, column in named if column is not None}


def has_labels(config: Config, role: str) -> bool:
    """Return whether batches of this role have labels and weights (only weights if the config has no labels)."""
    return role == "train" or (config.model.needs().labels and role in ("valid", "test"))


def columns_of(config: Config, feature: str) -> list[str]:
    """Return the columns of the data that a feature is read from: one, or those of its cross."""
    settings = config.features[feature]
    return list(settings.cross) if settings.cross else [settings.column or feature]


def column_of(config: Config, feature: str) -> str:
    """Return the name of a feature's column, or of the one that is made of its columns."""
    name, settings = " × ".join(columns_of(config, feature)), config.features[feature]
    if settings.separator is None:
        return name
    return f"{name} split at {settings.separator}{' into integers' if settings.integers else ''}"


def with_separators(config: Config, role: str) -> list[str]:
    """Return the features of which a dataset of this role has texts that are split into lists."""
    return [name for name in role_features(config, role) if config.features[name].separator is not None]


def item_column(config: Config) -> str:
    """Return the name of the column with item ids in data.items, for a retrieval model."""
    return column_of(config, config.model.needs().item_id or "")


def made_columns(config: Config, role: str) -> dict[str, Made]:
    """Return by name the columns that are made of others in a dataset of this role."""
    features = {name: config.features[name] for name in read_features(config, role)}
    made = {name: feature for name, feature in features.items() if feature.cross or feature.separator is not None}
    return {
        column_of(config, name): Made(tuple(columns_of(config, name)), feature.separator, feature.integers)
        for name, feature in made.items()
    }


def needed_columns(config: Config, role: str) -> dict[str, str]:
    """Return the columns to read from a dataset, each with the config key that asks for it, for messages."""
    needed: dict[str, str] = {}
    keys = {name: f"features.{config.features[name].expert_of or name}" for name in read_features(config, role)}
    for name, key in keys.items():
        needed |= dict.fromkeys(columns_of(config, name), f"config key '{key}'")
    for name, key in keys.items():
        if config.features[name].weights is not None:
            needed[config.features[name].weights or ""] = f"config key '{key}.weights'"
    made = made_columns(config, role)
    lists = role_lists(config, role).values()
    needed |= {column: f"config key '{key}'" for column, key in lists if column not in made}
    if has_labels(config, role):
        for name, label in config.labels().items():
            condition = _condition(config, name)
            columns = [label.column or name] if condition is None else sorted(condition.columns())
            needed |= dict.fromkeys(columns, f"config key '{_label_key(config, name)}'")
        if role == "train":
            needed |= dict.fromkeys(config.taught_columns().values(), "config key 'train.distill.column'")
        if config.data.weight_column is not None:
            needed[config.data.weight_column] = "config key 'data.weight_column'"
    return needed


def float_column(
    name: str, feature: FeatureConfig, column: str | None, facts: Facts | None, finite: bool = True
) -> FloatColumn:
    """Return how a float feature becomes numbers; if `column` is None, all of them are the fill value."""
    known = (facts.floats.get(name) if facts else None) or FloatFacts()
    scale = (known.mean, known.std) if feature.standardise else (None, None)
    clip = None if feature.clip is None else (feature.clip[0], feature.clip[1])
    transform = Transform(clip, feature.log1p, *scale) if clip or feature.log1p or feature.standardise else None
    fill: float | tuple[float, ...] | None = feature.fill
    if feature.nulls is NullPolicy.refuse:
        fill = None
    elif feature.nulls is NullPolicy.mean:
        fill = known.raw_mean
    return FloatColumn(name, column, fill, finite=finite, transform=transform, dim=feature.dim)


def _label_key(config: Config, name: str) -> str:
    return f"data.labels.{name}" if config.data.labels else "data.label_column"


def _condition(config: Config, label: str) -> Condition | None:
    """Return the condition that a label's expression states, or None if it has no expression."""
    text = config.labels()[label].expression
    with _of_label(config, label):
        return None if text is None else parse_filter(text)


def _of_label(config: Config, label: str) -> AbstractContextManager[None]:
    """Let errors of conditions name the label instead of the filter."""
    return in_words({FILTER_KEY: f"config key '{_label_key(config, label)}'"})


def label_column(config: Config, name: str, finite: bool, schema: pa.Schema | None) -> FloatColumn:
    """Return how a label becomes numbers; its expression is bound to the types of `schema`, if given."""
    label, condition = config.labels()[name], _condition(config, name)
    if condition is not None and schema is not None:
        with _of_label(config, name):
            condition = condition.bind(schema)
            condition.mask(schema.empty_table())  # refuses `sampled`, which only a filter may use
    unknown, binary = label.nulls is LabelNulls.unknown, label.loss.is_binary
    column = None if condition else label.column or name
    fill = 0.0 if unknown else None
    key = _label_key(config, name)
    return FloatColumn(key, column, fill, binary=binary, finite=finite, may_be_unknown=unknown, condition=condition)


def taught_columns(config: Config, finite: bool, role: str) -> list[FloatColumn]:
    """Return how a teacher's scores of the labels become numbers; empty without a teacher, or if not for data.train."""
    labels, key = config.labels(), "train.distill.column"
    return [
        FloatColumn(key, column, None, finite=finite, probability=labels[name].loss.is_binary)
        for name, column in (config.taught_columns().items() if role == "train" else ())
    ]


def row_filter(config: Config, role: str) -> str | None:
    """Return the filter that rows of a dataset must match: data.filter and the sampling by data.keep_negatives."""
    given = config.data.filter
    if isinstance(given, dict):
        given = given.get(role)
    elif role == "items":  # a corpus has columns of its own
        given = None
    if role != "train" or config.data.keep_negatives is None:
        return given
    labels = {name: label for name, label in config.labels().items() if label.loss.is_binary}
    positives = [label.expression or f"col({label.column or name!r}) > 0" for name, label in labels.items()]
    # The key is not the seed: a filter that samples by the seed too would then keep all of the rows kept here, or none.
    drawn = f"sampled({config.data.keep_negatives}, {make_key(config.seed, 'keep_negatives')})"
    kept = " or ".join([*(f"({positive})" for positive in positives), drawn])
    return kept if given is None else f"({given}) and ({kept})"


def of_row_filter(config: Config, role: str) -> AbstractContextManager[None]:
    """Let errors of `row_filter` name data.keep_negatives if the filter, or a part of it, comes from that."""
    if role != "train" or config.data.keep_negatives is None:
        return nullcontext()
    given = config.data.filter.get(role) if isinstance(config.data.filter, dict) else config.data.filter
    also = "key 'data.keep_negatives'" if given is None else "keys 'data.filter' and 'data.keep_negatives'"
    return in_words({FILTER_KEY: f"config {also}"})


def with_figures(config: Config) -> list[str]:
    """Return the float features that need figures measured on data.train: mean and deviation."""
    features = ((name, config.features[name]) for name in float_features(config))
    return [name for name, feature in features if feature.standardise or feature.nulls is NullPolicy.mean]
