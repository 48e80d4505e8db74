"""`recsys prepare`: the command line of the converters, of public data sets, synthetic logs and one's own files.

examples:
  {prog} movielens-100k
  {prog} synthetic --out data/synthetic --rows 10000000 --alpha 1.1 --unseen 0.05
  {prog} synthetic --out data/criteo-like --shape criteo --items 1000000
  {prog} csv logs/*.csv.gz --out data/clicks --split 0.9,0.1 --split-by time:ts
  {prog} csv ratings.dat --out data/ratings --delimiter '\\t' \\
      --columns user_id,item_id,rating,ts --types user_id=string --label 'rating>=4' \\
      --split 0.8,0.1,0.1 --split-by user:user_id
  {prog} retrieval logs/ --time ts --out data/clicks-retrieval

data/README.md describes the columns that are written and the rules for your own files.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from recsys.datasets import delimited, interactions, movielens, synthetic, writer
from recsys.errors import UserError

_ABOUT = "Write training data as Parquet: a public data set, synthetic logs, or your own delimited files."
_Options = TypeVar("_Options")


class _Parser(argparse.ArgumentParser):
    """Says a mistake in one line, without the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def prepare(arguments: Sequence[str], prog: str = "recsys prepare") -> int:
    """Run one converter.

    Args:
        arguments: the words of the command line after `prog`.
        prog: what the user has called, for messages.

    Returns:
        The exit status: 0, or 2 for a mistake of the user, which is told in one line.
    """
    parser = _Parser(
        prog=prog,
        description=_ABOUT,
        epilog=str(__doc__).partition("\n\n")[2].format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_movielens, _add_synthetic, _add_csv, _add_retrieval):
        add(commands)
    args = parser.parse_args(arguments)
    try:
        written = args.run(args)
        if not written:
            print("already complete, nothing to do:")
        print(writer.describe(args.out))
    except (UserError, OSError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _options(kind: type[_Options], args: argparse.Namespace, **changed: Any) -> _Options:
    """Return the dataclass whose fields have the names of the arguments."""
    return kind(**({field.name: getattr(args, field.name) for field in fields(kind)} | changed))  # type: ignore[arg-type]


def _add_movielens(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "movielens-100k",
        help="MovieLens-100K out of the recbole wheel, which pip downloads",
        description="MovieLens-100K in RecBole's splits: ctr/ (label: rating >= 4) and retrieval/.",
    )
    parser.add_argument("--out", type=Path, default=Path("data/movielens-100k"), help="%(default)s")
    parser.add_argument("--cache", type=Path, default=Path("data/.cache"), help="%(default)s")
    parser.set_defaults(run=lambda args: movielens.prepare_movielens_100k(args.out, args.cache))


def _add_synthetic(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "synthetic",
        help="power-law ids and a planted teacher, so that the best possible AUC is known",
        description="Logs drawn from a known model; teacher.json holds the AUC and log loss it reaches.",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    _add_options(parser, synthetic.SyntheticOptions)
    _add_overwrite(parser)
    parser.set_defaults(
        run=lambda args: synthetic.write_synthetic(args.out, _options(synthetic.SyntheticOptions, args), args.overwrite)
    )


def _add_csv(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "csv",
        help="any delimited files, plain or compressed",
        description="Delimited files, streamed into Parquet. Types are inferred from the first 4 MiB of the "
        "first file where --types does not give them, and hold for all files. Empty fields are null.",
    )
    parser.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help=".csv, .tsv, .csv.gz …")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    _add_options(parser, delimited.CsvOptions)
    _add_overwrite(parser)
    parser.set_defaults(run=_run_csv)


def _run_csv(args: argparse.Namespace) -> bool:
    options = _options(delimited.CsvOptions, args, types=dict(args.types), lists=dict(args.lists))
    delimited.convert_csv(args.inputs, args.out, options, args.overwrite)
    return True


def _add_retrieval(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "retrieval",
        help="a Parquet log of interactions, for two towers",
        description="A log with a row for each interaction, as train/, valid/, test/ (a user's queries, with what is "
        "to be found and what was seen) and items/.",
    )
    parser.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help=".parquet files, or folders of them")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--user", default="user_id", metavar="COLUMN", help="(%(default)s)")
    parser.add_argument("--item", default="item_id", metavar="COLUMN", help="(%(default)s)")
    parser.add_argument("--time", metavar="COLUMN", help="without it, rows are taken to be in order")
    parser.add_argument("--user-features", type=delimited.names, default=[], metavar="A,B", help="columns of the log")
    parser.add_argument("--item-features", type=delimited.names, default=[], metavar="A,B", help="columns of the log")
    parser.add_argument("--where", metavar="FILTER", help=writer.WHERE_HELP)
    held_out = parser.add_mutually_exclusive_group()
    held_out.add_argument(
        "--hold-out",
        choices=interactions.HOLD_OUT,
        default=interactions.HOLD_OUT[0],
        help="last: each user's last item is of test, the one before of valid; random: a tenth of each user's items "
        "for each, as RecBole does (%(default)s)",
    )
    held_out.add_argument(
        "--split-column",
        metavar="COLUMN",
        help="with train, valid or test in each row, or 0, 1 or 2, or whether it is of test",
    )
    for name in ("valid", "test"):
        text = f"the log's rows of {name}, files or folders; INPUT is then all of train"
        parser.add_argument(f"--{name}", type=Path, nargs="+", default=[], metavar="PATH", help=text)
    _add_overwrite(parser)
    parser.set_defaults(run=_run_retrieval)


def _run_retrieval(args: argparse.Namespace) -> bool:
    columns = interactions.Columns(args.user, args.item, args.time, args.user_features, args.item_features)
    if (args.valid or args.test) and (args.split_column or args.hold_out != interactions.HOLD_OUT[0]):
        raise UserError("--valid and --test are a split by themselves; leave out --split-column and --hold-out")
    hold_out = interactions.HoldOut(args.hold_out, args.split_column, args.valid, args.test)
    interactions.convert_log(args.inputs, args.out, columns, hold_out, args.where, args.overwrite)
    return True


def _add_options(parser: argparse.ArgumentParser, kind: type[_Options]) -> None:
    """Add an argument for each field that was made by ``option``."""
    for each in fields(kind):  # type: ignore[arg-type]
        default, settings = getattr(kind(), each.name), dict(each.metadata)
        if settings.keys().isdisjoint({"type", "choices"}) and default is not None:
            settings["type"] = type(default)
        if default not in (None, [], {}, ()):
            settings["help"] += " (%(default)s)"
        flag = settings.pop("flag", each.name).replace("_", "-")
        default = [] if default == {} else default
        parser.add_argument(f"--{flag}", dest=each.name, default=default, **settings)


def _add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace what was written to --out before")
