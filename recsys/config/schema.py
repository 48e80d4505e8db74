"""The dataclasses behind a config file: every key, its type, its default and its meaning.

Features and tables are mappings by name, so that `tables.item.embedding_dim=32` reaches them from the command line.
`C{1..26}` names 26 alike ones at once (`recsys.config.ranges`).
Names are letters and digits of any script, `_` and `-` (`names`), since files, modules and tensors are called by them.
"""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from recsys.config.choices import (
    Autocast,
    ComputeKernel,
    DataType,
    DenseOptimizer,
    Device,
    FeatureType,
    FloatType,
    IdMappingType,
    Interaction,
    Keep,
    NullPolicy,
    Pooling,
    Schedule,
    ShardingChoice,
    StateType,
    TableOptimizer,
)
from recsys.config.initial import InitConfig
from recsys.config.topology import MemoryConfig, TopologyConfig


@dataclass
class RunConfig:
    """Where a run writes, and what to do when that place is taken."""

    name: str | None = None  # letters, digits, _, - and .; default: the config file's stem
    dir: str | None = None  # default: runs/NAME-TIME
    resume: bool = False  # continue from the newest checkpoint in run.dir, or start if there is none
    overwrite: bool = False  # replace an earlier run in run.dir
    stop_file: str | None = None  # when this file is there, save and end as for SIGTERM
    plan: str | None = None  # sharding plan of an earlier run, RUN/plan.json; default: the planner makes one
    device: Device = Device.auto
    num_threads: int | None = None  # OpenMP threads of a rank; default: its share of the cores, less one of many
    profile_steps: int = 0  # trace so many steps, from the 13th on, to RUN/profile/rank_K.json
    stuck_after_s: float = 600  # in training, name a rank that makes no progress for so long, and end; not with --debug


@dataclass
class DataConfig:
    """Parquet files and how they are read. A path is a directory, a glob, a file, or a list of these."""

    train: Any = MISSING
    valid: Any = None  # evaluated every train.eval_every_steps, or eval_every_epochs, and at the end
    test: Any = None  # evaluated once, at the end
    items: Any = None  # retrieval: every item once
    label_column: str | None = None
    weight_column: str | None = None
    targets_column: str = "targets"  # retrieval: held-out items of a user, a list of raw ids
    seen_column: str | None = "seen"  # retrieval: items masked when ranking, a list of raw ids
    shuffle: bool = True
    num_streams: int = 8  # a step takes rows of each; no row is decoded twice if it is a multiple of the ranks
    window_mib: int = 64  # rows of a stream shuffled together, in MiB as held in memory; two are held for each stream
    drop_last: bool = False  # leave out the rows of data.train that do not fill the last batch of an epoch
    num_threads: int = 2  # decoding threads of a rank; 0 reads in the training thread
    # Put together ahead of training, by a thread; 0: in the training thread. Default: 4, but 0 where ranks of a CPU run
    # have no core to spare, and the two threads would only wait for each other.
    prefetch_batches: int | None = None
    max_rows: int | None = None  # use only the first rows of each dataset
    filter: Any = (
        None  # rows of train, valid and test to use: "day >= '2026-11-01'"; or {train: …, items: …}, each its own
    )
    verify_checksums: bool = True  # of pages that have one, as our own writers' do
    retries: int = 3  # of a read from a remote file system
    max_bad_files: int = 0  # files whose footer cannot be read: leave out up to so many, in place of an error
    max_bad_rows: int = 0  # rows of row groups that cannot be decoded: give up to so many weight 0, likewise


@dataclass
class FeatureConfig:
    """One input column. An `id` feature names the table that holds its vectors."""

    type: FeatureType = FeatureType.id
    column: str | None = None  # default: the feature's name
    table: str | None = None
    max_length: int | None = None  # of a list
    keep: Keep = Keep.last  # which end of a longer list
    weights: str | None = None  # column with a weight for each id: a list of numbers as long as the list of ids
    boundaries: list[float] | None = None  # the column holds numbers, and the id is how many of these are <= it
    nulls: NullPolicy = NullPolicy.reserved  # (`null` itself would be no name in YAML, but the null)
    fill: float = 0.0  # value of a null float
    clip: list[float | None] | None = (
        None  # float: least and greatest value, null: none. First clip, then log1p, then standardise
    )
    log1p: bool = False  # float: log(1 + x)
    standardise: bool = False  # float: (x - mean) / standard deviation, both of data.train


