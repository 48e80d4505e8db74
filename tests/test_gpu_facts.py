"""What must hold on a GPU, as far as the sources of FBGEMM and a machine without one show it."""

import ast
import inspect
import json
import pydoc
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bare_loop
import pytest
import torch
from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from launch import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from recsys.config import OptimizerConfig, load_config
from recsys.config.checks import _LEAST_FP8_RANGE
from recsys.config.choices import ELEMENTWISE, DenseOptimizer
from recsys.config.schema import DenseOptimizerConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.memory import Timeline
from recsys.memory.advice import Explained, limit_memory
from recsys.memory.dry_run import rehearse_run
from recsys.memory.fakes import fake_tensors
from recsys.runtime import threads
from recsys.step.optim import build_dense_optimizer
from recsys.tables.spec import fill_initial
from recsys.training import run

CONFIG = "configs/dlrm_sample.yaml"
FBGEMM = [optimizer for optimizer in TableOptimizer if optimizer.value.path]
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("optimizer", FBGEMM, ids=lambda optimizer: optimizer.name)
def test_fbgemm_gives_the_state_of_each_optimizer_and_reads_its_decay(optimizer: TableOptimizer) -> None:
    rule, kind = optimizer.value, optimizer_type_to_emb_opt_type(pydoc.locate(optimizer.value.path))
    states = [torch.zeros(1)] * (rule.row_state + rule.element_state)
    stub = SimpleNamespace(
        optimizer=kind,
        split_optimizer_states=lambda: [states] if states else [],
        use_rowwise_bias_correction=False,
        _used_rowwise_adagrad_with_counter=False,
        _used_rowwise_adagrad_with_global_weight_decay=False,
    )
    given = SplitTableBatchedEmbeddingBagsCodegen.get_optimizer_state(stub)
    assert [len(each) for each in given] == ([len(states)] if states else [])
    name = kind.value.removeprefix("exact_").replace("row_wise", "rowwise")
    code = ast.parse(inspect.getsource(getattr(invokers, f"lookup_{name}")))
    read = {node.attr for node in ast.walk(code) if isinstance(node, ast.Attribute)}
    assert ("weight_decay" in read, "weight_decay_mode" in read) == (rule.reads_decay, rule.decay_has_modes)


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=lambda optimizer: optimizer.name)
def test_optimizers_of_the_dense_part_take_weights_on_a_gpu(optimizer: DenseOptimizer) -> None:
    """torch 2.11's Adagrad does not, if it is fused."""
    with FakeTensorMode():
        weights = torch.nn.Parameter(torch.empty(2, 2, device=CUDA))
        weights.grad = torch.empty_like(weights)
        built = build_dense_optimizer([weights], OptimizerConfig(dense=DenseOptimizerConfig(name=optimizer)))
        try:
            built.step()
        except Exception as error:  # some then want a GPU that is there
            assert "supported devices" not in str(error)


def test_fp8_tables_that_would_start_as_zeros_are_refused() -> None:
    weights = torch.zeros(200, 16, dtype=torch.float8_e4m3fn)
    fill_initial(weights, 0, 0, 1, "user", _LEAST_FP8_RANGE)
    assert (weights.float() != 0).float().mean() > 0.7
    large = ["tables.user.data_type=FP8", "tables.user.num_embeddings=1000000"]
    with pytest.raises(UserError, match=r"'tables.user.init_range': FP8 .* within ±0.001 would start as zeros"):
        load_config(CONFIG, large)
    for init_range in (_LEAST_FP8_RANGE, 0):
        load_config(CONFIG, [*large, f"tables.user.init_range={init_range}"])


def test_the_history_of_allocations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked(Exception):
        pass

    def record(max_entries: int = sys.maxsize) -> None:
        assert max_entries <= 1_000_000
        raise Asked

    class OnGPU:
        def __enter__(self) -> Any:
            return SimpleNamespace(device=CUDA, world_size=1, from_rank_zero=lambda make: make()), None

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(run, "open_run_world", lambda *_: OnGPU())
    monkeypatch.setattr(run, "Timeline", lambda *_: None)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    with pytest.raises(Asked):
        run.run(load_config(CONFIG, ["memory.snapshot=true"]))


