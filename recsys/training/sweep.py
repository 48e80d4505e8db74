"""Search over settings: trials of a config, each in its own process, in a study that several machines may share."""

import json
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from recsys.config import Config, IdMappingType, as_value, load_config
from recsys.data.facts import vocabulary_file
from recsys.errors import UserError, told_error
from recsys.models.metrics import is_higher_better
from recsys.runtime.cgroups import num_cores
from recsys.runtime.launch import environment_of_child
from recsys.runtime.logs import logger
from recsys.tables.row_codes import row_bytes
from recsys.training.sweep_processes import PROCESS, StoppedError, StopSignal, counted, cut_torn, end, joined, put_back
from recsys.training.sweep_report import Tried, write_report
from recsys.training.sweep_space import OF_TRIALS, Space, import_optuna

_STUDY = "sweep"
_POLL_S = 0.2
_NOT_ENDED = "not ended"  # of a trial that another process still trains


@dataclass(frozen=True)
class Sweep:
    """A search.

    Attributes:
        config: YAML file. overrides: `key=value` over it, in all trials.
        trials: number of trials, of all processes that share `out`. seeds: trainings of each trial.
        metric: of data.valid. by_bytes: also minimise the bytes of tables; no trial is then ended early.
        stop: the signal that ends the search.
    """

    config: str
    overrides: tuple[str, ...]
    space: Space
    out: Path
    trials: int
    seeds: int
    jobs: int
    metric: str
    by_bytes: bool
    stop: StopSignal = field(default_factory=StopSignal, init=False)

    def run(self) -> int:
        """Run trials until there are `trials`, and write sweep.json, .md and .svg; return the exit status.

        The status is 0, or 130 or 143 if SIGINT or SIGTERM came first.

        Raises:
            UserError: `out` holds another sweep, or every trial failed.
        """
        cut_torn(self._journal)
        study = self._study()
        with self.stop.caught(), joined(study, self.out) as process, ThreadPoolExecutor(self.jobs) as pool:
            for done in [pool.submit(self._work, process) for _ in range(self.jobs)]:
                done.result()
        begun = [trial for trial in counted(study.get_trials(deepcopy=False)) if trial.state.name != "WAITING"]
        tried = [_tried(trial) for trial in begun[: self.trials]]
        if tried:
            write_report(self.out, tried, self.metric, is_higher_better(self.metric), self.by_bytes, self._command())
        if self.stop.number:
            logger.info("stopped by %s; the same command continues it", signal.Signals(self.stop.number).name)
            return 128 + self.stop.number
        if not any(trial.values or trial.remark == _NOT_ENDED for trial in tried):
            raise UserError(f"every trial of {self.out} failed, the first with: {tried[0].remark}")
        return 0

    @property
    def _journal(self) -> Path:
        return self.out / "journal.log"

    def _command(self) -> list[str]:
        return ["recsys", "train", self.config, *self.overrides]

    def _study(self) -> Any:
        """Make or join the study; each thread has an object of its own, over the same file."""
        optuna = import_optuna()
        directions = ["maximize" if is_higher_better(self.metric) else "minimize"]
        if self.by_bytes:
            directions.append("minimize")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of optuna about experimental features
            backend = optuna.storages.journal.JournalFileBackend(str(self._journal))
            storage = optuna.storages.JournalStorage(backend)
            sampler = optuna.samplers.TPESampler(constant_liar=True)  # others may be trying
        try:
            study = optuna.create_study(
                storage=storage, sampler=sampler, study_name=_STUDY, directions=directions, load_if_exists=True
            )
        except ValueError as error:
            raise UserError(f"'{self.out}' cannot be joined ({error}); name another folder with --out") from error
        settings = {"command": self._command(), "space": self.space.texts, "metric": self.metric, "seeds": self.seeds}
        is_other = [direction.name.lower() for direction in study.directions] != directions  # which Optuna would join
        if is_other or study.user_attrs.setdefault("asked", settings) != settings:
            raise UserError(
                f"'{self.out}' holds another sweep; use the same options, or name another folder with --out"
            )
        study.set_user_attr("asked", settings)
        return study

    def _work(self, process: str) -> None:
        study, distributions = self._study(), self.space.distributions()
        while not self.stop.number:
            trial = study.ask(distributions)
            trial.set_user_attr(PROCESS, process)
            earlier = [other for other in study.get_trials(deepcopy=False) if other.number < trial.number]
            if len(counted(earlier)) >= self.trials:
                study.tell(trial, state=import_optuna().trial.TrialState.FAIL)  # a surplus trial, in no report
                return
            self._try(study, trial)

    def _try(self, study: Any, trial: Any) -> None:
        optuna, start = import_optuna(), time.monotonic()
        folder, words = self.out / "trials" / f"{trial.number:04d}", [f"{k}={v}" for k, v in trial.params.items()]
        logger.info("trial %d: %s", trial.number, ", ".join(words))
        try:
            values = [self._value(trial, folder / f"seed-{seed}", words, seed) for seed in range(1, self.seeds + 1)]
            mean = statistics.mean(values)
            num_bytes = table_bytes(load_config(folder / "seed-1" / "config.yaml"), folder / "seed-1")
            for name, value in (("values", values), ("bytes", num_bytes), ("seconds", time.monotonic() - start)):
                trial.set_user_attr(name, value)
            study.tell(trial, [mean, num_bytes] if self.by_bytes else mean)
            logger.info("trial %d: %s %.5f", trial.number, self.metric, mean)
        except optuna.TrialPruned:
            trial.set_user_attr("seconds", time.monotonic() - start)
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            logger.info("trial %d: ended early, below the median of the others", trial.number)
        except StoppedError:
            put_back(study, trial)
        except UserError as error:
            trial.set_user_attr("error", error.args[0])  # for a line of the table; the log of the trial has all of it
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            logger.warning("trial %d failed: %s", trial.number, error)

    def _value(self, trial: Any, run_dir: Path, words: Sequence[str], seed: int) -> float:
        """Train once; return the metric.

        Raises:
            UserError: the process failed. TrialPruned: it was ended early. StoppedError: the search is stopped.
        """
        self.stop.check()
        command = [sys.executable, "-m", "recsys", "train", self.config, *self._changes(run_dir, words, seed)]
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = run_dir.parent / f"{run_dir.name}.log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=environment_of_child())
            try:
                for step, value in self._evaluations(process, run_dir / "metrics.jsonl"):
                    if seed == 1 and not self.by_bytes:
                        trial.report(value, step)
                        if trial.should_prune():
                            raise import_optuna().TrialPruned
            finally:
                process.kill()  # it has ended, is pruned, or this process is about to end
                process.wait()
                shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        self.stop.check_after(process)
        if process.returncode:
            raise told_error(log.read_text(), process.returncode)
        result = json.loads((run_dir / "result.json").read_text())["metrics"].get("valid", {})
        if result.get(self.metric) is None:
            raise UserError(f"the run has no {self.metric} of data.valid")
        return float(result[self.metric])

    def _changes(self, run_dir: Path, words: Sequence[str], seed: int) -> list[str]:
        """Return the changes to the config of one training; if several run at once, they share the cores by default."""
        changes = [*self.overrides, *words, f"seed={seed}", f"run.dir={as_value(run_dir)}", *OF_TRIALS]
        if self.jobs > 1 and load_config(self.config, changes).run.num_threads is None:
            changes.append(f"run.num_threads={max(1, num_cores() // self.jobs)}")
        return changes

    def _evaluations(self, process: "subprocess.Popen[bytes]", metrics: Path) -> Iterator[tuple[int, float]]:
        """Yield step and metric of each evaluation of data.valid after which training continues, until a process has
        ended. The last evaluation is the result of the trial, and no reason to end it early.

        Raises:
            StoppedError: the search is stopped, and the process has ended.
        """
        at, evaluated = 0, None
        while True:
            is_over = process.poll() is not None
            if metrics.exists():
                with metrics.open("rb") as lines:
                    lines.seek(at)
                    for line in lines:
                        if not line.endswith(b"\n"):
                            break  # still being written
                        at += len(line)
                        try:
                            record = json.loads(line)
                        except ValueError:  # the end of a line: an evaluation was repeated, with more digits
                            continue
                        if evaluated is not None and record["kind"] == "train" and record["step"] > evaluated[0]:
                            yield evaluated
                            evaluated = None
                        if record["kind"] == "valid" and record.get(self.metric) is not None:
                            evaluated = record["step"], record[self.metric]
            if is_over:
                return
            if self.stop.number:
                end(process)
                raise StoppedError
            time.sleep(_POLL_S)


def table_bytes(config: Config, run_dir: Path) -> int:
    """Return the bytes of the tables of a run when served: rows times the bytes of a row in its code."""
    total = 0
    for name, table in config.tables.items():
        rows = table.num_embeddings
        if table.mapping is IdMappingType.vocabulary:
            ids = pq.read_metadata(run_dir / "vocabulary" / vocabulary_file(name)).num_rows
            rows = min(rows, 1 + ids + table.num_buckets)
        total += rows * row_bytes(table, table.quantize)
    return total


def _tried(trial: Any) -> Tried:
    attributes, state = trial.user_attrs, trial.state.name.lower()
    texts = {"complete": "", "pruned": "ended early", "running": _NOT_ENDED, "fail": attributes.get("error", "failed")}
    return Tried(
        trial.number,
        {key: str(value) for key, value in trial.params.items()},
        attributes.get("values", []),
        attributes.get("bytes"),
        attributes.get("seconds"),
        texts.get(state, state),
    )
