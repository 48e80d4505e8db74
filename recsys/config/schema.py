"""Dataclasses of a config file: every key with its type, default and meaning.

Features and tables are mappings by name: `tables.item.embedding_dim=32`. `C{1..26}` names 26 at once (`ranges`).
Names are letters and digits of any script, `_` and `-` (`names`), since files, modules and tensors are called by them.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recsys.config.bounds import LARGE, bounded
from recsys.config.choices import (
    Autocast,
    ComputeKernel,
    DataType,
    DenseOptimizer,
    DenseSharding,
    Device,
    FeatureType,
    FloatType,
    IdMappingType,
    Keep,
    NullPolicy,
    Pooling,
    RowCode,
    Schedule,
    ShardingChoice,
    StateType,
)
from recsys.config.data import DataConfig, LabelConfig
from recsys.config.experts import ExpertsConfig, experts_by_id
from recsys.config.initial import InitConfig
from recsys.config.serving import DistillConfig, PublishConfig, SparsityConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.config.topology import MemoryConfig, TopologyConfig
from recsys.config.track import TrackConfig


@dataclass
class RunConfig:
    """Section `run`: where a run writes, whether it resumes or replaces another, and what it runs on."""

    name: str | None = None  # letters, digits, _, - and .; default: the stem of the config file
    dir: str | None = None  # folder of the run; default: runs/NAME-TIME
    resume: bool = False  # continue from the newest checkpoint in run.dir, or start if there is none
    overwrite: bool = False  # replace an earlier run in run.dir
    stop_file: str | None = None  # when this file exists, save a checkpoint and end, as on SIGTERM
    plan: str | None = None  # sharding plan to use, RUN/plan.json of an earlier run; default: the planner makes one
    device: Device = Device.auto
    # OpenMP threads of a rank. Default: 1 with a GPU, else its share of the cores, less one if it has more than two.
    num_threads: int | None = bounded(None, 1, 1024)
    profile_steps: int = bounded(0, 0, 10_000)  # trace this many steps, from the 13th on, to RUN/profile/rank_K.json
    # Seconds without progress (other commands: an answer) of a rank until it is named and all end; not with --debug.
    stuck_after_s: float = bounded(600, 2, 1e8)
    track: TrackConfig = field(default_factory=TrackConfig)


@dataclass
class FeatureConfig:
    """A feature: one input column. An `id` feature names the table that holds its vectors."""

    type: FeatureType = FeatureType.id
    column: str | None = None  # default: the name of the feature; device.os is a field of a struct
    # Instead of a column: an id for each combination of the ids in these columns, such as [user_country, item_id].
    cross: list[str] | None = None
    # `id`: what stands between the ids in a text, such as "|" in Action|Comedy, which becomes a list of ids. Empty ids,
    # and spaces around ids, are left out. An id is a text too, even 12 in "7|12", unless integers is true.
    separator: str | None = None
    # With separator: the ids in the texts are integers of 64 bits, as in a column of integers that has the same table.
    integers: bool = False
    table: str | None = None  # `id`: the table with its vectors, which features may share
    max_length: int | None = bounded(None, 1)  # `id`: longer lists are cut to this many ids, nulls included
    keep: Keep = Keep.last  # which end of a longer list is kept
    weights: str | None = None  # column with a weight for each id: a list of numbers as long as the list of ids
    boundaries: list[float] | None = None  # the column holds numbers; the id is how many of these are <= the number
    dim: int | None = bounded(None, 1, 2**16)  # `float`: each row is a list of this many numbers, such as a text vector
    nulls: NullPolicy = NullPolicy.reserved  # what a null id or number becomes
    # `id` that is not known when rows are scored, such as the position at which an item was shown: it is null in this
    # share of the rows of data.train, drawn in each epoch, and in all rows of other data, which need no column for it.
    hidden: float | None = bounded(None, 1e-6, below=1)
    fill: float = bounded(0.0, -LARGE, LARGE)  # value of a null float, before clip, log1p and standardise
    clip: list[float | None] | None = None  # `float`: [least, greatest], null: no bound; before log1p, standardise
    log1p: bool = False  # `float`: log(1 + x)
    standardise: bool = False  # `float`: (x - mean) / standard deviation, both of data.train
    # Not a key: the feature that this one was added for, to look its ids up in a further expert.
    expert_of: str | None = field(default=None, metadata={"omegaconf_ignore": True})


@dataclass
class TableOptimizerConfig:
    """Optimizer of tables. In the backward pass it updates only the rows that a batch touches (l2_all_rows: all rows).

    The loss is the mean over the global batch, few rows of which touch a given row of a table. So the steps of sgd
    shrink as train.global_batch_size grows: multiply a rate for one row at a time by it (0.02 becomes 20 for batches of
    1,000). The other optimizers divide by the size of past gradients, and need no such factor.
    """

    name: TableOptimizer = TableOptimizer.rowwise_adagrad
    learning_rate: float = bounded(0.05, 0, LARGE)  # with sgd, raise it as train.global_batch_size grows, see above
    eps: float = bounded(1e-8, 1e-30, LARGE)  # all but sgd; with 0, a row without gradient would step by 0 / 0
    l1: float = bounded(0.0, 0, LARGE)  # `ftrl`: elements whose gradients add up to no more than this are exactly 0
    beta1: float = bounded(0.9, 0, below=1)  # adam and lamb, also row-wise: decay of the first moment
    beta2: float = bounded(0.999, 0, below=1)  # adam and lamb, also row-wise: decay of the second moment
    weight_decay: float = bounded(0.0, 0, LARGE)  # GPUs, all but sgd, adagrad and ftrl; times the rate, as in AdamW
    state_dtype: StateType = StateType.FP32  # `BF16`: for the first moment of partial_rowwise_adam
    allow_column_split: bool = False  # allow row-wise optimizers on column splits; what is learned depends on the plan


@dataclass
class DenseOptimizerConfig:
    """Optimizer of the dense part. Weight decay and clipping cover the dense part only; tables are never clipped."""

    name: DenseOptimizer = DenseOptimizer.adam
    learning_rate: float = bounded(1e-3, 0, LARGE)  # times the factor of the schedule
    momentum: float = bounded(0.0, 0, 1)  # of `sgd`
    # Of adamw, adafactor and lamb: times the rate, subtracted from the weights. Of the others: added to the gradient.
    weight_decay: float = bounded(0.0, 0, LARGE)
    clip_norm: float | None = bounded(None, 1e-30, LARGE)  # greatest norm that all its gradients together may have


@dataclass
class TableConfig:
    """A table: embeddings shared by all features that name it."""

    num_embeddings: int = MISSING  # rows; for a vocabulary the most it may have, fewer if the data have fewer ids
    embedding_dim: int = MISSING  # width of a row, a multiple of 4
    # Width to which a matrix of the dense part brings the vectors for the model; default: embedding_dim.
    projected_dim: int | None = bounded(None, 1, 2**16)
    data_type: DataType = DataType.FP32
    pooling: Pooling = Pooling.sum
    # The model reads vectors as rounded by this code, in training too (gradients pass through). The weights themselves
    # are not rounded; `recsys export` writes the codes.
    quantize: RowCode | None = None
    mapping: IdMappingType = IdMappingType.hash
    hash_seed: int = bounded(0, 0)  # with another seed, other ids share a row
    # `hash`: an id has this many rows, each by a hash of its own; its vector is their sum (pooling mean: their mean).
    num_hashes: int = bounded(1, 1, 16)
    num_ids: int | None = bounded(None, 1, 2**62)  # `quotient_remainder`: how many ids are told apart
    min_count: int = bounded(1, 1)  # `vocabulary`: rarer ids get no row of their own
    num_buckets: int = 1  # `vocabulary`: rows that ids without a row of their own share, by hash
    # All but `vocabulary`: Parquet file of `recsys compress` with the rows that were not pruned. num_embeddings counts
    # these, and one that the pruned rows share.
    kept_rows: str | None = None
    vocabulary: str | None = None  # `vocabulary`: Parquet file with ids in `id`, as RUN/vocabulary/TABLE.parquet
    init_range: float | None = bounded(None, 0, 65504)  # weights start within ± this; default 1/sqrt(num_embeddings)
    # Adds to the loss: l2 / 2 times the squared length of each vector that the table gives (of a pooled list, its sum),
    # as the weighted mean over rows; sasrec, simplex and ultragcn divide the sum by the number of items to be found.
    # Exact on every device and plan, unlike weight_decay. Logged losses leave it out.
    l2: float = bounded(0.0, 0, LARGE)
    # Adds to the loss: l2_all_rows / 2 times the sum of squares of the whole table, looked up or not, as in recipes for
    # small data. Every rank holds such a table, and each step rewrites it. Logged losses leave it out.
    l2_all_rows: float = bounded(0.0, 0, LARGE)
    sparsity: SparsityConfig | None = None
    sharding_type: ShardingChoice = ShardingChoice.auto
    compute_kernel: ComputeKernel = ComputeKernel.fused
    cache_load_factor: float = bounded(0.2, 1e-6, 1)  # `fused_uvm_caching`: share of the rows in the cache
    stochastic_rounding: bool = False  # FP16, on GPUs: round at random; the draws depend on the plan
    optimizer: TableOptimizerConfig | None = None  # default: optimizer.tables
    experts: ExpertsConfig | None = None

    @property
    def model_dim(self) -> int:
        """Width of the vectors that the model reads."""
        return self.embedding_dim if self.projected_dim is None else self.projected_dim


@dataclass
class ScheduleConfig:
    """Schedule of the learning rate: a factor for each step, which both optimizers use."""

    name: Schedule = Schedule.constant
    warmup_steps: int = bounded(0, 0)  # steps in which the rate rises from 0, before the schedule
    final_factor: float = bounded(0.0, 0, LARGE)  # `linear` and `cosine`: factor at the last step
    plateau_factor: float = bounded(0.5, 0, 1)  # `plateau`: what the rate is multiplied by
    plateau_patience: int = bounded(1, 1)  # `plateau`: evaluations without improvement before that


@dataclass
class OptimizerConfig:
    """Both optimizers and their schedule."""

    tables: TableOptimizerConfig = field(default_factory=TableOptimizerConfig)
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class PrecisionConfig:
    """Section `precision`: number types of the dense part and of exchanged vectors; tables have a data_type."""

    autocast: Autocast = Autocast.none
    # `fp16`: factor of the mean loss in the backward pass of the dense part; gradients are divided by it before they
    # reach an optimizer or table. If a gradient overflows, the step is skipped and the factor halved, down to 1.
    loss_scale: float = bounded(4096.0, 1, 2.0**24)
    loss_scale_growth_steps: int | None = bounded(2000, 1)  # double it after so many good steps; `null`: never
    dense_int8: bool = False  # evaluate, predict and export linear layers in INT8; training does not change
    output_dtype: FloatType = FloatType.FP32  # type of the vectors of tables and of their gradients; no BF16 on CPU
    forward_wire: FloatType = FloatType.FP32  # type of vectors sent between ranks
    backward_wire: FloatType = FloatType.FP32  # type of gradients sent between ranks
    tf32: bool = False  # GPUs: multiply FP32 matrices with 10 bits of mantissa


@dataclass
class EarlyStopConfig:
    """Early stopping: end when a metric of data.valid stops improving, and evaluate data.test at its best step."""

    metric: str | None = None  # such as auc or recall@20; `null`: train to the end
    patience: int = bounded(3, 1)  # evaluations without improvement before training ends


@dataclass
class TrainConfig:
    """Section `train`: how long to train, in what batches, and what to evaluate and save on the way."""

    global_batch_size: int = bounded(1024, 1, 2**31)  # rows of a step, over all ranks
    micro_batch_size: int | None = bounded(None, 1)  # rows that a rank computes at a time; default: all of its rows
    # Most ids in the lists of a micro-batch, which has fewer rows if their lists are long.
    micro_batch_ids: int | None = bounded(None, 1)
    eval_batch_size: int | None = bounded(None, 1, 2**31)  # rows of a step of evaluation; default: global_batch_size
    epochs: int = bounded(1, 1)  # passes over data.train
    max_steps: int | None = bounded(None, 1)  # end after this many steps, if the epochs have more
    # Skip up to so many steps whose loss or gradient is not finite, instead of failing.
    max_bad_steps: int = bounded(0, 0)
    check_every_step: bool = True  # `false`: check a step later whether it was finite; if not, it still changes nothing
    eval_every_steps: int | None = bounded(None, 1)  # steps between evaluations; default: only at the end
    eval_every_epochs: int | None = bounded(None, 1)  # instead of steps: epochs between evaluations
    log_every_steps: int = bounded(50, 1)  # steps between lines of the log and of metrics.jsonl
    checkpoint_every_steps: int | None = bounded(None, 1)  # steps between checkpoints; default: only at the end
    keep_checkpoints: int = bounded(2, 1)  # keep this many, the newest; older ones are removed
    async_checkpoints: bool = False  # copy the state to host memory, and write it while training continues
    activation_checkpointing: bool = False  # recompute the layers of an MLP in the backward pass, not keep them
    activation_offload: bool = False  # GPUs: keep activations in host memory from the forward to the backward pass
    dense_sharding: DenseSharding = DenseSharding.none  # what of the dense part ranks share; the same is learned
    compile: bool = False  # run the dense part by torch.compile; on CPU it needs a C++ compiler
    init_from: str | None = None  # run directory or checkpoint whose weights and optimizer state to start from
    init: InitConfig = field(default_factory=InitConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)
    distill: DistillConfig | None = None
    publish: PublishConfig = field(default_factory=PublishConfig)

    @property
    def in_micro_batches(self) -> bool:
        """Whether the dense part may be computed for some rows at a time."""
        return self.micro_batch_size is not None or self.micro_batch_ids is not None


@dataclass
class Config:
    """The whole config.

    Attributes:
        model: a ModelConfig, the `Config` of the class that `model.name` selects.
    """

    model: Any = MISSING  # its name, and the keys of that model
    features: dict[str, FeatureConfig] = MISSING  # by name, which is also the column unless `column` is set
    tables: dict[str, TableConfig] = MISSING  # by name
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    seed: int = bounded(1, 0)  # seed of the order of rows, of the first weights and of all that is drawn
    debug: bool = False  # set by --debug
    # Not a key: all values as given, with references to other keys and the environment, and with these filled in.
    given: tuple[Any, Any] = field(default=(None, None), compare=False, repr=False, metadata={"omegaconf_ignore": True})

    def labels(self) -> dict[str, LabelConfig]:
        """Return the labels by name, in the order of a batch's columns."""
        column = self.data.label_column
        return self.data.labels or ({} if column is None else {"label": LabelConfig(column)})

    def taught_columns(self) -> dict[str, str]:
        """Return, by label, the column of data.train with the score of the teacher; empty without a teacher."""
        distill, labels = self.train.distill, self.labels()
        if distill is None:
            return {}
        return {name: f"{distill.column}_{name}" if len(labels) > 1 else distill.column for name in labels}

    def unpooled_features(self) -> list[str]:
        """Return the id features of which the model reads a vector for each id of a list, not one for the list."""
        return list(self.model.needs().sequences)

    def unpooled_tables(self) -> set[str]:
        """Return the tables of these features; torchrec then gives a vector for each id of their other features too.

        They include tables whose vectors are quantised, which happens before vectors are summed, and experts.
        """
        quantized = {name for name, table in self.tables.items() if table.quantize is not None}
        return {self.features[f].table or "" for f in self.unpooled_features()} | quantized | experts_by_id(self)

    def table_optimizer(self, table: str) -> TableOptimizerConfig:
        """Return the optimizer of a table: its own, or that of all."""
        return self.tables[table].optimizer or self.optimizer.tables

    def updated_in_torch(self, table: str) -> bool:
        """Return whether a table is updated by rules in torch even if FBGEMM has kernels."""
        return self.table_optimizer(table).name.value.path is None or self.tables[table].sparsity is not None

    def table_optimizer_key(self, table: str) -> str:
        """Return the key of the section that `table_optimizer` returns."""
        return f"tables.{table}.optimizer" if self.tables[table].optimizer else "optimizer.tables"
