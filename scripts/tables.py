#!/usr/bin/env python
"""Export tables of a checkpoint as Parquet; the same as `recsys tables`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recsys.__main__ import tables

if __name__ == "__main__":
    sys.exit(tables(sys.argv[1:], "tables.py"))
