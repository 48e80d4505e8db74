"""Checkpoint tensors in canonical form, the same for any number of ranks and any sharding plan.

`tables/T` is [num_embeddings, embedding_dim]; `table_optimizer/T/S` is the same, or [num_embeddings] for a row-wise
optimizer. P in `dense/P` and `dense_optimizer/P/S` is the name of a parameter, R in `rng/R/G` is a rank, and
`ids/R/F` has the counts of a feature's ids on a rank.
"""

import inspect
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from recsys.checkpoint.tensor_files import Entry, LocalShard, LocalTensor
from recsys.ids import IdStatistics
from recsys.runtime.world import World
from recsys.tables.module_names import parameter_name
from recsys.tables.spec import local_shards

TABLES, TABLE_OPTIMIZER, RNG, IDS = "tables/", "table_optimizer/", "rng/", "ids/"
DENSE, DENSE_OPTIMIZER = "dense/", "dense_optimizer/"
_SCALARS = (int, float, str, type(None))


@dataclass
class Tensors:
    """Tensors of a checkpoint, read from and restored into a model, its tables and optimizers.

    Attributes:
        tables: weights by table; table_optimizer: state by `TABLE/STATE`; ShardedTensors, or tensors that every rank
            holds.
        slices: `DenseShards.slices` if `dense_optimizer` is sharded over the ranks.
        statistics: of ids, by feature.
        after_load: called once tables have been loaded in place.
    """

    tables: Callable[[], dict[str, Any]]
    table_optimizer: Callable[[], dict[str, Any]]
    dense: torch.nn.Module
    dense_optimizer: torch.optim.Optimizer
    slices: Mapping[torch.Tensor, tuple[torch.Tensor, int]] | None = None
    statistics: Mapping[str, IdStatistics] = field(default_factory=dict)
    after_load: Callable[[], None] = lambda: None

    def to_save(self, world: World) -> tuple[dict[str, LocalTensor], dict[str, str]]:
        """Return all tensors, and the reason for each that is only approximate; collective."""
        weights, states = self.tables(), self.table_optimizer()
        tensors = {TABLES + name: LocalTensor.of(value) for name, value in weights.items()}
        split = {name for name in states if _column_shards(weights, name, states[name])}
        tensors |= {
            TABLE_OPTIMIZER + name: LocalTensor.of(value) for name, value in states.items() if name not in split
        }
        approximate = {}
        # A rank knows only the state that it holds a shard of.
        for name in sorted(set().union(*world.gather(split))):
            tensors[TABLE_OPTIMIZER + name] = LocalTensor.of(_mean_over_columns(weights, name, states.get(name), world))
            approximate[TABLE_OPTIMIZER + name] = (
                "row-wise state of a table split by columns, saved as the mean over its column shards by their width"
            )
        tensors |= {DENSE + name: LocalTensor.of(value) for name, value in self._dense().items()}
        tensors |= self._optimizer_tensors()
        own = {f"{RNG}{world.rank}/{name}": value for name, value in rng_tensors(world.device).items()}
        for name, statistics in self.statistics.items():
            own[f"{IDS}{world.rank}/{name}"] = torch.from_numpy(statistics.state().view(np.int64))
        for name, value in own.items():
            tensors[name] = LocalTensor(tuple(value.shape), value.dtype, (LocalShard(value, (0,)),))
        return tensors, approximate

    def scalars(self) -> dict[str, Any]:
        """Return the state of the dense optimizer that is not a tensor, by name."""
        return {name: value for name, value in self._optimizer_state().items() if isinstance(value, _SCALARS)}

    def to_load(self) -> dict[str, LocalTensor]:
        """Return the tables, their optimizers' state and the dense weights, to be loaded in place."""
        weights = self.tables()
        tensors = {TABLES + name: LocalTensor.of(value) for name, value in weights.items()}
        for name, value in self.table_optimizer().items():
            shards = _column_shards(weights, name, value)
            tensors[TABLE_OPTIMIZER + name] = _column_tensor(weights, name, value) if shards else LocalTensor.of(value)
        return tensors | {DENSE + name: LocalTensor.of(value) for name, value in self._dense().items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the dense optimizer, or this rank's slices of them, by name, in its order."""
        names = {parameter: parameter_name(name) for name, parameter in self.dense.named_parameters()}
        groups = self.dense_optimizer.param_groups
        slices = self.slices or {}
        return {names[slices.get(own, (own, 0))[0]]: own for group in groups for own in group["params"]}

    def room_for(self, saved: Mapping[str, Entry]) -> dict[str, LocalTensor]:
        """Return empty tensors to load the saved state of the dense optimizer into, or this rank's slices of it."""
        if self.slices is None:
            return {name: LocalTensor.of(entry.empty()) for name, entry in saved.items()}
        parameters, room = self.parameters(), {}
        for name, entry in saved.items():
            own = parameters.get(owner_of(name).removeprefix(DENSE))
            if own is not None:
                of_rows = entry.size == tuple(self.slices[own][0].shape)
                tensor = torch.empty(own.shape if of_rows else entry.size, dtype=entry.torch_dtype)
                room[name] = _local_rows(tensor, own, *self.slices[own])
        return room

    def _optimizer_tensors(self) -> dict[str, LocalTensor]:
        """Return the dense optimizer's tensors; if it is sharded, each rank has its rows, and one has the counters."""
        state = {DENSE_OPTIMIZER + n: v for n, v in self._optimizer_state().items() if isinstance(v, torch.Tensor)}
        if self.slices is None:
            return {name: LocalTensor.of(value) for name, value in state.items()}
        parameters, tensors = self.parameters(), {}
        for name, value in state.items():
            own = parameters[owner_of(name).removeprefix(DENSE)]
            whole, first = self.slices[own]
            if first == 0 or value.shape == own.shape:
                tensors[name] = _local_rows(value.detach(), own, whole, first)
        return tensors

    def set_dense_optimizer(self, tensors: dict[str, torch.Tensor], scalars: dict[str, Any]) -> None:
        """Restore the state of the dense optimizer.

        Its settings (weight decay …) stay those of this run's config; parameters without saved state start with none.

        Args:
            tensors: by `PARAMETER/STATE`; scalars: likewise, and by `group0/NAME` for the groups of parameters.

        Raises:
            KeyError, ValueError: they are not a state of this optimizer.
        """
        content = self.dense_optimizer.state_dict()
        parameters = self.parameters()
        numbers = {name: number for number, name in enumerate(parameters)}
        groups = {f"group{number}": group for number, group in enumerate(content["param_groups"])}
        state: dict[int, dict[str, Any]] = {}
        for key, value in {**tensors, **scalars}.items():
            owner, _, name = key.rpartition("/")
            target = groups[owner] if owner in groups else state.setdefault(numbers[owner], {})
            target[name] = value
        for name, number in numbers.items():
            _check_state(name, state.get(number, {}), parameters[name], self.dense_optimizer)
        self.dense_optimizer.load_state_dict({"state": state, "param_groups": content["param_groups"]})

    def _dense(self) -> dict[str, torch.Tensor]:
        return {parameter_name(name): value for name, value in self.dense.state_dict().items()}

    def _optimizer_state(self) -> dict[str, Any]:
        """Return the state of the dense optimizer by `PARAMETER/STATE`, without its settings."""
        optimizer = self.dense_optimizer
        learned_state = {
            f"{name}/{key}": value
            for name, parameter in self.parameters().items()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        for number, group in enumerate(optimizer.param_groups):
            learned = group.keys() - optimizer.defaults.keys() - {"params"}
            learned_state |= {f"group{number}/{key}": group[key] for key in learned}
        return learned_state

    def add_statistics(self, name: str, counts: torch.Tensor) -> None:
        """Add saved counts of ids, a tensor `ids/R/F`, to the statistics.

        Raises:
            KeyError, ValueError: they are of another feature, or not statistics.
        """
        self.statistics[name.removeprefix(IDS).partition("/")[2]].add_state(counts.numpy().view(np.uint64))


def owner_of(name: str) -> str:
    """Return the table or weight, `tables/T` or `dense/P`, whose optimizer state a tensor is; otherwise its name."""
    for states, owners in ((TABLE_OPTIMIZER, TABLES), (DENSE_OPTIMIZER, DENSE)):
        if name.startswith(states):
            return owners + name.removeprefix(states).rpartition("/")[0]
    return name


def _local_rows(state: torch.Tensor, own: torch.Tensor, whole: torch.Tensor, first: int) -> LocalTensor:
    """Return the state of `own`, a slice of the parameter `whole` from row `first` on; a counter is for all of it."""
    of_rows = state.dim() > 0 and state.shape == own.shape
    offsets = tuple(first if of_rows and dim == 0 else 0 for dim in range(state.dim()))
    return LocalTensor(tuple(whole.shape if of_rows else state.shape), state.dtype, (LocalShard(state, offsets),))


def _check_state(name: str, state: dict[str, Any], parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Raise a ValueError if a parameter's state has other names, shapes or types than a step of the optimizer makes."""
    # A step with a parameter of 2 × 2 shows which dimensions of the state are as long as the parameter's.
    small = torch.nn.Parameter(parameter.new_zeros((2,) * parameter.dim()))
    small.grad = torch.zeros_like(small)
    wanted = inspect.signature(type(optimizer)).parameters.keys() & optimizer.defaults.keys()
    twin = type(optimizer)([small], **{key: optimizer.param_groups[0][key] for key in wanted})
    twin.step()
    expected = twin.state[small]
    if state and expected and state.keys() != expected.keys():
        raise ValueError(f"the optimizer keeps {', '.join(expected)} of {name}, found {', '.join(state)}")
    for key, value in state.items():
        if isinstance(like := expected.get(key), torch.Tensor):
            sides = zip(like.shape, parameter.shape, strict=False)
            shape = tuple(size if side == 2 else side for side, size in sides)
            if not isinstance(value, torch.Tensor) or (tuple(value.shape), value.dtype) != (shape, like.dtype):
                raise ValueError(f"{name}/{key} has another shape or type than the optimizer's")


def rng_tensors(device: torch.device) -> dict[str, torch.Tensor]:
    """Return the states of torch's generators (host, and `device` if it is a GPU), of NumPy's and of Python's.

    Training itself draws from counters (`runtime.counter_random`); the generators are saved for other code that draws.
    The second number of a pair from the normal distribution, which NumPy and Python buffer, is not saved.

    Returns:
        uint8 for torch's; int64 [625] for NumPy's and Python's: the words of the Mersenne Twister and its position.
    """
    numpy_state = np.random.get_state(legacy=False)["state"]
    _, state, _ = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*numpy_state["key"].tolist(), numpy_state["pos"]]),
        "python": torch.tensor(state),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_rank_rng(tensors: dict[str, torch.Tensor], world: World) -> None:
    """Restore this rank's generators from the tensors `rng/R/G`."""
    prefix, device = f"{RNG}{world.rank}/", world.device
    tensors = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
    torch.set_rng_state(tensors["torch"])
    *words, position = tensors["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(words, np.uint32), position, 0, 0.0))
    random.setstate((3, tuple(tensors["python"].tolist()), None))
    if "cuda" in tensors and device.type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], device)


