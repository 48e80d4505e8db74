"""The configuration: dataclasses (`schema`), YAML and `key=value` loading (`load`), cross-checks (`checks`).

Nothing here imports torch, so that a mistake in a config is reported before the slow imports.
"""

from recsys.config.choices import (
    Autocast,
    ComputeKernel,
    DataType,
    Device,
    FeatureType,
    IdMappingType,
    Keep,
    NullPolicy,
    Pooling,
    Schedule,
    ShardingChoice,
)
from recsys.config.data import DataConfig, LabelConfig
from recsys.config.idle import idle_settings
from recsys.config.load import config_text, load_config
from recsys.config.model import ModelConfig, Needs
from recsys.config.schema import (
    Config,
    FeatureConfig,
    OptimizerConfig,
    PrecisionConfig,
    TableConfig,
    TableOptimizerConfig,
)
from recsys.config.serving import DistillConfig, PublishConfig, SparsityConfig
from recsys.config.values import as_value
