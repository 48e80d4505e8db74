"""Choices of config keys: enums whose members are named as they are written in YAML."""

from enum import Enum


class FeatureType(Enum):
    """Type of a feature: ids, which are looked up in a table, or numbers.

    `id`: one id or a list of ids a row. `float`: one number a row, or a vector of `dim` numbers.
    """

    id, float = "id", "float"


class NullPolicy(Enum):
    """Value that a null becomes.

    For ids: row 0 of the table (`reserved`), no id at all (`empty`), or an error (`refuse`). For floats: the `fill` of
    the feature (`reserved`), the mean of data.train (`mean`), or an error (`refuse`).
    """

    reserved, empty, mean, refuse = "reserved", "empty", "mean", "refuse"


class Keep(Enum):
    """Which end is kept of a list longer than `max_length`."""

    first, last = "first", "last"


class IdMappingType(Enum):
    """Mapping of raw ids to rows of a table; row 0 is the null row except under `identity`.

    `hash`: any id to rows 1..n-1. `identity`: id i is row i. `vocabulary`: ids that occur at least `min_count` times in
    data.train get a row each, the rest share `num_buckets` rows. `quotient_remainder`: ids are hashed to `num_ids`
    numbers, each the sum of two rows (Shi et al. 2020, arXiv:1909.02107).
    """

    hash, identity, vocabulary, quotient_remainder = "hash", "identity", "vocabulary", "quotient_remainder"


class DataType(Enum):
    """Storage type of table weights, not of optimizer state. FP8 (e4m3, the NFP8 of FBGEMM) trains on GPUs only."""

    FP32, FP16, FP8 = "FP32", "FP16", "FP8"


class RowCode(Enum):
    """Code in which the vectors of a table are served.

    `FP16`: half precision. `INT8`, `INT4`, `INT2`: whole numbers of that many bits, with a scale and a bias per row.
    """

    FP16, INT8, INT4, INT2 = "FP16", "INT8", "INT4", "INT2"


class ComputeKernel(Enum):
    """Memory and kernel of a table. On CPU all are `fused`, in host memory; so is `data_parallel` sharding.

    `fused`: device memory. `fused_uvm`: host memory, read over the bus. `fused_uvm_caching`: the same with a cache of
    rows in device memory, whose share of the table is `cache_load_factor`.
    """

    fused, fused_uvm, fused_uvm_caching = "fused", "fused_uvm", "fused_uvm_caching"


class LabelLoss(Enum):
    """Loss of a label.

    `binary`: cross-entropy of the logit that the model gives and a label of 0 or 1. `squared`: squared error of its
    output.
    """

    binary, squared = "binary", "squared"

    @property
    def is_binary(self) -> bool:
        """Whether a label is 0 or 1 and the output of the model a logit; otherwise both are any numbers."""
        return self is not LabelLoss.squared


class SequenceLayer(Enum):
    """Layer of a sequence model.

    `sasrec`: attention, then two linear layers with a ReLU. Both read their input normalised and are added to the input
    itself, as in the formula of the paper. `original`: as in the code of the authors (github.com/kang205/SASRec): both
    are added to the normalised input, and keys and values come from the input itself. `ligr`: `sasrec` with SwiGLU and
    a gate on what is added (Borisyuk et al. 2025, arXiv:2502.03417; eSASRec, arXiv:2508.06450). `hstu`: attention by
    SiLU instead of softmax, times a gate, without further layers (Zhai et al. 2024, arXiv:2402.17152).
    """

    sasrec, original, ligr, hstu = "sasrec", "original", "ligr", "hstu"


class SequenceLoss(Enum):
    """Loss of the next item of a sequence against drawn negatives.

    `softmax`: cross-entropy over the item and all negatives. `gbce`: binary cross-entropies; that of the item is
    calibrated to the share of items that are drawn (Petrov & Macdonald 2023, arXiv:2308.07192).
    """

    softmax, gbce = "softmax", "gbce"


class RetrievalLoss(Enum):
    """Loss of an item of a user against negatives, from the scores of the model: cosines or dot products.

    `softmax`: cross-entropy over the item and all negatives. `contrastive`: 1 minus the cosine of the item, plus the
    mean excess of the negatives' cosines over a margin (Mao et al. 2021, arXiv:2109.12613). `binary`: binary
    cross-entropies. `bpr`: mean of -log sigmoid(item's score - negative's score) (Rendle et al. 2009, arXiv:1205.2618).
    """

    softmax, contrastive, binary, bpr = "softmax", "contrastive", "binary", "bpr"


class RetrievalMetric(Enum):
    """Metrics of the best K items of each user; users without targets do not count.

    Means over users: share of targets among the K (`recall`); discounted gain over the best possible (`ndcg`); whether
    a target is among them (`hit_rate`); 1 / rank of the first target (`mrr`); average precision over the number of
    targets (`map`). `coverage`: share of all items that are among the K of any user.
    """

    recall, ndcg, hit_rate, mrr = "recall", "ndcg", "hit_rate", "mrr"
    map, coverage = "map", "coverage"


class LabelNulls(Enum):
    """Treatment of null labels: `refuse` is an error; with `unknown`, the row does not count for this label."""

    refuse, unknown = "refuse", "unknown"


