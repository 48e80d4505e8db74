"""A step without memory: what the dense part and the data will take, before anything is trained, and the prediction."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pyarrow as pa
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.build import build_step
from recsys.config import Config, IdMappingType
from recsys.data.batch import Batch
from recsys.data.buffers import Fence
from recsys.data.order import Position
from recsys.data.parquet import Dataset, read_head
from recsys.data.window import Columns, Ragged, convert_table
from recsys.id_mapping import index_bytes, is_text
from recsys.inputs import Inputs
from recsys.layers import Layer, analyse_layers, format_layers
from recsys.memory import DataFacts, DenseFacts, RankMemory, predict, predict_dense
from recsys.memory.live import LivePeak, storage_bytes
from recsys.memory.page import size as shown
from recsys.models import TrainStep, forget_constants
from recsys.tables import Shard, float_features, id_features
from recsys.topology import Topology

_SAMPLE_ROWS = 20_000
_MOST_ROWS = 1 << 24  # of a rank
_NUMBER_BYTES = 8  # of an id, unless it is a text
_PRECISION = 0.02  # of the largest batch that fits
_ORDER_BYTES = 12  # of a row of a window that is shuffled, while that is done
_DECODING = 5  # times the decoded row group is what Arrow takes for it at its peak (measured: 4 to 5.5)
_TRACED_PIECES = 2  # of a step in micro-batches; each further one leaves its share of the pooled gradients


def rehearse(config: Config, data: DataFacts, rows: int) -> DenseFacts:
    """Return what the dense part takes for `rows` rows of a rank, from a step on fake tensors, as it goes on the CPU.

    A process group of the number of ranks must be there, such as that of `rehearse_world`.
    """
    with _fake_tensors():
        step = build_step(config, lambda: torch.zeros(1))
        size = predict_dense(step.dense, config, dist.get_world_size())
        step_bytes, heap_bytes = _step_bytes(config, data, step, rows)
        return DenseFacts(
            parameter_bytes=size["parameter_bytes"],
            buffer_bytes=_buffer_bytes(config),
            gradient_bytes=size["gradient_bytes"],
            optimizer_bytes=size["optimizer_bytes"],
            rows=rows,
            step_bytes=step_bytes,
            eval_bytes=_traced(config, data, step.eval(), rows, (0, rows))[0],
            heap_bytes=heap_bytes,
        )


@contextmanager
def _fake_tensors() -> Iterator[None]:
    forget_constants()  # that a step has made: fake ones mix with real ones neither way
    try:
        # --debug looks for values that are not finite, and fake tensors have none.
        with torch.random.fork_rng(devices=[]), torch.autograd.set_detect_anomaly(False), FakeTensorMode():
            yield
    finally:
        forget_constants()


def _buffer_bytes(config: Config) -> int:
    item = getattr(config.model, "item_id", None)
    if item is None or not config.model.logq_correction:
        return 0
    return 4 * config.tables[config.features[item].table or ""].num_embeddings  # the log of the items' shares


def _step_bytes(config: Config, data: DataFacts, step: TrainStep, rows: int) -> tuple[int, int]:
    """Return `step_bytes` and `heap_bytes` of the dense part."""
    micro = min(rows, config.train.micro_batch_size or rows)
    if config.train.micro_batch_ids is not None:
        by_ids = int(config.train.micro_batch_ids / max(1e-9, sum(data.mean_ids.values())))
        micro = max(1, min(micro, by_ids))
    step.train()
    pieces = -(-rows // micro)
    if pieces <= _TRACED_PIECES + 1 or not step.dense.task.loss_by_rows:
        return _traced(config, data, step, rows, (*range(0, rows, micro), rows))
    traced = micro * _TRACED_PIECES
    width = 4 * sum(_dims(config).values())
    peak, heap_bytes = _traced(config, data, step, traced, (*range(0, traced, micro), traced))
    return max(peak + (rows - traced) * width, 2 * rows * width), heap_bytes


def _traced(config: Config, data: DataFacts, step: TrainStep, rows: int, bounds: tuple[int, ...]) -> tuple[int, int]:
    """Return the peak of what lives in the dense half beside parameters, all their gradients and its inputs, and how
    much of it lies in heaps at most."""
    parameters = list(step.dense.parameters())
    for parameter in parameters:
        parameter.grad = None
    pooled, by_id = _looked_up(config, data, rows)
    batch = _batch(config, data, rows, bounds)
    tensors = [each.values() for each in (pooled, *by_id.values()) if each is not None]
    inputs = (*tensors, batch.floats, batch.labels, batch.weights, batch.ids.values(), batch.ids.lengths())
    outside = (*parameters, *inputs, batch.ids.offsets())
    live = LivePeak(outside, lambda: storage_bytes(p.grad for p in parameters if p.grad is not None))
    with live, torch.set_grad_enabled(step.training):
        step.dense(pooled, by_id, batch)
    if dist.get_world_size() > 1:  # gradients live in DistributedDataParallel's buckets all the time
        return live.peak, live.heap_peak
    gradients = storage_bytes(p.grad for p in parameters if p.grad is not None)
    return max(0, live.highest - gradients), live.heap_peak


def layer_page(config: Config, data: DataFacts, rows: int) -> str:
    """Return the table of the layers of tables and dense part, for `rows` rows of a rank, as Markdown."""
    with _fake_tensors():
        step = build_step(config, lambda: torch.zeros(1)).eval()
        batch = _batch(config, data, rows, (0, rows))
        pooled, by_id = _looked_up(config, data, rows)
        with torch.no_grad():
            layers = analyse_layers(step.dense.task.model, lambda: step.dense(pooled, by_id, batch))
    return format_layers([*_table_layers(config, data, rows), *layers], rows)


def _table_layers(config: Config, data: DataFacts, rows: int) -> list[Layer]:
    """Return the tables as layers: each id looked up adds a row to its feature's vector."""
    layers = []
    for name, table in config.tables.items():
        features = [feature for feature in id_features(config) if config.features[feature].table == name]
        ids = rows * sum(data.mean_ids[feature] for feature in features)
        size = table.num_embeddings * table.embedding_dim
        outputs = rows * len(features) * table.embedding_dim
        layers.append(Layer(f"tables.{name}", "EmbeddingBag", size, outputs, round(ids * table.embedding_dim)))
    return layers


