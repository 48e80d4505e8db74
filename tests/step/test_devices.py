"""No operator of a whole run takes a tensor of the device and one of the host's memory; for models see
`tests/models/test_pretended_gpu.py`.

No GPU is needed. What would lie on one is marked by its storage: what a rank copies there, weights, and what is made of
marked tensors or for their device. Asked for its device a marked tensor says cuda:0, so that the code takes a GPU's
way; what is made for cuda:0 is made for cpu:0, which nobody else asks for.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import must_train
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recsys.step.step import DenseHalf
from recsys.tables import updates
from recsys.training.trainer import Trainer

CUDA, PLACE = torch.device("cuda", 0), torch.device("cpu", 0)
SAMPLE = "configs/dlrm_sample.yaml"


class Marked:
    """The tensors that would lie on a GPU, by their storages."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}  # while a reference is held, no other storage has its number

    def __contains__(self, tensor: Any) -> bool:
        found = self._storages.get(tensor.untyped_storage()._cdata) if isinstance(tensor, torch.Tensor) else None
        return found is not None and not found.expired()

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor not in self:
                self._storages[tensor.untyped_storage()._cdata] = StorageWeakRef(tensor.untyped_storage())


class Operators(TorchDispatchMode):
    """Marks what operators make, and notes those that take both."""

    def __init__(self, marked: Marked) -> None:
        super().__init__()
        self.marked, self.mixed, self.num_on_device = marked, set[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        on_device = [each for each in given if each in self.marked]
        on_host = [each for each in given if each not in self.marked and each.dim() and each.numel()]
        # FBGEMM's tables lie in host memory here, with the tensors that belong to them.
        if on_device and on_host and name not in ("copy_", "_to_copy") and func.namespace != "fbgemm":
            self.mixed.add(f"{func} at {_caller()}")
        self.num_on_device += bool(on_device)
        made, device = func(*args, **kwargs), kwargs.get("device")
        goes = bool(on_device) if device is None or name.startswith("new_") else device == PLACE
        if goes and name != "copy_":
            own = {id(each) for each in given}
            self.marked.add(each for each in tree_leaves(made) if id(each) not in own)
        return made


class Functions(TorchFunctionMode):
    """Says where tensors lie, and takes those to the host that are asked to go there."""

    def __init__(self, marked: Marked) -> None:
        super().__init__()
        self.marked = marked

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        asked = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        if asked in ("device", "is_cuda") and first in self.marked:
            return CUDA if asked == "device" else True
        args, kwargs = tuple(map(_there, args)), {key: _there(value) for key, value in (kwargs or {}).items()}
        to_host = name == "cpu" or (name == "to" and torch.device("cpu") in map(_as_device, (*args, *kwargs.values())))
        if to_host and first in self.marked:
            return torch.empty(first.shape, dtype=first.dtype).copy_(first.detach())
        made = func(*args, **kwargs)
        if name in ("new_tensor", "tensor", "as_tensor") and (first in self.marked or kwargs.get("device") == PLACE):
            self.marked.add([made])
        return made


def _there(value: Any) -> Any:
    return PLACE if isinstance(value, torch.device) and value == CUDA else value


def _as_device(value: Any) -> torch.device | None:
    return torch.device(value) if isinstance(value, (str, torch.device)) else None


def _caller() -> str:
    """The innermost place in the package."""
    frame: Any = sys._getframe(2)
    while frame is not None and "/recsys/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Event:
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


def pretend() -> None:
    """Train and evaluate with the weights and all batches marked."""
    fit = Trainer.fit
    torch.cuda.Event = Event  # type: ignore[assignment, misc]
    updates.look_up_as_sums = lambda _: None  # type: ignore[assignment]
    DenseHalf.late_exchange = property(lambda self: True, lambda self, late: None)  # type: ignore[assignment]

    def fitted(self: Any) -> bool:
        marked, model = Marked(), self._built.model
        marked.add(getattr(each, "data", each) for each in (*model.parameters(), *model.buffers()))
        marked.add(values for table in model.module.dense.replicated.tables for values in table.state)
        self._pipeline._device = PLACE
        object.__setattr__(self._world, "device", PLACE)
        with Operators(marked) as operators, Functions(marked):
            stopped = fit(self)
        found = [sorted(operators.mixed), operators.num_on_device]
        (self._run_dir / "mixed.json").write_text(json.dumps(found))
        return stopped

    Trainer.fit = fitted  # type: ignore[method-assign]


MUCH = (
    "model.attention={history: item_id}", "model.dropout=0.1", "precision.autocast=bf16", "tables.user.l2=0.1",
    "tables.device.l2_all_rows=0.1",
    "data.label_column=null", "data.labels={a: label, b: {column: label, weight: 2, nulls: unknown}}",
    "optimizer.dense.clip_norm=1", "train.micro_batch_size=100",
)  # fmt: skip


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), MUCH], ids=["plain", "much"])
def test_no_operator_takes_tensors_of_both(options: tuple[str, ...], tmp_path: Path) -> None:
    short = (f"run.dir={tmp_path}/run", "train.max_steps=3", "run.num_threads=1", *options)
    must_train(SAMPLE, *short, before=pretend)
    mixed, num_on_device = json.loads((tmp_path / "run/mixed.json").read_text())
    assert mixed == [] and num_on_device > 300
