"""`recsys prepare`: the command line of the converters of public data sets, synthetic logs and your own files.

examples:
  {prog} movielens-100k
  {prog} synthetic --out data/synthetic --rows 10000000 --alpha 1.1 --unseen 0.05
  {prog} synthetic --out data/criteo-like --shape criteo --items 1000000
  {prog} csv logs/*.csv.gz --out data/clicks --split 0.9,0.1 --split-by time:ts
  {prog} csv ratings.dat --out data/ratings --delimiter '\\t' \\
      --columns user_id,item_id,rating,ts --types user_id=string --label 'rating>=4' \\
      --split 0.8,0.1,0.1 --split-by user:user_id
  {prog} retrieval logs/ --time ts --out data/clicks-retrieval
  {prog} histories logs/ --time ts --history-where 'label == 1' --out data/clicks-histories

data/README.md describes the columns that are written and the rules for your own files.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from recsys.datasets import delimited, histories, interactions, movielens, synthetic, writer
from recsys.errors import in_words
from recsys.runtime.arguments import Parser
from recsys.runtime.live import Task
from recsys.runtime.signals import ending_orderly

_ABOUT = "Write training data as Parquet: a public data set, synthetic logs, or your own delimited files."


def prepare(arguments: Sequence[str], prog: str = "recsys prepare") -> None:
    """Run one converter, and print what it has written.

    Args:
        arguments: the words of the command line after `prog`.
        prog: what the user has called, for messages.

    Raises:
        UserError: a mistake in the words, or in what is converted. OSError: a file cannot be written.
        KeyboardInterrupt: Ctrl-C, or SIGTERM as `TerminatedError`. Then, too, no output is left.
    """
    args = _parser(prog).parse_args(arguments)
    with ending_orderly():
        with Task(f"writing {args.out}"):
            is_new = args.run(args) is not False
        if not is_new:
            print("already complete, nothing to do:")
        print(writer.describe(args.out))


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description=_ABOUT,
        epilog=str(__doc__).partition("\n\n")[2].format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_movielens(commands)
    _add_converter(
        commands,
        "synthetic",
        "",
        synthetic.SyntheticOptions,
        synthetic.write_synthetic,
        help="power-law ids and a planted teacher, so that the best possible AUC is known",
        description="Logs drawn from a known model; teacher.json holds the AUC and log loss it reaches.",
    )
    _add_converter(
        commands,
        "csv",
        ".csv, .tsv, .csv.gz …",
        delimited.CsvOptions,
        delimited.convert_csv,
        help="any delimited files, plain or compressed",
        description="Delimited files, streamed into Parquet. Types that --types does not give are inferred from the "
        "first 4 MiB of the first file that has rows, and apply to all files. Empty fields are null.",
    )
    _add_logs(commands)
    return parser


def _add_logs(commands: argparse._SubParsersAction) -> None:
    """Add the converters of Parquet logs."""
    _add_converter(
        commands,
        "retrieval",
        ".parquet files, or globs or folders of them",
        interactions.LogOptions,
        interactions.convert_log,
        help="a Parquet log of interactions, for two towers",
        description="A log with a row for each interaction, as train/, valid/ and test/ (queries of users, with the "
        "items to find and those seen), items/, and users/ (all items of each user, to recommend more).",
    )
    _add_converter(
        commands,
        "histories",
        ".parquet files, or globs or folders of them",
        histories.HistoryOptions,
        histories.convert_histories,
        help="a Parquet log with lists of what the user of each row did before",
        description="The rows of a log, with all columns, in order of time, and with lists of the values that earlier "
        "rows of the same user have, the oldest first. Rows of one moment stay in the order in which they are read. "
        "Memory holds about a million rows, or those of one moment if these are more, and --history values for each "
        f"user and list; these values are written to {histories.USERS}, which --after reads.",
    )


def _add_movielens(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "movielens-100k",
        help="MovieLens-100K from the recbole wheel, which pip downloads",
        description="MovieLens-100K in the splits of RecBole: ctr/ (label: rating >= 4) and retrieval/.",
    )
    parser.add_argument("--out", type=Path, default=Path("data/movielens-100k"), help="folder to write (%(default)s)")
    parser.add_argument("--cache", type=Path, default=Path("data/.cache"), help="folder of downloads (%(default)s)")
    parser.set_defaults(run=lambda args: movielens.prepare_movielens_100k(args.out, args.cache))


def _add_converter(
    commands: argparse._SubParsersAction,
    name: str,
    inputs: str,
    options: type,
    convert: Callable[..., bool | None],
    **texts: Any,
) -> None:
    """Add a command that calls `convert(inputs, out, options, overwrite)`; without help, it has no inputs."""
    parser = commands.add_parser(name, **texts)
    if inputs:
        parser.add_argument("inputs", type=Path, nargs="+", metavar="INPUT", help=inputs)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    for option in fields(options):
        default = getattr(options(), option.name)
        settings = {key: value for key, value in option.metadata.items() if key not in ("least", "most")}
        if settings.keys().isdisjoint({"type", "choices"}) and default is not None:
            settings["type"] = type(default)
        if default not in (None, [], {}, ()):
            settings["help"] += " (%(default)s)"
        flag = settings.pop("flag", option.name).replace("_", "-")
        default = [] if default == {} else default
        parser.add_argument(f"--{flag}", dest=option.name, default=default, **settings)
    parser.add_argument("--overwrite", action="store_true", help="replace what was written to --out before")

    def run(args: argparse.Namespace) -> bool | None:
        given = {option.name: getattr(args, option.name) for option in fields(options)}
        pairs = {name: dict(given[name]) for name, default in vars(options()).items() if default == {}}
        with _added_to(given.get("where")):
            return convert(*([args.inputs] if inputs else []), args.out, options(**(given | pairs)), args.overwrite)

    parser.set_defaults(run=run)


def _added_to(where: str | None) -> contextlib.AbstractContextManager[None]:
    """Return a context whose errors that advise a --where say one that keeps the condition that the user gave."""
    given = re.sub(r'([\\"$`])', r"\\\1", where or "")  # as it is written between double quotes in a shell
    return in_words({'--where "': f'--where "({given}) and '} if where else {})