def _looked_up(config: Config, data: DataFacts, rows: int) -> tuple[KeyedTensor | None, dict[str, JaggedTensor]]:
    """Return what the tables give for a batch: vectors of rows, and of single ids."""
    dims = _dims(config)
    by_id = {name: dims.pop(name) for name in list(dims) if config.features[name].table in config.unpooled_tables()}
    values = torch.empty(rows, sum(dims.values()), requires_grad=True)
    pooled = KeyedTensor(list(dims), list(dims.values()), values) if dims else None
    lengths = torch.empty(rows, dtype=torch.int32)
    return pooled, {
        name: JaggedTensor(torch.empty(math.ceil(rows * data.mean_ids[name]), dim, requires_grad=True), lengths=lengths)
        for name, dim in by_id.items()
    }


def _dims(config: Config) -> dict[str, int]:
    return {name: config.tables[config.features[name].table or ""].embedding_dim for name in id_features(config)}


def _batch(config: Config, data: DataFacts, rows: int, bounds: tuple[int, ...]) -> Batch:
    names = id_features(config)
    counts = [math.ceil(rows * data.mean_ids[name]) for name in names]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    ids = KeyedJaggedTensor(
        names,
        torch.empty(ends[-1], dtype=torch.int32),
        lengths=torch.empty(len(names) * rows, dtype=torch.int32),
        offsets=torch.empty(len(names) * rows + 1, dtype=torch.int32),
        stride=rows,
        length_per_key=counts,
        offset_per_key=ends,
    )
    floats = torch.empty(rows, len(float_features(config)))
    position = Position(0, ())
    id_bounds = tuple(tuple(count * bound // rows for bound in bounds) for count in counts)
    return Batch(ids, floats, torch.empty(rows), torch.empty(rows), None, rows, 0, bounds, position, Fence(), id_bounds)


def data_facts(config: Config, inputs: Inputs | None, world_size: int) -> DataFacts:
    """Return what the footers and the first rows tell of the data, or without `inputs` what the config does."""
    biggest = max(table.num_embeddings for table in config.tables.values())
    if inputs is None:
        mean_ids = {name: float(config.features[name].max_length or 1) for name in id_features(config)}
        windows = 2 * (config.data.window_mib << 20) * -(-config.data.num_streams // world_size)
        id_bytes = 4 if biggest < 1 << 31 else 8
        source, of_ids = "max_length or 1: the data are not here", _vocabularies(config, None)
        return DataFacts(mean_ids, id_bytes, windows, windows // 2, {}, source, *of_ids)
    sample = _Sample(inputs, inputs.datasets["train"])
    roles = {role: -(-dataset.num_rows // world_size) for role, dataset in inputs.datasets.items() if role != "train"}
    windows, decoding = _window_bytes(inputs, sample)
    id_bytes = inputs.spec("train").dtype.itemsize
    source, of_ids = f"the first {sample.rows:,} rows", _vocabularies(config, inputs)
    return DataFacts(sample.mean_ids(), id_bytes, windows, decoding, roles, source, *of_ids)


def _vocabularies(config: Config, inputs: Inputs | None) -> tuple[int, dict[str, int]]:
    """Return the bytes of vocabularies and their indices, and of how many ids each table's is chosen.

    Before the data are counted, a vocabulary is taken to have as many ids as the table has rows for, and no more to
    choose from.
    """
    corpus = [] if inputs is None or inputs.corpus is None else [inputs.corpus]
    facts = None if inputs is None else inputs.facts
    if facts is not None:
        return sum(map(_index_bytes, [*corpus, *facts.vocabularies.values()])), facts.num_counted
    tables = {name: table for name, table in config.tables.items() if table.mapping is IdMappingType.vocabulary}
    rows = {name: table.num_embeddings - 1 - table.num_buckets for name, table in tables.items()}
    counted = {name: rows[name] for name, table in tables.items() if table.vocabulary is None}
    indices = sum(index_bytes(each, each * _NUMBER_BYTES) for each in rows.values())
    return indices + sum(map(_index_bytes, corpus)), counted


def _index_bytes(ids: pa.Array) -> int:
    """Return the bytes of a list of ids and of its index, which shares numbers with it, and has texts of its own."""
    return index_bytes(len(ids), ids.nbytes * (2 if is_text(ids.type) else 1))


class _Sample:
    """The first rows of a dataset, as a window of the loader holds them."""

    def __init__(self, inputs: Inputs, dataset: Dataset) -> None:
        # A sample is no training: its ids are counted in no statistics.
        spec = inputs.spec("train")
        spec = replace(spec, ids=[replace(part, statistics=None) for part in spec.ids])
        table = read_head(dataset, _SAMPLE_ROWS)
        self.columns: Columns = convert_table(table, spec)
        self.rows = max(1, table.num_rows)
        self.names = [part.name for part in spec.ids]
        self.arrow_row_bytes = table.nbytes / self.rows
        self.row_bytes = self.columns.num_bytes / self.rows

    def mean_ids(self) -> dict[str, float]:
        """Return the table rows of each feature, of one row of data."""
        return {
            name: len(part.values) / self.rows if isinstance(part, Ragged) else 1.0
            for name, part in zip(self.names, self.columns.ids, strict=True)
        }


def _held_rows(inputs: Inputs, role: str) -> tuple[int, int]:
    """Return the most rows of windows that a loader's streams hold at once, and those of the largest window."""
    held, largest = 0, 0
    again = role == "train" and inputs.config.train.epochs > 1
    for rows in inputs.loader(role).window_rows():
        following = [*rows[1:], rows[0] if rows and again else 0]
        pairs = [sum(pair) for pair in zip(rows, following, strict=False)] if inputs.config.data.num_threads else rows
        held += max(pairs, default=0)
        largest = max(largest, *rows, 0)
    return held, largest


def _window_bytes(inputs: Inputs, sample: _Sample) -> tuple[int, int]:
    """Return the bytes of the windows that the first rank's loaders hold at once, and of those being made.

    Beside that of the training data there is one that evaluates, and keeps its memory for the next time.
    """
    threads = inputs.config.data.num_threads
    held, largest = _held_rows(inputs, "train")
    held += max((_held_rows(inputs, role)[0] for role in inputs.datasets if role != "train"), default=0)
    # One that is made is there twice, in the order of the files and shuffled, with the order of its rows.
    making = max(1, threads) * largest * (sample.row_bytes + _ORDER_BYTES)
    row_group = int(inputs.datasets["train"].row_groups.num_rows.max())
    # Threads seldom stand at Arrow's peak together: measured, two take half as much again as one.
    decoding = (1 + max(1, threads)) / 2 * _DECODING * row_group * sample.arrow_row_bytes
    return int(held * sample.row_bytes), int(making + decoding)


@dataclass(frozen=True)
class Prediction:
    """The memory of all ranks, and what it follows from."""

    ranks: list[RankMemory]
    data: DataFacts
    dense: DenseFacts


def predict_run(config: Config, data: DataFacts, topology: Topology, pieces: Sequence[Shard]) -> Prediction:
    """Return the memory of every rank under a plan."""
    rows = -(-config.train.global_batch_size // topology.world_size)
    dense = rehearse(config, data, rows)
    return Prediction(predict(config, data, dense, topology, pieces), data, dense)


def largest_batch(config: Config, data: DataFacts, topology: Topology, pieces: Sequence[Shard]) -> int:
    """Return the largest global batch that fits under a plan, to a fiftieth; 0 where none does."""
    dense = _by_rows(config, data, topology)

    def fits(rows: int, facts: DenseFacts) -> bool:
        train = replace(config.train, global_batch_size=rows * topology.world_size)
        return not misfits(predict(replace(config, train=train), data, facts, topology, pieces), topology)

    low, high = 0, _MOST_ROWS
    while high - low > max(1, int(low * _PRECISION)):
        middle = max(1, math.isqrt(max(1, low) * high)) if high > 2 * low else (low + high) // 2
        low, high = (middle, high) if fits(middle, dense(middle)) else (low, middle)
    while low and not fits(low, rehearse(config, data, low)):
        low = int(low * (1 - _PRECISION))
    return low * topology.world_size


def _by_rows(config: Config, data: DataFacts, topology: Topology) -> Callable[[int], DenseFacts]:
    """Return the dense part's bytes as a function of a rank's rows, from three steps.

    They are linear in the rows, or square where the loss compares all rows of a batch with each other.
    """
    base = max(64, -(-config.train.global_batch_size // topology.world_size), 4 * (config.train.micro_batch_size or 0))
    known = [rehearse(config, data, base << i) for i in range(3)]

    def at(rows: int) -> DenseFacts:
        values = {}
        for name in ("step_bytes", "eval_bytes"):
            y0, y1, y2 = (getattr(each, name) for each in known)
            x = rows / base  # the parabola through 1, 2 and 4
            values[name] = int(y0 * (x - 2) * (x - 4) / 3 - y1 * (x - 1) * (x - 4) / 2 + y2 * (x - 1) * (x - 2) / 6)
        return replace(known[0], rows=rows, **{name: max(0, value) for name, value in values.items()})

    return at


def demands(ranks: Sequence[RankMemory], topology: Topology) -> Iterator[tuple[str, int, int]]:
    """Yield for each GPU and machine what it is, the bytes that it needs at its peak, and the bytes that it has."""
    for rank in ranks if topology.on_gpu else ():
        size, phase = rank.peak("device")
        yield f"the GPU of rank {rank.rank} ({phase})", size, topology.device_bytes
    for machine in range(topology.num_machines):
        first = machine * topology.local_world_size
        size = sum(rank.peak("host")[0] for rank in ranks[first : first + topology.local_world_size])
        yield f"the host memory of machine {machine}", size, topology.host_bytes


def misfits(ranks: Sequence[RankMemory], topology: Topology) -> list[str]:
    """Return a sentence for each GPU and machine whose memory is not enough."""
    found = demands(ranks, topology)
    return [f"{where} would take {shown(size)} of {shown(there)}" for where, size, there in found if size > there]
