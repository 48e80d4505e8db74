"""Train a user-item model from a YAML config; `python train.py --help` tells how."""

import argparse
import sys
from typing import NoReturn

from recsys.errors import EchoError, UserError, end_run
from recsys.runtime.environment import is_first_rank, prepare_environment
from recsys.runtime.versions import check_versions

_EPILOG = """\
how to start it:
  torchrun --standalone --nproc_per_node 8 train.py CONFIG
                                    eight ranks: NCCL and GPUs where there are any, gloo and the CPU otherwise
  python train.py CONFIG            one process
  python train.py CONFIG --dry-run topology.world_size=64 topology.local_world_size=8 topology.device=cuda
         topology.device_memory=80GiB topology.host_memory=1TiB
                                    the plan and the memory on every rank, without GPUs and without training;
                                    status 0 if it fits, 1 if not
  python train.py RUN --evaluate data.test=/logs/2026-12-02/
                                    metrics of a run's model on other data; no training, and the run stays as it is
  python train.py CONFIG --debug    one process, 200 steps on the first 20,000 rows, no loader threads,
                                    nothing overlapped, autograd's anomaly checks on: works under pdb and debugpy

key=value changes any key of the config, the value is YAML:
  train.epochs=3 tables.item.embedding_dim=32 data.train=/logs/2026-11-*/ data.valid=null
  run.dir=runs/mine                 where the run writes (default runs/NAME-TIME)
  run.resume=true                   go on from the newest checkpoint in run.dir, if there is one
  run.overwrite=true                replace an earlier run in run.dir
  train.init_from=runs/yesterday    start from that run's weights and optimizers, on new files

SIGTERM, SIGUSR2, Ctrl-C or the file run.stop_file: save a checkpoint and exit with status 143 (torchrun's own status is
then 1, and it passes on SIGUSR2 only with --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2). Status 0: the
job is done.
torchrun --max-restarts N goes on from the newest checkpoint by itself after a rank has failed.
All keys, with their meaning and default: recsys/config/schema.py. The data: data/README.md.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; changes are written key=value, and python train.py --help tells the rest")


def main() -> int:
    """Parse the command line and run; a mistake of the user is told in one sentence."""
    parser = _Parser(
        prog="train.py", description=__doc__, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", metavar="CONFIG", help="YAML file, such as configs/dlrm_movielens.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="changes to the config")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--debug", action="store_true", help="single-device debug mode")
    mode.add_argument("--dry-run", action="store_true", help="plan and predict memory, for the machines of topology")
    mode.add_argument("--evaluate", action="store_true", help="evaluate a run; CONFIG is its directory or checkpoint")
    try:
        arguments = parser.parse_intermixed_args()
        # Imported in this order, so that a mistake is told before the slow imports, and a missing package by name.
        prepare_environment()
        check_versions()
        from recsys.config import load_config

        try:
            if arguments.evaluate:
                from recsys.serving.evaluate import evaluate, find_run

                run_to_evaluate = find_run(arguments.config, arguments.overrides)
            else:
                config = load_config(arguments.config, arguments.overrides, arguments.debug)
        except UserError as error:
            if is_first_rank():
                raise
            raise EchoError(*error.args) from error
        if arguments.evaluate:
            return evaluate(*run_to_evaluate)
        if arguments.dry_run:
            from recsys.memory.dry_run import dry_run

            return dry_run(config)
        from recsys.training.run import run

        return run(config)
    except Exception as error:
        if "--debug" in sys.argv and not isinstance(error, UserError):
            raise  # to the debugger
        end_run(error)


if __name__ == "__main__":
    sys.exit(main())
