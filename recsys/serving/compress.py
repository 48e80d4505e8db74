"""Compression of a finished run, step by step, as far as a metric allows. The result is a run of its own.

1. *Quantise*: a code for the vectors of each table. Each table is first tried by itself in each code. Codes that the
   metric then allows are tried in the order of bytes saved per loss; each is accepted if the metric allows it together
   with those before. The linear layers of the dense part come last.
2. *Prune*: rows of all tables are removed, the least important first, as many as the metric allows.
3. *Neurons* of the dense part are removed likewise, those that matter least for the size of their weights first.
4. *Distil*: a student of the run so far is trained, also on the scores of the original run, and used if it is as good.

A loss is allowed if it would be on 95 % of other data sets of the same size and kind (`Loss.at_most`). Each step goes
as far as is allowed, so if only the loss on these rows decided, every second step would lose too much elsewhere.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from recsys.config.choices import RowCode
from recsys.config.compression_checks import takes_code
from recsys.config.experts import deciding_tables
from recsys.config.names import check_metric_name
from recsys.errors import UserError, nearest
from recsys.runtime.logs import logger, quiet_libraries, start_logging
from recsys.runtime.run_lock import output_lock
from recsys.runtime.watchdog import open_run_world
from recsys.runtime.world import World
from recsys.serving.accepted import CodeMove, accepted_moves, cheapest_first, most_accepted
from recsys.serving.compressed_run import begin_folder, finish_folder, write_run
from recsys.serving.compression_report import Stage, write_report
from recsys.serving.distill import check_student, train_student
from recsys.serving.finished import Finished, find_run
from recsys.serving.trials import Compression, Trials
from recsys.tables.row_codes import row_bytes
from recsys.training.alike import check_shared

STEPS, IMPORTANCES = ("quantize", "prune", "neurons", "distill"), ("norm", "count", "gradient")
_CUTS = 64  # shares of the rows or neurons in use that pruning tries to remove


@dataclass(frozen=True)
class Request:
    """Options of a compression.

    Attributes:
        steps: of `STEPS`, in order. The first k of n steps may lose k / n of the allowed loss together.
        metric: on data.valid, or without it on data.test. max_loss: allowed loss of the metric, as written by the user,
            with 95 % confidence.
        prune_by: of `IMPORTANCES`. student: of distill, `key=value` over the config so far.
        overrides: `key=value` that name other data.
    """

    steps: tuple[str, ...]
    metric: str
    max_loss: str
    prune_by: str
    student: tuple[str, ...]
    overrides: tuple[str, ...]

    def check(self, run: Finished, world_size: int) -> None:
        """Raise a UserError for options that do not fit a run."""
        config = run.config
        steps = [("--steps", step, STEPS) for step in self.steps]
        for option, word, allowed in (*steps, ("--prune-by", self.prune_by, IMPORTANCES)):
            if word not in allowed:
                raise UserError(f"{option}: there is no '{word}'{nearest(word, allowed)} (known: {', '.join(allowed)})")
        check_metric_name("--metric", self.metric, config.model.metric_names(config))
        if "distill" in self.steps and world_size > 1:
            raise UserError("--steps: distill trains in a separate process; start recsys compress on one rank")
        if "distill" in self.steps:
            check_student(run.checkpoint, self.student, self.steps)
        self.allowed(1.0)

    def allowed(self, value: float) -> float:
        """Return the allowed loss of the metric at a value: `max_loss`, which may be a percentage of the value.

        Raises:
            UserError: `max_loss` is neither a number of at least 0 nor such a percentage.
        """
        is_share = self.max_loss.endswith("%")
        try:
            number = float(self.max_loss.removesuffix("%"))
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise UserError(
                f"--max-loss must be a number of at least 0, or a percentage such as 1%, found {self.max_loss}"
            )
        return number / 100 * abs(value) if is_share else number


def compress(run: Finished, out: Path, request: Request) -> int:
    """Write a compressed run; return the exit status, 0.

    Args:
        out: folder of the new run, which also gets compression.md, .json and .svg.

    Raises:
        UserError: the request or the data do not fit the model, or the folder is not empty.
    """
    quiet_libraries()
    with open_run_world(run.config.run) as (world, _), output_lock() as lock:
        world.agree(lambda: request.check(run, world.world_size))
        world.from_rank_zero(lambda: begin_folder(out, lock))
        check_shared(out, lock, world, "OUT")
        start_logging(out / "logs", world.rank)
        _compress(run, out, request, world)
        lock.check(now=True)
        world.from_rank_zero(lambda: finish_folder(out))
        logger.info("done: %s", out)
    return 0


_Step = Callable[[Trials, Compression, float], tuple[Compression, str]]


@dataclass(frozen=True)
class _State:
    """State between steps: a run, and its accepted compression."""

    trials: Trials
    compression: Compression

    def write(self, out: Path) -> None:
        """Write the run with the compression so far; collective."""
        pruned, trials = self.compression.pruned, self.trials
        shared = {table: trials.shared_vector(table, pruning) for table, pruning in pruned.items()}
        trials.world.from_rank_zero(lambda: write_run(trials, self.compression, shared, out))


def _compress(run: Finished, out: Path, request: Request, world: World) -> None:
    trials = Trials(run, world, request.metric)
    trials.introduce()
    allowed = request.allowed(trials.base.metrics[request.metric])
    stages, state = _stages(_State(trials, trials.given), request, allowed, out)
    state.write(out)
    world.from_rank_zero(lambda: write_report(stages, trials, request.max_loss, allowed, out))


def _stages(state: _State, request: Request, allowed: float, out: Path) -> tuple[list[Stage], _State]:
    """Run the steps one after another; return the stage after each, and the final state."""
    stages, teacher = [Stage("as trained", "", state.trials.base)], state.trials
    takes: dict[str, _Step] = {"quantize": _quantize, "neurons": _neurons}
    takes["prune"] = partial(_prune, by=request.prune_by)
    for number, step in enumerate(request.steps, start=1):
        budget = allowed * number / len(request.steps)
        if step == "distill":
            state, accepted = _distill(state, request, budget, teacher, out / f"distill-{number}")
        else:
            compression, accepted = takes[step](state.trials, state.compression, budget)
            state = replace(state, compression=compression)
        remark = accepted or "left out, since it would lose more than is allowed"
        stages.append(Stage(step, remark, state.trials.run(state.compression) if accepted else stages[-1].trial))
        logger.info("%s: %s", step, remark)
    return stages, state


def _distill(state: _State, request: Request, budget: float, teacher: Trials, folder: Path) -> tuple[_State, str]:
    """Return a state with a student of the run, and a remark; an empty one if it loses more than `budget`."""
    start = folder / "start"
    start.mkdir(parents=True)
    state.write(start)
    run, began = train_student(teacher.source.path, start, folder, request.student)
    student = find_run(str(run), request.overrides, trust_code=True)  # its class is the run's, or named by --student
    trials = Trials(student, teacher.world, request.metric, teacher)
    loss = trials.loss(trials.given, "distill, the student")
    if loss.at_most > budget:
        return state, ""
    return _State(trials, trials.given), f"a student {began}"


def _quantize(trials: Trials, before: Compression, budget: float) -> tuple[Compression, str]:
    """Return the compression with the codes that the metric allows, and a remark; an empty one if it allows none."""
    moves = _code_moves(trials, before, budget)

    def after(chosen: Sequence[CodeMove]) -> Compression:
        return replace(before, codes={**before.codes, **dict(chosen)})

    def is_accepted(chosen: Sequence[CodeMove]) -> bool:
        table, code = chosen[-1]
        remark = f"quantize, {len(chosen)} of {len(moves)} changes, the last of {table} to {code.name}"
        return trials.loss(after(chosen), remark).at_most <= budget

    chosen = accepted_moves(moves, is_accepted)
    accepted, shown = after(chosen), _shown_codes(dict(chosen))
    in_int8 = replace(accepted, dense_int8=True)
    is_published = trials.config.train.publish.dir is not None  # with its layers as FP32
    if is_published or trials.dense_bytes(in_int8) == trials.dense_bytes(accepted):
        return accepted, shown
    if trials.loss(in_int8, "quantize, the dense part in INT8").at_most > budget:
        return accepted, shown
    return in_int8, "; ".join(filter(None, (shown, "the dense part in INT8")))


def _code_moves(trials: Trials, before: Compression, budget: float) -> list[CodeMove]:
    """Return changes of tables to shorter codes, in the order of bytes saved per loss of each table alone.

    The loss is the upper bound (`Loss.at_most`): the loss on these rows would put lucky tables first. Codes with which
    a table by itself may lose more than allowed are left out.
    """
    losses: dict[tuple[str, RowCode | None], float] = {}
    sizes: dict[tuple[str, RowCode | None], int] = {}
    for table, settings in trials.config.tables.items():
        now = before.codes.get(table)
        losses[table, now], sizes[table, now] = 0.0, trials.num_bytes(before)
        for code in RowCode:
            changed = replace(before, codes={**before.codes, table: code})
            if not takes_code(settings, code) or trials.num_bytes(changed) >= sizes[table, now]:
                continue
            at_most = trials.loss(changed, f"quantize, {table} alone to {code.name}").at_most
            if at_most <= budget:
                losses[table, code], sizes[table, code] = at_most, trials.num_bytes(changed)
    return cheapest_first(losses, sizes, dict(before.codes), budget)


def _shown_codes(codes: Mapping[str, RowCode]) -> str:
    by_code = {code: [table for table, used in codes.items() if used is code] for code in RowCode}
    return "; ".join(f"{code.name}: {', '.join(tables)}" for code, tables in by_code.items() if tables)


def _prune(trials: Trials, before: Compression, budget: float, by: str) -> tuple[Compression, str]:
    """Return the compression with the rows pruned that the metric allows, and a remark; an empty one if none."""
    tables, rows, num_idle = _least_important(trials, before, by)
    if not len(rows):
        return before, "nothing, since no row is left"
    cuts = _cuts(len(rows), num_idle)

    def after(number: int) -> Compression:
        chosen = cuts[number]
        by_table = {name: rows[:chosen][tables[:chosen] == i] for i, name in enumerate(trials.config.tables)}
        pruned = {
            name: trials.pruning(name, np.concatenate([_gone(before, name), dropped]))
            for name, dropped in by_table.items()
            if len(dropped)
        }
        return replace(before, pruned={**before.pruned, **pruned})

    number = most_accepted(
        len(cuts) - 1, lambda n: trials.loss(after(n), f"prune, {cuts[n]:,} of {len(rows):,} rows").at_most <= budget
    )
    return after(number), f"{cuts[number]:,} of {len(rows):,} rows" if number else ""


def _gone(compression: Compression, table: str) -> np.ndarray:
    """Return the rows of a table that are already pruned, int64 [rows]."""
    pruning = compression.pruned.get(table)
    return np.zeros(0, np.int64) if pruning is None else (~pruning.kept).nonzero().flatten().numpy()


def _cuts(number: int, idle: Sequence[int] = (0,)) -> np.ndarray:
    """Return how many of `number` rows or neurons to try to prune, from 0 on; idle ones, in front, all or none."""
    return np.unique([0, *idle, *np.linspace(max(idle), number, _CUTS + 1).astype(int)])


def _neurons(trials: Trials, before: Compression, budget: float) -> tuple[Compression, str]:
    """Return the compression with the neurons pruned that the metric allows, and a remark; an empty one if none.

    Each layer keeps its most important neuron.
    """
    if not trials.layers:
        keys = " and ".join(f"model.{key}" for key in trials.config.model.mlps)
        why = f"{keys} have no hidden layer but what other parts read, or is normalised"
        why = why if keys else "no MLP has widths of its own"
        return before, f"nothing, since {why}"
    columns = []
    for number, (name, importance) in enumerate(trials.neuron_gradients(before).items()):
        marks = before.neurons.get(name)
        remaining = np.arange(len(importance)) if marks is None else marks.nonzero().flatten().numpy()
        remaining = remaining[np.argsort(importance[remaining], kind="stable")][:-1]
        columns.append(
            (np.full(len(remaining), number), remaining, importance[remaining] / trials.layers[name].num_weights)
        )
    layers, neurons, values = map(np.concatenate, zip(*columns, strict=True))
    if not len(neurons):
        return before, "nothing, since each layer has one neuron left"
    order, cuts = np.argsort(values, kind="stable"), _cuts(len(neurons))

    def after(number: int) -> Compression:
        chosen = order[: cuts[number]]
        pruned = {name: neurons[chosen][layers[chosen] == i] for i, name in enumerate(trials.layers)}
        kept = {name: trials.kept_neurons(before, name, dropped) for name, dropped in pruned.items() if len(dropped)}
        return replace(before, neurons={**before.neurons, **kept})

    number = most_accepted(
        len(cuts) - 1, lambda n: trials.loss(after(n), f"neurons, {cuts[n]:,} of {len(neurons):,}").at_most <= budget
    )
    return after(number), f"{cuts[number]:,} of {len(neurons):,} hidden neurons" if number else ""


def _least_important(trials: Trials, before: Compression, importance: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return table (by number) and row of all rows that may still be pruned, the least important per byte first.

    Rows that are 0 come first, then those that are not in data.train. The third value holds the ends of these two
    groups.
    """
    columns, unpruned = [], deciding_tables(trials.config)
    if importance == "gradient":
        by_table = trials.gradients(before)
    else:
        by_table = trials.counts if importance == "count" else trials.norms
    for number, name in enumerate(trials.config.tables):
        if name in unpruned:  # its pruned ids would be looked up in another expert
            continue
        rows = np.arange(1, len(trials.counts[name]) - trials.num_shared(name))
        rows = np.setdiff1d(rows, _gone(before, name))
        counts, norms = trials.counts[name][rows], trials.norms[name][rows]
        value = by_table[name][rows] / row_bytes(trials.config.tables[name], before.codes.get(name))
        group = np.where(norms > 0, np.where(counts > 0, 2, 1), 0)
        columns.append((np.full(len(rows), number), rows, group, value, norms))
    tables, rows, group, value, norms = map(np.concatenate, zip(*columns, strict=True))
    order = np.lexsort((norms, value, group))
    return tables[order], rows[order], np.searchsorted(group[order], [1, 2]).tolist()
