"""Where training starts: at the beginning, at a checkpoint of the same run, or with another run's weights."""

from functools import partial
from pathlib import Path

from recsys.build import Built
from recsys.checkpoint import (
    Checkpoints,
    Loaded,
    TableRows,
    TrainState,
    check_whole,
    find_checkpoint,
    import_table,
    load_tensors,
)
from recsys.data.footer_cache import changed_files
from recsys.data.loader import Loader
from recsys.errors import UserError
from recsys.inputs import Inputs
from recsys.observe import logger


class Starting:
    """Brings a built model to its start.

    Args:
        loader: of data.train. checkpoints: of the run directory.
    """

    def __init__(self, inputs: Inputs, built: Built, loader: Loader, checkpoints: Checkpoints, run_dir: Path) -> None:
        self._config, self._world, self._facts = inputs.config, inputs.world, inputs.facts
        self._built, self._loader, self._checkpoints, self._run_dir = built, loader, checkpoints, run_dir

    def state(self) -> TrainState:
        """Load what there is to load, and return where training stands; collective.

        Raises:
            UserError: a checkpoint that is not whole, or of other data or tables.
        """
        config, dataset = self._config, self._loader.dataset
        fresh = TrainState(
            position=self._loader.start(),
            fingerprint=dataset.fingerprint,
            seed=config.seed,
            shuffle=config.data.shuffle,
            window_mib=config.data.window_mib,
        )
        found = self._checkpoints.newest_whole() if config.run.resume else None
        if found is not None:
            latest, state = found[0], found[1].state
            self._check_resumable(state, latest)
            self._report(load_tensors(*found, self._built.tensors, self._world))
            if state.loss_scale is not None:
                scale = self._built.step.dense.loss_scale
                scale.value, scale.good_steps = state.loss_scale, state.loss_scale_good_steps
            logger.info("resumed at step %d from %s", state.step, latest)
            self._resume_order(state)
            return state
        if config.train.init_from is not None:
            source = self._world.from_rank_zero(lambda: find_checkpoint(config.train.init_from or ""))
            marker = check_whole(source, self._world)
            loaded = load_tensors(source, marker, self._built.tensors, self._world, config.train.init)
            self._report(loaded)
            logger.info("weights and optimizers taken from %s", source)
            for line in loaded.lines():
                logger.info("%s", line)
        self._import_tables()
        return fresh

    def _import_tables(self) -> None:
        config, facts = self._config, self._facts
        for table, path in config.train.init.from_parquet.items():
            settings, targets = config.tables[table], self._built.tensors.to_load()
            rows = TableRows(settings, facts.vocabularies.get(table) if facts else None)
            taken = self._world.agree(partial(import_table, Path(path), table, settings, rows, targets))
            logger.info("table %s: %s rows from %s", table, f"{taken:,}", path)

    def _report(self, loaded: Loaded) -> None:
        self._world.from_rank_zero(lambda: loaded.write(self._run_dir / "loaded.json"))

    def _check_resumable(self, state: TrainState, path: Path) -> None:
        dataset = self._loader.dataset
        if state.fingerprint != dataset.fingerprint:
            kept = path.parent.parent / "footers" / "train.footers"
            changes = changed_files(kept, dataset, self._config.data.max_rows is None)
            raise UserError(
                f"the files of data.train are not those that checkpoint '{path}' was trained on{changes}, so its "
                f"position in them means nothing; start a new run with train.init_from={path}"
            )
        for key, found, saved in (
            ("seed", self._config.seed, state.seed),
            ("data.shuffle", self._config.data.shuffle, state.shuffle),
            ("data.window_mib", self._config.data.window_mib, state.window_mib),
        ):
            if found != saved:
                raise UserError(
                    f"config key '{key}' is {found}, but checkpoint '{path}' has {saved}; use {key}={saved}"
                )

    def _resume_order(self, state: TrainState) -> None:
        saved = state.position
        state.position = self._loader.resume(saved)
        if state.position != saved:
            logger.info(
                "rows left of epoch %d are cut anew into %d streams for %d ranks: each comes once, in another order",
                saved.epoch,
                self._loader.num_streams,
                self._world.world_size,
            )
