"""Trackers of the figures of a run, in addition to metrics.jsonl: TensorBoard, W&B and MLflow.

Only rank 0 imports their packages, and only those that the config asks for.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from recsys.config import Config, config_text
from recsys.config.choices import Tracker
from recsys.config.values import flat
from recsys.errors import UserError
from recsys.report.record import figures, read_config
from recsys.report.writers import JsonLines, Writer
from recsys.runtime.files import replace_file
from recsys.runtime.logs import logger
from recsys.runtime.versions import is_installed

TENSORBOARD = "tensorboard"  # folder in the run directory
_PACKAGES = {Tracker.tensorboard: "tensorboard", Tracker.wandb: "wandb", Tracker.mlflow: "mlflow"}
_MLFLOW_STATUSES = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


def _scalars(line: dict[str, Any]) -> dict[str, float]:
    return {f"{line['kind']}/{name}": value for name, value in figures(line) if value is not None}


def _but_of_tensorboard(error: threading.ExceptHookArgs) -> None:
    if type(error.thread).__name__ != "_AsyncWriterThread":
        threading.__excepthook__(error)


class TensorBoard(Writer):
    """Writes event files, in which scalars are called KIND/FIGURE."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        self._summary = Summary
        # Errors of SummaryWriter's thread are raised at the next write; Python would also print their traceback.
        threading.excepthook = _but_of_tensorboard
        self._writer: Any = SummaryWriter(
            str(run_dir / TENSORBOARD), purge_step=step + 1 if step else None, flush_secs=30
        )

    def write(self, line: dict[str, Any]) -> None:
        # One event has all figures of a line: one for each, as add_scalar writes them, takes six times as long.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in _scalars(line).items()]
        self._writer.file_writer.add_summary(self._summary(value=values), line["step"], line["time"])

    def text(self, name: str, text: str) -> None:
        self._writer.add_text(name, re.sub("^", "    ", text, flags=re.MULTILINE))  # Markdown's preformatted text

    def histogram(self, name: str, step: int, counts: np.ndarray, limits: np.ndarray) -> None:
        middles, filled = (limits[:-1] + limits[1:]) / 2, np.flatnonzero(counts)
        self._writer.add_histogram_raw(
            name,
            min=limits[filled[0]] if len(filled) else 0.0,
            max=limits[filled[-1] + 1] if len(filled) else 0.0,
            num=int(counts.sum()),
            sum=(counts * middles).sum(),
            sum_squares=(counts * middles**2).sum(),
            bucket_limits=limits[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def vectors(self, name: str, step: int, vectors: np.ndarray, ids: Sequence[Any]) -> None:
        self._writer.add_embedding(vectors, [str(raw_id) for raw_id in ids], global_step=step, tag=name)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Writer):
    """Writes to a run of Weights & Biases, which is resumed if this run is."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        import wandb

        self._wandb, file = wandb, run_dir / "wandb.json"
        name, project, earlier = config.run.name, config.run.track.project, _earlier_run(file, step)
        resume = "allow" if earlier else None
        self._run = wandb.init(project=project, name=name, id=earlier, resume=resume, dir=str(run_dir))
        replace_file(file, json.dumps({"run_id": self._run.id}))
        self._step = self._run.starting_step  # if the run is resumed, one after its last step

    def write(self, line: dict[str, Any]) -> None:
        self._log(_scalars(line), line["step"])

    def _log(self, values: dict[str, Any], step: int) -> None:
        # W&B drops values for a step before its last one, such as metrics of the best step if later ones were logged.
        self._step = max(step, self._step)
        self._run.log(values, step=self._step)

    def text(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def config(self, text: str) -> None:
        super().config(text)
        self._run.config.update(read_config(text), allow_val_change=True)

    def histogram(self, name: str, step: int, counts: np.ndarray, limits: np.ndarray) -> None:
        self._log({name: self._wandb.Histogram(np_histogram=(counts, limits))}, step)

    def close(self) -> None:
        self._run.finish(exit_code=0 if self.status == "done" else 1)


class Mlflow(Writer):
    """Writes to a run of MLflow, at the address in MLFLOW_TRACKING_URI; it is resumed if this run is."""

    def __init__(self, config: Config, run_dir: Path, step: int) -> None:
        import mlflow

        self._mlflow, file = mlflow, run_dir / "mlflow.json"
        mlflow.set_experiment(config.run.track.project)
        self._earlier = _earlier_run(file, step)
        run = mlflow.start_run(run_id=self._earlier, run_name=config.run.name)
        replace_file(file, json.dumps({"run_id": run.info.run_id}))

    def write(self, line: dict[str, Any]) -> None:
        self._mlflow.log_metrics(_named_for_mlflow(_scalars(line)), step=line["step"], synchronous=False)

    def text(self, name: str, text: str) -> None:
        self._mlflow.log_text(text, f"{name}.txt")

    def config(self, text: str) -> None:
        super().config(text)
        if self._earlier is None:  # because MLflow refuses to change the value of a parameter
            self._mlflow.log_params(_named_for_mlflow(dict(flat("", read_config(text)))))

    def close(self) -> None:
        self._mlflow.end_run(_MLFLOW_STATUSES[self.status])


def _earlier_run(file: Path, step: int) -> str | None:
    """Return a tracker's id of this run, which an earlier start has written to `file`; None if the run begins now."""
    return json.loads(file.read_text())["run_id"] if step and file.exists() else None


def _named_for_mlflow(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with names that MLflow accepts: letters, digits and a few signs, but no @."""
    return {re.sub(r"[^\w\-. /]", "_", name): value for name, value in values.items()}


_WRITERS: dict[Tracker, Callable[[Config, Path, int], Writer]] = {
    Tracker.tensorboard: TensorBoard,
    Tracker.wandb: WeightsAndBiases,
    Tracker.mlflow: Mlflow,
}


class Writers(Writer):
    """Writes everything to metrics.jsonl and to each tracker; one that fails is reported once and dropped.

    Args:
        first: writer of metrics.jsonl, whose errors are raised. makers: by tracker, what opens its writer.
    """

    def __init__(self, first: Writer, makers: Mapping[Tracker, Callable[[], Writer]]) -> None:
        self._first = first
        self._trackers: dict[Tracker, Writer] = {}
        for tracker, make in makers.items():
            with self._dropped_if_it_fails(tracker):
                self._trackers[tracker] = make()

    def write(self, line: dict[str, Any]) -> None:
        self._first.write(line)
        self._each(lambda writer: writer.write(line))

    def last(self, line: dict[str, Any]) -> None:
        self._each(lambda writer: writer.write({"time": time.time(), **line}))

    def text(self, name: str, text: str) -> None:
        self._each(lambda writer: writer.text(name, text))

    def config(self, text: str) -> None:
        self._each(lambda writer: writer.config(text))

    def histogram(self, name: str, step: int, counts: np.ndarray, limits: np.ndarray) -> None:
        self._each(lambda writer: writer.histogram(name, step, counts, limits))

    def vectors(self, name: str, step: int, vectors: np.ndarray, ids: Sequence[Any]) -> None:
        self._each(lambda writer: writer.vectors(name, step, vectors, ids))

    def close(self) -> None:
        self._first.close()
        for writer in self._trackers.values():
            writer.status = self.status
        self._each(lambda writer: writer.close())

    def _each(self, use: Callable[[Writer], None]) -> None:
        for tracker, writer in list(self._trackers.items()):
            with self._dropped_if_it_fails(tracker):
                use(writer)

    @contextmanager
    def _dropped_if_it_fails(self, tracker: Tracker) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a network or a disk, with a type that depends on the library
            self._trackers.pop(tracker, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            logger.warning("%s gets no more metrics of this run (%s)", _PACKAGES[tracker], reason)


def import_trackers(config: Config) -> None:
    """Import the packages of `run.track.to` early, so that their memory counts as that of libraries.

    Raises:
        UserError: a package is not installed.
    """
    for tracker in asked_trackers(config):
        package = _PACKAGES[tracker]
        if not is_installed(package):
            raise UserError(
                f"config key 'run.track.to': the Python package '{package}' is not installed; `pip install {package}` "
                f"installs it, or remove {tracker.name} from the list"
            )
        import_module("torch.utils.tensorboard" if tracker is Tracker.tensorboard else package)


def asked_trackers(config: Config) -> list[Tracker]:
    """Return the trackers that a config asks for: by default TensorBoard, if it is installed."""
    if config.run.track.to is not None:
        return config.run.track.to
    return [Tracker.tensorboard] if is_installed("tensorboard") else []


def open_writers(config: Config, run_dir: Path, step: int, plan: str) -> Writers:
    """Open the writers of a run's figures: metrics.jsonl, and the trackers that the config asks for.

    Args:
        step: at which the run starts or resumes. plan: the sharding plan in words.
    """
    chosen = asked_trackers(config)
    if config.run.track.to is None and not chosen:
        logger.info(
            "no curves for TensorBoard, which is not installed (`pip install tensorboard`); report.html has curves too"
        )
    trackers = {tracker: partial(_WRITERS[tracker], config, run_dir, step) for tracker in chosen}
    writers = Writers(JsonLines(run_dir / "metrics.jsonl", step), trackers)
    writers.config(config_text(config))
    writers.text("plan", plan)
    return writers
