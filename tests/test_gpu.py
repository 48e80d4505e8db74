"""The same config on a GPU: the numbers of the CPU, a checkpoint that moves between the two, device peaks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_train
from rows import SPEC, build, rows, write

from recsys.data.parquet import open_dataset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]
CONFIG = "configs/dlrm_sample.yaml"


def train(run_dir: Path, *overrides: str) -> tuple[dict[str, Any], list[float]]:
    done = run_train(CONFIG, f"run.dir={run_dir}", "train.log_every_steps=1", *overrides)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run_dir / "result.json").read_text()), [r["loss"] for r in records if r["kind"] == "train"]


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd", "adagrad"])
def test_a_gpu_trains_what_a_cpu_trains(optimizer: str, tmp_path: Path) -> None:
    options = (f"optimizer.tables.name={optimizer}", "model.dropout=0.1")
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


def test_a_checkpoint_moves_between_cpu_and_gpu(tmp_path: Path) -> None:
    before, _ = train(tmp_path, "train.max_steps=20", "run.device=cuda")
    after, _ = train(tmp_path, "train.max_steps=20", "run.device=cpu", "run.resume=true")
    torch.testing.assert_close(after["metrics"], before["metrics"], rtol=0, atol=1e-4)


def test_debug_mode_and_device_peaks(tmp_path: Path) -> None:
    train(tmp_path, "--debug", "train.max_steps=5", "run.device=cuda")
    report = json.loads((tmp_path / "memory" / "rank_0.json").read_text())
    assert report["totals"]["predicted"] == report["totals"]["measured"]
    assert report["process"]["device_peak_allocated_bytes"] > report["totals"]["measured"]["table_weight_bytes"]


def test_page_locked_batches_are_written_again_only_after_their_copy(tmp_path: Path) -> None:
    write(tmp_path, [[400, 400], [301]])
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
