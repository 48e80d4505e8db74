"""Parts of command lines: parser, argument types, options of commands, and how a mistake ends a command."""

import argparse
import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from recsys.errors import EchoError, UsageError, UserError, end_interrupted, end_run, flush_output
from recsys.runtime.environment import is_below_torchrun, is_first_rank


class Parser(argparse.ArgumentParser):
    """An argument parser that raises mistakes as UserErrors."""

    def error(self, message: str) -> NoReturn:
        hint = "changes are written key=value, and " if "key=value" in self.format_usage() else ""
        raise UsageError(f"{message}; {hint}{self.prog} --help tells the rest")


def positive(text: str) -> int:
    """Parse a whole number above 0.

    Raises:
        ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number above 0")
    return int(text)


def bounds(text: str) -> tuple[int, ...]:
    """Parse whole numbers above 0, separated by commas; return them distinct and ascending."""
    return tuple(sorted(set(map(positive, text.split(",")))))


def names(text: str) -> list[str]:
    """Return the names in a text, separated by commas; a name with a comma must be in double quotes."""
    pairs = re.findall(r'"((?:[^"]|"")*)"(?=,|$)|([^,]+)', text)
    return [quoted.replace('""', '"') or plain for quoted, plain in pairs]


def as_names(columns: Iterable[str]) -> str:
    """Return column names as the text that `names` reads."""
    return ",".join('"' + name.replace('"', '""') + '"' if "," in name or '"' in name else name for name in columns)


def price(text: str) -> float:
    """Parse a price.

    Raises:
        ArgumentTypeError: it is not a number above 0.
    """
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Add the options of an evaluation that computes more than metrics over all rows, and `--trust-code`."""
    parser.add_argument("--by", metavar="COLUMN", help="evaluation: also metrics for each value of a column")
    about = "with --by: slices by how often a value occurs in data.train: fewer than N times, and N times or more"
    parser.add_argument("--cold", metavar="N[,N…]", type=bounds, default=(), help=about)
    about = "evaluation: mean AUC over the values of a column, such as users, weighted by their rows (gauc)"
    parser.add_argument("--group", metavar="COLUMN", help=about)
    about = "evaluation: 95 %% intervals of the metrics, from N draws of rows, or of values of the --group column"
    parser.add_argument("--bootstrap", metavar="N", type=positive, default=0, help=about)
    about = "evaluation: what metrics lose when the values of a feature are permuted, as the mean of REPEATS"
    parser.add_argument("--importance", metavar="[REPEATS]", type=positive, default=0, help=about)
    about = "evaluation: import the class that the run names as its model"
    parser.add_argument("--trust-code", action="store_true", help=about)


def add_compression(parser: argparse.ArgumentParser) -> None:
    """Add the options of a compression: its steps, and how much of a metric it may lose."""
    parser.add_argument(
        "--steps", default="quantize,prune", help="of quantize, prune, neurons, distill, in this order (quantize,prune)"
    )
    about = "most that the metric may lose over all steps: 0.001, or a share of its value: 1%%"
    parser.add_argument("--max-loss", required=True, help=about)
    parser.add_argument("--metric", help="metric on data.valid; default: as in early stopping, or the model's first")
    parser.add_argument("--prune-by", default="norm", help="importance of rows: norm, count in data.train, gradient")
    about = "distill: changes to the config for the student"
    parser.add_argument("--student", metavar="key=value", nargs="+", default=[], help=about)


