#!/usr/bin/env python
"""Export tables of a checkpoint as Parquet; train.init.from_parquet.TABLE=FILE takes them into another run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recsys.errors import UserError
from recsys.runtime.environment import prepare_environment
from recsys.runtime.versions import exit_unless_installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0, or 1 for a mistake of the user."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    export = commands.add_parser("export", help="write one table: row (or raw id), vector, optimizer state")
    export.add_argument("source", metavar="RUN_OR_CHECKPOINT", type=Path)
    export.add_argument("table", metavar="TABLE")
    export.add_argument("out", metavar="OUT.parquet", type=Path)
    args = parser.parse_args(arguments)
    exit_unless_installed("torch", "torchrec", "pyarrow", "omegaconf")
    prepare_environment()
    from recsys.checkpoint import export_table

    try:
        num_rows = export_table(args.source, args.table, args.out)
    except (UserError, OSError) as error:
        print(f"tables.py: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {num_rows:,} rows of table {args.table}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
