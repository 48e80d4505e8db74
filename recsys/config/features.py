"""Features of a config by type, in the order of batches, and the rows of a batch on a rank."""

from collections.abc import Container

from recsys.config.choices import FeatureType, Pooling, RowCode
from recsys.config.schema import Config, TableConfig


def id_features(config: Config) -> list[str]:
    """Return the names of the id features, in the order of the KeyedJaggedTensor's keys."""
    return [name for name, feature in config.features.items() if feature.type is FeatureType.id]


def features_by_table(config: Config) -> dict[str, list[str]]:
    """Return for each table the id features that name it, in the order of `id_features`."""
    names: dict[str, list[str]] = {table: [] for table in config.tables}
    for feature in id_features(config):
        names[config.features[feature].table or ""].append(feature)
    return names


def model_features(config: Config) -> list[str]:
    """Return the names of the id features that a model reads: all but those of further experts."""
    return [name for name in id_features(config) if config.features[name].expert_of is None]


def table_of_feature(config: Config, feature: str) -> TableConfig:
    """Return the table of an id feature of a checked config."""
    return config.tables[config.features[feature].table or ""]


def dims_of(config: Config) -> dict[str, int]:
    """Return the embedding_dim of each id feature's table."""
    return {name: table_of_feature(config, name).embedding_dim for name in id_features(config)}


def with_experts(config: Config, names: Container[str]) -> list[str]:
    """Return the features in `names`, each with those of its further experts, in the order of the config."""
    return [name for name, feature in config.features.items() if (feature.expert_of or name) in names]


def float_features(config: Config) -> list[str]:
    """Return the names of the float features, in the order of their columns in a batch: vectors come last."""
    floats = {name: feature for name, feature in config.features.items() if feature.type is FeatureType.float}
    return sorted(floats, key=lambda name: floats[name].dim is not None)


def float_columns(config: Config) -> list[str]:
    """Return the feature of each column of a batch's floats; a vector has `dim` columns."""
    return [name for name in float_features(config) for _ in range(config.features[name].dim or 1)]


def has_weighted_ids(config: Config) -> bool:
    """Return whether ids of any feature have weights; those of all features then do, since they travel together."""
    return any(feature.weights is not None for feature in config.features.values())


def sampled_rows(config: Config, world_size: int) -> int:
    """Return the number of rows with drawn items in the batch of a rank."""
    return -(-config.model.needs().sampled_items // world_size)


def rank_rows(config: Config, world_size: int) -> int:
    """Return the number of rows in the batch of a rank in training, including drawn items."""
    return -(-config.train.global_batch_size // world_size) + sampled_rows(config, world_size)


def evaluated_rows(config: Config, world_size: int, rows: int) -> int:
    """Return the number of rows in the batch of a rank in evaluation; `rows`: the number in training (`rank_rows`)."""
    if config.train.eval_batch_size is not None:
        return -(-config.train.eval_batch_size // world_size)
    return max(1, rows - sampled_rows(config, world_size))


def quantized_features(config: Config) -> dict[str, RowCode]:
    """Return the code of each id feature whose table is quantised."""
    codes = {name: table_of_feature(config, name).quantize for name in id_features(config)}
    return {name: code for name, code in codes.items() if code is not None}


def averaged_features(config: Config) -> dict[str, list[str]]:
    """Return, for each id feature with mean pooling, the features that the mean is over: itself and its experts."""
    return {
        name: with_experts(config, [config.features[name].expert_of or name])
        for name in id_features(config)
        if table_of_feature(config, name).pooling is Pooling.mean
    }
