"""A step on fake tensors: the bytes of the dense part before training, and predictions made with them."""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.config import Config
from recsys.config.features import dims_of, evaluated_rows, features_by_table, rank_rows, sampled_rows
from recsys.errors import UserError
from recsys.memory import DataFacts, DenseFacts, RankMemory, predict, predict_dense
from recsys.memory.data_facts import of_rank_rows
from recsys.memory.fakes import fake_inputs, fake_step, fake_tensors
from recsys.memory.layers import Layer, analyse_layers, format_layers
from recsys.memory.tensors import dense_update_bytes, gradient_bytes, storage_bytes
from recsys.memory.workspaces import workspace_bytes
from recsys.models.halves import is_in_halves, sum_in_halves
from recsys.models.retrieval import check_vectors
from recsys.report.text import size as shown
from recsys.runtime.environment import HEAP_BLOCK_BYTES
from recsys.runtime.machine import Topology
from recsys.step.offload import Offload
from recsys.step.step import TrainStep
from recsys.tables.spec import Shard, vector_type

_MOST_ROWS = 1 << 24  # of a rank
_PRECISION = 0.02  # of the largest batch that fits
_TRACED_MICRO_BATCHES = 2  # each further one only adds its share of the pooled gradients
_LAYER_ROWS = 1 << 17  # at most so many rows are traced to count layers; counts for more rows are proportional
_MOST_TRACED = 16  # micro-batches, if the loss compares all rows


def rehearse(config: Config, data: DataFacts, rows: int, device: torch.device) -> DenseFacts:
    """Return the bytes of the dense part for `rows` rows of a rank on a device, from a step on fake tensors.

    It needs a process group of as many ranks as the run has, such as that of `rehearse_world`.
    """
    with fake_tensors():
        step = fake_step(config)
        step.dense.model.rehearse(device)
        step.dense.gate.output_dtype = vector_type(config, device.type == "cuda")
        # CPUs compute layers in halves. `PartByPart` models are left out: their predicted peaks are right without it.
        if device.type == "cpu" and is_in_halves(step.dense.model, config) and step.dense.model.loss_by_rows:
            sum_in_halves(step.dense.model, dist.get_world_size())
        offloaded: list[int] = []
        if config.train.activation_offload:
            step.dense.offload = partial(_Counted, sizes=offloaded)
        step_bytes, heap_bytes = _step_bytes(config, data.of_large_batches(), step, rows, device)
        evaluated = evaluated_rows(config, dist.get_world_size(), rows)
        of_batches = [replace(data, mean_ids=means) for means in data.evaluated_ids(evaluated)]
        traces = [_traced(config, facts, step.eval(), evaluated, (0, evaluated), device) for facts in of_batches]
        return DenseFacts(
            **predict_dense(step.dense, config, dist.get_world_size()),
            buffer_bytes=storage_bytes(step.dense.model.buffers()),
            rows=rows,
            step_bytes=step_bytes,
            eval_bytes=tuple(peak for peak, _ in traces),
            heap_bytes=heap_bytes,
            host_bytes=max(offloaded, default=0),
            update_bytes=dense_update_bytes(step.dense, config),
        )


