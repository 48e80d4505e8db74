"""The end of a run: result.json, and the lines that close its log."""

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from recsys.checkpoint import Source, TrainState
from recsys.config import Config, as_value
from recsys.config.experts import expert_tables
from recsys.data.inputs import Inputs
from recsys.errors import UserError
from recsys.memory.page import when
from recsys.report.page import PAGE
from recsys.report.record import Record
from recsys.report.text import size
from recsys.runtime.launch import is_called, launch_identity
from recsys.runtime.logs import show_metrics
from recsys.runtime.versions import git_commit, installed_versions
from recsys.runtime.world import World
from recsys.training.trainer import Trainer, num_steps

_PLACE_KEYS = ("run.dir=", "run.resume=", "run.overwrite=")


def run_result(
    inputs: Inputs, trainer: Trainer, stopped: bool, reports: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """Return the content of result.json.

    Args:
        trainer: when it has ended. reports: of memory, of every rank.
    """
    config, world, state = inputs.config, inputs.world, trainer.state
    memory = ("peak_rss_bytes", "device_peak_allocated_bytes", "device_peak_reserved_bytes")
    return {
        "status": "stopped" if stopped else "done",
        "name": config.run.name,
        "metrics": trainer.metrics,
        "steps": state.step,
        "best_step": state.best_step,
        "bad_steps": state.bad_steps,
        "overflows": state.overflows,
        "rows_seen": sum(seen for seen, _, _ in state.epoch_rows),
        "epochs": state.position.epoch,
        "data": _data_report(inputs, state),
        **{name: round(value, 4) for name, value in trainer.progress.totals().items()},
        "seconds": round(seconds, 2),
        "world_size": world.world_size,
        "device": world.device.type,
        **{name: [report["host"][name] for report in reports] for name in memory},
        "versions": installed_versions(),
        "git_commit": git_commit(),
        "optimizer": {"tables": config.optimizer.tables.name.name, "dense": config.optimizer.dense.name.name},
        "state": asdict(state),
    }


def _data_report(inputs: Inputs, state: TrainState) -> dict[str, Any]:
    """Return the rows expected, seen, bad and skipped in each epoch, and reports of ids and experts."""
    train, position, config = inputs.datasets["train"], state.position, inputs.config
    num_left_out = train.num_rows % config.train.global_batch_size if config.data.drop_last else 0
    epochs = []
    for epoch, (seen, bad, skipped) in enumerate(state.epoch_rows):
        expected = position.rows if epoch == position.epoch else train.num_rows - num_left_out
        epochs.append({"expected": expected, "seen": seen, "bad": bad, "skipped": skipped})
    ids = inputs.id_report(state.rows_read)
    return {
        "rows": train.num_rows,
        "files": train.num_files,
        "bad_files": list(train.bad_files),
        "filter": train.filter,
        "epochs": epochs,
        "ids": ids,
        "experts": _use_of_experts(inputs.config, ids),
    }


def _use_of_experts(config: Config, ids: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the ids looked up in training, and their share, by table with experts and by expert."""
    use = {}
    for name, table in config.tables.items():
        if table.experts is None:
            continue
        lookups = {
            expert: sum(report["ids"] for feature, report in ids.items() if config.features[feature].table == expert)
            for expert in expert_tables(config, name)
        }
        total = max(1, sum(lookups.values()))
        use[name] = {expert: {"lookups": number, "share": number / total} for expert, number in lookups.items()}
    return use


def closing_lines(result: dict[str, Any], reports: list[dict[str, Any]], run_dir: Path, go_on: str) -> list[str]:
    """Return the last lines of the log: metrics, peak memory, where the results are, and how to continue.

    Args:
        reports: of memory, of every rank. go_on: command for a run that was stopped.
    """
    lines = [f"{role}: {show_metrics(metrics)}" for role, metrics in result["metrics"].items()]
    fullest = max(reports, key=lambda report: report["peak"]["measured_bytes"])
    peak, rank = fullest["peak"], f", rank {fullest['identity']['rank']}" if len(reports) > 1 else ""
    libraries = size(fullest["host"]["baseline_bytes"])
    above = "of the GPU" if result["device"] == "cuda" else f"above the {libraries} of libraries"
    lines.append(
        f"peak memory: {size(peak['measured_bytes'])} {above}, {size(peak['predicted_bytes'])} predicted "
        f"({when(peak)}{rank}): {run_dir / PAGE}"
    )
    if result["status"] == "stopped":
        return [*lines, f"stopped at step {result['steps']}: {run_dir / 'result.json'}", f"go on with: {go_on}"]
    best = "" if result["best_step"] is None else f", the best is step {result['best_step']}"
    return [*lines, f"done at step {result['steps']}{best}: {run_dir / 'result.json'}"]


def how_to_go_on(config: Config, run_dir: Path, world: World) -> str:
    """Return the command line, or the call, that resumes this run, as far as this process can know it."""
    folder = as_value(run_dir)
    if is_called():
        words = json.dumps(f"run.dir={folder}", ensure_ascii=False)
        return f'the same call, recsys.train(…, {words}, "run.resume=true")'
    place = ["run.dir=" + shlex.quote(folder), "run.resume=true"]
    if launch_identity()["slurm_job"] is not None and config.run.stop_file is not None:
        return f"the same sbatch and {place[0]}, unless the job is requeued by itself"
    if world.world_size > world.local_world_size:
        return f"the same command on every machine, and {' '.join(place)}"
    command = [word for word in _command() if not word.startswith(_PLACE_KEYS)]
    return " ".join([shlex.join(command), *place])


def _command() -> list[str]:
    """Return the command line of the launcher, if it ends like that of this process, else that of this process."""
    own, words = sys.argv, list(sys.orig_argv)
    with suppress(psutil.Error, OSError):
        parent = psutil.Process(os.getppid()).cmdline()
        # `torchrun -m recsys train …` becomes the path of recsys/__main__.py, then what follows.
        for tail in (own, ["-m", "recsys", *own[1:]]):
            if parent[-len(tail) :] == tail:
                words = parent
    # A script on the path, such as torchrun, is shown by its name.
    if len(words) > 1 and words[1] == shutil.which(Path(words[1]).name):
        words = [Path(words[1]).name, *words[2:]]
    return words


def is_finished(run_dir: Path, source: Source, inputs: Inputs, text: str) -> bool:
    """Return whether a resumed run is done already, and its config (`text`) asks for nothing new.

    The config is compared with result.json, since config.yaml may be from a later start that failed. A change of how to
    train is nothing new if no step is left.
    """
    try:
        result = Record(run_dir).result
    except UserError:  # the file is damaged
        return False
    state = source.marker.state
    if result.get("status") != "done" or result["steps"] != state.step:
        return False
    whole, evaluated = asked_of(text)
    then = result.get("asked", [None, None])
    if then[0] == whole or then[1] != evaluated:
        return then[0] == whole
    return num_steps(inputs.loader("train"), inputs.config, state) <= state.step


def asked_of(text: str) -> list[str]:
    """Return digests of a config: of all sections that change results, and of these except `train` and `optimizer`."""
    sections = re.split(r"\n(?=\S)", text.rstrip())
    whole = [section for section in sections if not section.startswith(("run:", "topology:", "memory:"))]
    evaluated = [section for section in whole if not section.startswith(("train:", "optimizer:"))]
    return [hashlib.sha256("\n".join(part).encode()).hexdigest() for part in (whole, evaluated)]
