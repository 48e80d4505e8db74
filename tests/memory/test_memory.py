"""Predicted bytes of tensors are those that live, to the byte; predicted peaks are near those of the process."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import benchmark_peaks as peaks
import benchmark_random
import numpy as np
import pytest
import random_runs
import yaml
from launch import run_recsys, run_train
from storages import walk

from recsys.config import ShardingChoice
from recsys.memory import DataFacts, Timeline

KINDS = [choice.value for choice in ShardingChoice if choice is not ShardingChoice.auto]
TYPES = ("FP32", "FP16")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")
TABLES = {"user": (999, 16), "item": (333, 8), "category": (77, 16)}
MIB = 1 << 20


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of three tables, one of which two features share, with rows that no number of ranks divides."""
    content = {
        "data": {"train": "data/sample/train", "label_column": "label", "window_mib": 1, "num_threads": 0},
        "features": {
            "user_id": {"table": "user"},
            "item_id": {"table": "item"},
            "history": {"table": "item", "max_length": 10},
            "category": {"table": "category"},
            "price": {"type": "float"},
        },
        "tables": {name: {"num_embeddings": rows, "embedding_dim": dim} for name, (rows, dim) in TABLES.items()},
        "model": {"name": "dlrm", "bottom_mlp": [16], "top_mlp": [32]},
        "optimizer": {"tables": {"allow_column_split": True}},
        "train": {"global_batch_size": 256},
    }
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def variant(kind: str, dtype: str, optimizer: str) -> list[str]:
    tables = [f"tables.{t}.{key}" for t in TABLES for key in (f"sharding_type={kind}", f"data_type={dtype}")]
    return [f"optimizer.tables.name={optimizer}", *tables]


def check(config: Path, variants: list[list[str]], nproc: int, folder: Path, timeout: float) -> None:
    for overrides, ranks in zip(variants, walk(config, variants, nproc, folder, timeout), strict=True):
        for rank in ranks:
            assert rank["predicted"] == rank["measured"], overrides
            # FBGEMM's small tensors of offsets and placements, torchrec's of features, constants of the model.
            assert 0 <= rank["rest"] < 64 << 10, overrides


@pytest.mark.parametrize("num_threads", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_loops_that_are_compiled_are_predicted(num_threads: int, tmp_path: Path) -> None:
    """By numba, where more than two threads decode.

    In a process of its own: on Python 3.13, one that is forked takes 40 MiB more.
    """
    options = (f"data.num_threads={num_threads}", "train.max_steps=20", "data.valid=null", "data.test=null")
    done = run_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}/run", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    peak = json.loads((tmp_path / "run/memory/rank_0.json").read_text())["peak"]
    assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak


def test_a_vocabulary_that_is_read_instead_of_counted_is_predicted() -> None:
    facts = DataFacts({}, 4, 0, (), {}, "", vocabulary_bytes=1000)
    assert facts.counting_bytes(0, 1) == {"vocabularies": 1000}
    assert replace(facts, vocabulary_bytes=0).counting_bytes(0, 1) == {}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
def test_what_torch_compile_takes_is_predicted(tmp_path: Path) -> None:
    """In a process of its own: those that are forked have imported a part of it before."""
    options = ("train.compile=true", "train.max_steps=4", "data.valid=null", "data.test=null", "run.num_threads=1")
    done = run_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}/run", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    peak = json.loads((tmp_path / "run/memory/rank_0.json").read_text())["peak"]
    assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak


@pytest.mark.parametrize("nproc", [1, 2])
def test_tensors_are_predicted_to_the_byte(nproc: int, config: Path, tmp_path: Path) -> None:
    variants = [variant("row_wise", "FP16", "rowwise_adagrad"), variant("table_wise", "FP32", "adagrad")]
    shared = [*variant("table_wise", "FP32", "adagrad"), "train.dense_sharding=optimizer"]
    check(config, [*variants, variant("data_parallel", "FP32", "rowwise_adagrad"), shared], nproc, tmp_path, 120)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_a_shared_dense_optimizer_to_the_byte(nproc: int, config: Path, tmp_path: Path) -> None:
    optimizers = ("adam", "adamw", "adagrad", "sgd", "sgd optimizer.dense.momentum=0.9")
    variants = [["train.dense_sharding=optimizer", *f"optimizer.dense.name={name}".split()] for name in optimizers]
    check(config, variants, nproc, tmp_path, 300)


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2, 4])
def test_every_plan_type_and_optimizer_to_the_byte(nproc: int, config: Path, tmp_path: Path) -> None:
    check(config, [variant(*each) for each in product(KINDS, TYPES, OPTIMIZERS)], nproc, tmp_path, 900)