class _Counted(Offload):
    """Counts the bytes that would be kept on the host; tensors are dropped, and come back without content.

    Args:
        sizes: an entry for this forward pass is added, in bytes; CUDA locks powers of two.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], sizes: list[int]) -> None:
        super().__init__(parameters)
        sizes.append(0)
        self._sizes, self._place = sizes, len(sizes) - 1

    def to_host(self, tensor: torch.Tensor) -> Any:
        num_bytes = tensor.numel() * tensor.element_size()
        self._sizes[self._place] += 1 << max(0, num_bytes - 1).bit_length()
        return tensor.shape, tensor.dtype

    def to_device(self, packed: Any, device: torch.device) -> torch.Tensor:
        return torch.empty(packed[0], dtype=packed[1], device=device)


def _step_bytes(config: Config, data: DataFacts, step: TrainStep, rows: int, device: torch.device) -> tuple[int, int]:
    """Return `step_bytes` and `heap_bytes` of the dense part."""
    micro = min(rows, config.train.micro_batch_size or rows)
    if config.train.micro_batch_ids is not None:
        by_ids = int(config.train.micro_batch_ids / max(1e-9, sum(data.mean_ids.values())))
        micro = max(1, min(micro, by_ids))
    step.train()
    if not step.dense.model.loss_by_rows:
        micro = max(micro, -(-rows // _MOST_TRACED))  # smaller ones need hardly less
    if not step.dense.model.loss_by_rows or rows <= (_TRACED_MICRO_BATCHES + 1) * micro:
        return _traced(config, data, step, rows, (*range(0, rows, micro), rows), device)
    traced = micro * _TRACED_MICRO_BATCHES
    width = 4 * sum(dims_of(config).values())
    peak, heap_bytes = _traced(config, data, step, traced, (*range(0, traced, micro), traced), device)
    return max(peak + (rows - traced) * width, 2 * rows * width), heap_bytes


def _traced(
    config: Config, data: DataFacts, step: TrainStep, rows: int, bounds: tuple[int, ...], device: torch.device
) -> tuple[int, int]:
    """Return the peak of live bytes in the dense half, apart from parameters, their gradients and inputs; and the peak
    of those in the heap.

    Raises:
        UserError: a user's own model branches on values, or does not return vectors that can be ranked.
    """
    parameters = list(step.dense.parameters())
    for parameter in parameters:
        parameter.grad = None
    drawn = sampled_rows(config, dist.get_world_size()) if step.training else 0
    pooled, by_id, batch = fake_inputs(config, data, rows, bounds, drawn, step.dense.gate.output_dtype)
    tensors = [vectors.values() for vectors in (pooled, *by_id.values()) if vectors is not None]
    inputs = (*tensors, batch.floats, batch.labels, batch.weights, batch.ids.values(), batch.ids.lengths())
    outside = (*parameters, *step.dense.buffers(), *inputs, batch.ids.offsets())
    live = LivePeak(outside, lambda: gradient_bytes(parameters), on_gpu=device.type == "cuda")
    try:
        with live, torch.set_grad_enabled(step.training):
            _, output = step.dense(pooled, [by_id], batch)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"config key 'model.name': the model branches on values ({error.func}), as with rows[mask], "
            f"nonzero() or an if, and its memory is predicted by shapes alone; compute all rows, and choose by "
            f"torch.where"
        ) from error
    if not step.training and config.model.needs().item_id is not None:
        check_vectors(output.outputs, rows, config.model.needs().vector_dim)
    if dist.get_world_size() > 1:  # gradients are views of exchange buffers, which are always there
        return live.peak, live.heap_peak
    gradients = gradient_bytes(parameters)
    return max(0, live.highest - gradients), live.heap_peak


class LivePeak(TorchDispatchMode):
    """Counts the bytes of live storages that operators inside it have made.

    Args:
        outside: tensors whose memory is not counted, such as a model's parameters and its inputs.
        apart: returns how many of the live bytes are accounted for elsewhere; called at every new peak.
        on_gpu: whether workspaces of operators count too, as on GPUs; on CPUs they are small.

    Attributes:
        live: bytes now; highest: their peak; peak: that of `live` less `apart`.
        heap_peak: peak of the bytes in blocks of the heap.
    """

    def __init__(
        self, outside: Iterable[torch.Tensor], apart: Callable[[], int] = lambda: 0, on_gpu: bool = False
    ) -> None:
        super().__init__()
        self.live = self.highest = self.peak = 0
        self._on_heap = self.heap_peak = 0
        self._apart, self._on_gpu = apart, on_gpu
        self._storages: dict[int, Any] = {id(s): s for s in (t.untyped_storage() for t in outside)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        if self._on_gpu:
            self._note(self.live + workspace_bytes(func, args))
        return result

    def _note(self, size: int) -> None:
        if size > self.highest:
            self.highest = size
            self.peak = max(self.peak, size - self._apart())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._forget(key, size))
        self.live += size
        self._note(self.live)
        if size < HEAP_BLOCK_BYTES:
            self._on_heap += size
            self.heap_peak = max(self.heap_peak, self._on_heap)

    def _forget(self, key: int, size: int) -> None:
        self.live -= size
        self._on_heap -= size if size < HEAP_BLOCK_BYTES else 0
        del self._storages[key]


def layer_page(config: Config, data: DataFacts, rows: int) -> str:
    """Return a Markdown table of the layers, those of embedding tables and of the dense part, for a rank's `rows`."""
    traced = min(rows, _LAYER_ROWS)
    with fake_tensors():
        step = fake_step(config).eval()
        step.dense.model.rehearse(torch.device("cuda"))  # all pairs of vectors at once, not in a CPU's blocks of rows
        pooled, by_id, batch = fake_inputs(config, data, traced, (0, traced))
        with torch.no_grad():
            layers = analyse_layers(step.dense.model, lambda: step.dense(pooled, [by_id], batch))
    whole = [replace(x, outputs=x.outputs * rows // traced, flops=x.flops * rows // traced) for x in layers]
    return format_layers([*_table_layers(config, data, rows), *whole], rows)


def _table_layers(config: Config, data: DataFacts, rows: int) -> list[Layer]:
    """Return the tables as layers: each id looked up adds a row to its feature's vector."""
    layers = []
    for name, features in features_by_table(config).items():
        table = config.tables[name]
        ids = rows * sum(data.mean_ids[feature] for feature in features)
        size = table.num_embeddings * table.embedding_dim
        outputs = rows * len(features) * table.embedding_dim
        layers.append(Layer(f"tables.{name}", "EmbeddingBag", size, outputs, round(ids * table.embedding_dim)))
    return layers


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of all ranks, and the facts it is based on."""

    ranks: list[RankMemory]
    data: DataFacts
    dense: DenseFacts


def predict_run(config: Config, data: DataFacts, topology: Topology, shards: Sequence[Shard]) -> Prediction:
    """Return the memory of every rank under a plan."""
    dense = rehearse(config, data, rank_rows(config, topology.world_size), topology.device)
    return Prediction(predict(config, data, dense, topology, shards), data, dense)


def largest_batch(
    config: Config, data: DataFacts, topology: Topology, shards: Sequence[Shard], dense: DenseFacts | None = None
) -> int:
    """Return the largest global batch that fits under a plan, to within 2 %; 0 if none fits.

    Args:
        dense: the dense part at the rows of the config, if it is known: a rehearsal with hundreds of tables takes
            seconds.
    """
    known = {} if dense is None else {dense.rows: dense}
    ranks, drawn = topology.world_size, sampled_rows(config, topology.world_size)

    def fits(rows: int, facts: DenseFacts) -> bool:
        train = replace(config.train, global_batch_size=max(1, rows - drawn) * ranks)
        of_rows = of_rank_rows(config, data, ranks, rows)
        return not misfits(predict(replace(config, train=train), of_rows, facts, topology, shards), topology)

    def search(dense: Callable[[int], DenseFacts], high: int = _MOST_ROWS) -> int:
        low = 0
        while high - low > max(1, int(low * _PRECISION)):
            middle = max(1, math.isqrt(max(1, low) * high)) if high > 2 * low else (low + high) // 2
            low, high = (middle, high) if fits(middle, dense(middle)) else (low, middle)
        return low

    def rehearsed(rows: int) -> DenseFacts:
        if rows not in known:
            known[rows] = rehearse(config, of_rank_rows(config, data, ranks, rows), rows, topology.device)
        return known[rows]

    base = max(64, rank_rows(config, ranks), 4 * (config.train.micro_batch_size or 0))
    low = search(_by_rows(base, rehearsed))
    low = search(_by_rows(max(base, low // 4), rehearsed))  # measured near the result, where it is exact
    if low and not fits(low, rehearsed(low)):
        low = search(rehearsed, low)
    return max(0, low - drawn) * ranks


def _by_rows(base: int, rehearsed: Callable[[int], DenseFacts]) -> Callable[[int], DenseFacts]:
    """Return the dense part's bytes as a function of a rank's rows, from rehearsals of three sizes.

    Bytes are linear in the rows, or quadratic if the loss compares all rows of a batch with each other.
    """
    rehearsals = [rehearsed(base << i) for i in range(3)]

    def at(rows: int) -> DenseFacts:
        def value(name: str) -> int:
            return _parabola(rows / base, [getattr(facts, name) for facts in rehearsals])

        return replace(
            rehearsals[0],
            rows=rows,
            step_bytes=value("step_bytes"),
            eval_bytes=tuple(
                _parabola(rows / base, sizes) for sizes in zip(*(facts.eval_bytes for facts in rehearsals), strict=True)
            ),
            heap_bytes=value("heap_bytes"),
            host_bytes=value("host_bytes"),
        )

    return at


def _parabola(x: float, values: Sequence[int]) -> int:
    """Return the value at `x` of the parabola through three values at 1, 2 and 4, or 0 if that is negative."""
    y0, y1, y2 = values
    y = y0 * (x - 2) * (x - 4) / 3 - y1 * (x - 1) * (x - 4) / 2 + y2 * (x - 1) * (x - 2) / 6
    return max(0, int(y))


class Demand(NamedTuple):
    """The predicted peak of a GPU, of a process or of a machine's processes, and the bytes available there."""

    where: str
    size: int
    there: int
    number: int  # of the rank, or of the machine
    num_ranks: int = 1
    is_machine: bool = False

    def __str__(self) -> str:
        return f"{self.where} would take {shown(self.size)} of {shown(self.there)}"

    @property
    def is_too_much(self) -> bool:
        """Whether it needs more than there is."""
        return self.size > self.there


def demands(ranks: Sequence[RankMemory], topology: Topology) -> Iterator[Demand]:
    """Yield the demand of each GPU, or of each process with a budget; and of each machine, unless budgets limit it."""
    for rank in ranks:
        if topology.on_gpu:
            size, phase = rank.peak("device")
            yield Demand(f"the GPU of rank {rank.rank} ({phase})", size, topology.device_bytes, rank.rank)
        elif topology.process_bytes is not None:
            size, phase = rank.peak("host")
            yield Demand(f"the process of rank {rank.rank} ({phase})", size, topology.process_bytes, rank.rank)
    if topology.process_bytes is not None and topology.sources["host_bytes"] == "memory.budget":
        return
    local = topology.local_world_size
    for machine in range(topology.num_machines):
        size = sum(rank.peak("host")[0] for rank in ranks[machine * local : (machine + 1) * local])
        yield Demand(f"the host memory of machine {machine}", size, topology.host_bytes, machine, local, True)


def misfits(ranks: Sequence[RankMemory], topology: Topology) -> list[str]:
    """Return a sentence for each GPU, process and machine whose memory is not enough."""
    return [str(place) for place in demands(ranks, topology) if place.is_too_much]
