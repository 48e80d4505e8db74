"""The same config on a GPU: the numbers of the CPU, a checkpoint that moves between the two, device peaks."""

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import benchmark_peaks as peaks
import pyarrow.parquet as pq
import pytest
import torch
from launch import ROOT, environment, losses_of, run_train
from rows import SPEC, build, rows
from rows import write as write_rows
from test_fit import SHORT, first_advice
from test_plans import KINDS, overrides, reference, write

from recsys.config import ComputeKernel, ShardingChoice, load_config
from recsys.config.choices import COLUMN_SPLITS
from recsys.data.parquet import open_dataset
from recsys.training.run import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
CONFIG = "configs/dlrm_sample.yaml"


def train(run_dir: Path, *overrides: str, config: Path | str = CONFIG) -> tuple[dict[str, Any], list[float]]:
    """Train in this process, for most of a short run on a GPU is to import everything and to begin with CUDA."""
    # One thread on CPUs, since several tests run at once, and OpenMP's threads spin.
    options = [f"run.dir={run_dir}", "train.log_every_steps=1", "run.num_threads=1", *overrides]
    try:
        assert run(load_config(config, options)) == 0
    finally:
        if torch.distributed.is_initialized():  # a run that fails leaves that to the end of its process
            torch.distributed.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()  # other tests are on the same GPU
    return json.loads((run_dir / "result.json").read_text()), losses_of(run_dir)


ALL_ROWS = ("tables.user.l2_all_rows=0.02", "tables.device.l2_all_rows=0.5")


BY_ID = ("model.attention={history: item_id}", "tables.user.quantize=INT8")  # of two dimensions, and pooled tables


