"""Feature names of a config by type, in the order of batches."""

from collections.abc import Container

from recsys.config.choices import FeatureType, Pooling, RowCode
from recsys.config.schema import Config


def id_features(config: Config) -> list[str]:
    """Return the names of the id features, in the order of the KeyedJaggedTensor's keys."""
    return [name for name, feature in config.features.items() if feature.type is FeatureType.id]


def model_features(config: Config) -> list[str]:
    """Return the names of the id features that a model reads: without those of further experts."""
    return [name for name in id_features(config) if config.features[name].expert_of is None]


def dims_of(config: Config) -> dict[str, int]:
    """Return by id feature the dimension of its table."""
    return {name: config.tables[config.features[name].table or ""].embedding_dim for name in id_features(config)}


def with_experts(config: Config, names: Container[str]) -> list[str]:
    """Return those of all features that are named, each with those of its further experts."""
    return [name for name, feature in config.features.items() if (feature.expert_of or name) in names]


def float_features(config: Config) -> list[str]:
    """Return the names of the float features, in the order of their columns in a batch: those of vectors come last."""
    floats = {name: feature for name, feature in config.features.items() if feature.type is FeatureType.float}
    return sorted(floats, key=lambda name: floats[name].dim is not None)


def float_columns(config: Config) -> list[str]:
    """Return for each column of a batch's floats the name of its feature; a vector has as many as its `dim`."""
    return [name for name in float_features(config) for _ in range(config.features[name].dim or 1)]


def sampled_rows(config: Config, world_size: int) -> int:
    """Return how many rows of a rank's batch are for items that are drawn."""
    return -(-config.model.needs().sampled_items // world_size)


def rank_rows(config: Config, world_size: int) -> int:
    """Return how many rows a rank's batch of data.train has, with those for items that are drawn."""
    return -(-config.train.global_batch_size // world_size) + sampled_rows(config, world_size)


def evaluated_rows(config: Config, world_size: int, rows: int) -> int:
    """Return how many rows a rank's batch of an evaluation has, where one of training has `rows`, as of `rank_rows`."""
    if config.train.eval_batch_size is not None:
        return -(-config.train.eval_batch_size // world_size)
    return max(1, rows - sampled_rows(config, world_size))


def quantized_features(config: Config) -> dict[str, RowCode]:
    """Return the code of the vectors of each id feature whose table has one."""
    codes = {name: config.tables[config.features[name].table or ""].quantize for name in id_features(config)}
    return {name: code for name, code in codes.items() if code is not None}


def averaged_features(config: Config) -> dict[str, list[str]]:
    """Return by id feature whose rows are averaged the features whose rows count: itself, with its experts."""
    return {
        name: with_experts(config, [config.features[name].expert_of or name])
        for name in id_features(config)
        if config.tables[config.features[name].table or ""].pooling is Pooling.mean
    }
