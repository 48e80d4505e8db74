"""Pruned neurons: what goes of a layer and of the next, by hand, and a run whose layers are narrower in earnest."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_tables
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from launch import evaluate, run_recsys

from recsys.config import ModelConfig, load_config
from recsys.config.choices import RowCode
from recsys.models.base import mlp
from recsys.models.dcn import DCNConfig
from recsys.models.dlrm import DLRMConfig
from recsys.runtime.world import open_world
from recsys.serving.compress import _gone, _neurons, _prune
from recsys.serving.finished import find_run
from recsys.serving.neurons import hidden_layers, hide_neurons, narrower, without_neurons
from recsys.serving.trials import Compression, Loss, Trials
from recsys.step.int8 import Int8Linear
from recsys.training import build


def test_weights_are_cut_on_both_sides_of_a_neuron() -> None:
    model = torch.nn.Module()
    model.top, model.bottom = mlp(2, [3, 2], 1, 0.0), None
    config = DLRMConfig(top_mlp=[3, 2])
    layers = hidden_layers(model, config)
    assert {name: (layer.key, layer.place, layer.num_weights) for name, layer in layers.items()} == {
        "top.0": ("top_mlp", 0, 2 + 1 + 2),
        "top.3": ("top_mlp", 1, 3 + 1 + 1),
    }
    kept = {"top.0": torch.tensor([True, False, True]), "top.3": torch.tensor([False, True])}
    assert narrower(config, layers, kept) == DLRMConfig(top_mlp=[2, 1])
    smaller = mlp(2, [2, 1], 1, 0.0)
    state = {name: without_neurons(f"top.{name}", each, layers, kept) for name, each in model.top.state_dict().items()}
    smaller.load_state_dict(state)
    assert state["3.weight"].equal(model.top[3].weight[1:, [0, 2]])
    assert without_neurons("top.0.weight", torch.tensor(7.0), layers, kept) == 7, "a count of steps"
    x = torch.randn(5, 2)
    with torch.no_grad():  # a neuron that nothing reads is none
        model.top[3].weight[:, 1] = model.top[6].weight[:, 0] = 0
    torch.testing.assert_close(smaller(x), model.top(x))


def test_layers_without_a_bias() -> None:
    """The package's own have one; those of a user's model may not."""
    model, linear = torch.nn.Module(), torch.nn.Linear
    model.top = torch.nn.Sequential(linear(2, 3, bias=False), torch.nn.Tanh(), linear(3, 1, bias=False))
    layers = hidden_layers(model, DLRMConfig(top_mlp=[3]))
    assert layers["top.0"].num_weights == 2 + 1
    hide_neurons(layers, {"top.0": torch.tensor([True, False, True])})
    assert not model.top[0].weight[1].any() and not model.top[2].weight[:, 1].any()
    assert model.top[0].weight[[0, 2]].all()


@pytest.mark.parametrize("in_int8", [False, True])
def test_hidden_neurons_are_as_good_as_gone(in_int8: bool) -> None:
    """In INT8 the largest number of a row, or of an output's weights, decides how all others are rounded."""
    model, smaller = torch.nn.Module(), mlp(5, [4, 3], 1, 0.0)
    model.top = mlp(5, [8, 6], 1, 0.0)
    layers = hidden_layers(model, DLRMConfig(top_mlp=[8, 6]))
    kept = {"top.0": torch.arange(8) % 2 == 0, "top.3": torch.arange(6) % 2 == 1}
    with torch.no_grad():
        model.top[0].weight[1] = model.top[0].bias[1] = 9.0
        model.top[3].weight[:, 1] = 9.0
    state = {name: without_neurons(f"top.{name}", each, layers, kept) for name, each in model.top.state_dict().items()}
    smaller.load_state_dict(state)
    hide_neurons(layers, kept)
    with torch.no_grad(), Int8Linear() if in_int8 else nullcontext():
        x = torch.randn(50, 5).abs()
        torch.testing.assert_close(smaller(x), model.top(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "shape", "left"), [("top.0", (3, 1), (2, 1)), ("top.0", (1, 2), (1, 2))])
def test_what_adafactor_holds_for_rows_or_columns_is_cut_too(
    name: str, shape: tuple[int, int], left: tuple[int, int]
) -> None:
    model = torch.nn.Module()
    model.top = mlp(2, [3, 2], 1, 0.0)
    layers = hidden_layers(model, DLRMConfig(top_mlp=[3, 2]))
    kept = {"top.0": torch.tensor([True, False, True])}
    assert without_neurons(f"{name}.weight", torch.randn(shape), layers, kept).shape == left
    assert without_neurons("top.3.weight", torch.randn(2, 1), layers, kept).shape == (2, 1)
    assert without_neurons("top.3.weight", torch.randn(1, 3), layers, kept).shape == (1, 2)


