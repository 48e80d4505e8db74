"""Runs that are killed, stopped or out of space go on as if nothing had been, or end with one sentence."""

import json
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import kills
import pytest
import torch
from checkpoints import load_tables
from launch import fork_train, records_of

CONFIG = "configs/dlrm_sample.yaml"
STEPS = 12
OPTIONS = (
    "data.window_mib=1", "data.valid=null", "data.test=null", "train.log_every_steps=5", "model.dropout=0.1",
    "run.num_threads=1",
)  # fmt: skip
SAVING = ("train.checkpoint_every_steps=4", "train.keep_checkpoints=1", "train.epochs=1")
_TIMES = ("time", "samples_per_s", "wait_share", "seconds_left", "memory")


def start(run_dir: Path, *options: str, nproc: int = 1, before: Any = None) -> Any:
    return fork_train(
        CONFIG, f"run.dir={run_dir}", "run.resume=true", *OPTIONS, *options, nproc=nproc, before=before, timeout=300
    )


def finish(run_dir: Path, *options: str, nproc: int = 1) -> dict[str, Any]:
    done = start(run_dir, *options, nproc=nproc)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((run_dir / "result.json").read_text())


def assert_same(run_dir: Path, other: Path, steps: int) -> None:
    """Every tensor, every line of metrics.jsonl and the state at the end are equal, to the last bit."""
    tensors, expected = (load_tables(run / f"checkpoints/step-{steps:09d}", "") for run in (run_dir, other))
    assert tensors.keys() == expected.keys() and len(tensors) > 20
    for name, value in tensors.items():
        # Every process seeds Python's and NumPy's generators otherwise, and ids are counted again where rows are read
        # again, which result.json allows for.
        if not name.endswith(("/python", "/numpy")) and not name.startswith("ids/"):
            assert torch.equal(value, expected[name]), name
    assert lines(run_dir) == lines(other)
    results = [json.loads((run / "result.json").read_text()) for run in (run_dir, other)]
    for key in ("state", "metrics", "steps", "best_step"):
        assert results[0][key] == results[1][key], key
    assert results[0]["data"]["epochs"] == results[1]["data"]["epochs"]


def lines(run_dir: Path) -> list[dict[str, Any]]:
    records = records_of(run_dir, kind=None)
    # Ids are counted where rows are read, which is ahead of training, and again where rows are read again.
    kept = [record for record in records if not record["kind"].startswith("ids/")]
    return [{key: value for key, value in record.items() if key not in _TIMES} for record in kept]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    finish(run_dir, *SAVING, nproc=2)
    return run_dir


def cases() -> list[Any]:
    found = []
    for point, ranks, background in product(kills.POINTS, ((0,), (1,), (0, 1)), (False, True)):
        if point in kills.ON_RANK_ZERO and ranks != (0,):
            continue
        marks = [] if (point, ranks, background) == ("shard", (1,), True) else [pytest.mark.slow]
        name = f"{point}-{'and'.join(map(str, ranks))}-{'background' if background else 'foreground'}"
        found.append(pytest.param(point, ranks, background, marks=marks, id=name))
    return found


@pytest.mark.parametrize("point, ranks, background", cases())
def test_killed_and_resumed_is_the_run_that_never_stopped(
    point: str, ranks: tuple[int, ...], background: bool, reference: Path, tmp_path: Path
) -> None:
    options = (*SAVING, f"train.async_checkpoints={str(background).lower()}")
    number = {"step": 7, "shard": 60, "pruning": 1}.get(point, 2)
    killed = start(tmp_path / "run", *options, nproc=2, before=partial(kills.kill_at, point, ranks, number))
    assert killed.returncode != 0 and not (tmp_path / "run/result.json").exists(), killed.stdout
    errors = [line for line in killed.stderr.splitlines() if line.startswith("error: ")]
    assert all("another rank ended" in line for line in errors), killed.stderr
    assert 2 - len(ranks) <= len(errors) < 2, killed.stderr  # one that is to be killed may find the other gone first
    result = finish(tmp_path / "run", *options, nproc=2)
    assert result["data"]["epochs"] == [{"expected": 3000, "seen": 3000, "bad": 0, "skipped": 0}]
    assert_same(tmp_path / "run", reference, STEPS)
    assert len(list((tmp_path / "run/checkpoints").iterdir())) == 2  # one checkpoint, and `latest`