class FloatType(Enum):
    """Type of numbers that are computed or sent, not stored."""

    FP32, FP16, BF16 = "FP32", "FP16", "BF16"


class StateType(Enum):
    """Type of the optimizer state per element of a table; state per row is FP32."""

    FP32, BF16 = "FP32", "BF16"


class Pooling(Enum):
    """How the list of a feature is pooled into one vector."""

    sum, mean = "sum", "mean"


class Route(Enum):
    """How the experts are chosen that an id is looked up in.

    `frequency`: one expert. Each table except the last has rows for the most frequent ids of data.train that no table
    before it has, as many as fit; the last has all others. `hash`: `active` experts, chosen by a hash of the id.
    """

    frequency, hash = "frequency", "hash"


class Gate(Enum):
    """Factors of experts, 2 / (1 + exp(-x)): between 0 and 2, and 1 at first.

    `none`: always 1. `table`: x is learned for each expert. `features`: x is a linear function of the vectors of the
    other id features; in a retrieval model, of those on the same side.
    """

    none, table, features = "none", "table", "features"


class ShardingChoice(Enum):
    """How a table is split over the ranks; `auto`: the planner decides. One rank splits nothing.

    `data_parallel`: every rank holds the whole table. `table_wise`: one rank does. `row_wise`, `column_wise`: split
    over all ranks. `table_row_wise`: rows over the ranks of one machine. `table_column_wise`: columns over single
    ranks. `grid_shard`: columns over machines, and rows over the ranks of each.
    """

    auto = "auto"
    data_parallel = "data_parallel"
    table_wise = "table_wise"
    row_wise = "row_wise"
    column_wise = "column_wise"
    table_row_wise = "table_row_wise"
    table_column_wise = "table_column_wise"
    grid_shard = "grid_shard"


# Sharding types for which torchrec can look up a vector for each id of a list.
UNPOOLED = (ShardingChoice.auto, ShardingChoice.table_wise, ShardingChoice.row_wise, ShardingChoice.column_wise)
COLUMN_SPLITS = (ShardingChoice.column_wise, ShardingChoice.table_column_wise, ShardingChoice.grid_shard)
MACHINE_SPLITS = (ShardingChoice.table_row_wise, ShardingChoice.grid_shard)
# Splits of rows: each rank sums the rows of a list that it holds, and the sums of the ranks are added up.
ROW_SPLITS = (ShardingChoice.row_wise, ShardingChoice.table_row_wise, ShardingChoice.grid_shard)


class DenseOptimizer(Enum):
    """Optimizer of the dense (data-parallel) part."""

    adam, adamw, adagrad, sgd, adafactor, lamb = "adam", "adamw", "adagrad", "sgd", "adafactor", "lamb"


class DenseSharding(Enum):
    """What of the dense part is split over the ranks, instead of copied to each.

    `none`: nothing. `optimizer`: the state of its optimizer (ZeRO-1), which must be an elementwise one.
    """

    none, optimizer = "none", "optimizer"


# Optimizers whose update of a weight depends on no other weight.
ELEMENTWISE = (DenseOptimizer.adam, DenseOptimizer.adamw, DenseOptimizer.adagrad, DenseOptimizer.sgd)


class Schedule(Enum):
    """Course of the learning rate after the warm-up.

    `constant`: unchanged. `linear`, `cosine`: falls along a line or half a cosine. `plateau`: is multiplied by
    `plateau_factor` whenever `train.early_stop.metric` has not improved for `plateau_patience` evaluations.
    """

    constant, linear, cosine, plateau = "constant", "linear", "cosine", "plateau"


class Tracker(Enum):
    """Where metrics of a run go besides metrics.jsonl: TensorBoard (RUN/tensorboard), Weights & Biases, MLflow."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


class Saver(Enum):
    """Changes of `memory.fit` that change what is learned.

    `row_order`: data.window_mib, and with it the order of rows. `bf16_autocast`: precision.autocast. `row_wise_state`:
    the optimizer of tables, to its row-wise kind. `fp16_tables`: the data_type of tables.
    """

    row_order = "row_order"
    bf16_autocast = "bf16_autocast"
    row_wise_state = "row_wise_state"
    fp16_tables = "fp16_tables"


class TableEncoding(Enum):
    """Type in which exports and publications write rows of tables; `stored`: as in checkpoints."""

    fp32, stored, fp16, int8, int4, int2 = "fp32", "stored", "fp16", "int8", "int4", "int2"


class Device(Enum):
    """Device of a run: `auto` uses CUDA if there is a GPU, otherwise the CPU."""

    auto, cpu, cuda = "auto", "cpu", "cuda"


class Autocast(Enum):
    """Type in which the dense part multiplies matrices; weights, losses and gradients for tables stay FP32."""

    none, bf16, fp16 = "none", "bf16", "fp16"


class Interaction(Enum):
    """Inputs of the top MLP of DLRM besides the pairwise dots: the bottom output, or every vector too."""

    dot, dot_and_embeddings = "dot", "dot_and_embeddings"


class CrossStructure(Enum):
    """Where the MLP of DCN is: parallel to the cross layers, or on top of them."""

    parallel, stacked = "parallel", "stacked"