@pytest.mark.slow
def test_neurons_are_told_apart_where_gradients_are_summed_in_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An MLP on a CPU computes its layers as one, and importances are read between them."""
    options = ("train.max_steps=8", "model.top_mlp=[6,4]", "data.valid=data/sample/test")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={tmp_path}", *options)
    found = []
    for halves in (True, False):
        monkeypatch.setattr(build, "is_in_halves", lambda *_, halves=halves: halves)
        run = find_run(str(tmp_path))
        with open_world(run.config.run.device, 1) as world:
            trials = Trials(run, world, "auc")
            found.append(trials.neuron_gradients(trials.given))
    for name, importance in found[0].items():
        assert (importance > 0).any()
        np.testing.assert_allclose(importance, found[1][name], rtol=1e-4)


@pytest.mark.slow
def test_importances_are_those_of_a_compression_whatever_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's caches of rows are dropped for each, so that `fused_uvm_caching` reads none of the one before.

    The first scale of the loss, by which FP16 overflows, is that of a finished run too.
    """
    options = ("train.max_steps=20", "data.valid=data/sample/test")
    in_fp16 = ("precision.autocast=fp16", "precision.loss_scale=16777216", "train.max_bad_steps=9")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={tmp_path}", *options, *in_fp16)
    run = find_run(str(tmp_path))
    with open_world(run.config.run.device, 1) as world:
        trials = Trials(run, world, "auc")
        in_int2 = replace(trials.given, codes=dict.fromkeys(run.config.tables, RowCode.INT2))
        dropped: list[Any] = []
        kernel = SplitTableBatchedEmbeddingBagsCodegen
        monkeypatch.setattr(kernel, "reset_cache_states", lambda fbgemm: dropped.append(fbgemm))
        before, other = trials.gradients(trials.given), trials.gradients(in_int2)
        again = trials.gradients(trials.given)
        assert len(dropped) == 3 * len(set(map(id, dropped))) > 0
        of_neurons = trials.neuron_gradients(trials.given)
    assert all(np.isfinite(found).all() and found.any() for found in (*before.values(), *of_neurons.values()))
    assert all(np.array_equal(again[name], before[name]) for name in run.config.tables)
    assert not any(np.array_equal(other[name], before[name]) for name in run.config.tables)


def test_the_last_layer_of_a_tower_stays() -> None:
    model = torch.nn.Module()
    model.mlp = mlp(2, [3, 2], None, 0.0)

    class Config(DLRMConfig):
        mlps = {"top_mlp": "mlp"}  # noqa: RUF012

    assert [*hidden_layers(model, Config(top_mlp=[3, 2]))] == ["mlp.0"]
    model.mlp = mlp(2, [3, 2], None, 0.0, layer_norm=True)  # what is normalised follows all neurons
    assert not hidden_layers(model, Config(top_mlp=[3, 2]))


@pytest.mark.slow
def test_a_run_of_fewer_neurons_is_evaluated_trained_exported(tmp_path: Path) -> None:
    options = ("train.max_steps=24", "model.top_mlp=[32,16]", "optimizer.dense.learning_rate=0.01")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={tmp_path}/run", *options)
    found = []
    for nproc in (1, 2):
        small = tmp_path / f"small-{nproc}"
        words = ("--steps", "neurons,prune", "--max-loss", "0.02")
        run_recsys("compress", f"{tmp_path}/run", small, *words, nproc=nproc)
        stages = json.loads((small / "compression.json").read_text())["stages"]
        assert evaluate(small, f"run.dir={tmp_path}")["valid"] == pytest.approx(stages[-1]["metrics"], abs=1e-6)
        found.append([(stage["accepted"], stage["dense_bytes"]) for stage in stages])
    assert found[0] == found[1] and found[0][1][0].endswith("hidden neurons")
    dense = load_tables(small, "dense/")
    assert sum(4 * each.numel() for each in dense.values()) == found[0][-1][1] < found[0][0][1] / 2
    assert dense["top.0.weight"].shape[0] == dense["top.3.weight"].shape[1] < 32
    run_recsys("train", f"{small}/config.yaml", "run.resume=true", "train.max_steps=30")
    pytest.importorskip("onnxruntime")
    run_recsys("export", small, f"{tmp_path}/export")


@pytest.mark.parametrize("seed", range(8))
def test_a_second_step_prunes_more_of_what_the_first_has_left(seed: int) -> None:
    generator, config = np.random.default_rng(seed), load_config("configs/dlrm_sample.yaml")
    tables = config.tables = {name: replace(config.tables[name], num_embeddings=40) for name in ("user", "item")}
    trials: Any = SimpleNamespace(config=config, num_shared=lambda table: 0)
    trials.counts = {name: generator.integers(0, 3, 40) for name in tables}
    trials.norms = {name: generator.random(40) * generator.integers(0, 2, 40) for name in tables}
    trials.pruning = partial(Trials.pruning, trials)

    def loss(compression: Compression, remark: str) -> Loss:  # not one that grows with the rows alone
        value = sum(each.num_rows * -0.01 for each in compression.pruned.values()) + generator.random()
        return Loss(value, value)

    trials.loss = loss
    state, left = Compression(), 2 * 39
    for budget in (0.1, 0.3, 0.9, 0.9):
        before = {name: set(_gone(state, name).tolist()) for name in tables}
        state, remark = _prune(trials, state, budget, by="norm")
        after = {name: set(_gone(state, name).tolist()) for name in tables}
        assert all(before[name] <= after[name] for name in tables)
        number = sum(map(len, after.values())) - sum(map(len, before.values()))
        assert remark == (f"{number} of {left} rows" if number else "" if left else "nothing, since no row is left")
        left -= number


def test_what_has_no_neurons_to_go_is_said_why() -> None:
    trials: Any = SimpleNamespace(layers={}, config=SimpleNamespace(model=DCNConfig()))
    assert _neurons(trials, Compression(), 0.1)[1] == (
        "nothing, since model.bottom_mlp and model.mlp have no hidden layer but what other parts read, or is normalised"
    )
    trials.config.model = ModelConfig()
    assert _neurons(trials, Compression(), 0.1)[1] == "nothing, since no MLP has widths of its own"
