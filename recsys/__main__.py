"""The command `recsys`, also `python -m recsys`: trains models, and uses, evaluates and exports what they learned.

how to start it:
  torchrun --standalone --nproc_per_node 8 train.py CONFIG
                                    eight ranks: NCCL and GPUs where there are any, gloo and the CPU otherwise
                                    (without a clone: torchrun --standalone --nproc_per_node 8 -m recsys train CONFIG)
  python train.py CONFIG            one process (without a clone: recsys train CONFIG)
  python train.py CONFIG --dry-run topology.world_size=64 topology.local_world_size=8 topology.device=cuda
         topology.device_memory=80GiB topology.host_memory=1TiB
                                    the plan and the memory on every rank, without GPUs and without training;
                                    status 0 if it fits, 1 if not (the same: recsys dry-run CONFIG …)
  python train.py RUN --evaluate data.test=/logs/2026-12-02/
                                    metrics on other data; the run stays as it is (the same: recsys evaluate RUN …)
  python train.py CONFIG --debug    one process, 200 steps on the first 20,000 rows, no loader threads,
                                    nothing overlapped, autograd's anomaly checks on: works under pdb and debugpy

key=value changes any key of the config, the value is YAML:
  train.epochs=3 tables.item.embedding_dim=32 data.train=/logs/2026-11-*/ data.valid=null
  run.dir=runs/mine                 where the run writes (default runs/NAME-TIME)
  run.resume=true                   continue from the newest checkpoint in run.dir, if there is one
  run.overwrite=true                replace an earlier run in run.dir
  train.init_from=runs/yesterday    start from that run's weights and optimizers, on new files

SIGTERM, SIGUSR2, Ctrl-C or the file run.stop_file: save a checkpoint and exit with status 143 (torchrun's own status is
then 1, and it passes on SIGUSR2 only with --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2). Status 0: the
job is done.
After a rank has failed, torchrun --max-restarts N continues by itself from the newest checkpoint.
All keys, with their meaning and default: docs/config.md. The data: data/README.md.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recsys.runtime.arguments import (
    Parser,
    add_calibration,
    add_changes,
    add_compression,
    add_evaluation,
    add_out,
    add_sweep,
    add_table_export,
    mistakes_told,
    names,
    positive,
    price,
    told_by_first_rank,
    with_data,
)
from recsys.runtime.checkpoint_folders import checkpoints_of
from recsys.runtime.environment import importing, restart_with_malloc_settings
from recsys.runtime.files import make_folder, prepare_json
from recsys.runtime.versions import exit_unless_installed, own_version

COMMANDS = {
    "train": "train a model from a YAML config",
    "dry-run": "plan, and predict the memory of every rank, without GPUs and without training",
    "calibrate": "measure the speed of devices like these, so that dry runs predict times; takes one to three minutes",
    "evaluate": "evaluate the model of a finished run on other data",
    "predict": "score rows with a finished run, and write the scores as Parquet",
    "recommend": "rank items for users with a finished retrieval run, and write the best as Parquet",
    "embeddings": "write vectors of items, users or a table by raw id as Parquet; optional: a FAISS index of items",
    "semantic-ids": "write a few small codes for each item, shared by similar items, to use as features instead of ids",
    "compress": "quantise, prune and distil a finished run, as far as a metric allows",
    "export": "write a finished run as a folder that scores and recommends without torch",
    "report": "write report.html of a run: curves, memory, plan and ids; also of a failed run or one in progress",
    "compare": "compare runs in one HTML page: config keys that differ, results, and their curves in the same plots",
    "sweep": "search over settings of a config with any number of processes, and write a table and a plot",
    "inspect": "show what the columns of a log hold, and write a first config",
    "prepare": "write training data as Parquet: a public data set, synthetic logs, or your own files",
    "tables": "export a table of a checkpoint as Parquet",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status, or end the process with a mistake of the user in one sentence."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser("recsys", description="Distributed training of recommender models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {own_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, about in COMMANDS.items():
        commands.add_parser(name, help=about, add_help=False)
    with mistakes_told():
        command = parser.parse_args(words[:1]).command
    alone = {"prepare": prepare, "sweep": sweep, "calibrate": calibrate, "compress": compress, "export": export}
    if command in (alone := alone | {"tables": tables}):
        return alone[command](words[1:])
    named = {"predict": predict, "recommend": predict, "embeddings": predict, "report": report, "compare": report}
    if command in (named := named | {"inspect": files, "semantic-ids": files}):
        return named[command](words[1:], command)
    return train(words[1:], f"recsys {command}", command)


def train(arguments: Sequence[str], prog: str, command: str = "train") -> int:
    """Train, dry-run or evaluate; return the exit status, or end the process with a mistake of the user.

    Args:
        arguments: the words of the command line after `prog`.
        prog: what the user has called, for messages.
        command: what to do; train has the other two as options.
    """
    with mistakes_told(debug="--debug" in arguments):
        words = _parse(arguments, prog, command)
        if words.command != "dry-run" and not words.debug:  # a debugger would lose the process
            restart_with_malloc_settings()
        # Imported in this order, so that mistakes are reported before the slow imports, and missing packages by name.
        with importing():
            job = _job(words)
        return job()


def prepare(arguments: Sequence[str], prog: str = "recsys prepare") -> int:
    """Convert data; return the exit status 0, or end the process with a mistake of the user in one sentence."""
    exit_unless_installed("numpy", "pyarrow")
    with mistakes_told(if_stopped="nothing is left of it"):
        from recsys.datasets.prepare import prepare as run_converter

        run_converter(arguments, prog)
    return 0


def predict(arguments: Sequence[str], command: str) -> int:
    """Predict, recommend or write vectors; return the exit status 0, or end the process with a mistake of the user."""
    parser = _parser_of_run(command)
    if command == "embeddings":
        parser.add_argument("name", metavar="NAME", help="item, user, or a table (also tables.NAME)")
        about = "Parquet: users, items to use instead of data.items, or rows with ids of the table"
        parser.add_argument("--data", help=about)
        about = "write an index of the item vectors, exact (flat) or compressed (ivfpq)"
        parser.add_argument("--faiss", choices=("flat", "ivfpq"), help=about)
        parser.add_argument("--queries", metavar="USERS", help="Parquet: users on which to measure recall of the index")
    else:
        parser.add_argument("data", metavar="DATA", help="Parquet: a directory, glob or file; labels are not needed")
    add_out(parser, "folder to write; an unfinished one is completed", "data.filter")
    about = "columns to copy to OUT, separated by commas; default: the ids that the model reads"
    parser.add_argument("--keep", metavar="COLUMNS", type=names, help=about)
    if command == "recommend":
        parser.add_argument("--k", type=positive, default=20, help="items for each row (20)")
    with mistakes_told(if_stopped="the same command goes on with OUT"):
        words, run = _run_named_by(parser, arguments)
        from recsys.serving.embeddings import embeddings
        from recsys.serving.predict import predict as score
        from recsys.serving.predict import recommend

        if command == "embeddings":
            return embeddings(run, words.name, words.out, words.data, words.keep, words.faiss, words.queries)
        if command == "recommend":
            return recommend(run, words.data, words.out, words.k, words.keep)
        return score(run, words.data, words.out, words.keep)


def compress(arguments: Sequence[str]) -> int:
    """Compress a run; return the exit status 0, or end the process with a mistake of the user in one sentence."""
    parser = _parser_of_run("compress")
    add_out(parser, "folder of the compressed run, new or empty", "data.valid")
    add_compression(parser)
    with mistakes_told():
        words, run = _run_named_by(parser, arguments)
        from recsys.serving.compress import Request
        from recsys.serving.compress import compress as compress_run

        with told_by_first_rank():
            metric = words.metric or run.trained.train.early_stop.metric or run.config.model.metric_names(run.config)[0]
            steps, student, overrides = tuple(words.steps.split(",")), tuple(words.student), tuple(words.overrides)
            request = Request(steps, metric, words.max_loss, words.prune_by, student, overrides)
        return compress_run(run, words.out, request)


def files(arguments: Sequence[str], command: str) -> int:
    """Read Parquet without a run; return the exit status 0, or end the process with a mistake of the user."""
    exit_unless_installed("numpy", "pyarrow")
    with mistakes_told():
        if command == "inspect":
            from recsys.datasets.inspect import main as carry_out
        else:
            from recsys.serving.semantic_ids import main as carry_out
        return carry_out(_parser_of(command), arguments)


def sweep(arguments: Sequence[str]) -> int:
    """Search over settings; return the exit status 0, or end the process with a mistake of the user in one sentence."""
    parser = _parser_of("sweep")
    add_sweep(parser)
    with mistakes_told():
        words = parser.parse_intermixed_args(arguments)
        with importing():  # in this order, as `train` does
            from recsys.training.sweep_space import open_space

            trained = words.config, tuple(words.overrides)
            space, metric = open_space(*trained, words.space, words.out, words.metric)
            from recsys.runtime.logs import quiet_libraries, start_logging
            from recsys.training.sweep import Sweep

        quiet_libraries()
        make_folder(words.out, "--out")
        start_logging(words.out / "logs", 0)
        return Sweep(*trained, space, words.out, words.trials, words.seeds, words.jobs, metric, words.bytes).run()


def calibrate(arguments: Sequence[str]) -> int:
    """Measure devices; return the exit status 0, or end the process with a mistake of the user in one sentence."""
    with mistakes_told():
        from recsys.config.choices import Device

        parser = _parser_of("calibrate")
        add_calibration(parser, Device.__members__)
        words = parser.parse_args(arguments)
        with told_by_first_rank():
            prepare_json(words.out, "recsys calibrate", "schema_version", "device", "ranks")
        restart_with_malloc_settings()
        with importing():
            from recsys.training.calibrate import calibrate as measure

        return measure(words.out, Device[words.device], words.threads)


def export(arguments: Sequence[str]) -> int:
    """Export a run; return the exit status 0, or end the process with a mistake of the user in one sentence."""
    with mistakes_told():
        from recsys.config.choices import TableEncoding

        parser = _parser_of_run("export")
        add_out(parser, "folder to write, new or empty", "data.items")
        encodings, about = [encoding.name for encoding in TableEncoding], "type of the rows of tables (fp32)"
        parser.add_argument("--tables", choices=encodings, default="fp32", help=about)
        words, run = _run_named_by(parser, arguments)
        from recsys.serving.export import export as export_run

        return export_run(run, words.out, words.tables)


def report(arguments: Sequence[str], command: str) -> int:
    """Write a page on one run or several; return the exit status 0, or end the process with a mistake of the user."""
    parser = _parser_of(command)
    many = "+" if command == "compare" else 1
    parser.add_argument("runs", metavar="RUN", type=Path, nargs=many, help="run directory")
    parser.add_argument("--out", metavar="FILE", type=Path, help="page; default: RUN/report.html, or ./compare.html")
    with mistakes_told():
        words = parser.parse_args(arguments)
        exit_unless_installed("omegaconf")
        from recsys.report.compare import compare
        from recsys.report.page import write_report

        print(compare(words.runs, words.out) if command == "compare" else write_report(words.runs[0], words.out))
    return 0


def _parser_of(command: str, prog: str | None = None, **settings: Any) -> Parser:
    about = COMMANDS[command]
    return Parser(prog or f"recsys {command}", description=f"{about[0].upper()}{about[1:]}.", **settings)


def _parser_of_run(command: str) -> Parser:
    """Return a parser for a command on a finished run, with its first argument."""
    parser = _parser_of(command)
    parser.add_argument("run", metavar="RUN", help="run directory, or one of its checkpoints")
    parser.add_argument("--trust-code", action="store_true", help="import the class that the run names as its model")
    return parser


def _run_named_by(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """Return the parsed arguments of a command on a finished run, and that run."""
    words = parser.parse_intermixed_args(arguments)
    with told_by_first_rank():
        checkpoints_of(words.run, "RUN")  # before the imports, which take seconds
    restart_with_malloc_settings()
    with importing(), told_by_first_rank():
        from recsys.serving.finished import find_run

        return words, find_run(words.run, words.overrides, words.trust_code)


def tables(arguments: Sequence[str], prog: str = "recsys tables") -> int:
    """Export a table of a checkpoint; return the exit status 0, or end the process with a mistake of the user."""
    parser = Parser(prog, description="Export tables of a checkpoint; train.init.from_parquet.TABLE=FILE reads them.")
    add_table_export(parser)
    with mistakes_told():
        words = parser.parse_args(arguments)
        checkpoints_of(words.source, "RUN_OR_CHECKPOINT")
        with importing():
            from recsys.checkpoint.parquet import export_table

        print(f"{words.out}: {export_table(words.source, words.table, words.out):,} rows of table {words.table}")
    return 0


def _job(words: argparse.Namespace) -> Callable[[], int]:
    """Return a function that trains, dry-runs or evaluates, after its imports and with its config read."""
    from recsys.config import load_config

    with told_by_first_rank():
        if words.command == "evaluate":
            checkpoints_of(words.config, "RUN")  # before the imports, as in `_run_named_by`
            from recsys.serving.evaluate import Extras, evaluate, roles_of
            from recsys.serving.finished import find_run

            run_to_evaluate = find_run(words.config, words.overrides, words.trust_code)
            extras = Extras(words.by, words.cold, words.group, words.bootstrap, words.importance)
            return partial(evaluate, run_to_evaluate, roles_of(run_to_evaluate), extras)
        config = load_config(words.config, words.overrides, words.debug)
    if words.command == "dry-run":
        from recsys.memory.dry_run import dry_run

        return partial(dry_run, config, words.price_per_hour)
    from recsys.training.run import run

    if config.train.publish.dir is None:
        return partial(run, config)
    from recsys.serving.publish import Publisher

    return partial(run, config, Publisher)


def _parse(arguments: Sequence[str], prog: str, command: str) -> argparse.Namespace:
    examples, as_written = str(__doc__).partition("\n\n")[2], argparse.RawDescriptionHelpFormatter
    parser = _parser_of(command, prog, epilog=examples, formatter_class=as_written)
    if command == "evaluate":
        options = "[--by COLUMN [--cold N[,N…]]] [--group COLUMN] [--bootstrap N] [--importance [REPEATS]]"
        parser.usage = f"{prog} RUN [DATA …] [key=value …] {options} [--trust-code]"
        parser.add_argument("config", metavar="RUN", help="run directory, or one of its checkpoints")
        add_changes(parser, "changes to the config; other words are DATA to use instead of data.valid and data.test")
    else:
        parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/dlrm_movielens.yaml")
        add_changes(parser, "changes to the config")
    parser.set_defaults(command=command, debug=False, trust_code=False)
    if command != "dry-run":
        add_evaluation(parser)
    if command == "train":
        mode = parser.add_mutually_exclusive_group()
        mode.add_argument("--debug", action="store_true", help="one process, 20,000 rows, 200 steps, no threads")
        for name, about in (("dry-run", COMMANDS["dry-run"]), ("evaluate", "evaluate a run; CONFIG is its directory")):
            mode.add_argument(f"--{name}", dest="command", action="store_const", const=name, help=about)
    if command != "evaluate":
        about = "price of a machine: a dry run with topology.speeds then predicts the cost of an epoch"
        parser.add_argument("--price-per-hour", metavar="PRICE", type=price, help=about)
    pairs = zip(arguments, [*arguments[1:], ""], strict=False)
    once = [word == "--importance" and not after.isdecimal() for word, after in pairs]
    words = parser.parse_intermixed_args([f"{w}=1" if o else w for w, o in zip(arguments, once, strict=True)])
    if words.command == "evaluate":
        words.overrides = with_data(words.overrides)
    return words


if __name__ == "__main__":
    sys.exit(main())
