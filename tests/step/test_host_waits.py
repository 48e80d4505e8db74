"""What a training step asks of a GPU: to wait for it once, for the sums, and operators that have a kernel there."""

import json
import os
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from gpu_order import step_as_gpus
from launch import losses_of, must_train
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchgen.gen import ParsedYaml, parse_native_yaml
from torchgen.model import DispatchKey

CONFIG = "configs/dlrm_sample.yaml"
# Read the values of a tensor, or copy values out of memory that is not page-locked.
_BY_NAME = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "new_tensor", "tensor"}
_BY_NAME |= {"as_tensor", "nonzero", "masked_select", "unique", "unique_consecutive", "allclose", "equal"}
_OPERATORS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
_FIRST, _LAST = 8, 12  # steps

_FBGEMM = "split_table_batched_embeddings_ops_training.py"
# Of what lies in host memory with a GPU too: FBGEMM's count of its passes, and the widths of its features.
ON_HOST = {("item", f"{_FBGEMM}:forward"), ("cpu", f"{_FBGEMM}:forward"), ("cpu", f"{_FBGEMM}:_generate_vbe_metadata")}
# torchrec reads a step ahead how many ids go where, on a stream of its own with nothing but their exchange queued.
# What `__torch_function__` does is counted there.
_NOT_COUNTED = {"start_sparse_data_dist", "wait_sparse_data_dist", "dist_init", "__torch_function__"}
THE_ONE = "tolist", "exchange.py:wait"
# FBGEMM's operators with a kernel for CUDA, by its sources (DISPATCH_TO_CUDA, FBGEMM_OP_DISPATCH(CUDA, …)); wheels for
# CPUs do not tell. Look there before you add one.
FBGEMM_ON_CUDA = re.compile(
    "asynchronous_complete_cumsum|block_bucketize_sparse_features|bounds_check_indices|invert_permute|"
    "permute_[12]D_sparse_data|dense_embedding_codegen_lookup_function|"
    "split_embedding_(nobag_)?(codegen_forward|backward_codegen_[a-z_]+?)_(un)?weighted_pt2_wrapper"
)


def _caller() -> str:
    """The innermost place outside torch; empty for what is not counted."""
    frame: Any = sys._getframe(2)
    place = ""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _NOT_COUNTED:
            return ""
        if not place and ("/torch/" not in code.co_filename or "/torch/optim/" in code.co_filename):
            place = f"{Path(code.co_filename).name}:{code.co_name}"
        frame = frame.f_back
    return place


class Calls(TorchFunctionMode):
    def __init__(self, found: Counter[tuple[str, str]]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        places = args[1] if name in ("__getitem__", "__setitem__") else ()
        by_list = any(isinstance(place, list) for place in (places if isinstance(places, tuple) else (places,)))
        if name in _BY_NAME or by_list:  # a list of places is a tensor on the host
            self.found[name, _caller()] += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, found: Counter[tuple[str, str]], operators: set[str]) -> None:
        super().__init__()
        self.found, self.operators = found, operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.operators.add(str(func))
        by_mask = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        unsized = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in _OPERATORS or by_mask or unsized:
            self.found[name, _caller()] += 1
        return func(*args, **(kwargs or {}))


def count_waits() -> None:
    """Count in the order of a GPU's step."""
    of_gpu = step_as_gpus()
    progress, step, found = of_gpu.progress, 0, Counter[tuple[str, str]]()
    operators: set[str] = set()

    def counted(self: Any, batches: Any) -> Any:
        nonlocal step
        step += 1
        if not self._model.training or not _FIRST <= step < _LAST:
            return progress(self, batches)
        with Operators(found, operators), Calls(found):
            output = progress(self, batches)
        if step == _LAST - 1:
            by_place = {" ".join(key): count / (_LAST - _FIRST) for key, count in found.items() if key[1]}
            (run_dir,) = (each.removeprefix("run.dir=") for each in sys.argv if each.startswith("run.dir="))
            Path(run_dir, f"waits-{os.environ.get('RANK', 0)}").write_text(json.dumps([by_place, sorted(operators)]))
        return output

    of_gpu.progress = counted


BY_SPLIT = [f"tables.{name}.sharding_type=row_wise" for name in ("user", "item", "category", "device", "hour")]
RUNS = {
    "plain": (1, ["model.attention={history: item_id}"]),
    "by rows on two ranks": (2, [*BY_SPLIT, "train.micro_batch_size=32", "optimizer.dense.clip_norm=1"]),
    "read later": (2, [*BY_SPLIT, "train.check_every_step=false", "optimizer.dense.clip_norm=1"]),
    "much": (
        2,
        [
            *("model.attention={history: item_id}", "model.dropout=0.1", "precision.autocast=bf16"),
            *(
                "tables.hour.sharding_type=data_parallel",
                "tables.user.l2=0.1",
                "tables.device.l2_all_rows=0.1",
                "data.label_column=null",
            ),
            "data.labels={a: label, b: {column: label, weight: 2, nulls: unknown}}",
        ],
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "much" else [pytest.mark.slow]) for name in RUNS]
)
def test_the_host_waits_once_a_step_and_every_operator_is_there(name: str, tmp_path: Path) -> None:
    nproc, options = RUNS[name]
    short = ("train.max_steps=14", "data.valid=null", "data.test=null", "data.prefetch_batches=2")
    options = [*short, "run.num_threads=1", "train.log_every_steps=1", *options]
    must_train(CONFIG, f"run.dir={tmp_path}", *options, nproc=nproc, before=count_waits)
    for rank in range(nproc):
        waits, operators = json.loads((tmp_path / f"waits-{rank}").read_text())
        assert len(operators) > 40 and not [each for each in operators if not on_cuda(each)]
        allowed = {" ".join(each) for each in ON_HOST}
        expected = {} if name == "read later" else {" ".join(THE_ONE): 1}
        assert {place: count for place, count in waits.items() if place not in allowed} == expected
    if name == "much":
        must_train(CONFIG, f"run.dir={tmp_path}/on_cpu", *options, nproc=nproc)
        assert losses_of(tmp_path) == losses_of(tmp_path / "on_cpu")


@cache
def torchs_operators() -> ParsedYaml:
    folder = Path(torchgen.__file__).parent / "packaged/ATen/native"
    return parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))


def on_cuda(operator: str) -> bool:
    namespace, name, overload = operator.split(".")
    if namespace == "recsys":  # operators on the CPU alone: elsewhere their place is taken by torch's own
        return name in ("uniform", "kept")
    if namespace != "aten":
        return namespace in ("c10d", "profiler") or bool(FBGEMM_ON_CUDA.fullmatch(name))
    full = name if overload == "default" else f"{name}.{overload}"
    (function,) = (each for each in torchs_operators().native_functions if str(each.func.name) == full)
    in_cuda = torchs_operators().backend_indices[DispatchKey.CUDA].has_kernel(function)
    return function.has_composite_kernel or in_cuda or function.structured_delegate is not None