def test_a_prediction_leaves_the_generator_of_the_gpu_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has set it, and predicts after that; a model is made by the seed of the config."""
    states: list[object] = ["as saved"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", states.append)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: (states[-1], device))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.append((*state, device)))
    with fake_tensors():
        torch.manual_seed(7)
    assert states == ["as saved", 7, ("as saved", 3, 3)]


def test_a_snapshot_of_memory_is_left_beside_the_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that runs out before any report has been written."""
    config = load_config(CONFIG, ["memory.snapshot=true", "topology.device_memory=8GiB"])
    world: Any = SimpleNamespace(device=CUDA, rank=0, world_size=1, local_world_size=1)
    explained, told = Explained(config, world, Timeline(CPU)), []
    explained.folder, explained.write = tmp_path / "memory", lambda status, _: told.append(status)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda **_: {})
    with pytest.raises(UserError, match=r"memory has run out in .*CUDA out of memory"), explained:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert told == ["out of memory"] and (tmp_path / "memory/snapshot_rank_0.pickle").exists()


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_the_allocator_may_take_what_a_budget_leaves_beside_the_context(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And beside NCCL's buffers, as it is predicted."""
    options = ["memory.budget=8GiB", "topology.device=cuda", "topology.device_memory=80GiB"]
    config = load_config(CONFIG, [*options, f"topology.world_size={num_ranks}", "data.valid=null", "data.test=null"])
    (context,) = {rank.phases["step"]["device"]["context"] for rank in rehearse_run(config).prediction.ranks}
    given: list[float] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: given.append(share * (80 << 30))
    )
    world: Any = SimpleNamespace(device=CUDA, world_size=num_ranks)
    assert limit_memory(config, world) is None
    assert given == [pytest.approx((8 << 30) - context)]


def test_a_rank_beside_a_gpu_decodes_on_its_cores_and_computes_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no GPU is here, its machine may have as many cores as can be of use."""
    assert torch.cuda.is_available() or threads.decoding_threads(None, CUDA, 2) == 12
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for cores, decoding in ((1, 2), (16, 6), (128, 12)):
        monkeypatch.setattr(threads, "num_cores", lambda number=cores: number)
        assert threads.computing_threads(None, CUDA, 2) == 1 and threads.computing_threads(3, CUDA, 2) == 3
        assert threads.decoding_threads(None, CUDA, 2) == decoding and threads.decoding_threads(0, CUDA, 2) == 0
        assert threads.decoding_threads(None, CPU, 2) == 2
    assert threads.computing_threads(None, CPU, 2) == 63


def test_the_bare_loop_is_timed_to_the_end_of_what_it_has_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("synchronised"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    bare = bare_loop.Bare.__new__(bare_loop.Bare)
    bare._device, bare._world_size, bare._rows, bare.batches = CUDA, 1, 4, iter(())
    bare._pipeline = SimpleNamespace(progress=lambda _: done.append("step"))
    bare.measure(2, 1)
    assert done == ["synchronised", "step", "step", "synchronised"]
    batch = SimpleNamespace(pin_memory=lambda: "page-locked")
    assert bare_loop.pinned(batch, CUDA) == "page-locked" and bare_loop.pinned(batch, CPU) is batch


@pytest.mark.slow
def test_the_check_of_a_gpu_runs_without_one(tmp_path: Path) -> None:
    """All but the tests of a GPU, which would be skipped."""
    command = [sys.executable, "scripts/gpu_check.py", "--out", str(tmp_path / "out"), "--device", "cpu", "--quick"]
    parts = ["matrix", "peaks", "throughput", "variants", "threads", "two_ranks", "step", "loader", "seeds"]
    subprocess.run([*command, "--parts", *parts, "sanitizer"], cwd=ROOT, check=True, capture_output=True, timeout=900)
    assert all(json.loads((tmp_path / "out" / f"{part}_cpu.json").read_text()) for part in parts)
