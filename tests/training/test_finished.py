"""A finished run that is told to go on changes nothing, unless more is asked for; metrics.jsonl has each line once."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
from launch import records_of, run_recsys

from recsys.checkpoint import Marker, Source
from recsys.report.record import Record
from recsys.training.resume import _warn_unfinished

CONFIG = "configs/dlrm_sample.yaml"
OPTIONS = (
    "data.drop_last=true", "train.eval_every_steps=5", "train.early_stop.metric=auc", "train.early_stop.patience=9",
    "run.resume=true", "run.num_threads=1", "run.track.to=[]",
)  # fmt: skip
EPOCH = {"expected": 11 * 256, "seen": 11 * 256, "bad": 0, "skipped": 0}


def train(run_dir: Path, epochs: int, *options: str) -> str:
    """Train, and return what is told."""
    return run_recsys("train", CONFIG, f"run.dir={run_dir}", *OPTIONS, f"train.epochs={epochs}", *options)


@pytest.fixture(scope="module")
def of_one_epoch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, of 11 steps."""
    train(run_dir := tmp_path_factory.mktemp("trained") / "run", 1)
    return run_dir


@pytest.fixture
def finished(of_one_epoch: Path, tmp_path: Path) -> Path:
    """That run, for a test of its own."""
    return copytree(of_one_epoch, tmp_path / "run")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    records = records_of(run_dir, kind=None)
    places = [(record["kind"], record["step"]) for record in records]
    assert len(set(places)) == len(places)
    return [{name: value for name, value in record.items() if name != "time"} for record in records]


def contents(run_dir: Path) -> dict[Path, bytes]:
    """What is in a run directory but for its log, and what each start writes anew."""
    paths = (path for path in run_dir.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in paths if path.name not in ("rank_0.log", "report.html", "config.yaml")}


