#!/usr/bin/env bash
# Lint, types and tests, after doing the set-up. Arguments go to pytest: bash scripts/test.sh -m slow
# With `--set oldest` or `--set newest` first, the tests alone, on the oldest or newest versions supported, in a .venv of
# their own: gigabytes, and by hand.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ "${1:-}" == --set ]]; then
    [[ "${2:-}" =~ ^(oldest|newest)$ ]] || { echo "usage: bash scripts/test.sh [--set oldest|newest] [for pytest]" >&2; exit 2; }
    export SET=$2
    shift 2
fi
bash scripts/setup.sh

bin=.venv${SET:+-$SET}/bin
if [[ -z "${SET:-}" ]]; then
    "$bin/ruff" check .
    "$bin/ruff" format --check .
    "$bin/mypy" recsys train.py scripts benchmarks
fi
# Once, for the hundred processes to come, which write none where PYTHONDONTWRITEBYTECODE is set.
"$bin/python" -m compileall -q recsys
# Files side by side, four at a time: ranks wait for each other, so that fewer leave two cores idle half of the time.
[[ $# -gt 0 ]] || set -- --numprocesses 4 --dist loadfile --no-loadscope-reorder
exec "$bin/python" -m pytest "$@"