@dataclass
class TableOptimizerConfig:
    """Optimizer of tables, applied in the backward pass to the rows that a batch touches, and to no others.

    The loss is the mean over the global batch, and a row of a table is touched by few of its rows. So the steps of sgd
    shrink as train.global_batch_size grows: a rate for one row at a time is to be multiplied by it (0.02 of one row is
    20 of batches of 1,000). The others divide by the size of past gradients, and need no such factor.
    """

    name: TableOptimizer = TableOptimizer.rowwise_adagrad
    learning_rate: float = 0.05  # of sgd: grows with train.global_batch_size, see above
    eps: float = 1e-8  # of all but sgd
    beta1: float = 0.9  # of adam and lamb
    beta2: float = 0.999
    weight_decay: float = 0.0  # on GPUs, of all but sgd and adagrad; times the rate, as AdamW's
    state_dtype: StateType = StateType.FP32  # FP16: of partial_rowwise_adam, its first moment
    allow_column_split: bool = False  # of row-wise optimizers: what is learned then depends on the plan


@dataclass
class DenseOptimizerConfig:
    """Optimizer of the dense part. Weight decay and clipping cover the dense part only; tables are never clipped."""

    name: DenseOptimizer = DenseOptimizer.adam
    learning_rate: float = 1e-3
    momentum: float = 0.0  # of sgd
    weight_decay: float = 0.0
    clip_norm: float | None = None  # most that the norm over all gradients of the dense part may be


@dataclass
class TableConfig:
    """One embedding table, shared by all features that name it."""

    num_embeddings: int = MISSING  # rows; of a vocabulary at most so many, fewer where the data have fewer ids
    embedding_dim: int = MISSING  # a multiple of 4
    data_type: DataType = DataType.FP32
    pooling: Pooling = Pooling.sum
    mapping: IdMappingType = IdMappingType.hash
    hash_seed: int = 0
    num_hashes: int = 1  # hash: the vector of an id is the sum of so many rows, each by a hash of its own
    num_ids: int | None = None  # quotient_remainder: how many ids are told apart
    min_count: int = 1  # vocabulary: rarer ids have no row of their own
    num_buckets: int = 1  # vocabulary: rows for the ids that have none of their own, by hash
    vocabulary: str | None = None  # vocabulary: Parquet file of an earlier run, RUN/vocabulary/TABLE.parquet
    init_range: float | None = None  # uniform in +-init_range; default 1/sqrt(num_embeddings)
    sharding_type: ShardingChoice = ShardingChoice.auto
    compute_kernel: ComputeKernel = ComputeKernel.fused
    cache_load_factor: float = 0.2  # fused_uvm_caching: share of the rows that the cache holds
    storage_dir: str | None = None  # key_value: folder on a disk of each machine
    stochastic_rounding: bool = False  # FP16, on GPUs: what it draws depends on the plan
    optimizer: TableOptimizerConfig | None = None  # default: optimizer.tables


@dataclass
class ScheduleConfig:
    """One factor over the steps for both learning rates."""

    name: Schedule = Schedule.constant
    warmup_steps: int = 0
    final_factor: float = 0.0  # factor at the last step of linear and cosine


@dataclass
class OptimizerConfig:
    """Both optimizers and their schedule."""

    tables: TableOptimizerConfig = field(default_factory=TableOptimizerConfig)
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class PrecisionConfig:
    """Number types of the dense part. Those of a table are its own."""

    autocast: Autocast = Autocast.none
    # fp16: the mean loss is multiplied by this for the backward pass of the dense part, and gradients are divided by
    # it before they reach any optimizer or table. Halved, and the step left out, where a gradient overflows, down to 1.
    loss_scale: float = 4096.0
    loss_scale_growth_steps: int | None = 2000  # doubled after so many steps without overflow; null: never
    output_dtype: FloatType = FloatType.FP32  # vectors that tables give, and their gradients; CPUs have no BF16 there
    forward_wire: FloatType = FloatType.FP32  # of vectors sent between ranks; gloo sends FP16 for BF16
    backward_wire: FloatType = FloatType.FP32  # of their gradients
    tf32: bool = False  # GPUs: FP32 products of matrices with 10 bits of mantissa


@dataclass
class EarlyStopConfig:
    """Stop when a metric of data.valid has not improved for `patience` evaluations; the best is tested."""

    metric: str | None = None  # auc, recall@20 …; null: train to the end
    patience: int = 3


