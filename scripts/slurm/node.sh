#!/usr/bin/env bash
# What train.sbatch runs on every node: torchrun with a rank for each GPU, or NPROC_PER_NODE ranks.
set -uo pipefail

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=python
    if [[ -z "${LAUNCHER:-}" && -x .venv/bin/python ]]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONUNBUFFERED=1 TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '

# In a process group of its own torchrun gets none of Slurm's signals: it would kill the ranks 30 seconds later, saved or
# not. They are asked to stop by the file, and have the whole of Slurm's grace time.
set -m
trap 'touch "$STOP_FILE"' TERM USR1 USR2
# shellcheck disable=SC2086 # LAUNCHER is several words
${LAUNCHER:-} "$PYTHON" -m torch.distributed.run \
    --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "${NPROC_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2 --tee 3 \
    ${NUMA_BINDING:+--numa-binding "$NUMA_BINDING"} \
    train.py "$@" &
pid=$!
wait "$pid"
status=$?
while kill -0 "$pid" 2>/dev/null; do
    wait "$pid"
    status=$?
done
# What follows from the failure of one node, the end of the others by srun, is no request to stop.
if ((status != 0)) && [[ ! -e "$STOP_FILE" ]]; then touch "$STOP_FILE.failed"; fi
exit "$status"
