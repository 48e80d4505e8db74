"""Where figures go: what TensorBoard's own reader, W&B and MLflow get is what metrics.jsonl has."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from launch import records_of, run_recsys
from retrieval import NUM_ITEMS, train, write_retrieval

from recsys.config import load_config
from recsys.config.choices import Tracker
from recsys.errors import UserError
from recsys.report import trackers
from recsys.report.record import figures
from recsys.report.trackers import Writers, import_trackers, open_writers
from recsys.report.writers import JsonLines, Writer
from recsys.training.figures import NORM_LIMITS, log_row_norms

CONFIG = "configs/dlrm_sample.yaml"
LINE = {"kind": "train", "time": 1.0, "step": 10, "loss": 0.5, "losses": {"a": 0.25, "b": None}, "rows": 7}


def read_back(folder: Path) -> Any:
    """Return TensorBoard's own reader of a folder."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder), size_guidance={accumulator.SCALARS: 0})
    return events.Reload()


def print_the_status_at_the_end() -> None:
    """Let a run print the status that its trackers get."""

    def close(writer: trackers.TensorBoard) -> None:
        print(f"closed as {writer.status}")
        close_writer(writer)

    close_writer = trackers.TensorBoard.close
    trackers.TensorBoard.close = close  # type: ignore[method-assign]


