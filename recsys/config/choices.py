"""Choices of config keys: enums whose members are named as they are written in YAML."""

from enum import Enum


class FeatureType(Enum):
    """Type of a feature: ids, which are looked up in a table, or numbers.

    `id`: one id or a list of ids a row. `float`: one number a row, or a vector of `dim` numbers.
    """

    id, float = "id", "float"


class NullPolicy(Enum):
    """Value that a null becomes.

    Of an id: row 0 of the table (`reserved`), no id at all (`empty`), or an error (`refuse`). Of a float: the feature's
    `fill` (`reserved`), the mean of data.train (`mean`), or an error (`refuse`).
    """

    reserved, empty, mean, refuse = "reserved", "empty", "mean", "refuse"


class Keep(Enum):
    """End of a list longer than `max_length` that is kept."""

    first, last = "first", "last"


class IdMappingType(Enum):
    """Mapping of raw ids to rows of a table; row 0 is the null row except under `identity`.

    `hash`: any id to rows 1..n-1. `identity`: id i is row i. `vocabulary`: the ids that data.train shows at least
    `min_count` times have a row each, the rest share `num_buckets` rows. `quotient_remainder`: ids hashed to `num_ids`
    numbers, each the sum of two rows (Shi et al. 2020, arXiv:1909.02107).
    """

    hash, identity, vocabulary, quotient_remainder = "hash", "identity", "vocabulary", "quotient_remainder"


class DataType(Enum):
    """Storage type of a table's weights, not of optimizer state. FP8 (e4m3, FBGEMM's NFP8) trains on GPUs only."""

    FP32, FP16, FP8 = "FP32", "FP16", "FP8"


class RowCode(Enum):
    """Code of a table's vectors as they are served.

    `FP16`: halves. `INT8`, `INT4`, `INT2`: whole numbers of so many bits, with a scale and a bias for each row.
    """

    FP16, INT8, INT4, INT2 = "FP16", "INT8", "INT4", "INT2"


class ComputeKernel(Enum):
    """Place and kernel of a table. On CPU all are `fused`, in host memory; so is `data_parallel` sharding.

    `fused`: device memory. `fused_uvm`: host memory, read over the bus. `fused_uvm_caching`: the same with a cache of
    rows in device memory, `cache_load_factor` of the table.
    """

    fused, fused_uvm, fused_uvm_caching = "fused", "fused_uvm", "fused_uvm_caching"


class LabelLoss(Enum):
    """Loss of a label.

    `binary`: the cross-entropy of the model's logit and a label of 0 or 1. `squared`: the squared error of its output.
    """

    binary, squared = "binary", "squared"

    @property
    def is_binary(self) -> bool:
        """Whether a label is 0 or 1 and the model's output a logit; else both are any numbers."""
        return self is not LabelLoss.squared


class SequenceLayer(Enum):
    """Layer of a sequence model.

    `sasrec`: attention, then two linear layers with a ReLU; both read their input normalised, and are added to the
    input itself, which is the formula of the paper. `original`: the code of SASRec's authors
    (github.com/kang205/SASRec): both are added to the normalised input, and keys and values are of the input itself.
    `ligr`: as `sasrec` with SwiGLU, and a gate on what is added (Borisyuk et al. 2025, arXiv:2502.03417; as eSASRec,
    arXiv:2508.06450). `hstu`: attention by SiLU in place of softmax, times a gate, and no other layers (Zhai et al.
    2024, arXiv:2402.17152).
    """

    sasrec, original, ligr, hstu = "sasrec", "original", "ligr", "hstu"


class SequenceLoss(Enum):
    """Loss of a sequence's next item against drawn negatives.

    `softmax`: the cross-entropy among all of these. `gbce`: binary cross-entropies, of which the next item's is
    calibrated to the share of items that are drawn (Petrov & Macdonald 2023, arXiv:2308.07192).
    """

    softmax, gbce = "softmax", "gbce"


class RetrievalLoss(Enum):
    """Loss of a user's item against drawn negatives, by the scores of the model: cosines, or dot products.

    `softmax`: the cross-entropy among all of these. `contrastive`: 1 minus the item's cosine, plus the mean excess of
    the negatives' cosines over a margin (Mao et al. 2021, arXiv:2109.12613). `binary`: binary cross-entropies. `bpr`:
    the mean of -log sigmoid(item's score - negative's score) (Rendle et al. 2009, arXiv:1205.2618).
    """

    softmax, contrastive, binary, bpr = "softmax", "contrastive", "binary", "bpr"


class RetrievalMetric(Enum):
    """Metric of the best K items of each user; users without targets do not count.

    Means over users: the share of targets among the K (`recall`); discounted gain over the best possible (`ndcg`);
    whether a target is among them (`hit_rate`); 1 / rank of the first target (`mrr`); average precision over the
    number of targets (`map`). `coverage`: the share of all items that are among any user's K.
    """

    recall, ndcg, hit_rate, mrr = "recall", "ndcg", "hit_rate", "mrr"
    map, coverage = "map", "coverage"