def test_a_finished_run_goes_on_only_where_more_is_asked_for(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train(run_dir, 2)
    result, told = json.loads((run_dir / "result.json").read_text()), lines(run_dir)
    assert result["best_step"] is not None and result["data"]["epochs"] == [EPOCH] * 2
    before = contents(run_dir)
    again = train(run_dir, 2, f"run.stop_file={tmp_path}/stop")
    assert "done at step 22 already, and nothing more is asked for" in again and "valid at step" not in again
    assert contents(run_dir) == before

    # As of a run that was killed in its last evaluation, on a disk that has lost more.
    (run_dir / "memory/rank_0.json").write_bytes(b"\xff")
    (run_dir / "config.yaml").write_bytes(b"\xff\x00")
    (run_dir / "result.json").write_bytes(b"\xff")
    with (run_dir / "metrics.jsonl").open("ab") as file:
        file.write(b"7\n\xff")
    train(run_dir, 2)
    assert lines(run_dir) == told and json.loads((run_dir / "result.json").read_text())["metrics"] == result["metrics"]
    train(run_dir, 3)
    result = json.loads((run_dir / "result.json").read_text())
    assert result["steps"] == 33 and result["data"]["epochs"] == [EPOCH] * 3
    assert lines(run_dir)[-1]["step"] == result["best_step"]


def test_a_start_that_is_refused_leaves_the_run_as_it_is(finished: Path) -> None:
    """config.yaml is of what was trained, whatever else the run was asked to go on with."""
    before = contents(finished) | {finished / "config.yaml": (finished / "config.yaml").read_bytes()}
    others = (f"run.dir={finished}", *OPTIONS, "train.epochs=1", "data.train=data/sample/test")
    assert "the files of data.train are not those" in run_recsys("train", CONFIG, *others, status=1)
    assert contents(finished) | {finished / "config.yaml": (finished / "config.yaml").read_bytes()} == before
    assert Record(finished).status == "done"
    assert "done at step 11 already" in train(finished, 1)


@pytest.mark.slow
def test_a_run_whose_best_checkpoint_is_damaged_ends_without_it(finished: Path) -> None:
    newest = max((finished / "checkpoints").glob("step-*"))
    best, marker = copytree(newest, newest.with_name("step-000000003")), Marker.read(newest)
    (best / "rank_0.bin").write_bytes(b"")
    replace(marker, state=replace(marker.state, best_step=3, best_metric=2.0)).write(newest)
    told = run_recsys("train", CONFIG, f"run.dir={finished}", *OPTIONS, "train.epochs=2", status=1)
    assert "use another one, or remove it and run.resume=true ends with" in told
    rmtree(best)
    assert "the checkpoint of step 3, the best so far, is gone" in train(finished, 2)
    assert json.loads((finished / "result.json").read_text())["steps"] == 22


def test_what_a_start_that_failed_had_asked_for_is_still_to_be_done(finished: Path, tmp_path: Path) -> None:
    """config.yaml is of that start by then."""
    (tmp_path / "plan.json").write_text("{}")
    more = (f"run.dir={finished}", *OPTIONS, "train.epochs=2", f"run.plan={tmp_path}/plan.json")
    assert "plan.json" in run_recsys("train", CONFIG, *more, status=1)
    assert "done at step 22," in train(finished, 2)


def test_how_to_train_asks_for_nothing_where_no_step_is_left(finished: Path) -> None:
    before = contents(finished) | {finished / "config.yaml": (finished / "config.yaml").read_bytes()}
    changes = "optimizer.tables.learning_rate=0.5", "train.global_batch_size=128", "train.keep_checkpoints=7"
    assert "done at step 11 already" in train(finished, 1, *changes)
    assert contents(finished) | {finished / "config.yaml": (finished / "config.yaml").read_bytes()} == before
    assert "done at step 11," in train(finished, 1, "data.test=null")  # of which the result says something


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (["train.max_steps=11", "data.drop_last=false"], ["data.drop_last=true"]),
        pytest.param(
            ["train.max_steps=9", "data.drop_last=true"],
            ["data.drop_last=true", "train.global_batch_size=1024"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["drops the last now", "larger batches"],
)
def test_an_epoch_in_which_no_step_is_left_has_ended(before: list[str], now: list[str], tmp_path: Path) -> None:
    """3,000 rows are 11 batches of 256 and some."""
    options = [f"run.dir={tmp_path}/run", "train.epochs=2", "train.eval_every_epochs=1", "run.stuck_after_s=20"]
    options += ["run.num_threads=1", "run.track.to=[]"]
    run_recsys("train", CONFIG, *options, *before)
    run_recsys("train", CONFIG, *options, "run.resume=true", *now)
    steps = [line["step"] for line in lines(tmp_path / "run") if line["kind"] == "valid"]
    first = int(before[0].partition("=")[2])
    assert steps[0] == first and len(steps) == 2


def test_data_that_early_stopping_has_come_to_compare_by_stay(tmp_path: Path) -> None:
    """It was switched on as a run went on."""
    options = [f"run.dir={tmp_path}/run", "run.num_threads=1", "run.track.to=[]", "run.resume=true"]
    stopping = ["train.early_stop.metric=auc", "train.eval_every_steps=2"]
    run_recsys("train", CONFIG, *options, "train.max_steps=3")
    run_recsys("train", CONFIG, *options, *stopping, "train.max_steps=6")
    others = (*options, *stopping, "train.max_steps=9", "data.valid=data/sample/test")
    assert "the files of data.valid are not those" in run_recsys("train", CONFIG, *others, status=1)


def test_a_metric_that_is_no_number_costs_no_step(tmp_path: Path) -> None:
    options = [f"run.dir={tmp_path}/run", "run.num_threads=1", "run.track.to=[]", "train.async_checkpoints=true"]
    stopping = ["train.early_stop.metric=auc", "train.eval_every_steps=2", "data.filter={valid: label == 1}"]
    for more in ("train.max_steps=9", "run.resume=true"):  # which says it again, and trains no further
        told = run_recsys("train", CONFIG, *options, *stopping, more, status=1)
        assert "auc is not a number on data.valid" in told
        assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-000000002"]


def test_a_first_start_that_is_refused_leaves_its_page(tmp_path: Path) -> None:
    start = (f"run.dir={tmp_path}/run", *OPTIONS, f"train.init_from={tmp_path}/none")
    assert "warning" not in run_recsys("train", CONFIG, *start, status=1)
    assert "does not exist; name a run directory" in (tmp_path / "run/report.html").read_text()


def test_a_start_from_a_run_that_has_not_ended_is_told(
    finished: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as of a day before that was killed, or that still goes on."""
    checkpoint = finished / "checkpoints/step-000000011"
    source = Source(checkpoint, Marker.read(checkpoint), None)

    def told(run_dir: Path) -> bool:
        caplog.clear()
        _warn_unfinished(run_dir, source)
        return "has not come to its end" in caplog.text

    assert not told(finished)
    result = json.loads((finished / "result.json").read_text())
    (finished / "result.json").write_text(json.dumps(result | {"status": "stopped"}))
    ending = finished / "memory/rank_0.json"
    ending.write_text(ending.read_text().replace('"status": "done"', '"status": "stopped"'))
    assert told(finished)
    text = train(tmp_path / "next", 1, f"train.init_from={finished}", "train.max_steps=1")
    assert f"'{finished}' has not come to its end (stopped), and these are its weights of step 10" in text
    (finished / "result.json").unlink()
    ending.unlink()  # as of one that was killed, before its first line of figures
    (finished / "metrics.jsonl").write_text("")
    assert told(finished) and not told(checkpoint)
    (finished / "metrics.jsonl").unlink()
    assert not told(finished)
