"""Counts of the steps of a run: rows, losses, skipped steps; read at once, or a step later."""

from collections import deque
from pathlib import Path

from recsys.checkpoint import TrainState
from recsys.config import Autocast, Config
from recsys.errors import UserError, counted
from recsys.runtime.logs import Progress, logger
from recsys.step.loss_scale import LossScale
from recsys.step.output import StepOutput


class StepCounts:
    """Reads the totals of steps, and counts them in the state of the run.

    Args:
        state: its `epoch_rows`, `bad_steps`, `overflows` and loss scale are updated.
        progress: gets rows and losses of each step.
        run_dir: its folder `bad_steps` gets the rows of steps that are not finite.
    """

    def __init__(
        self, config: Config, state: TrainState, progress: Progress, scale: LossScale, run_dir: Path, rank: int
    ) -> None:
        self._config, self._state, self._progress, self._scale = config, state, progress, scale
        self._folder, self._rank = run_dir / "bad_steps", rank
        self._unread: deque[tuple[int, int, StepOutput, float]] = deque()

    def add(self, step: int, epoch: int, output: StepOutput, waited: float) -> None:
        """Queue the output of a step, to be read later.

        Args:
            epoch: of its rows. waited: seconds for its batch.
        """
        self._unread.append((step, epoch, output, waited))

    def read(self, but_the_last: bool = False) -> bool:
        """Read and count the queued steps, all or all but the last; return whether one asks to stop.

        Raises:
            UserError: more rows cannot be read, or more steps are not finite, than the config allows.
        """
        stops, num_left = False, 1 if but_the_last else 0
        while len(self._unread) > num_left:
            step, epoch, output, waited = self._unread.popleft()
            output.read()
            self._count(step, epoch, output, waited)
            stops = stops or output.stop
        return stops

    def _count(self, step: int, epoch: int, output: StepOutput, waited: float) -> None:
        state, scale = self._state, self._scale
        while len(state.epoch_rows) <= epoch:
            state.epoch_rows.append([0, 0, 0])
        counts = state.epoch_rows[epoch]
        counts[2 if output.skipped else 0] += output.num_rows
        counts[1] += output.num_bad_rows
        has_loss = output.has_loss and not output.skipped
        self._progress.step(output.num_rows, waited, {"": output.loss, **output.losses} if has_loss else {})
        self._check_bad_rows(step, counts[1])
        in_fp16 = self._config.precision.autocast is Autocast.fp16
        state.loss_scale, state.loss_scale_good_steps = (scale.value, scale.good_steps) if in_fp16 else (None, 0)
        if output.overflowed:
            state.overflows += 1
            logger.info("step %d: a gradient overflows, the step is skipped, loss scale %g", step, scale.value)
        elif output.skipped:
            self._count_bad_step(step, output)

    def _count_bad_step(self, step: int, output: StepOutput) -> None:
        """Save the rows of a step that is not finite, and end the run if there are too many such steps."""
        most = self._config.train.max_bad_steps
        self._state.bad_steps += 1
        if not output.finite_here:
            path = self._folder / f"step-{step:09d}-rank-{self._rank}.pt"
            output.batch.save(path)
            logger.warning("step %d is not finite and is skipped on all ranks; its rows are in %s", step, path)
        if self._state.bad_steps > most:
            what = "the loss or its gradient is not finite"
            advice = "lower optimizer.dense.learning_rate or optimizer.tables.learning_rate"
            if output.is_weightless:
                what = f"the weights of its rows, of data.weight_column, add up to {output.weight:g}"
                advice = "multiply all weights by a number, or write 0 for what is next to nothing"
            raise UserError(
                f"step {step}: {what}, and config key 'train.max_bad_steps' allows {counted(most, 'such step')}; look "
                f"at the rows in '{self._folder}', {advice}, or raise train.max_bad_steps"
            )

    def _check_bad_rows(self, step: int, num_bad: int) -> None:
        most = self._config.data.max_bad_rows
        if num_bad > most:  # the number is the same on every rank, so all of them end here
            raise UserError(
                f"config key 'data.max_bad_rows' allows {counted(most, 'row')} of an epoch that cannot be read, found "
                f"{num_bad} up to step {step} (the files are named in the logs of the ranks); repair them, or raise "
                f"data.max_bad_rows"
            )
