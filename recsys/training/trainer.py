"""The training loop: steps, evaluations, checkpoints, an orderly stop."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from recsys.checkpoint import Checkpoints, Source, TrainState, load_tensors, verify_checkpoint
from recsys.config import Config, Schedule
from recsys.config.meaning import meaning
from recsys.data.batch import Batch
from recsys.data.inputs import Inputs
from recsys.data.loader import Loader
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.memory import Timeline
from recsys.memory.growth import Growth
from recsys.models.metrics import is_higher_better
from recsys.report.writers import Writer
from recsys.runtime.environment import GiveBack, give_unused_back
from recsys.runtime.live import Task, live_line
from recsys.runtime.logs import Progress, logger, show_metrics
from recsys.runtime.machine import topology_of
from recsys.runtime.profiling import traced_steps
from recsys.runtime.signals import StopRequests
from recsys.step.optim import schedule_factor, set_learning_rate
from recsys.step.output import StepOutput
from recsys.step.pipeline import TimedIterator, build_pipeline
from recsys.step.step import ignore_phase
from recsys.training.build import Built, Publishes
from recsys.training.evaluation import EvaluationStopped, evaluate_dataset, watched
from recsys.training.figures import log_tables, step_figures
from recsys.training.learning import facts_entries
from recsys.training.resume import start_training
from recsys.training.step_counts import StepCounts


def num_steps(loader: Loader, config: Config, state: TrainState) -> int:
    """Return the number of steps of the whole run, including those that `state` has trained."""
    total = state.step + loader.steps_left(state.position, config.train.epochs)
    return min(total, config.train.max_steps or total)


class Trainer:
    """Trains a built model to the end of its epochs, to `train.max_steps`, or to a stop signal.

    Args:
        source: what the run starts from, if anything.
        enter_phase: called when training makes progress, with the phase and, at a new step, its number.
        publisher: publishes the model at the steps that it asks for, and at the end of training.

    Attributes:
        state: saved in checkpoints. metrics: of the last evaluation of each dataset by this process.
        loader: of data.train. progress: speed so far. growth: of memory over the steps.
        writer: of figures; drops them until it is replaced.
    """

    def __init__(
        self,
        inputs: Inputs,
        built: Built,
        run_dir: Path,
        timeline: Timeline,
        source: Source | None = None,
        enter_phase: Callable[..., None] = ignore_phase,
        publisher: Publishes | None = None,
    ) -> None:
        config, world = inputs.config, inputs.world
        self._inputs, self._config, self._built, self._world = inputs, config, built, world
        self._run_dir, self._timeline, self._enter_phase = run_dir, timeline, enter_phase
        self._publisher, self._published_at, self._give_back = publisher, -1, GiveBack()
        self.loader = inputs.loader("train")
        self._checkpoints = Checkpoints(
            run_dir / "checkpoints",
            world,
            config.train.keep_checkpoints,
            documents=(run_dir / "config.yaml", run_dir / "plan.json"),
            background=config.train.async_checkpoints,
            meaning=meaning(config),
            facts=world.from_rank_zero(lambda: facts_entries(inputs.facts, run_dir)),
        )
        stop_file = Path(config.run.stop_file) if config.run.stop_file and world.rank == 0 else None
        self._stop = StopRequests(built.step.dense, stop_file)
        self._pipeline = build_pipeline(built.model, built.dense_optimizer, world.device, config.debug)
        built.step.dense.enter_phase = enter_phase
        self.metrics: dict[str, dict[str, float]] = {}
        self.state = start_training(inputs, built, source, run_dir)
        self._saved_at = self.state.step or None
        self.writer = Writer()
        self.state.position = self.loader.begun(self.state.position)
        self._num_steps = num_steps(self.loader, config, self.state)
        per_epoch = self.loader.steps_left(Position(), 1)
        batch = config.train.global_batch_size
        logger.info(
            "an epoch has %s steps of %s rows, the run %s", *(f"{n:,}" for n in (per_epoch, batch, self._num_steps))
        )
        self.growth = Growth(world.device, topology_of(config, world), self._num_steps)
        self.progress = Progress(self._num_steps, self.state.step, self.state.window)
        self._counts = StepCounts(config, self.state, self.progress, built.step.dense.loss_scale, run_dir, world.rank)

    def fit(self) -> bool:
        """Train, evaluate and save; return whether a signal ended it early.

        Raises:
            UserError: bad data, a loss that is not finite, a checkpoint that cannot be written.
        """
        trace = self._run_dir / "profile" / f"rank_{self._world.rank}.json"
        with self._stop.signals(), closing(live_line):
            with traced_steps(self._config.run.profile_steps, trace, self._world.device) as self._step_traced:
                stopped = self._train()
            if self._saved_at != self.state.step:
                self._save()
            if not stopped:
                self._publish()
                stopped = self._final_evaluation()
            self._checkpoints.wait()
        return stopped

    def _train(self) -> bool:
        """Train to the end; return whether a signal ended it early."""
        state, train = self.state, self._config.train
        self._enter_phase("data loading", state.step + 1)
        batches = self.loader.batches(state.position, train.epochs)
        with closing(batches):
            if self._at_boundary():
                return True
            while state.step < self._num_steps and not self._should_stop_early():
                if self._run_until(min(self._num_steps, self._next_evaluation()), batches):
                    return True
                # The pipeline holds no batch here: it has trained all that it was given.
                self._pipeline.detach()
                if self._at_boundary():
                    return True
        return False

    def _at_boundary(self) -> bool:
        """Evaluate and save if due; return whether a signal stopped the evaluation, which a resumed run repeats."""
        try:
            if self._evaluation_is_due() and self.state.evaluated_step != self.state.step:
                self._evaluate_and_compare()
        except EvaluationStopped:
            return True
        self._save_if_due()
        return False

    def _next_evaluation(self) -> int:
        """Return the next step after which data.valid is evaluated, which may lie after the end."""
        state, train = self.state, self._config.train
        if train.eval_every_epochs is not None:
            epochs = _next_multiple(state.position.epoch, train.eval_every_epochs)
            return state.step + self.loader.steps_left(state.position, epochs)
        return self._num_steps if train.eval_every_steps is None else _next_multiple(state.step, train.eval_every_steps)

    def _evaluation_is_due(self) -> bool:
        position, every = self.state.position, self._config.train.eval_every_epochs
        if every is None:
            return _is_due(self.state.step, self._config.train.eval_every_steps)
        # After the last row of an epoch, the position is before the first row of the next one.
        return position.num_rows == position.rows_before and _is_due(position.epoch, every)

    def _run_until(self, boundary: int, batches: Iterator[Batch]) -> bool:
        state, train = self.state, self._config.train
        timed = TimedIterator(islice(batches, boundary - state.step), self._enter_phase)
        while state.step < boundary:
            self._enter_phase("forward", state.step + 1)
            self._stop_requested()
            self._begin_updates()
            if self._publisher is not None:
                self._built.step.dense.publish_requested = self._publisher.asks(state.step + 1)
            waited = timed.seconds
            output = self._pipeline.progress(timed)
            self._step_traced()
            self._advance(output, timed.seconds - waited)
            is_logged = state.step % train.log_every_steps == 0 or state.step == boundary
            stops = self._counts.read(but_the_last=not (is_logged or self._is_save_due() or train.check_every_step))
            # A stop writes no line, so that metrics.jsonl has the same lines as without it.
            if is_logged:
                self._log()
            if output.publish:
                self._publish()
            if stops:
                self._counts.read()
                logger.info("stop requested: saving step %d", state.step)
                return True
            if state.step < boundary:  # at the boundary an evaluation comes first, to be in the checkpoint
                self._save_if_due()
            del output  # the memory of its batch is free before another is made
        return False

    def _begin_updates(self) -> None:
        state, config = self.state, self._config.optimizer
        factor = self._rates_factor(state.step)
        set_learning_rate(self._built.dense_optimizer, config.dense.learning_rate * factor)
        self._built.table_updates.begin(factor, state.updates_of)

    def _rates_factor(self, step: int) -> float:
        schedule = self._config.optimizer.schedule
        # The factor of an earlier plateau schedule does not count under another schedule.
        plateau_factor = self.state.rate_factor if schedule.name is Schedule.plateau else 1.0
        return schedule_factor(schedule, self._num_steps, step) * plateau_factor

    def _advance(self, output: StepOutput, waited: float) -> None:
        state = self.state
        epoch, state.position = state.position.epoch, output.batch.position
        self._timeline.step = state.step = state.step + 1
        self._timeline.check()
        self._give_back()
        self._counts.add(state.step, epoch, output, waited)

    def _log(self) -> None:
        warning = self.growth.sample(self.state.step, self.loader.host_bytes)
        if warning is not None:
            logger.warning("step %d: %s", self.state.step, warning)
        values = self.progress.line()
        logger.info(self.progress.show(values), extra={"is_live": True})
        factor = self._rates_factor(self.state.step - 1)
        self.writer.log("train", values | step_figures(self._built, self._config, self.state, factor, self.loader))

    def _evaluate(self, role: str, step: int) -> dict[str, float]:
        def stop_requested() -> bool:  # asked before every batch
            self._enter_phase(f"evaluation on data.{role}", step)
            return self._stop_requested()

        with self.progress.pause():
            give_unused_back()  # an evaluation cannot reuse memory that steps have freed, nor the reverse
            with self._timeline.phase("evaluation"):
                # Use the pipeline of training, which is empty now: another would need its own streams and memory.
                metrics = evaluate_dataset(self._inputs, self._built.model, role, stop_requested, self._pipeline)
                give_unused_back()
            self.metrics[role] = self.state.metrics[role] = metrics
            logger.info("%s at step %d: %s", role, step, show_metrics(metrics))
            self.writer.log(role, {"step": step, **metrics})
            if role == "valid":
                log_tables(self.writer, step, self._inputs, self._built, self.state, self._num_steps)
        return metrics

    def _evaluate_and_compare(self) -> None:
        state, metric = self.state, self._config.train.early_stop.metric
        metrics = self._evaluate("valid", state.step)
        if metric is None:
            state.evaluated_step = state.step
            return
        try:
            value = watched(metric, metrics)
        except UserError:  # the trained weights are worth more than the metric
            self._save()
            self._checkpoints.wait()
            raise
        best, state.evaluated_step = state.best_metric, state.step
        if best is None or (value > best if is_higher_better(metric) else value < best):
            state.best_metric, state.best_step, state.bad_evaluations = value, state.step, 0
            self._save()
        else:
            state.bad_evaluations += 1
            self._slow_down(metric)

    def _slow_down(self, metric: str) -> None:
        state, schedule = self.state, self._config.optimizer.schedule
        if schedule.name is Schedule.plateau and state.bad_evaluations % schedule.plateau_patience == 0:
            state.rate_factor *= schedule.plateau_factor
            logger.info("%s has not improved: learning rates times %g from here on", metric, state.rate_factor)

    def _should_stop_early(self) -> bool:
        stop = self._config.train.early_stop
        return stop.metric is not None and self.state.bad_evaluations >= stop.patience

    def _final_evaluation(self) -> bool:
        """Evaluate the best step, or the last; return whether a signal ended it early."""
        state, step = self.state, self.state.step
        if state.best_step is not None and state.best_step != step:
            step = state.best_step
            self._checkpoints.wait()
            best = self._checkpoints.path(step)
            tensors = replace(self._built.tensors, statistics={})  # counts of ids stay as they are
            try:
                marker = verify_checkpoint(best, self._world)
            except UserError as error:
                raise UserError(f"{error}, or remove it and run.resume=true ends with the last step") from error
            load_tensors(best, marker, tensors, self._world)
            logger.info("early stopping: back to step %d, the best by %s", step, self._config.train.early_stop.metric)
        try:
            if "valid" in self._inputs.datasets and (state.evaluated_step != step or "valid" not in self.metrics):
                self._evaluate("valid", step)
            if "test" in self._inputs.datasets:
                self._evaluate("test", step)
        except EvaluationStopped:
            return True
        return False

    def _is_save_due(self) -> bool:
        every = self._config.train.checkpoint_every_steps
        return _is_due(self.state.step, every) and self._saved_at != self.state.step

    def _save_if_due(self) -> None:
        if self._is_save_due():
            self._save()

    def _save(self) -> None:
        self._enter_phase("saving the checkpoint", self.state.step)
        self._write_checkpoint()

    def _write_checkpoint(self) -> None:
        is_shown = self._world.rank == 0
        with self.progress.pause(), self._timeline.phase("save"), Task("saving the checkpoint", is_shown=is_shown):
            self._checkpoints.save(self._built.tensors, self.state)
        self._saved_at = self.state.step

    def _publish(self) -> None:
        """Publish the model, unless that is done for this step."""
        if self._publisher is not None and self._published_at != self.state.step:
            self._published_at = self.state.step
            self._enter_phase("publishing", self.state.step)
            with self.progress.pause(), self._timeline.phase("save"):
                self._publisher.publish(self.state.step, self._saved)

    def _saved(self) -> Path | UserError:
        """Return the folder of the checkpoint of this step, saved now if it was not yet, or why that failed.

        Raises:
            UserError: an earlier checkpoint in the background could not be written.
        """
        self._checkpoints.wait()
        if self._saved_at != self.state.step:
            self._enter_phase("saving the checkpoint", self.state.step)
            try:  # it fails on all ranks
                self._write_checkpoint()
                self._checkpoints.wait()
            except UserError as error:
                self._saved_at = None
                return error
        return self._checkpoints.path(self.state.step)

    def _stop_requested(self) -> bool:
        """Return whether this rank asks to stop; the others learn it from the totals of the step."""
        if self._checkpoints.failed:
            self._stop.request()  # all ranks stop at the same step, and waiting for the save raises its error
        return self._stop.requested()


def _is_due(count: int, every: int | None) -> bool:
    return every is not None and count > 0 and count % every == 0


def _next_multiple(count: int, every: int) -> int:
    return (count // every + 1) * every
