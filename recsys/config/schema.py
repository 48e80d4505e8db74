"""Dataclasses of a config file: every key with its type, default and meaning.

Features and tables are mappings by name, so that `tables.item.embedding_dim=32` reaches them from the command line.
`C{1..26}` names 26 alike ones at once (`recsys.config.ranges`).
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
    LabelLoss,
    LabelNulls,
    NullPolicy,
    Pooling,
    RowCode,
    Schedule,
    ShardingChoice,
    StateType,
)
from recsys.config.experts import ExpertsConfig, experts_by_id
from recsys.config.initial import InitConfig
from recsys.config.serving import DistillConfig, PublishConfig, SparsityConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.config.topology import MemoryConfig, TopologyConfig
from recsys.config.track import TrackConfig


@dataclass
class RunConfig:
    """Section `run`: where a run writes, and what happens when that place is taken."""

    name: str | None = None  # letters, digits, _, - and .; default: the config file's stem
    dir: str | None = None  # default: runs/NAME-TIME
    resume: bool = False  # continue from the newest checkpoint in run.dir, or start if there is none
    overwrite: bool = False  # replace an earlier run in run.dir
    stop_file: str | None = None  # when this file is there, save and end as for SIGTERM
    plan: str | None = None  # sharding plan of an earlier run, RUN/plan.json; default: the planner makes one
    device: Device = Device.auto
    # OpenMP threads of a rank; default: its share of the cores, less one of many; with a GPU, 1.
    num_threads: int | None = bounded(None, 1, 1024)
    profile_steps: int = bounded(0, 0, 10_000)  # trace so many steps, from the 13th on, to RUN/profile/rank_K.json
    # In training, name a rank that makes no progress for so long, and end; not with --debug.
    stuck_after_s: float = bounded(600, 2, 1e8)
    track: TrackConfig = field(default_factory=TrackConfig)


@dataclass
class LabelConfig:
    """A label: something to learn of each row. Its loss is a mean over the rows that have it, by their weights."""

    column: str | None = None  # default: the label's name
    expression: str | None = None  # in place of a column: a condition as in data.filter, "event == 'purchase'"
    loss: LabelLoss = LabelLoss.binary
    weight: float = bounded(1.0, 0, LARGE)  # of this label's loss among those of all labels
    nulls: LabelNulls = LabelNulls.refuse


@dataclass
class DataConfig:
    """Section `data`: Parquet files and how they are read; a path is a directory, glob or file, or a list of these."""

    train: Any = MISSING  # Parquet to train on
    valid: Any = None  # evaluated every train.eval_every_steps, or eval_every_epochs, and at the end
    test: Any = None  # evaluated once, at the end
    items: Any = None  # retrieval: every item once
    label_column: str | None = None  # of 0 and 1, where there is one label; short for labels={label: {column: …}}
    # What is learned, by name; the model gives an output for each. `click: clicked` is short for {column: clicked}, and
    # `buy: "event == 'purchase'"` for {expression: …}: a text that is more than one word.
    labels: dict[str, LabelConfig] = field(default_factory=dict)
    weight_column: str | None = None  # of a weight for each row, in losses and metrics of labels; default: all weigh 1
    # Of the rows of data.train without a positive label, train on such a share only, the same in every epoch. Each
    # counts 1 / share times, so that losses and what is predicted stay those of all rows; none is left out elsewhere.
    keep_negatives: float | None = bounded(None, 1e-6, 1)
    targets_column: str = "targets"  # retrieval: held-out items of a user, a list of raw ids
    seen_column: str | None = "seen"  # retrieval: items masked when ranking, a list of raw ids
    candidates_column: str | None = None  # of `recsys recommend`: items to choose from, a list of raw ids
    shuffle: bool = True  # false: rows come in the order of the files
    num_streams: int = bounded(8, 1, 2**20)  # a step takes rows of each; a multiple of the ranks decodes no row twice
    # Rows of a stream shuffled together, in MiB as held in memory; of each two are held, or all that a batch takes.
    window_mib: int = bounded(64, 1, 2**20)
    drop_last: bool = False  # leave out the rows of data.train that do not fill the last batch of an epoch
    num_threads: int | None = bounded(None, 0, 1024)  # that decode; 0: the training thread; default: 2, on GPUs ≤ 12
    processes: bool | None = None  # one for each of num_threads decodes data.train; default: with a GPU, if there are 3
    # Put together ahead of training, by a thread; 0: in the training thread. Default: 4 with a GPU, else 0.
    prefetch_batches: int | None = bounded(None, 0, 2**20)
    max_rows: int | None = bounded(None, 1)  # use only the first rows of each dataset
    # Columns that some files may lack, as those of days before a column was added, and which are null there: [channel].
    optional_columns: list[str] = field(default_factory=list)
    # Rows of train, valid and test to use: "day >= '2026-11-01'"; or {train: …, items: …}, each its own. result.json
    # has it as it was read, so that "day >= '${oc.env:DAY}'" tells of which day, and no secret belongs in it.
    filter: Any = None
    verify_checksums: bool = True  # of pages that have one, as our own writers' do
    retries: int = bounded(3, 0, 100)  # of a read from a remote file system
    max_bad_files: int = bounded(0, 0)  # whose footer cannot be read: leave out up to so many, in place of an error
    max_bad_rows: int = bounded(0, 0)  # of row groups that cannot be decoded: give up to so many weight 0, likewise


@dataclass
class FeatureConfig:
    """A feature: one input column. An `id` feature names the table that holds its vectors."""

    type: FeatureType = FeatureType.id
    column: str | None = None  # default: the feature's name; of a struct a field, such as device.os
    # In place of a column: of these columns, an id for each combination of their ids. [user_country, item_id]
    cross: list[str] | None = None
    table: str | None = None  # of an id: the table with its vectors, which features may share
    max_length: int | None = bounded(None, 1)  # of a list
    keep: Keep = Keep.last  # which end of a longer list
    weights: str | None = None  # column with a weight for each id: a list of numbers as long as the list of ids
    boundaries: list[float] | None = None  # the column holds numbers, and the id is how many of these are <= it
    dim: int | None = bounded(None, 1, 2**16)  # float: a row has a list of so many numbers, as a vector of its text
    nulls: NullPolicy = NullPolicy.reserved  # what a null id or number becomes
    fill: float = bounded(0.0, -LARGE, LARGE)  # value of a null float
    clip: list[float | None] | None = None  # float: least and greatest value, null: none; before log1p and standardise
    log1p: bool = False  # float: log(1 + x)
    standardise: bool = False  # float: (x - mean) / standard deviation, both of data.train
    # Not a key: of a feature that is made for a further expert of another's table, that other.
    expert_of: str | None = field(default=None, metadata={"omegaconf_ignore": True})


@dataclass
class TableOptimizerConfig:
    """Optimizer of tables, applied in the backward pass to the rows that a batch touches alone (l2_all_rows: to all).

    The loss is the mean over the global batch, and a row of a table is touched by few of its rows. So the steps of sgd
    shrink as train.global_batch_size grows: a rate for one row at a time is to be multiplied by it (0.02 of one row is
    20 of batches of 1,000). The others divide by the size of past gradients, and need no such factor.
    """

    name: TableOptimizer = TableOptimizer.rowwise_adagrad
    learning_rate: float = bounded(0.05, 0, LARGE)  # of sgd: grows with train.global_batch_size, see above
    eps: float = bounded(1e-8, 1e-30, LARGE)  # of all but sgd; 0 / 0 would be the step of a row without gradient
    l1: float = bounded(0.0, 0, LARGE)  # of ftrl: elements whose gradients add up to no more are exactly 0
    beta1: float = bounded(0.9, 0, below=1)  # of adam and lamb
    beta2: float = bounded(0.999, 0, below=1)  # likewise
    weight_decay: float = bounded(0.0, 0, LARGE)  # on GPUs, not of sgd, adagrad and ftrl; times the rate, as AdamW's
    state_dtype: StateType = StateType.FP32  # BF16: of partial_rowwise_adam, its first moment
    allow_column_split: bool = False  # of row-wise optimizers: what is learned then depends on the plan


@dataclass
class DenseOptimizerConfig:
    """Optimizer of the dense part. Weight decay and clipping cover the dense part only; tables are never clipped."""

    name: DenseOptimizer = DenseOptimizer.adam
    learning_rate: float = bounded(1e-3, 0, LARGE)  # times the schedule's factor
    momentum: float = bounded(0.0, 0, 1)  # of sgd
    # Of adamw, adafactor and lamb times the rate, and taken from the weights; of the others added to the gradient.
    weight_decay: float = bounded(0.0, 0, LARGE)
    clip_norm: float | None = bounded(None, 1e-30, LARGE)  # most that the norm over all its gradients may be


@dataclass
class TableConfig:
    """A table: embeddings shared by all features that name it."""

    num_embeddings: int = MISSING  # rows; of a vocabulary at most so many, fewer where the data have fewer ids
    embedding_dim: int = MISSING  # a multiple of 4
    # A matrix of the dense part brings vectors to this width, which the model reads; default: embedding_dim.
    projected_dim: int | None = bounded(None, 1, 2**16)
    data_type: DataType = DataType.FP32
    pooling: Pooling = Pooling.sum
    # The model reads vectors as this code leaves them, in training too (gradients pass through); weights stay as they
    # are trained, and `recsys export` writes the codes.
    quantize: RowCode | None = None
    mapping: IdMappingType = IdMappingType.hash
    hash_seed: int = bounded(0, 0)  # another seed, another hash: other ids share a row
    # Hash: the vector of an id is the sum of so many rows, each by a hash of its own; with pooling: mean, their mean.
    num_hashes: int = bounded(1, 1, 16)
    num_ids: int | None = bounded(None, 1, 2**62)  # quotient_remainder: how many ids are told apart
    min_count: int = bounded(1, 1)  # vocabulary: rarer ids have no row of their own
    num_buckets: int = 1  # vocabulary: rows for the ids that have none of their own, by hash
    # Of the other mappings: Parquet file of `recsys compress` with the rows that were not pruned. num_embeddings counts
    # these, and one that the pruned ones share.
    kept_rows: str | None = None
    vocabulary: str | None = None  # vocabulary: Parquet file with ids in `id`, as RUN/vocabulary/TABLE.parquet
    init_range: float | None = bounded(None, 0, 65504)  # uniform in +-init_range; default 1/sqrt(num_embeddings)
    # Added to the loss: l2 / 2 times the mean over rows of the squared length of each vector that the table gives, by
    # their weights; of a pooled list, of its sum. Exact on every device and plan, other than weight_decay. Of sasrec,
    # simplex and ultragcn the sum over rows is divided as their loss is: by the number of items to be found.
    l2: float = bounded(0.0, 0, LARGE)
    # Added too: l2_all_rows / 2 times the sum of squares of the whole table, looked up or not, as in recipes for small
    # data. Every rank holds such a table, and each step rewrites it.
    l2_all_rows: float = bounded(0.0, 0, LARGE)
    sparsity: SparsityConfig | None = None
    sharding_type: ShardingChoice = ShardingChoice.auto
    compute_kernel: ComputeKernel = ComputeKernel.fused
    cache_load_factor: float = bounded(0.2, 1e-6, 1)  # fused_uvm_caching: share of the rows that the cache holds
    stochastic_rounding: bool = False  # FP16, on GPUs: what it draws depends on the plan
    optimizer: TableOptimizerConfig | None = None  # default: optimizer.tables
    experts: ExpertsConfig | None = None

    @property
    def model_dim(self) -> int:
        """Width of the vectors that the model reads."""
        return self.embedding_dim if self.projected_dim is None else self.projected_dim


@dataclass
class ScheduleConfig:
    """Schedule of the learning rate: one factor over the steps for both optimizers."""

    name: Schedule = Schedule.constant
    warmup_steps: int = bounded(0, 0)  # steps in which the rate rises from 0, before the schedule
    final_factor: float = bounded(0.0, 0, LARGE)  # factor at the last step of linear and cosine
    plateau_factor: float = bounded(0.5, 0, 1)  # of plateau: what the rate is multiplied by
    plateau_patience: int = bounded(1, 1)  # of plateau: evaluations without a gain before that


@dataclass
class OptimizerConfig:
    """Both optimizers and their schedule."""

    tables: TableOptimizerConfig = field(default_factory=TableOptimizerConfig)
    dense: DenseOptimizerConfig = field(default_factory=DenseOptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)


@dataclass
class PrecisionConfig:
    """Section `precision`: number types of the dense part; those of a table are its own."""

    autocast: Autocast = Autocast.none
    # fp16: the mean loss is multiplied by this for the backward pass of the dense part, and gradients are divided by
    # it before they reach any optimizer or table. Halved, and the step left out, where a gradient overflows, down to 1.
    loss_scale: float = bounded(4096.0, 1, 2.0**24)
    loss_scale_growth_steps: int | None = bounded(2000, 1)  # doubled after so many steps without overflow; null: never
    dense_int8: bool = False  # evaluate, predict and export linear layers in INT8; they are trained as they are
    output_dtype: FloatType = FloatType.FP32  # vectors that tables give, and their gradients; CPUs have no BF16 there
    forward_wire: FloatType = FloatType.FP32  # of vectors sent between ranks
    backward_wire: FloatType = FloatType.FP32  # of their gradients
    tf32: bool = False  # GPUs: FP32 products of matrices with 10 bits of mantissa


@dataclass
class EarlyStopConfig:
    """Early stopping, when a metric of data.valid has not improved for `patience` evaluations; the best is tested."""

    metric: str | None = None  # auc, recall@20 …; null: train to the end
    patience: int = bounded(3, 1)  # evaluations without a gain before training ends


@dataclass
class TrainConfig:
    """Section `train`: how long, how much at a time, and what happens on the way."""

    global_batch_size: int = bounded(1024, 1, 2**31)  # rows that a step trains, over all ranks
    micro_batch_size: int | None = bounded(None, 1)  # rows of a rank that are computed at a time; default: all
    # Ids in the lists of these rows, at most: long lists make smaller micro-batches.
    micro_batch_ids: int | None = bounded(None, 1)
    eval_batch_size: int | None = bounded(None, 1, 2**31)  # the same for evaluation; default: global_batch_size
    epochs: int = bounded(1, 1)  # times that all of data.train is trained on
    max_steps: int | None = bounded(None, 1)  # end earlier than the epochs do
    # Steps whose loss or gradient is not finite: leave out up to so many, in place of an error.
    max_bad_steps: int = bounded(0, 0)
    check_every_step: bool = True  # false: read a step later whether it was finite; it changes nothing if it was not
    eval_every_steps: int | None = bounded(None, 1)  # default: at the end only
    eval_every_epochs: int | None = bounded(None, 1)  # in place of steps: after the last row of every so many epochs
    log_every_steps: int = bounded(50, 1)  # a line of the log and of metrics.jsonl each
    checkpoint_every_steps: int | None = bounded(None, 1)  # default: at the end only
    keep_checkpoints: int = bounded(2, 1)  # the newest so many; older ones are removed
    async_checkpoints: bool = False  # write a copy in host memory while training goes on
    activation_checkpointing: bool = False  # compute the layers of an MLP again in the backward pass, not keep them
    activation_offload: bool = False  # GPUs: keep activations in host memory from the forward to the backward pass
    dense_sharding: DenseSharding = DenseSharding.none  # what ranks share out of the dense part; the same is learned
    compile: bool = False  # the dense part by torch.compile; on CPU it needs a C++ compiler
    init_from: str | None = None  # run directory or checkpoint to take weights and optimizer from
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
    features: dict[str, FeatureConfig] = MISSING  # by name; a column has its feature's name, unless that says another
    tables: dict[str, TableConfig] = MISSING  # by name
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    run: RunConfig = field(default_factory=RunConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    seed: int = bounded(1, 0)  # of the order of rows, first weights and all that is drawn
    debug: bool = False  # set by --debug
    # Not a key: all values as they were given, which may refer to others or to the environment, and as these were then.
    given: tuple[Any, Any] = field(default=(None, None), compare=False, repr=False, metadata={"omegaconf_ignore": True})

    def labels(self) -> dict[str, LabelConfig]:
        """Return the labels by name, in the order of a batch's columns."""
        column = self.data.label_column
        return self.data.labels or ({} if column is None else {"label": LabelConfig(column)})

    def taught_columns(self) -> dict[str, str]:
        """Return by label the column of data.train with a teacher's score, where there is a teacher."""
        distill, labels = self.train.distill, self.labels()
        if distill is None:
            return {}
        return {name: f"{distill.column}_{name}" if len(labels) > 1 else distill.column for name in labels}

    def unpooled_features(self) -> list[str]:
        """Return the id features of which the model reads a vector for each id of a list, not one for the list."""
        return list(self.model.needs().sequences)

    def unpooled_tables(self) -> set[str]:
        """Return the tables of such features; torchrec gives a vector for each id of their other features too.

        Tables whose vectors are quantised are among them, since these are to be so before they are summed, and experts.
        """
        quantized = {name for name, table in self.tables.items() if table.quantize is not None}
        return {self.features[f].table or "" for f in self.unpooled_features()} | quantized | experts_by_id(self)

    def table_optimizer(self, table: str) -> TableOptimizerConfig:
        """Return the optimizer of a table: its own, or that of all."""
        return self.tables[table].optimizer or self.optimizer.tables

    def updated_in_torch(self, table: str) -> bool:
        """Return whether a table is updated by rules in torch even where FBGEMM has kernels."""
        return self.table_optimizer(table).name.value.path is None or self.tables[table].sparsity is not None

    def table_optimizer_key(self, table: str) -> str:
        """Return the key of the section that `table_optimizer` returns."""
        return f"tables.{table}.optimizer" if self.tables[table].optimizer else "optimizer.tables"
