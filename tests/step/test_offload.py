"""Activations in host memory: the gradients that they give, what is predicted of them, and where they are refused."""

from pathlib import Path

import pytest
import torch
from launch import fork_train
from test_fit import CONFIG, FACTS, WIDE

from recsys.config import load_config
from recsys.memory.autofit import planned_shards
from recsys.memory.predict import predict
from recsys.memory.trace import rehearse
from recsys.models.base import checkpoint_mlps
from recsys.runtime.machine import topology_of
from recsys.runtime.world import rehearse_world
from recsys.step.offload import Offload

ON_GPU = ("topology.device=cuda", "topology.device_memory=80GiB", "topology.host_memory=500GiB")


class Seen(Offload):
    """Notes what goes to the host."""

    def __init__(self, model: torch.nn.Module, packed: list[torch.Tensor]) -> None:
        super().__init__(model.parameters())
        self.packed = packed

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        copied: torch.Tensor = super().to_host(tensor)
        if tensor.numel():  # torch 2.11 has an empty one for each checkpoint
            assert copied.data_ptr() != tensor.data_ptr()
            self.packed.append(copied)
        return copied


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_the_same_and_parameters_stay(checkpointed: bool) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3), torch.nn.Tanh())
    model = torch.nn.ModuleList([layers])
    if checkpointed:
        checkpoint_mlps(model)
    x = torch.randn(4, 5, requires_grad=True)
    packed: list[torch.Tensor] = []
    gradients = []
    for offloaded in (False, True):
        with Seen(model, packed) if offloaded else torch.enable_grad():
            loss = model[0](x).square().sum()
        gradients.append(torch.autograd.grad(loss, [x, *model.parameters()]))
    assert all(map(torch.equal, *gradients))
    # The layers' inputs, and what ReLU, Tanh and the square give or take; no weight, of 7 × 5 or 3 × 7.
    shapes = [tuple(tensor.shape) for tensor in packed]
    assert shapes == ([(4, 5), (4, 3)] if checkpointed else [(4, 5), (4, 7), (4, 7), (4, 3), (4, 3)])


def test_the_prediction_moves_them_to_the_host() -> None:
    found = {}
    for offloaded in ("false", "true"):
        config = load_config(CONFIG, [*WIDE, *ON_GPU, f"train.activation_offload={offloaded}"])
        topology = topology_of(config)
        with rehearse_world(1, 1, topology.device):
            dense = rehearse(config, FACTS, config.train.global_batch_size, topology.device)
            (rank,) = predict(config, FACTS, dense, topology, planned_shards(config, topology))
        found[offloaded] = dense.step_bytes, rank.phases["step"]["host"].get("offloaded_activations", 0)
    (step, none), (offloaded_step, host) = found.values()
    widest = 4 * 65536 * 1024
    # Each of the two wide layers' outputs, by ReLU and by the layer above it.
    assert none == 0 and 4 * widest <= host < 4.2 * widest
    # A gradient, what it is made of, and what it is multiplied with.
    assert step > 4 * widest and offloaded_step < 3.1 * widest


def test_a_cpu_refuses_it(tmp_path: Path) -> None:
    done = fork_train(CONFIG, f"run.dir={tmp_path}/run", "train.activation_offload=true")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "'train.activation_offload': on CPU activations are in host memory already; set it to false" in done.stderr
