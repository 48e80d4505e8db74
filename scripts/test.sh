#!/usr/bin/env bash
# Lint, types and tests, after doing the set-up. Arguments go to pytest: bash scripts/test.sh -m slow
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

bin=.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
"$bin/mypy" recsys train.py scripts benchmarks
# Files side by side, two at a time: ranks wait for each other, so that one file alone leaves cores idle.
[[ $# -gt 0 ]] || set -- --numprocesses 2 --dist loadfile
exec "$bin/python" -m pytest "$@"
