"""Trains in forked ranks, and measures all tensors that are alive there, whatever holds them."""

import gc
import json
import os
import socket
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path

import torch
from launch import ROOT, _variables, forking
from torchrec.optim.fused import FusedOptimizerModule

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.memory import predict_dense
from recsys.runtime.world import World, open_world
from recsys.step.pipeline import build_pipeline
from recsys.tables.bytes import rank_tables
from recsys.tables.updates import kernels
from recsys.training.build import Built, build_model


def walk(config: Path, variants: Sequence[list[str]], nproc: int, folder: Path, timeout: float) -> list[list[dict]]:
    """Train each variant (overrides of the config) for two steps on `nproc` ranks.

    Returns:
        By variant and rank: bytes "predicted" and "measured" by kind, and those of all other live tensors ("rest").
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with forking() as context:
        ranks = []
        for rank in range(nproc):
            variables = {} if nproc == 1 else _variables(rank, nproc, port)
            arguments = (str(config), list(variants), variables, str(folder / f"{nproc}-{rank}.json"))
            ranks.append(context.Process(target=_rank, args=arguments))
            ranks[-1].start()
        for process in ranks:
            process.join(timeout)
        late = [process for process in ranks if process.is_alive()]
        for process in late:
            process.kill()
    assert not late and not any(process.exitcode for process in ranks)
    found = [json.loads((folder / f"{nproc}-{rank}.json").read_text()) for rank in range(nproc)]
    return [list(each) for each in zip(*found, strict=True)]


def _rank(config: str, variants: list[list[str]], variables: dict[str, str], path: str) -> None:
    os.environ.update(variables)
    os.chdir(ROOT)
    with open_world(Device.cpu) as world:
        Path(path).write_text(json.dumps([_train(config, overrides, world) for overrides in variants]))


def _train(config_path: str, overrides: list[str], world: World) -> dict:
    gc.collect()
    before = _live()  # tensors that the process has anyway, such as constants of libraries
    config = load_config(config_path, overrides)
    inputs = open_inputs(config, world)
    built = build_model(inputs)
    pipeline = build_pipeline(built.model, built.dense_optimizer, world.device, debug=True)
    with closing(inputs.loader("train").batches()) as batches:
        for _ in range(2):
            pipeline.progress(iter(list(islice(batches, 1))))
    del pipeline, batches
    time.sleep(0.1)  # gloo's threads release exchanged tensors a little after all ranks have them
    gc.collect()
    live = {pointer: size for pointer, size in _live().items() if pointer not in before}
    kinds = _kinds(built)
    dense = predict_dense(built.step.dense, config, world.world_size)
    tables = rank_tables(config, built.shards, world.rank).values()
    return {
        "predicted": {
            "weight": sum(entry.weight for entry in tables),
            "state": sum(entry.optimizer for entry in tables),
            "parameter": dense["parameter_bytes"],
            "gradient": dense["gradient_bytes"],
            "optimizer": dense["optimizer_bytes"][world.rank],
        },
        "measured": {name: sum(pointers.values()) for name, pointers in kinds.items()},
        "rest": sum(live.values()) - sum(sum(pointers.values()) for pointers in kinds.values()),
    }


def _live() -> dict[int, int]:
    # The shards of a ShardedTensor are tensors of their own.
    found = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return _storages(each for each in found if not hasattr(each, "local_shards"))


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors in host memory, by address."""
    plain = (t for t in tensors if not hasattr(t, "local_shards"))  # the pieces of a ShardedTensor are tensors too
    storages = [t.untyped_storage() for t in plain if t.layout is torch.strided and t.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def _kinds(built: Built) -> dict[str, dict[int, int]]:
    """Return the storages by kind of what holds them: FBGEMM's modules, the dense part, its optimizer."""
    modules = [kernel.emb_module for kernel in kernels(built.model, FusedOptimizerModule)]
    weights = [module.weights_host for module in modules]
    names = ("momentum1_host", "momentum2_host")
    # If an optimizer has no state, FBGEMM keeps placeholders of one number.
    states = [s for module in modules for n in names if (s := getattr(module, n)).numel() > 1]
    for table in built.table_updates.replicated.tables:
        weights.append(table.weights)
        states += table.state
    states += (values for shard in built.table_updates._shards for values in shard.state)
    parameters = list(built.dense_model.parameters())
    optimizer = [v for entry in built.dense_optimizer.state.values() for v in entry.values()]
    return {
        "weight": _storages(weights),
        "state": _storages(states),
        "parameter": _storages(parameters),
        "gradient": _storages(p.grad for p in parameters if p.grad is not None),
        "optimizer": _storages(v for v in optimizer if isinstance(v, torch.Tensor)),
    }
