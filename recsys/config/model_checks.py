"""Checks of section `model`, of what the model says it needs, and of the data that it reads."""

from recsys.config.choices import FeatureType, IdMappingType
from recsys.config.features import id_features
from recsys.config.model import Needs
from recsys.config.schema import Config, TableConfig
from recsys.errors import UserError, nearest


def check_model(config: Config) -> None:
    """Refuse data that the model does not read, or lacks, and a section that the model itself refuses."""
    model, needs = config.model, config.model.needs()
    model.check(config)
    _check_needs(config, needs)
    if needs.item_id is None and config.data.items is not None:
        raise UserError(f"config key 'data.items': model {model.name} scores rows and reads no items; remove it")
    if config.data.labels and config.data.label_column is not None:
        raise UserError("config keys 'data.labels' and 'data.label_column' exclude each other; keep data.labels")
    if needs.labels and not config.labels():
        raise UserError(
            f"config key 'data.label_column' is not set, and model {model.name} needs a column with 0 or 1 "
            f"(or data.labels, for several)"
        )
    for name, label in config.data.labels.items():
        if label.column is not None and label.expression is not None:
            raise UserError(f"config key 'data.labels.{name}' has a column and an expression; keep one of them")
    if needs.labels and not any(label.weight for label in config.labels().values()):
        raise UserError("config key 'data.labels': every weight is 0, so that nothing is learned; set one above 0")
    if not needs.labels and config.labels():
        key = "labels" if config.data.labels else "label_column"
        raise UserError(
            f"config key 'data.{key}': model {model.name} treats every row as a positive and reads no label; "
            f"keep only positive rows in data.train, and drop data.{key}"
        )
    if config.data.keep_negatives is not None and not any(x.loss.is_binary for x in config.labels().values()):
        raise UserError(
            "config key 'data.keep_negatives' needs a label with loss: binary, and there is none; remove it"
        )
    if needs.item_id is not None:
        _check_item_id(config, needs.item_id)


def _check_needs(config: Config, needs: Needs) -> None:
    """Refuse needs that name no feature, or lack what they require; models of recsys check most by their own keys."""
    ids, model = id_features(config), f"config key 'model': {config.model.name}"
    for what, names, features in (
        ("a vector for each id of", needs.sequences, ids),
        ("of items", needs.item_features, list(config.features)),
        ("in training alone", needs.training_features, list(config.features)),
        ("the shares of the ids of", [needs.log_shares_of or ids[0]], ids),
    ):
        for name in (name for name in names if name not in features):
            kind = "id feature" if features is ids else "feature"
            raise UserError(
                f"{model} reads {what} feature '{name}', and no {kind} has that name{nearest(name, features)} (there "
                f"are: {', '.join(features)})"
            )
    if needs.item_id is not None and needs.item_id not in needs.item_features:
        found = ", ".join(needs.item_features) or "none"
        raise UserError(
            f"{model} identifies items by '{needs.item_id}', which is not one of its item features; add it to "
            f"Needs.item_features (there are: {found})"
        )
    for name in filter(None, (needs.item_id, *needs.sequences, *needs.training_features)):
        if config.features[name].hidden is not None:
            raise UserError(
                f"config key 'features.{name}.hidden': {config.model.name} needs the ids of '{name}' in all data; "
                f"remove it"
            )
    if needs.sampled_items and needs.item_id is None:
        raise UserError(f"{model} samples items, but names no feature that identifies them; add Needs.item_id")
    if needs.sampled_items and not config.data.items:
        raise UserError(f"config key 'data.items' is not set, but model {config.model.name} samples items from it")
    if needs.sampling_power and needs.log_shares_of != needs.item_id:
        raise UserError(
            f"{model} samples items by the counts that Needs.log_shares_of names; set it to Needs.item_id, "
            f"'{needs.item_id}', found {needs.log_shares_of!r}"
        )


def _check_item_id(config: Config, item_id: str) -> None:
    feature = config.features[item_id]
    if feature.type is not FeatureType.id:
        raise UserError(f"config key 'model.item_id': feature '{item_id}' must be of type id")
    table = config.tables[feature.table or ""]
    if gives_several_rows(table):
        raise UserError(
            f"config key 'model.item_id': table '{feature.table}' gives an id several rows, but each item "
            f"needs its own row; use mapping: hash with num_hashes=1, vocabulary or identity"
        )
    if (config.data.valid or config.data.test) and not config.data.items:
        raise UserError(
            "config key 'data.items' is not set, but evaluation of data.valid and data.test ranks a file of all items"
        )


def gives_several_rows(table: TableConfig) -> bool:
    """Return whether an id has several rows of the table."""
    return table.num_hashes > 1 or table.mapping is IdMappingType.quotient_remainder