class LabelNulls(Enum):
    """Null labels: an error (`refuse`), or `unknown`, so that the row does not count for this label."""

    refuse, unknown = "refuse", "unknown"


class FloatType(Enum):
    """Type of numbers that are computed or sent, not kept."""

    FP32, FP16, BF16 = "FP32", "FP16", "BF16"


class StateType(Enum):
    """Type that an optimizer of tables keeps its state for each element in; state for each row is FP32."""

    FP32, BF16 = "FP32", "BF16"


class Pooling(Enum):
    """Pooling of a feature's list into one vector."""

    sum, mean = "sum", "mean"


class Route(Enum):
    """Choice of the experts that an id is looked up in.

    `frequency`: one. Each table but the last has the most frequent ids of data.train that those before it have not, as
    many as it has rows for, and the last takes all others. `hash`: `active` of them, by a hash of the id.
    """

    frequency, hash = "frequency", "hash"


class Gate(Enum):
    """Factors of experts, between 0 and 2, and 1 at first: 2 / (1 + exp(-x)).

    `none`: always 1. `table`: x is learned for each expert. `features`: x is a linear function of the vectors of the
    other id features, of a retrieval model those of the same side.
    """

    none, table, features = "none", "table", "features"


class ShardingChoice(Enum):
    """Split of a table over the ranks; `auto` leaves it to the planner. One rank splits nothing.

    `data_parallel`: every rank holds all of it. `table_wise`: one rank does. `row_wise`, `column_wise`: split over all
    ranks. `table_row_wise`, `table_column_wise`: rows over the ranks of one machine, columns over single ranks.
    `grid_shard`: columns over machines, and rows over the ranks of each.
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
# Splits of rows: each rank sums the rows of a list that it holds, and the ranks' sums are added up.
ROW_SPLITS = (ShardingChoice.row_wise, ShardingChoice.table_row_wise, ShardingChoice.grid_shard)


class DenseOptimizer(Enum):
    """Optimizers of the dense (data-parallel) part."""

    adam, adamw, adagrad, sgd, adafactor, lamb = "adam", "adamw", "adagrad", "sgd", "adafactor", "lamb"


class DenseSharding(Enum):
    """What of the dense part is split over the ranks, in place of a copy on each.

    `none`: nothing. `optimizer`: the state of its optimizer (ZeRO-1), which must then be elementwise.
    """

    none, optimizer = "none", "optimizer"


# Optimizers whose update of a weight depends on no other weight.
ELEMENTWISE = (DenseOptimizer.adam, DenseOptimizer.adamw, DenseOptimizer.adagrad, DenseOptimizer.sgd)


class Schedule(Enum):
    """Shape of the learning rate after the warm-up.

    `constant`: unchanged. `linear`, `cosine`: straight down, or half a cosine. `plateau`: times `plateau_factor` each
    time `train.early_stop.metric` has not improved for `plateau_patience` evaluations.
    """

    constant, linear, cosine, plateau = "constant", "linear", "cosine", "plateau"


class Tracker(Enum):
    """Where figures of a run go besides metrics.jsonl: TensorBoard (RUN/tensorboard), Weights & Biases, MLflow."""

    tensorboard = "tensorboard"
    wandb = "wandb"
    mlflow = "mlflow"


class Saver(Enum):
    """Changes of `memory.fit` that change what is learned.

    `row_order`: data.window_mib, and with it the order of the rows. `bf16_autocast`: precision.autocast.
    `row_wise_state`: the tables' optimizer, to its row-wise kind. `fp16_tables`: their data_type.
    """

    row_order = "row_order"
    bf16_autocast = "bf16_autocast"
    row_wise_state = "row_wise_state"
    fp16_tables = "fp16_tables"


class TableEncoding(Enum):
    """How exports and publications write rows of tables; `stored`: as checkpoints do."""

    fp32, stored, fp16, int8, int4, int2 = "fp32", "stored", "fp16", "int8", "int4", "int2"


class Device(Enum):
    """Device of a run: `auto` takes CUDA where there is a GPU, the CPU otherwise."""

    auto, cpu, cuda = "auto", "cpu", "cuda"


class Autocast(Enum):
    """Type in which the dense part multiplies matrices; weights, losses and what tables get stay FP32."""

    none, bf16, fp16 = "none", "bf16", "fp16"


class Interaction(Enum):
    """Input of DLRM's top MLP beside the pairwise dots: the bottom output, or every vector too."""

    dot, dot_and_embeddings = "dot", "dot_and_embeddings"


class CrossStructure(Enum):
    """Where DCN's MLP stands: beside the cross layers, or on top of them."""

    parallel, stacked = "parallel", "stacked"
