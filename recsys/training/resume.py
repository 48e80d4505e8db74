"""The start of training: from the beginning, a checkpoint of the same run, or another run's weights."""

from functools import partial
from pathlib import Path

from recsys.checkpoint import (
    Loaded,
    Source,
    TableRows,
    TrainState,
    import_table,
    load_tensors,
)
from recsys.data.footer_cache import changed_files
from recsys.data.inputs import Inputs
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.runtime.logs import logger
from recsys.training.build import Built


class Starting:
    """Loads what a built model starts from.

    Args:
        source: what it starts from, if anything.
    """

    def __init__(self, inputs: Inputs, built: Built, source: Source | None, run_dir: Path) -> None:
        self._config, self._world, self._facts = inputs.config, inputs.world, inputs.facts
        self._datasets, self._built, self._source, self._run_dir = inputs.datasets, built, source, run_dir

    def state(self) -> TrainState:
        """Load weights, optimizers and position; return the training state; collective.

        Raises:
            UserError: the source is of other data or tables.
        """
        fingerprints = self._fingerprints()
        source, tensors = self._source, self._built.tensors
        if source is not None and source.goes_on:
            state = source.marker.state
            self._check_files(state, fingerprints)
            self._report(load_tensors(source.path, source.marker, tensors, self._world))
            if state.loss_scale is not None:
                scale = self._built.step.dense.loss_scale
                scale.value, scale.good_steps = state.loss_scale, state.loss_scale_good_steps
            logger.info("resumed at step %d from %s", state.step, source.path)
            return state
        if source is not None:
            kept = self._facts.kept if self._facts else {}
            loaded = load_tensors(source.path, source.marker, tensors, self._world, self._config, kept)
            self._report(loaded)
            logger.info("weights and optimizers taken from %s", source.path)
            for line in loaded.lines():
                logger.info("%s", line)
        self._import_tables()
        return TrainState(position=Position(), fingerprints=fingerprints)

    def _fingerprints(self) -> dict[str, str]:
        """Return those of what a position, and the best metric of early stopping, stand for."""
        roles = ("train", "valid", "items") if self._config.train.early_stop.metric else ("train",)
        return {role: dataset.fingerprint for role, dataset in self._datasets.items() if role in roles}

    def _import_tables(self) -> None:
        config, facts = self._config, self._facts
        for table, path in config.train.init.from_parquet.items():
            settings, targets = config.tables[table], self._built.tensors.to_load()
            rows = TableRows(settings, facts.vocabularies.get(table) if facts else None)
            taken = self._world.agree(partial(import_table, Path(path), table, settings, rows, targets))
            logger.info("table %s: %s rows from %s", table, f"{taken:,}", path)

    def _report(self, loaded: Loaded) -> None:
        self._world.from_rank_zero(lambda: loaded.write(self._run_dir / "loaded.json"))

    def _check_files(self, state: TrainState, here: dict[str, str]) -> None:
        assert self._source is not None
        path = self._source.path
        for role, fingerprint in state.fingerprints.items():
            if here.get(role) != fingerprint:
                kept, all_rows = path.parent.parent / "footers" / f"{role}.footers", self._config.data.max_rows is None
                changes = changed_files(kept, self._datasets[role], all_rows) if role in self._datasets else ""
                what = "position in them" if role == "train" else f"best {self._config.train.early_stop.metric}"
                raise UserError(
                    f"the files of data.{role} are not those that checkpoint '{path}' was trained with{changes}, so "
                    f"its {what} means nothing; start a new run with train.init_from={path}"
                )