@pytest.mark.slow
def test_terminated_twice(tmp_path: Path) -> None:
    """Rates, loss scale, early stopping and the means in metrics.jsonl are afterwards what they would have been."""
    options = (
        "data.valid=data/sample/valid", "train.epochs=2", "train.eval_every_steps=6", "train.early_stop.metric=auc",
        "optimizer.schedule.name=cosine", "optimizer.schedule.warmup_steps=9", "precision.autocast=fp16",
        "precision.loss_scale_growth_steps=5", "train.early_stop.patience=9", "optimizer.dense.name=lamb",
    )  # fmt: skip
    finish(tmp_path / "whole", *options)
    stopped = start(tmp_path / "run", *options, before=partial(kills.terminate_twice, 8))
    assert stopped.returncode == 143 and "saving step 8" in stopped.stdout, stopped.stderr[-2000:]
    assert "step 8/24" not in stopped.stdout
    result = finish(tmp_path / "run", *options)
    assert "resumed at step 8" in (tmp_path / "run/logs/rank_0.log").read_text()
    assert result["state"]["loss_scale"] > 4096 and result["best_step"] is not None
    assert_same(tmp_path / "run", tmp_path / "whole", 24)


@pytest.mark.slow
def test_a_file_stops_the_run(reference: Path, tmp_path: Path) -> None:
    options = (*SAVING, f"run.stop_file={tmp_path}/stop")
    (tmp_path / "stop").touch()
    stopped = start(tmp_path / "run", *options, nproc=2)
    assert stopped.returncode == 143, stopped.stderr[-2000:]
    assert json.loads((tmp_path / "run/result.json").read_text())["steps"] == 1
    (tmp_path / "stop").unlink()
    finish(tmp_path / "run", *options, nproc=2)
    assert_same(tmp_path / "run", reference, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_ends_all_ranks_alike(background: bool, reference: Path, tmp_path: Path) -> None:
    options = (*SAVING, f"train.async_checkpoints={str(background).lower()}")
    failed = start(tmp_path / "run", *options, nproc=2, before=partial(kills.fill_the_disk, 1, 2, 9))
    errors = re.findall(r"error: (.*)", failed.stderr)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr[-2000:]
    assert len(set(errors)) == 1 and "No space left on device" in errors[0]  # which one rank may tell for both
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert kept == ["latest", "step-000000004"]
    if background:  # noticed by a step, not by the save that would come next
        told = (tmp_path / "run/logs/rank_0.log").read_text()
        assert re.search(r"stop requested: saving step (9|1[0-2])\b", told), told
    finish(tmp_path / "run", *options, nproc=2)
    assert_same(tmp_path / "run", reference, STEPS)


@pytest.mark.slow
def test_two_ranks_walk_back_to_what_is_whole(reference: Path, tmp_path: Path) -> None:
    finish(tmp_path / "run", *SAVING, "train.max_steps=8", "train.keep_checkpoints=2", nproc=2)
    shard = tmp_path / "run/checkpoints/step-000000008/rank_1.bin"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    finish(tmp_path / "run", *SAVING, nproc=2)
    for rank in (0, 1):
        told = (tmp_path / f"run/logs/rank_{rank}.log").read_text()
        assert re.search(r"refused: .*step-000000008' is corrupt: rank_1.bin has changed", told)
        assert "resumed at step 4" in told
    assert_same(tmp_path / "run", reference, STEPS)


@pytest.mark.slow
def test_fifty_kills_at_any_moment(tmp_path: Path) -> None:
    """The tables are those of a run that was left alone, and every row of every epoch was trained once."""
    epochs, num_kills = 480, 0
    options = (f"train.epochs={epochs}", "train.checkpoint_every_steps=10", "train.async_checkpoints=true")
    while num_kills < 50:
        moment = kills.random_seconds(num_kills)
        done = start(tmp_path / "run", *options, before=partial(kills.kill_after, moment))
        assert done.returncode == -9, f"{num_kills} kills: {done.stderr[-2000:]}"
        num_kills += 1
    # Kills before the first checkpoint, or again at the same step, would show little.
    told = (tmp_path / "run/logs/rank_0.log").read_text()
    resumed = re.findall(r"resumed at step (\d+)", told)
    assert len(resumed) >= 30 and len(set(resumed)) >= 10, resumed
    result = finish(tmp_path / "run", *options)
    assert result["data"]["epochs"] == [{"expected": 3000, "seen": 3000, "bad": 0, "skipped": 0}] * epochs
    finish(tmp_path / "whole", f"train.epochs={epochs}")
    assert_same(tmp_path / "run", tmp_path / "whole", epochs * 12)
