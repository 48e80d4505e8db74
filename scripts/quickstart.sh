#!/usr/bin/env bash
# From nothing to a trained model: set-up, MovieLens-100K, training over two processes, evaluation, reports.
# Arguments are key=value settings for train.py: bash scripts/quickstart.sh train.epochs=1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
export PATH="$PWD/.venv/bin:$PATH"

echo "quickstart: data"
recsys prepare movielens-100k

# Two processes, unless there is just one GPU: NCCL refuses two ranks on one device.
ranks=2
if [[ "$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" == 1 ]]; then ranks=1; fi

# torchrun warns when it is not set; train.py chooses the number of threads itself (run.num_threads).
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

run=runs/quickstart
echo "quickstart: training with $ranks process(es)"
# The address because torchrun otherwise asks the network for this host's name, and hangs where none knows it.
torchrun --standalone --local-addr 127.0.0.1 --nproc_per_node "$ranks" train.py configs/dlrm_movielens.yaml \
    "$@" "run.dir=$run" run.overwrite=true