def test_the_reports_of_a_run(config: Path, tmp_path: Path) -> None:
    printed = run_recsys("train", config, f"run.dir={tmp_path}/run", "train.max_steps=3", nproc=2)
    folder = tmp_path / "run" / "memory"
    for rank in range(2):
        report = json.loads((folder / f"rank_{rank}.json").read_text())
        assert report["schema_version"] == 2
        identity = report["identity"]
        assert (identity["rank"], identity["world_size"], identity["status"], identity["step"]) == (rank, 2, "done", 3)
        assert {line["error"] for line in report["lines"] if line["measured_bytes"]} == {0.0}
        spans = report["timeline"]["spans"]
        assert {"init", "step", "save"} <= {span["phase"] for span in spans}
        assert report["host"]["peak_rss_bytes"] >= max(span["peak_bytes"] for span in spans) - MIB
        assert report["allocator"] is None and report["host"]["baseline_bytes"] > 0
        peak = report["peak"]
        assert peak["unexplained_bytes"] == peak["measured_bytes"] - peak["predicted_bytes"]
        assert sum(peak["by_kind_predicted"].values()) == peak["predicted_bytes"]
        # One block, of a power of two bytes: that of a batch is free before the next one is made.
        assert report["loader"]["batch_bytes"] < 2 * peak["by_kind_predicted"]["loader_batches"]
    page = (folder / "report.md").read_text()
    assert " on rank 0 (" in page and " predicted" in page and "| top.0 | Linear |" in page
    # The log ends in where the run has come to, and the page is in the file alone.
    ending = printed.split("checkpoints/step-000000003\n")[1].splitlines()
    assert len(ending) == 2 and ending[0].startswith("peak memory: ") and ending[0].endswith("/run/report.html")
    assert ending[1] == f"done at step 3: {tmp_path}/run/result.json"
    assert all("|" not in (tmp_path / f"run/logs/rank_{rank}.log").read_text() for rank in range(2))


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gradients_are_where_they_are_predicted(nproc: int, config: Path, tmp_path: Path) -> None:
    """Several ranks have them from the start; a rank alone from the first step on, in evaluations and saves too."""
    options = (
        "model.top_mlp=[4096,4096]",
        "train.max_steps=2",
        "train.global_batch_size=64",
        "data.valid=data/sample/valid",
    )
    run_recsys("train", config, f"run.dir={tmp_path}/run", *options, nproc=nproc)
    phases = json.loads((tmp_path / "run" / "memory" / "rank_0.json").read_text())["phases"]
    for phase in ("init", "evaluation", "save"):  # gradients are 64 MiB
        assert abs(phases[phase]["predicted_bytes"] - phases[phase]["measured_bytes"]) < 32 * MIB, phase


def test_a_run_that_fails_leaves_its_report(config: Path, tmp_path: Path) -> None:
    bad = ("optimizer.dense.learning_rate=1e30", "optimizer.dense.name=sgd", "train.max_steps=50")
    assert "is not finite" in run_recsys("train", config, f"run.dir={tmp_path}/run", *bad, status=1)
    report = json.loads((tmp_path / "run" / "memory" / "rank_0.json").read_text())
    assert report["identity"]["status"] == "failed" and report["identity"]["step"] > 0
    assert "failed at step" in (tmp_path / "run" / "memory" / "report.md").read_text()


def test_a_mistake_in_the_data_leaves_none(config: Path, tmp_path: Path) -> None:
    run_recsys("train", config, f"run.dir={tmp_path}/run", "data.label_column=price_", status=1)
    assert not (tmp_path / "run").exists()


def test_a_timeline_knows_the_peak_of_each_phase() -> None:
    import torch

    timeline = Timeline(torch.device("cpu"))
    timeline.step = 1
    with timeline.phase("step"):
        timeline.step = 2
        with timeline.phase("save"):
            np.ones(64 << 20, np.uint8)  # and is gone
        timeline.step = 3
    peak, peaks = timeline.peak(), timeline.peaks()
    timeline.close()
    assert (peak.phase, peak.step) == ("save", 2)
    assert peaks["save"] > timeline.baseline_bytes + 60 * MIB > peaks["step"]
    assert [span.phase for span in timeline.spans] == ["other", "step", "save", "step", "other"]


@pytest.mark.slow
@pytest.mark.parametrize("name", peaks.CASES)
def test_the_peak_of_the_process_is_predicted(name: str, tmp_path: Path) -> None:
    """Within 5 % or 32 MiB: `python -m pytest -m slow tests/memory/test_memory.py -k peak_of_the_process`."""
    for peak in peaks.measure(peaks.CASES[name], tmp_path):
        assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_the_peak_of_many_small_tables_is_predicted(nproc: int, tmp_path: Path) -> None:
    model, overrides = {"name": "logistic_regression"}, ("train.global_batch_size=256", "train.max_steps=5")
    case = peaks.Case(2000, ids=200, num_embeddings=500, dim=8, nproc=nproc, model=model, overrides=overrides)
    for peak in peaks.measure(case, tmp_path):
        assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak


@pytest.mark.slow
@pytest.mark.parametrize("seed", random_runs.AFTER)
def test_the_peaks_of_random_runs_are_predicted(seed: int, tmp_path: Path) -> None:
    for rank in benchmark_random.measure(seed, tmp_path):
        assert peaks.is_near(rank["peak"]["predicted_bytes"], rank["peak"]["measured_bytes"]), rank


def test_steps_are_traced_with_their_tables_marked(config: Path, tmp_path: Path) -> None:
    options = ("train.max_steps=16", "train.epochs=9", "run.profile_steps=2")
    run_recsys("train", config, f"run.dir={tmp_path}/run", *options, nproc=2)
    for rank in range(2):
        events = json.loads((tmp_path / f"run/profile/rank_{rank}.json").read_text())["traceEvents"]
        marks = [event for event in events if event.get("name") == "## tables: update ##"]
        assert len(marks) == 2 and any(event.get("name") == "[memory]" for event in events)