@dataclass
class TrainConfig:
    """How long, how much at a time, and what happens on the way."""

    global_batch_size: int = 1024  # rows that a step trains, over all ranks
    micro_batch_size: int | None = None  # rows of a rank whose dense part is computed at a time; default: all
    micro_batch_ids: int | None = None  # ids in the lists of these rows, at most: long lists make smaller micro-batches
    eval_batch_size: int | None = None  # the same for evaluation; default: global_batch_size
    epochs: int = 1
    max_steps: int | None = None  # end earlier than the epochs do
    max_bad_steps: int = 0  # steps whose loss or gradient is not finite: leave out up to so many, in place of an error
    eval_every_steps: int | None = None  # default: at the end only
    eval_every_epochs: int | None = None  # in place of steps: after the last row of every so many epochs
    log_every_steps: int = 50
    checkpoint_every_steps: int | None = None  # default: at the end only
    keep_checkpoints: int = 2
    async_checkpoints: bool = False  # write a copy in host memory while training goes on
    activation_checkpointing: bool = False  # compute the layers of an MLP again in the backward pass, not keep them
    compile: bool = False  # the dense part by torch.compile; on CPU it needs a C++ compiler
    init_from: str | None = None  # run directory or checkpoint to take weights and optimizer from
    init: InitConfig = field(default_factory=InitConfig)
    early_stop: EarlyStopConfig = field(default_factory=EarlyStopConfig)

    @property
    def in_micro_batches(self) -> bool:
        """Whether the dense part may be computed for some rows at a time."""
        return self.micro_batch_size is not None or self.micro_batch_ids is not None


@dataclass
class DLRMConfig:
    """DLRM ranker (Naumov et al. 2019, arXiv:1906.00091) with binary cross-entropy, over all features."""

    name: str = "dlrm"
    embedding_dim: int | None = None  # width of all vectors; narrower tables are projected. Default: the widest
    bottom_mlp: list[int] = field(default_factory=lambda: [64])  # hidden widths; the last is embedding_dim
    top_mlp: list[int] = field(default_factory=lambda: [64])  # hidden widths; the last is 1
    dropout: float = 0.0  # after each hidden layer
    embedding_dropout: float = 0.0  # of elements of the pooled embeddings
    interaction: Interaction = Interaction.dot
    # List features whose ids are weighted by how they match another feature's vector, in place of being summed as one:
    # {history: item_id}. Of tables split by rows, by columns or not at all.
    attention: dict[str, str] = field(default_factory=dict)
    attention_mlp: list[int] = field(default_factory=lambda: [32])  # hidden widths; the last is 1


@dataclass
class TwoTowerConfig:
    """Two-tower retrieval with in-batch softmax (Yi et al. 2019, doi:10.1145/3298689.3346996)."""

    name: str = "two_tower"
    user_features: list[str] = MISSING
    item_features: list[str] = MISSING
    item_id: str = MISSING  # the item feature that tells items apart
    user_mlp: list[int] = field(default_factory=lambda: [64])  # widths of the hidden layers
    item_mlp: list[int] = field(default_factory=lambda: [64])
    output_dim: int = 32
    dropout: float = 0.0
    normalize: bool = True  # cosine instead of dot product
    temperature: float = 0.1
    logq_correction: bool = True  # subtract the log of an item's share of the training rows
    top_k: list[int] = field(default_factory=lambda: [10, 20])  # recall@K and ndcg@K


MODELS: dict[str, type] = {"dlrm": DLRMConfig, "two_tower": TwoTowerConfig}


@dataclass
class Config:
    """The whole config. `model` is the dataclass that `model.name` selects."""

    model: Any = MISSING
    features: dict[str, FeatureConfig] = MISSING
    tables: dict[str, TableConfig] = MISSING
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    seed: int = 1
    debug: bool = False  # set by --debug
    # Not a key: all values as they were given, which may refer to others or to the environment, and as these were then.
    given: tuple[Any, Any] = field(default=(None, None), compare=False, repr=False, metadata={"omegaconf_ignore": True})

    def unpooled_features(self) -> list[str]:
        """Return the id features of which the model reads a vector for each id of a list, not one for the list."""
        return list(getattr(self.model, "attention", ()))

    def unpooled_tables(self) -> set[str]:
        """Return the tables of such features; torchrec gives a vector for each id of their other features too."""
        return {self.features[name].table or "" for name in self.unpooled_features()}

    def table_optimizer(self, table: str) -> TableOptimizerConfig:
        """Return the optimizer of a table: its own, or that of all."""
        return self.tables[table].optimizer or self.optimizer.tables

    def table_optimizer_key(self, table: str) -> str:
        """Return the key of the section that `table_optimizer` returns."""
        return f"tables.{table}.optimizer" if self.tables[table].optimizer else "optimizer.tables"
