"""What command lines share: parsers, types of arguments, and how a mistake ends a command."""

import argparse
import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from recsys.errors import EchoError, UserError, end_interrupted, end_run
from recsys.runtime.environment import is_first_rank


class Parser(argparse.ArgumentParser):
    """Raises a mistake as the sentence that the process ends with."""

    def error(self, message: str) -> NoReturn:
        hint = "changes are written key=value, and " if "key=value" in self.format_usage() else ""
        raise UserError(f"{message}; {hint}{self.prog} --help tells the rest")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return int(text)


def names(text: str) -> list[str]:
    """Return names that are separated by commas; one that holds a comma stands in double quotes."""
    pairs = re.findall(r'"((?:[^"]|"")*)"(?=,|$)|([^,]+)', text)
    return [quoted.replace('""', '"') or plain for quoted, plain in pairs]


def as_names(columns: Iterable[str]) -> str:
    """Return the text of which `names` makes these columns."""
    return ",".join('"' + name.replace('"', '""') + '"' if "," in name or '"' in name else name for name in columns)


def price(text: str) -> float:
    """Return a price.

    Raises:
        ArgumentTypeError: it is no number above 0.
    """
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"'{text}' is no number above 0")


def add_evaluation(parser: argparse.ArgumentParser) -> None:
    """Add what an evaluation tells besides the metrics of all rows, and `--trust-code`."""
    parser.add_argument("--by", metavar="COLUMN", help="of an evaluation: metrics by value of a column, too")
    about = "with --by: slices of values that data.train has in N rows (warm) or fewer (cold)"
    parser.add_argument("--cold", metavar="N", type=positive, default=0, help=about)
    about = "of an evaluation: the mean of the AUCs of this column's values, such as users, by their rows (gauc)"
    parser.add_argument("--group", metavar="COLUMN", help=about)
    about = "of an evaluation: 95 %% intervals of the metrics, by so many draws of rows, or of what --group names"
    parser.add_argument("--bootstrap", metavar="N", type=positive, default=0, help=about)
    about = "of an evaluation: what the metrics lose when the values of a feature are permuted, in the mean of REPEATS"
    parser.add_argument("--importance", metavar="[REPEATS]", type=positive, default=0, help=about)
    about = "of an evaluation: import the class that the run names as its model"
    parser.add_argument("--trust-code", action="store_true", help=about)


def add_out(parser: argparse.ArgumentParser, about: str, key: str) -> None:
    """Add what is written, and changes to a run's config, such as one of `key`."""
    parser.add_argument("out", metavar="OUT", type=Path, help=about)
    add_changes(parser, f"changes to the run's config, as {key}")


def add_changes(parser: argparse.ArgumentParser, about: str) -> None:
    """Add changes to a config, of which there may be none."""
    # With a default: without one argparse counts them among what is required.
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help=about)


def with_data(words: list[str]) -> list[str]:
    """Return changes of a config with the words that are none, which are paths, as data.test.

    Raises:
        UserError: data.test is among the changes too.
    """
    paths = [word for word in words if "=" not in word or "/" in word.partition("=")[0]]
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
    """Let the first rank tell a mistake that every rank finds by itself, and the others end as its echoes."""
    try:
        yield
    except UserError as error:
        if is_first_rank():
            raise
        raise EchoError(*error.args) from error


@contextmanager
def mistakes_told(debug: bool = False, goes_on: bool = False) -> Iterator[None]:
    """End the process with what went wrong, in one sentence where it is the user's to mend; with Ctrl-C in a line.

    Args:
        debug: an error of the program itself, and Ctrl-C, go on to the debugger.
        goes_on: the command, given once more, goes on with what an earlier one has written.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        if debug:
            raise
        end_interrupted(error, "the same command goes on with OUT" if goes_on else "", is_first_rank())
    except Exception as error:
        if debug and not isinstance(error, UserError):
            raise
        end_run(error)
