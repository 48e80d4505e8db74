#!/usr/bin/env python
"""Write training data as Parquet; the same as `recsys prepare`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recsys.__main__ import prepare

if __name__ == "__main__":
    sys.exit(prepare(sys.argv[1:], "prepare_data.py"))
