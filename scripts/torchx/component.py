"""TorchX component: training by any scheduler that TorchX knows (`pip install torchx`).

torchx run --scheduler kubernetes scripts/torchx/component.py:train --image REGISTRY/recsys:latest --nodes 2
    --nproc_per_node 8 --gpus 8 --run_dir /data/runs/mine --config configs/dlrm_movielens.yaml train.epochs=3
"""

import shlex

import torchx.specs as specs

_PORT = 29500


def train(
    config: str,
    *overrides: str,
    run_dir: str,
    image: str = "recsys:latest",
    nodes: int = 1,
    nproc_per_node: int = 1,
    cpus: int = 8,
    gpus: int = 0,
    memory_mib: int = 32768,
    max_restarts: int = 3,
) -> specs.AppDef:
    """Train; after a fault the ranks, or the whole job, resume from the newest checkpoint in run_dir.

    Args:
        config: YAML file in the image
        overrides: key=value, changes to the config
        run_dir: run directory, on a disk that all nodes share
        image: container image with this repository as its working directory; a folder for local schedulers
        nodes: number of nodes
        nproc_per_node: ranks on a node
        cpus: CPUs of a node
        gpus: GPUs of a node
        memory_mib: memory of a node, in MiB
        max_restarts: how often torchrun restarts the ranks, and the scheduler restarts the job
    """
    launcher = ["--standalone", "--local-addr", "127.0.0.1"]
    endpoint = ""
    if nodes > 1:
        launcher = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-id", specs.macros.app_id]
        # The shell of each node fills this in, so it is not quoted, and "$$" keeps TorchX from treating it as a macro.
        endpoint = f"--rdzv-endpoint $${{{specs.macros.rank0_env}:=localhost}}:{_PORT} "
    launcher += ["--nproc-per-node", str(nproc_per_node), "--max-restarts", str(max_restarts)]
    keys = [f"run.dir={run_dir}", "run.resume=true", *overrides]
    script = ["train.py", config, *(key.replace("$", "$$") for key in keys)]
    return specs.AppDef(
        name="recsys",
        roles=[
            specs.Role(
                name="train",
                image=image,
                num_replicas=nodes,
                entrypoint="bash",
                args=[
                    "-c",
                    f"exec python -m torch.distributed.run {endpoint}{shlex.join(launcher)} {shlex.join(script)}",
                ],
                env={"PYTHONUNBUFFERED": "1"},
                port_map={"c10d": _PORT},
                max_retries=max_restarts,
                resource=specs.Resource(cpu=cpus, gpu=gpus, memMB=memory_mib),
            )
        ],
    )