def add_table_export(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the export of a table."""
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    export = commands.add_parser("export", help="write one table: row (or raw id), vector, optimizer state")
    export.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", type=Path, help="run directory, or one of its checkpoints"
    )
    export.add_argument("table", metavar="TABLE", help="name of the table")
    export.add_argument("out", metavar="OUT.parquet", type=Path, help="file to write")


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a sweep: config, space and search."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/dlrm_movielens.yaml")
    add_changes(parser, "changes to the config, in every trial")
    about = "what to search: key=LOW..HIGH[:log|:STEP], key=[a, b], or a YAML file with these"
    parser.add_argument("--space", metavar="FILE|key=…", nargs="+", action="extend", required=True, help=about)
    about = "folder of the sweep; processes with the same folder share its trials"
    parser.add_argument("--out", type=Path, required=True, help=about)
    parser.add_argument("--trials", type=positive, default=40, help="number of trials, over all processes (40)")
    parser.add_argument("--seeds", type=positive, default=1, help="trainings of each trial, for mean and spread (1)")
    parser.add_argument("--jobs", type=positive, default=1, help="trials at a time in this process (1)")
    parser.add_argument("--metric", help="metric on data.valid; default: as in early stopping, or the model's first")
    about = "also minimise the bytes of tables: a table with the best trial at each size"
    parser.add_argument("--bytes", action="store_true", help=about)


def add_calibration(parser: argparse.ArgumentParser, devices: Iterable[str]) -> None:
    """Add the arguments of a calibration: the file for speeds, and what to measure."""
    parser.add_argument("out", metavar="OUT.json", type=Path, help="file to write, for topology.speeds of a dry run")
    parser.add_argument("--device", choices=[*devices], default="auto", help="device to measure (auto)")
    about = "computing threads of a rank on CPU; default: as in training"
    parser.add_argument("--threads", type=positive, help=about)


def add_out(parser: argparse.ArgumentParser, about: str, key: str) -> None:
    """Add OUT, described by `about`, and changes to a run's config, for which `key` is an example."""
    parser.add_argument("out", metavar="OUT", type=Path, help=about)
    add_changes(parser, f"changes to the config of the run, such as {key}")


def add_changes(parser: argparse.ArgumentParser, about: str) -> None:
    """Add changes to a config as an optional list of arguments."""
    # Without a default, argparse lists them among the required arguments.
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=about)


def with_data(words: list[str]) -> list[str]:
    """Return the config changes among words; all other words are paths, which become one change of data.test.

    The name of a partition's folder, such as day=5, is a path too, if there is such a folder.

    Raises:
        UserError: data.test is among the changes too.
    """
    pairs = [(word, word.partition("=")[0]) for word in words]
    paths = [w for w, key in pairs if "=" not in w or "/" in key or ("." not in key and os.path.exists(w))]
    changes = [word for word in words if word not in paths]
    named = [word for word in changes if word.partition("=")[0].strip() == "data.test"]
    if named and paths:
        raise UserError(
            f"the data to evaluate is named twice, by '{named[0]}' and by '{paths[0]}'; name all of it as paths, or "
            f"all of it by data.test=[…]"
        )
    return [*changes, f"data.test={json.dumps(paths)}"] if paths else changes


@contextmanager
def told_by_first_rank() -> Iterator[None]:
    """Below torchrun, let only the first rank report a mistake that every rank finds; the others end with EchoErrors.

    torchrun's summary lists all of them. Without it, every rank reports: it may be the only one that finds the mistake,
    as in a file that is being written, and the other ranks would wait for one that has ended silently.
    """
    try:
        yield
    except UserError as error:
        if is_first_rank() or not is_below_torchrun():
            raise
        raise EchoError(*error.args) from error


@contextmanager
def mistakes_told(debug: bool = False, if_stopped: str = "") -> Iterator[None]:
    """End the process on an error, reporting a mistake of the user in one sentence, and Ctrl-C in one line.

    Args:
        debug: errors of the program itself, and Ctrl-C, are passed on to the debugger.
        if_stopped: says what becomes of OUT if Ctrl-C or SIGTERM ends the command.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if debug:
            raise
        end_interrupted(error, if_stopped, is_first_rank())
    except Exception as error:
        if debug and not isinstance(error, UserError):
            raise
        end_run(error)
    finally:
        flush_output()
