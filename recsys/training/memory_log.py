"""Memory reports of a run, predicted and measured; written at its end, however it ends."""

import hashlib
import json
import socket
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from recsys.config.load import config_text
from recsys.data.inputs import Inputs
from recsys.memory import Timeline, measure_dense, predict_dense, table_entries
from recsys.memory.data_facts import data_facts
from recsys.memory.report import SCHEMA_VERSION, rank_report, tensor_lines, write_page, write_rank
from recsys.memory.trace import Prediction, layer_page, misfits, predict_run
from recsys.runtime.live import Task
from recsys.runtime.logs import logger
from recsys.runtime.machine import topology_of
from recsys.runtime.versions import git_commit, installed_versions
from recsys.training.build import Built
from recsys.training.trainer import Trainer


class MemoryLog:
    """Writer of a run's memory reports; made on every rank before the first step.

    Args:
        folder: RUN/memory; reports of an earlier start of the run are removed.
    """

    def __init__(self, inputs: Inputs, built: Built, trainer: Trainer, timeline: Timeline, folder: Path) -> None:
        config, world = inputs.config, inputs.world
        self._inputs, self._built, self._trainer = inputs, built, trainer
        self._timeline, self._folder = timeline, folder
        self._git_commit = world.from_rank_zero(git_commit)
        self._topology = topology_of(config, world)
        world.from_rank_zero(lambda: _clear(folder))
        with Task("predicting memory", is_shown=world.rank == 0):
            self._prediction, self._layers = world.from_rank_zero(self._predict)
        for problem in misfits(self._prediction.ranks, self._topology):  # the system may kill what uses too much
            logger.warning("the run is predicted not to fit: %s; recsys dry-run shows what needs the memory", problem)
        # While all ranks are alive: their tables no longer change.
        weights, states = built.tensors.tables(), built.tensors.table_optimizer()
        self._tables = table_entries(config, built.shards, world.rank, weights, states)

    def _predict(self) -> tuple[Prediction, str]:
        config, topology = self._inputs.config, self._topology
        prediction = predict_run(
            config, data_facts(config, self._inputs, topology.world_size), topology, self._built.shards
        )
        return prediction, layer_page(config, prediction.data, prediction.dense.rows)

    def write(self, status: str) -> dict[str, Any]:
        """Write and return this rank's report, and on rank 0 the pages over all ranks; collective."""
        world, report = self._inputs.world, self._report(status)
        world.agree(lambda: write_rank(self._folder, report))
        self._timeline.close()
        world.from_rank_zero(lambda: write_page(self._folder, self._layers))
        return report

    def write_alone(self, status: str, extra: dict[str, Any]) -> None:
        """Write this rank's report, and pages on the reports present, after a failure; not collective.

        Args:
            extra: further parts of the report.
        """
        with suppress(Exception):  # so that the failure itself is reported
            write_rank(self._folder, self._report(status) | extra)
            write_page(self._folder, self._layers)

    def _report(self, status: str) -> dict[str, Any]:
        config, world, built = self._inputs.config, self._inputs.world, self._built
        plan = json.dumps([asdict(shard) for shard in built.shards])
        identity = {
            "name": config.run.name,
            "status": status,
            "step": self._trainer.state.step,
            "rank": world.rank,
            "world_size": world.world_size,
            "local_world_size": world.local_world_size,
            "host": socket.gethostname(),
            "device": str(world.device),
            "seed": config.seed,
            "config_hash": _digest(config_text(config)),
            "plan_hash": _digest(plan),
            "versions": installed_versions(),
            "git_commit": self._git_commit,
        }
        predicted = predict_dense(built.step.dense, config, world.world_size)
        dense = {
            "predicted": predicted | {"optimizer_bytes": predicted["optimizer_bytes"][world.rank]},
            "measured": measure_dense(built.dense_model, built.dense_optimizer, built.tensors.slices),
        }
        loader = self._trainer.loader.host_bytes
        return {
            "schema_version": SCHEMA_VERSION,
            "identity": identity,
            "tables": self._tables,
            "dense": dense,
            "lines": tensor_lines(self._tables, dense),
            "loader": loader,
            "growth": self._trainer.growth.report(),
            **rank_report(self._prediction.ranks[world.rank], self._topology, self._timeline, loader),
        }


def _clear(folder: Path) -> None:
    for path in (*folder.glob("rank_*.json"), *folder.glob("report.*")):
        path.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
