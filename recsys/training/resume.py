"""The start of training: from scratch, from a checkpoint of the same run, or from the weights of another run."""

import shlex
from contextlib import suppress
from functools import partial
from pathlib import Path

from recsys.checkpoint import Source, TableRows, TrainState, footers_of, import_table, load_tensors
from recsys.checkpoint.state import name_of
from recsys.config import Autocast, Config, as_value
from recsys.data.checks import has_text_ids
from recsys.data.footer_cache import changed_files
from recsys.data.inputs import Inputs
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.report.record import Record
from recsys.runtime.logs import logger
from recsys.runtime.world import World
from recsys.training.build import Built


def check_files(inputs: Inputs, source: Source) -> None:
    """Refuse to resume a run with other files than it was trained on.

    Raises:
        UserError: names the data set, and what has changed.
    """
    config, path, fingerprints = inputs.config, source.path, _fingerprints(inputs)
    uses = _uses(config)
    for role, fingerprint in source.marker.state.fingerprints.items():
        if role in uses and fingerprints.get(role) != fingerprint:
            footers, all_rows = footers_of(path) / f"{role}.footers", config.data.max_rows is None
            changes = changed_files(footers, inputs.datasets[role], all_rows) if role in inputs.datasets else ""
            instead = f"train.init_from={shlex.quote(as_value(path))}"
            raise UserError(
                f"the files of data.{role} are not those that checkpoint '{path}' was trained with{changes}, so "
                f"its {uses[role]} means nothing; name those by data.{role}, start a new run with {instead}, or "
                f"restart this one with run.overwrite=true, without run.resume"
            )


def start_training(inputs: Inputs, built: Built, source: Source | None, run_dir: Path) -> TrainState:
    """Load what the run starts from into a built model; return the training state; collective.

    Args:
        source: what the run starts from, if anything.
        run_dir: where loaded.json is written.

    Raises:
        UserError: the source is of other tables.
    """
    world, tensors = inputs.world, built.tensors
    updates_before: dict[str, int] = {}
    if source is not None and source.goes_on:
        state = source.marker.state
        loaded = load_tensors(source.path, source.marker, tensors, world)
        if inputs.config.train.init_from is None:  # else it describes the start of the run, such as new rows
            world.from_rank_zero(lambda: loaded.write(run_dir / "loaded.json"))
        # A checkpoint that was not trained in FP16 has no scale; the config gives the first one.
        if state.loss_scale is not None and inputs.config.precision.autocast is Autocast.fp16:
            scale = built.step.dense.loss_scale
            scale.value, scale.good_steps = state.loss_scale, state.loss_scale_good_steps
        logger.info("resumed at step %d from %s", state.step, source.path)
        _check_best(state, source.path, world)
        state.fingerprints = _fingerprints(inputs) | state.fingerprints  # also of data.valid, if early stopping is new
        return state
    if source is not None:
        kept_ids = inputs.facts.kept if inputs.facts else {}
        loaded = load_tensors(source.path, source.marker, tensors, world, inputs.config, kept_ids)
        world.from_rank_zero(lambda: loaded.write(run_dir / "loaded.json"))
        logger.info("weights and optimizers loaded from %s", source.path)
        if world.rank == 0:
            _warn_unfinished(Path(inputs.config.train.init_from or ""), source)
        for line in loaded.lines():
            logger.info("%s", line)
        updates_before = {table: source.marker.state.updates_of(table) for table in loaded.optimized_tables()}
    for table, updates in _import_tables(inputs, built).items():
        updates_before[table] = max(updates_before.get(table, 0), updates)
    return TrainState(position=Position(), fingerprints=_fingerprints(inputs), updates_before=updates_before)


def _check_best(state: TrainState, path: Path, world: World) -> None:
    """Forget the best step if its checkpoint is gone, for example removed as damaged; `path` is a newer one."""
    step = state.best_step
    if step is not None and not world.from_rank_zero(lambda: path.with_name(name_of(step)).exists()):
        text = "the checkpoint of step %d, the best so far, is gone; the next evaluation counts as the best"
        logger.warning(text, step)
        state.best_step = state.best_metric = None


def _warn_unfinished(run_dir: Path, source: Source) -> None:
    """Warn of a source run that is unfinished, whose weights are not fully trained."""
    step, record = source.marker.state.step, Record(run_dir)
    with suppress(UserError):  # the file is damaged
        is_done = record.result.get("status") == "done" and record.result["steps"] >= step
        # Without metrics.jsonl, which a run makes at its start, this is only a copy of checkpoints.
        if not (is_done or record.status in ("done", "compressed")) and (run_dir / "metrics.jsonl").exists():
            text = "'%s' has not come to its end (%s), and these are its weights of step %d; let it go on first"
            logger.warning(text, run_dir, record.status, step)


def _fingerprints(inputs: Inputs) -> dict[str, str]:
    """Return fingerprints of the data that a state refers to."""
    uses = _uses(inputs.config)
    return {role: dataset.fingerprint for role, dataset in inputs.datasets.items() if role in uses}


def _uses(config: Config) -> dict[str, str]:
    """Return, by role of data, what in a state refers to its files; other files would change the run."""
    drawn = {"items": "sequence of drawn items"} if config.model.needs().sampled_items else {}
    metric = config.train.early_stop.metric
    compared = {} if metric is None else dict.fromkeys(("valid", "items"), f"best {metric}")
    return {"train": "position in them", **drawn, **compared}


def _import_tables(inputs: Inputs, built: Built) -> dict[str, int]:
    """Set rows of tables from files; return, by table, the number of updates of the optimizer state in the file."""
    config, facts, updates = inputs.config, inputs.facts, {}
    for table, path in config.train.init.from_parquet.items():
        settings, targets = config.tables[table], built.tensors.to_load()
        optimizer = config.table_optimizer(table).name.name
        vocabulary, kept = facts.of_table(table) if facts else (None, None)
        has_texts = has_text_ids(config, table, inputs.datasets["train"].schema)
        rows = TableRows(settings, vocabulary, kept, has_texts, inputs.mapping(table))
        imported = inputs.world.agree(partial(import_table, Path(path), table, settings, optimizer, rows, targets))
        logger.info("table %s: %s rows from %s", table, f"{imported.num_rows:,}", path)
        if imported.optimizer not in (None, optimizer):
            text = "table %s: state of %s in '%s' is not loaded, and that of %s starts from scratch in these rows"
            logger.warning(text, table, imported.optimizer, path, optimizer)
        else:
            updates[table] = imported.updates
    return updates
