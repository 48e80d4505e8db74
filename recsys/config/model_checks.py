"""Checks of a model's section against features and tables."""

from collections.abc import Iterable, Sequence

from recsys.config.choices import FeatureType, IdMappingType, Interaction
from recsys.config.schema import Config, DLRMConfig, TwoTowerConfig
from recsys.errors import UserError, nearest

_WIDEST = 2**24  # of a layer


def one_of(key: str, name: str, allowed: Iterable[str], what: str) -> None:
    """Raise a UserError unless `name`, given by config key `key`, is among `allowed`."""
    allowed = list(allowed)
    if name not in allowed:
        raise UserError(
            f"config key '{key}': there is no {what} '{name}'{nearest(name, allowed)} (known: {', '.join(allowed)})"
        )


def check_dlrm(config: Config, model: DLRMConfig) -> None:
    """Refuse a DLRM that does not fit to the features and tables."""
    if config.data.items is not None:
        raise UserError("config key 'data.items': model dlrm ranks rows, and reads no item corpus; remove it")
    if len(config.features) == 1 and model.interaction is Interaction.dot:
        raise UserError(
            "model dlrm with interaction=dot needs two features to take dot products of; add a feature, or set "
            "model.interaction=dot_and_embeddings"
        )
    if config.data.label_column is None:
        raise UserError("config key 'data.label_column' is not set, and model dlrm needs a column with 0 or 1")
    if not 0 <= model.embedding_dropout < 1:
        found = model.embedding_dropout
        raise UserError(f"config key 'model.embedding_dropout' must be from 0 to below 1, found {found}")
    widths = {name: getattr(model, name) for name in ("bottom_mlp", "top_mlp", "attention_mlp")}
    _check_layers(model.dropout, embedding_dim=[1 if model.embedding_dim is None else model.embedding_dim], **widths)
    for name, query in model.attention.items():
        _check_attention(config, model, name, query)
    dims = {table: config.tables[table].embedding_dim for table in sorted(config.unpooled_tables())}
    if len(set(dims.values())) > 1:
        shown = ", ".join(f"tables.{table} with {dim}" for table, dim in dims.items())
        raise UserError(
            f"config key 'model.attention': its features' tables must have one embedding_dim, found {shown}"
        )


def _check_attention(config: Config, model: DLRMConfig, name: str, query: str) -> None:
    ids = [each for each, feature in config.features.items() if feature.type is FeatureType.id]
    one_of("model.attention", name, ids, "id feature")
    one_of(f"model.attention.{name}", query, ids, "id feature")
    if query in model.attention:
        raise UserError(
            f"config key 'model.attention.{name}': the rows of '{query}' are weighted themselves; name a feature that "
            f"has one vector a row"
        )
    own, other = (config.tables[config.features[each].table or ""].embedding_dim for each in (name, query))
    if own != other:
        raise UserError(
            f"config key 'model.attention.{name}': its table has embedding_dim {own}, and that of '{query}' {other}; "
            f"they are compared element by element, so make them equal"
        )


def check_two_tower(config: Config, model: TwoTowerConfig) -> None:
    """Refuse towers that do not fit to the features and tables."""
    for key in ("user_features", "item_features"):
        names = getattr(model, key)
        if not names:
            raise UserError(f"config key 'model.{key}' is empty, and needs at least one feature")
        for name in names:
            one_of(f"model.{key}", name, config.features, "feature")
            if names.count(name) > 1:
                raise UserError(f"config key 'model.{key}' names '{name}' twice; name each feature once")
    one_of("model.item_id", model.item_id, model.item_features, "item feature")
    both = set(model.user_features) & set(model.item_features)
    if both:
        raise UserError(
            f"feature '{min(both)}' stands in model.user_features and model.item_features; keep one of them"
        )
    unused = set(config.features) - set(model.user_features) - set(model.item_features)
    if unused:
        raise UserError(
            f"feature '{min(unused)}' is in neither model.user_features nor model.item_features; add it there, or "
            f"remove features.{min(unused)}"
        )
    if config.features[model.item_id].type is not FeatureType.id:
        raise UserError(f"config key 'model.item_id': feature '{model.item_id}' must be of type id")
    table = config.tables[config.features[model.item_id].table or ""]
    if table.num_hashes > 1 or table.mapping is IdMappingType.quotient_remainder:
        raise UserError(
            f"config key 'model.item_id': table '{config.features[model.item_id].table}' gives an id several rows, and "
            f"items are told apart by one; use mapping: hash with num_hashes=1, vocabulary or identity"
        )
    if not 0 < model.temperature < 1e30:
        raise UserError(f"config key 'model.temperature' must be above 0 and below 1e30, found {model.temperature}")
    if not model.top_k or not all(1 <= k < 2**31 for k in model.top_k):
        raise UserError(f"config key 'model.top_k' needs numbers from 1 to 2147483647, found {model.top_k}")
    if (config.data.valid or config.data.test) and not config.data.items:
        raise UserError(
            "config key 'data.items' is not set, and data.valid and data.test are evaluated over a file of all items"
        )
    if config.data.label_column is not None:
        raise UserError(
            "config key 'data.label_column': model two_tower takes every row for a positive and reads no label; keep "
            "the positive rows in data.train, and set data.label_column=null"
        )
    _check_layers(model.dropout, user_mlp=model.user_mlp, item_mlp=model.item_mlp, output_dim=[model.output_dim])


def _check_layers(dropout: float, **widths: Sequence[int]) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"config key 'model.dropout' must be from 0 to below 1, found {dropout}")
    for key, values in widths.items():
        wrong = [value for value in values if not 1 <= value <= _WIDEST]
        if wrong:
            bound = "at least 1" if wrong[0] < 1 else f"at most {_WIDEST}"
            raise UserError(f"config key 'model.{key}' must be {bound}, found {wrong[0]}")