def test_tensorboard_has_the_curves_of_metrics_jsonl(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    options = ("train.epochs=1", "train.log_every_steps=2", "train.eval_every_steps=8", "run.track.row_norms=true")
    printed = run_recsys(
        "train", CONFIG, f"run.dir={tmp_path}/run", *options, nproc=2, before=print_the_status_at_the_end
    )
    assert "closed as done\n" in printed
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    expected: dict[str, list[tuple[int, np.float32]]] = {}
    for line in records_of(tmp_path / "run", kind=None):
        for name, value in figures(line):
            expected.setdefault(f"{line['kind']}/{name}", []).append((line["step"], np.float32(value)))
    for feature, report in result["data"]["ids"].items():  # what the end alone knows goes to the trackers alone
        for name, value in figures(report):
            expected[f"ids/{feature}/{name}"].append((result["steps"], np.float32(value)))
    assert {"train/loss", "train/learning_rate/tables", "train/gradient_norm", "valid/auc"} <= expected.keys()
    events = read_back(tmp_path / "run" / "tensorboard")
    for name, points in expected.items():
        assert [(each.step, np.float32(each.value)) for each in events.Scalars(name)] == points, name
    counted = result["data"]["ids"]["item_id"]
    so_far = records_of(tmp_path / "run", "ids/item_id")
    assert so_far and all(line["step"] % 8 == 0 and 0 < line["ids"] < counted["ids"] for line in so_far)
    assert {"config/text_summary", "plan/text_summary"} <= {*events.Tags()["tensors"]}
    counts = [sum(each.histogram_value.bucket) for each in events.Histograms("row_norms/item")]
    assert counts and {*counts} == {1000}  # each row once, though two ranks hold them


def test_the_projector_has_the_vectors_of_recsys_embeddings(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.plugins.projector.projector_plugin")
    config, run_dir, out = write_retrieval(tmp_path), tmp_path / "run", tmp_path / "vectors.parquet"
    train(config, run_dir, "train.epochs=1", "run.track.item_vectors=true")
    run_recsys("embeddings", run_dir, "item", out)
    expected = {row["item"]: row["vector"] for row in pq.read_table(out).to_pylist()}
    folder = run_dir / "tensorboard"
    text = (folder / reader.metadata.PROJECTOR_FILENAME).read_text()
    (listed,) = reader.text_format.Parse(text, reader.ProjectorConfig()).embeddings
    vectors = reader._read_tensor_tsv_file(str(folder / listed.tensor_path))
    ids = (folder / listed.metadata_path).read_text().splitlines()
    assert ids == [f"item-{i}" for i in range(NUM_ITEMS)] and {*ids} == expected.keys()
    np.testing.assert_allclose(vectors, np.array([expected[item] for item in ids]), rtol=1e-5, atol=1e-7)


def test_a_run_that_goes_on_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    config = load_config(CONFIG)
    for start, losses in ((0, {10: 0.5, 20: 0.4}), (10, {20: 0.3, 30: 0.2})):
        tracker = trackers.TensorBoard(config, tmp_path, start)
        for step, loss in losses.items():
            tracker.log("train", {"step": step, "loss": loss})
        tracker.close()
    found = read_back(tmp_path / "tensorboard").Scalars("train/loss")
    assert [(each.step, round(each.value, 6)) for each in found] == [(10, 0.5), (20, 0.3), (30, 0.2)]


@pytest.mark.slow
def test_without_tensorboard_nothing_is_imported_and_one_line_tells(tmp_path: Path) -> None:
    code = f"""
import logging, sys
from pathlib import Path
from recsys.config import load_config
from recsys.report import trackers
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
trackers.is_installed = lambda name: False
config = load_config("{CONFIG}")
trackers.import_trackers(config)
opened = trackers.open_writers(config, Path("{tmp_path}"), 0, "plan")
opened.log("train", {{"step": 1, "loss": 0.5}})
opened.close()
assert not any(name.partition(".")[0] in ("tensorboard", "wandb", "mlflow") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [line for line in done.stdout.splitlines() if not line.startswith("Successfully loaded")]  # by FBGEMM
    assert len(told) == 1 and "`pip install tensorboard`" in told[0]
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 0.5


def test_a_missing_package_gets_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "is_installed", lambda name: False)
    with pytest.raises(UserError, match=r"'run.track.to': the Python package 'mlflow' is not installed"):
        import_trackers(load_config(CONFIG, ["run.track.to=[mlflow]"]))


class Wandb(SimpleNamespace):
    """What is called of the package."""

    def init(self, **given: Any) -> "Wandb":
        self.given, self.summary, self.logged, self.ended, self.starting_step = given, {}, [], -1, 0
        self.settings: dict[str, Any] = {}
        self.id = given["id"] or "w1"
        self.config = SimpleNamespace(update=lambda values, allow_val_change: self.settings.update(values))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        if all(step >= earlier for earlier, _ in self.logged):  # else W&B leaves it out
            self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


class FakeMlflow(SimpleNamespace):
    def set_experiment(self, name: str) -> None:
        self.experiment, self.logged, self.texts, self.params = name, [], {}, {}

    def start_run(self, run_id: str | None, run_name: str | None) -> Any:
        self.asked = run_id
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "r1"))

    def log_metrics(self, values: dict[str, float], step: int, synchronous: bool) -> None:
        self.logged.append((step, values))

    def log_params(self, params: dict[str, Any]) -> None:
        self.params.update(params)

    def log_text(self, text: str, name: str) -> None:
        self.texts[name] = text

    def end_run(self, status: str) -> None:
        self.experiment += f" {status}"


def test_wandb_and_mlflow_get_the_same_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, mlflow = Wandb(), FakeMlflow()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    config = load_config(CONFIG, ["run.track.to=[wandb,mlflow]", "run.track.project=p"])
    opened = open_writers(config, tmp_path, 0, "the plan")
    opened.write(LINE)
    opened.log("valid", {"step": 10, "recall@20": 0.5})
    opened.log("test", {"step": 5, "recall@20": 0.25})  # of the best step
    opened.status = "done"
    opened.close()
    assert wandb.logged == [
        (10, {"train/loss": 0.5, "train/losses/a": 0.25, "train/rows": 7}),
        (10, {"valid/recall@20": 0.5}),
        (10, {"test/recall@20": 0.25}),
    ]
    assert [step for step, _ in mlflow.logged] == [10, 10, 5] and mlflow.logged[1][1] == {"valid/recall_20": 0.5}
    assert wandb.summary["plan"] == mlflow.texts["plan.txt"] == "the plan" and "epochs: 5" in wandb.summary["config"]
    assert wandb.given["project"] == "p" and wandb.ended == 0 and mlflow.experiment == "p FINISHED"
    assert wandb.settings["train"]["epochs"] == mlflow.params["train.epochs"] == 5
    open_writers(config, tmp_path, 10, "").close()  # after an error
    assert wandb.ended == 1 and mlflow.experiment == "p FAILED"
    assert wandb.given["id"] == "w1" and wandb.given["resume"] == "allow"
    assert mlflow.asked == "r1" and not mlflow.params  # the same run goes on, whose parameters cannot be changed
    assert wandb.settings["train"]["epochs"] == 5
    open_writers(config, tmp_path, 0, "").close()  # another run in the same folder, as after run.overwrite
    assert wandb.given["id"] is wandb.given["resume"] is mlflow.asked is None


def test_a_tracker_that_fails_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Writer):
        def write(self, line: dict[str, Any]) -> None:
            raise ConnectionError("no\nnetwork")

    opened = Writers(JsonLines(tmp_path / "metrics.jsonl", 0), {Tracker.wandb: Failing})
    logging.getLogger("recsys").propagate = True
    for step in (1, 2):
        opened.log("train", {"step": step})
    opened.close()
    assert [record.getMessage() for record in caplog.records] == [
        "wandb gets no more metrics of this run (ConnectionError: no network)"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_lengths_of_rows_are_counted() -> None:
    found = {}
    here: Any = SimpleNamespace(rank=0, sum=lambda counts: counts)
    taker: Any = SimpleNamespace(histogram=lambda name, step, counts, limits: found.update({name: counts}))
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.03, 0.04], [1e9, 0.0]])
    log_row_norms(taker, 1, {"t": rows}, here)
    places = np.flatnonzero(found["row_norms/t"])
    assert found["row_norms/t"].sum() == 4 and places[0] == 0 and places[-1] == len(NORM_LIMITS) - 2
    for place, length in zip(places[1:3], (0.05, 5.0), strict=True):
        assert NORM_LIMITS[place] <= length < NORM_LIMITS[place + 1]