def _column_shards(weights: dict[str, Any], name: str, state: Any) -> list[tuple[int, int]]:
    """Return (offset, width) of the column shards, for each of which a row-wise state repeats the rows; else []."""
    table = weights[name.rpartition("/")[0]]
    if not hasattr(table, "local_shards") or len(state.size()) != 1 or state.size()[0] == table.size()[0]:
        return []
    return sorted({(s.shard_offsets[1], s.shard_sizes[1]) for s in table.metadata().shards_metadata})


def _column_tensor(weights: dict[str, Any], name: str, state: Any) -> LocalTensor:
    """Return, as a tensor [rows], a state that repeats rows for each column shard; shards may hold a row twice."""
    rows = weights[name.rpartition("/")[0]].size()[0]
    shards = tuple(LocalShard(tensor, (offset % rows,)) for tensor, (offset,) in local_shards(state))
    return LocalTensor((rows,), shards[0].tensor.dtype, shards)


def _mean_over_columns(weights: dict[str, Any], name: str, state: Any, world: World) -> torch.Tensor:
    """Return a state's mean over column shards, weighted by width, [rows] FP32 in host memory, on every rank."""
    rows, columns = weights[name.rpartition("/")[0]].size()
    mean = torch.zeros(rows)
    if state is not None:
        shards = _column_shards(weights, name, state)
        for tensor, (offset,) in local_shards(state):
            number, row = divmod(offset, rows)
            mean[row : row + len(tensor)] += tensor.float().cpu() * (shards[number][1] / columns)
    return world.sum(mean)