@pytest.mark.parametrize("more", [(), ALL_ROWS, BY_ID], ids=["", "l2_all_rows", "by_id"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd", "adagrad", "adam", "ftrl"])
def test_a_gpu_trains_what_a_cpu_trains(optimizer: str, more: tuple[str, ...], tmp_path: Path) -> None:
    options = (f"optimizer.tables.name={optimizer}", "model.dropout=0.1", *more)
    on_cpu, losses = train(tmp_path / "cpu", *options, "run.device=cpu")
    on_gpu, losses_on_gpu = train(tmp_path / "gpu", *options, "run.device=cuda")
    torch.testing.assert_close(losses_on_gpu, losses, rtol=0, atol=1e-3)
    torch.testing.assert_close(on_gpu["metrics"], on_cpu["metrics"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"])
def test_evaluations_are_no_updates(optimizer: str, tmp_path: Path) -> None:
    """These correct by the number of updates, for which FBGEMM takes every forward pass."""
    options = (f"optimizer.tables.name={optimizer}", "train.max_steps=12", "run.device=cuda")
    _, losses = train(tmp_path / "plain", *options)
    _, with_evaluations = train(tmp_path / "often", *options, "train.eval_every_steps=2")
    torch.testing.assert_close(with_evaluations, losses, rtol=0, atol=1e-6)


@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ["FP32", "FP16"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_plan_learns_what_plain_torch_learns(kind: ShardingChoice, dtype: str, nproc: int, tmp_path: Path) -> None:
    """On NCCL, against one process of plain torch on the CPU, as tests/tables/test_plans.py has it on gloo."""
    if torch.cuda.device_count() < nproc:
        pytest.skip(f"there are {torch.cuda.device_count()} GPUs, and this takes {nproc}")
    config, run_dir = write(tmp_path), tmp_path / "run"
    optimizer = "adagrad" if kind in COLUMN_SPLITS else "rowwise_adagrad"
    options = ("run.device=cuda", "run.num_threads=1", *overrides(kind.name, dtype, optimizer))
    if nproc == 1:
        _, losses = train(run_dir, *options, config=config)
    else:
        done = run_train(str(config), f"run.dir={run_dir}", *options, nproc=nproc, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        losses = losses_of(run_dir)
    expected, _ = reference(tmp_path, *overrides("table_wise", dtype, optimizer), on_gpu=True)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-4 if dtype == "FP32" else 1e-3)


@pytest.mark.parametrize("kernel", [kernel.name for kernel in ComputeKernel])
def test_each_kernel_trains_the_same(kernel: str, tmp_path: Path) -> None:
    _, losses = train(tmp_path / "fused", "train.max_steps=20", "run.device=cuda")
    options = (f"tables.user.compute_kernel={kernel}", "train.max_steps=20", "run.device=cuda")
    _, with_kernel = train(tmp_path / "kernel", *options)
    torch.testing.assert_close(with_kernel, losses, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        ("tables.user.data_type=FP8",),
        ("tables.user.data_type=FP16", "tables.user.stochastic_rounding=true"),
        ("precision.autocast=bf16",),
        ("precision.autocast=fp16",),
        ("precision.output_dtype=BF16",),
        ("precision.output_dtype=FP16",),
        ("precision.forward_wire=BF16", "precision.backward_wire=BF16"),
        ("precision.tf32=true",),
        ("model.attention={history: item_id}",),
        ("train.compile=true",),
    ],
    ids=lambda options: options[0],
)
def test_each_precision_trains_nearly_the_same(options: tuple[str, ...], tmp_path: Path) -> None:
    plain = [option for option in options if option.startswith("model.")]
    _, losses = train(tmp_path / "plain", *plain, "train.max_steps=20", "run.device=cuda")
    _, with_options = train(tmp_path / "with", *options, "train.max_steps=20", "run.device=cuda")
    torch.testing.assert_close(with_options, losses, rtol=0, atol=2e-2)


def test_a_checkpoint_moves_between_cpu_and_gpu(tmp_path: Path) -> None:
    before, _ = train(tmp_path, "train.max_steps=20", "run.device=cuda")
    after, _ = train(tmp_path, "train.max_steps=20", "run.device=cpu", "run.resume=true")
    torch.testing.assert_close(after["metrics"], before["metrics"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("kernel", ["fused", "fused_uvm_caching"])
def test_ids_that_come_no_more_give_their_rows_to_new_ones(kernel: str, tmp_path: Path) -> None:
    """The day after, on a GPU and on a CPU."""
    table = (
        "tables.user.mapping=vocabulary",
        "tables.user.num_embeddings=2000",
        f"tables.user.compute_kernel={kernel}",
    )
    train(tmp_path / "before", *table, "data.filter={train: 'day <= 1'}", "run.device=cpu")
    start = (f"train.init_from={tmp_path}/before", "train.init.grow_vocabularies=true", "train.init.evict_after_runs=1")
    days = ("data.filter={train: 'day == 4'}", "train.epochs=4")
    on_cpu, losses = train(tmp_path / "cpu", *table, *start, *days, "run.device=cpu")
    on_gpu, losses_on_gpu = train(tmp_path / "gpu", *table, *start, *days, "run.device=cuda")
    assert json.loads((tmp_path / "gpu/loaded.json").read_text())["rows"]["user"]["evicted"] > 5
    torch.testing.assert_close(losses_on_gpu, losses, rtol=0, atol=1e-3)
    torch.testing.assert_close(on_gpu["metrics"], on_cpu["metrics"], rtol=0, atol=1e-3)


def test_a_gpu_scores_what_a_cpu_scores(tmp_path: Path) -> None:
    train(tmp_path / "run", "train.max_steps=20", "run.device=cuda")
    found, data = {}, str(ROOT / "data/sample/test")
    for device in ("cpu", "cuda"):
        out, exported = tmp_path / f"scores-{device}", tmp_path / f"export-{device}"
        for command in (
            ["predict", "RUN", data, str(out)],
            ["evaluate", "RUN", data],
            ["export", "RUN", str(exported)],
        ):
            words = [str(tmp_path / "run") if word == "RUN" else word for word in command]
            program = [sys.executable, "-m", "recsys", *words, f"run.device={device}"]
            done = subprocess.run(program, cwd=ROOT, env=environment(), capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
        found[device] = torch.from_numpy(pq.read_table(out).column("score").to_numpy().copy())
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=0, atol=1e-5)


def test_debug_mode_and_device_peaks(tmp_path: Path) -> None:
    done = run_train(CONFIG, f"run.dir={tmp_path}", "--debug", "train.max_steps=5", "run.device=cuda")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "memory" / "rank_0.json").read_text())
    assert all(line["predicted_bytes"] == line["measured_bytes"] for line in report["lines"])
    assert report["host"]["device_peak_allocated_bytes"] > report["lines"][0]["measured_bytes"] > 0


@pytest.mark.parametrize("name", peaks.CASES)
def test_the_peak_of_the_allocator_is_predicted(name: str, tmp_path: Path) -> None:
    """Within 3 %, and 98 % of it has a kind."""
    if torch.cuda.device_count() < peaks.CASES[name].nproc:
        pytest.skip(f"this takes {peaks.CASES[name].nproc} GPUs")
    for peak in peaks.measure(peaks.CASES[name], tmp_path, "run.device=cuda"):
        assert -0.02 <= peak["error"] <= 0.03, peak


def test_memory_that_runs_out_is_told_with_what_helps(tmp_path: Path) -> None:
    wide = ("model.top_mlp=[1024,1024]", "train.global_batch_size=131072")
    options = (*wide, *SHORT, "memory.budget=2GiB", "run.device=cuda")
    done = run_train(CONFIG, f"run.dir={tmp_path}/short", *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    report = json.loads((tmp_path / "short/memory/rank_0.json").read_text())
    assert report["identity"]["status"] == "out of memory"
    assert report["out_of_memory"]["holders"][0]["name"] == "activations"
    # Not by `run_recsys`: a process that was forked has no GPU.
    again = run_train(CONFIG, f"run.dir={tmp_path}/again", *options, *first_advice(done.stderr))
    assert again.returncode == 0, again.stderr[-3000:]


def test_page_locked_batches_are_written_again_only_after_their_copy(tmp_path: Path) -> None:
    write_rows(tmp_path, [[400, 400], [301]])
    dataset = open_dataset("data.train", str(tmp_path), dict.fromkeys(SPEC.columns(), "key"))
    device = torch.device("cuda", 0)
    expected = [rows(batch) for batch in build(dataset, 16).batches()]
    stream, copies = torch.cuda.Stream(), []
    for batch in build(dataset, 16, num_threads=2, pin_device=device).batches():
        assert all(t.is_pinned() for t in (batch.ids.values(), batch.ids.lengths(), batch.floats, batch.weights))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(1_000_000)  # the copy lags behind
            copies.append(batch.to(device, non_blocking=True))
    torch.cuda.synchronize()
    assert [rows(copy.to(torch.device("cpu"))) for copy in copies] == expected


def test_processes_that_decode_change_nothing(tmp_path: Path) -> None:
    found = {}
    for processes in ("false", "true"):
        options = (f"data.processes={processes}", "data.num_threads=3", "run.device=cuda", "optimizer.tables.name=sgd")
        found[processes] = train(tmp_path / processes, *options)
    torch.testing.assert_close(found["true"][1], found["false"][1], rtol=0, atol=1e-5)
    ids = [json.loads((tmp_path / each / "result.json").read_text())["data"]["ids"] for each in found]
    assert ids[0] == ids[1]


_PIECES = "train.micro_batch_size=16384"


@pytest.mark.parametrize("options", [(), (_PIECES,), (_PIECES, "train.activation_checkpointing=true")])
def test_activations_in_host_memory_are_learned_from_alike(options: tuple[str, ...], tmp_path: Path) -> None:
    """And the GPU takes as much less as is predicted. An evaluation would take more than steps in pieces do."""
    wide = ("model.top_mlp=[1024,1024]", "train.global_batch_size=65536", "train.max_steps=4", "run.device=cuda")
    wide += ("data.valid=null", "data.test=null")
    found = {}
    for offloaded in ("false", "true"):
        words = (f"run.dir={tmp_path / offloaded}", "train.log_every_steps=1", f"train.activation_offload={offloaded}")
        done = run_train(CONFIG, *wide, *options, *words)  # whose memory has nothing of other runs
        assert done.returncode == 0, done.stderr[-3000:]
        losses = losses_of(tmp_path / offloaded)
        report = json.loads((tmp_path / offloaded / "memory/rank_0.json").read_text())
        assert abs(report["peak"]["error"]) < 0.05, report["peak"]
        found[offloaded] = losses, report["host"]["device_peak_allocated_bytes"]
    torch.testing.assert_close(found["true"][0], found["false"][0], rtol=0, atol=1e-5)
    assert found["true"][1] < found["false"][1]


def test_a_shared_dense_optimizer_learns_the_same(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this takes 2 GPUs")
    losses = {}
    for form in ("none", "optimizer"):
        options = (f"run.dir={tmp_path / form}", f"train.dense_sharding={form}", "train.log_every_steps=1")
        done = run_train(CONFIG, *options, "train.max_steps=20", "run.device=cuda", nproc=2)
        assert done.returncode == 0, done.stderr[-3000:]
        losses[form] = losses_of(tmp_path / form)
    torch.testing.assert_close(losses["optimizer"], losses["none"], rtol=0, atol=1e-5)


def test_state_in_bf16_is_half_of_it_and_trains(tmp_path: Path) -> None:
    """FBGEMM keeps the first moment of partial row-wise Adam in BF16, which leaves the numbers near those of FP32."""
    found = {}
    for dtype in ("FP32", "BF16"):
        options = (f"optimizer.tables.state_dtype={dtype}", "train.max_steps=30", "run.device=cuda")
        _, losses = train(tmp_path / dtype, "optimizer.tables.name=partial_rowwise_adam", *options)
        report = json.loads((tmp_path / dtype / "memory/rank_0.json").read_text())
        (state,) = (line for line in report["lines"] if line["kind"] == "table_optimizer")
        assert state["measured_bytes"] == state["predicted_bytes"]
        found[dtype] = losses, state["measured_bytes"]
    torch.testing.assert_close(found["BF16"][0], found["FP32"][0], rtol=0, atol=1e-2)
    assert found["BF16"][1] < 0.65 * found["FP32"][1]
