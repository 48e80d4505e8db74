"""A user's own model, as docs/own_model.md has it: trained on one process and two, resumed, evaluated."""

import json
import random
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from launch import ROOT, environment
from pages import blocks
from torch import nn
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.config import Device, ModelConfig, load_config
from recsys.config.model import Needs, find_model
from recsys.errors import UserError
from recsys.memory.data_facts import data_facts
from recsys.memory.dry_run import rehearse_run
from recsys.memory.fakes import fake_inputs, fake_tensors
from recsys.models.base import DenseInputs, Model
from recsys.models.dropout import RowDropout
from recsys.runtime.world import open_world
from recsys.serving.finished import dense_weights
from recsys.step.build import build_dense_half
from recsys.step.micro_batches import Lookup

CONFIG = """
data: {{train: {sample}/train, test: {sample}/test, label_column: label, weight_column: weight}}
features: {{user_id: {{table: user}}, item_id: {{table: item}}, price: {{type: float}}}}
tables: {{user: {{num_embeddings: 1000, embedding_dim: 8}}, item: {{num_embeddings: 1000, embedding_dim: 8}}}}
model: {{name: my_models.FM, dropout: 0.1}}
train: {{global_batch_size: 256, max_steps: 8, checkpoint_every_steps: 4, log_every_steps: 1}}
"""


def run(folder: Path, *arguments: str, nproc: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "2"]
    command = [sys.executable, *(launcher if nproc == 2 else ()), str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=180)


def metrics(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())["metrics"]["test"]


@pytest.mark.slow
def test_it_trains_resumes_and_evaluates(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks(ROOT / "docs" / "own_model.md") if block.title == "my_models.py"]
    (tmp_path / "my_models.py").write_text(code)
    (tmp_path / "fm.yaml").write_text(CONFIG.format(sample=ROOT / "data" / "sample"))
    for nproc in (1, 2):
        done = run(tmp_path, "fm.yaml", f"run.dir=run{nproc}", nproc=nproc)
        assert done.returncode == 0, done.stderr[-2000:]
    assert metrics(tmp_path / "run1") == pytest.approx(metrics(tmp_path / "run2"), rel=1e-4)
    for steps in (4, 8):
        done = run(tmp_path, "fm.yaml", "run.dir=stopped", f"train.max_steps={steps}", "run.resume=true")
        assert done.returncode == 0, done.stderr[-2000:]
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "run1")

    refused = run(tmp_path, "run1", "--evaluate")
    assert refused.returncode == 1 and "--trust-code" in refused.stderr and "Traceback" not in refused.stderr
    trusted = run(tmp_path, "run1", "--evaluate", "--trust-code")
    assert trusted.returncode == 0, trusted.stderr[-2000:]
    assert json.loads(trusted.stdout.splitlines()[-1])["metrics"]["test"] == metrics(tmp_path / "run1")


@pytest.mark.parametrize("plan", [["user", "item", "hour"], ["hour", "user", "item"]])
def test_vectors_come_in_the_order_of_the_features(plan: list[str]) -> None:
    """A model may join them by `vectors.values()`, and other plans look features up in another order."""
    keys, places = ["user", "history", "item", "hour"], {"user": 0.0, "item": 1.0, "hour": 2.0}
    ids = KeyedJaggedTensor(keys, torch.arange(8), lengths=torch.ones(8, dtype=torch.int64))
    pooled = KeyedTensor(plan, [1, 1, 1], torch.tensor([[places[name] for name in plan]] * 2))
    lookup = Lookup(ids, pooled, {"history": JaggedTensor(torch.zeros(2, 1), lengths=torch.tensor([1, 1]))}, {})
    (part,) = lookup.parts((0, 2), ())
    vectors = lookup.vectors(part, lookup.rows(part), {}, ["history"])
    assert list(vectors) == keys and all(vectors[name][0] == place for name, place in places.items())


def test_a_prediction_of_memory_draws_no_number_that_training_would_miss() -> None:
    """It comes after a checkpoint is loaded, so that a resumed run would draw others than one that never stopped."""

    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    for set_seed in (random.seed, np.random.seed, torch.manual_seed):
        set_seed(7)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with fake_tensors():
        random.random(), np.random.rand(), torch.rand(3)
    assert drawn() == expected


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dlmr", "did you mean 'dlrm'"),
        ("no_such_module.Model", "cannot be imported"),
        ("recsys.models.dlrm.NoSuchClass", "cannot be imported"),
        ("pathlib.Path", "is not a model"),
        ("..", "there is no model '..'"),
    ],
)
def test_a_name_of_no_model(name: str, said: str) -> None:
    with pytest.raises(UserError, match=r"config key 'model\.name'") as caught:
        load_config(ROOT / "configs" / "dlrm_sample.yaml", [f"model.name={name}"])
    assert said in str(caught.value)


def test_what_a_model_here_needs_is_no_matter_of_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "recsys.models.dlrm", None)  # as where a package that it imports is missing
    with pytest.raises(ModuleNotFoundError):
        find_model("dlrm")


@dataclass
class OwnConfig(ModelConfig):
    width: int = 4


class Own(Model):
    Config = OwnConfig
    layer: nn.Module

    def __init__(self, config: OwnConfig, inputs: DenseInputs) -> None:
        super().__init__(inputs)
        self.net = nn.Sequential(nn.Linear(4, 4), self.layer)


def config_of_own(folder: Path) -> Path:
    path = folder / "own.yaml"
    path.write_text(f"base: {ROOT}/configs/dlrm_sample.yaml\nmodel: {{name: {__name__}.Own}}")
    return path


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (nn.BatchNorm1d(4), r"'model\.name': Own has a BatchNorm1d at 'net\.1', .* use nn\.LayerNorm"),
        (nn.BatchNorm1d(4, track_running_stats=False), "BatchNorm1d"),
        (nn.SyncBatchNorm(4), "SyncBatchNorm"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "InstanceNorm1d"),
        (nn.Dropout(0.1), r"a Dropout at 'net\.1', whose masks .* use recsys\.models\.RowDropout"),
        (nn.MultiheadAttention(4, 1, dropout=0.1), r"a MultiheadAttention at 'net\.1' with dropout=0\.1, whose masks"),
        (nn.GRU(4, 4, 2, dropout=0.1), r"a GRU at 'net\.1' with dropout=0\.1, whose masks .* set it to 0"),
        (
            nn.LazyLinear(4),
            r"Own does not know the shape of 'net\.1\.weight' before its first batch, .* from inputs\.dims",
        ),
        (nn.LayerNorm(4), None),
        (nn.InstanceNorm1d(4), None),
        (nn.Dropout(0), None),
        (nn.MultiheadAttention(4, 1), None),
        (RowDropout(0.1), None),
    ],
)
def test_layers_that_learn_by_where_rows_are_computed(
    layer: nn.Module, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "layer", layer, raising=False)
    config = load_config(config_of_own(tmp_path))
    if said is None:
        build_dense_half(config, lambda: (torch.zeros(0), 0))
    else:
        with pytest.raises(UserError, match=said):
            build_dense_half(config, lambda: (torch.zeros(0), 0))


def test_a_class_that_has_changed_since_training_is_refused() -> None:
    """There is no setting by which a finished run could do without some of its weights."""
    marker = SimpleNamespace(tensors={"dense/weight": SimpleNamespace(size=(2, 4)), "tables/user": None})
    source: Any = SimpleNamespace(path="runs/a/checkpoints/step-1", marker=marker)
    assert list(dense_weights(nn.Linear(4, 2, bias=False), source)) == ["dense/weight"]
    for changed, said in ((nn.Linear(5, 2, bias=False), r"\(dense/weight\)"), (nn.Linear(4, 2), r"\(dense/bias\)")):
        with pytest.raises(UserError, match=rf"other weights than the model's class {said}; restore the code"):
            dense_weights(changed, source)


class NoModel(nn.Module):
    Config = OwnConfig

    def __init__(self, config: OwnConfig, inputs: DenseInputs) -> None:
        nn.Module.__init__(self)


class WithoutSuper(NoModel, Model):
    pass


@pytest.mark.parametrize("name", ["NoModel", "WithoutSuper"])
def test_a_class_that_makes_no_model(name: str, tmp_path: Path) -> None:
    config = load_config(config_of_own(tmp_path), [f"model.name={__name__}.{name}"])
    with pytest.raises(UserError, match=rf"'model\.name': '.*{name}' made no recsys\.models\.Model .* call super"):
        build_dense_half(config, lambda: (torch.zeros(0), 0))


class PartlyUsed(Own):
    layer = nn.Linear(4, 4)

    def forward(self, vectors: Any, floats: torch.Tensor) -> torch.Tensor:
        return self.net[0](vectors["user_id"][:, :4]).sum(1)


@pytest.mark.parametrize("ranks", ["one", "several CPUs", "several GPUs"])
def test_weights_that_a_step_does_not_use_have_gradients_of_0(ranks: str, tmp_path: Path) -> None:
    """Without, one rank would not decay them; DistributedDataParallel waits for all, and then refuses the next step."""
    config = load_config(config_of_own(tmp_path), [f"model.name={__name__}.PartlyUsed"])
    with open_world(Device.cpu, 1):
        dense = build_dense_half(config, lambda: (torch.zeros(0), 0))
        dense.late_exchange = ranks == "several GPUs"
        if ranks != "one":
            dense.replicate(torch.device("cpu"))
        pooled, by_id, batch = fake_inputs(config, data_facts(config, None, 1), 8, (0, 8))
        for tensor in (batch.labels, batch.weights, *([] if pooled is None else [pooled.values().detach()])):
            tensor.fill_(1)
        for _ in range(2):
            dense.zero_grad()
            dense(pooled, [by_id], batch)
            used, unused = (layer.weight.grad for layer in dense.model.net)
            assert used.any() and unused is not None and not unused.any()
        del dense, used, unused


class DrawnElsewhere(Own):
    def __init__(self, config: OwnConfig, inputs: DenseInputs) -> None:
        super().__init__(config, inputs)
        self.net.requires_grad_(False)
        self.register_buffer("turned", torch.ones(2, 3, dtype=torch.float16).T)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)


@pytest.mark.parametrize("late", [False, True], ids=["CPUs", "GPUs"])
def test_ranks_begin_with_all_that_rank_0_has_drawn(
    late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with frozen weights and buffers, which NumPy may have drawn; here rank 0 has bytes of 0."""
    monkeypatch.setattr(Own, "layer", nn.Linear(4, 4), raising=False)
    monkeypatch.setattr(torch.distributed, "broadcast", lambda tensor, source: tensor.zero_())
    config = load_config(config_of_own(tmp_path), [f"model.name={__name__}.DrawnElsewhere"])
    with open_world(Device.cpu, 1):
        dense = build_dense_half(config, lambda: (torch.zeros(0), 0))
        dense.late_exchange = late
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dense.replicate(torch.device("cpu"))
        assert len([*dense.model.parameters(), *dense.model.buffers()]) == 7
        assert not any(tensor.any() for tensor in (*dense.model.parameters(), *dense.model.buffers()))
        del dense


class UsedByFirstRows(Own):
    layer = nn.Linear(4, 4)

    def forward(self, vectors: Any, floats: torch.Tensor) -> torch.Tensor:
        rows = vectors["user_id"][:, :4]
        layers = self.net if (rows > 0).any() else self.net[:1]
        return layers(rows).sum(1)


def test_weights_that_only_the_first_micro_batch_uses_keep_its_gradients(tmp_path: Path) -> None:
    """DistributedDataParallel waits for gradients of all weights in the last one."""
    config = load_config(config_of_own(tmp_path), [f"model.name={__name__}.UsedByFirstRows"])
    with open_world(Device.cpu, 1):
        by_order = {}
        for late in (False, True):
            torch.manual_seed(0)
            dense = build_dense_half(config, lambda: (torch.zeros(0), 0))
            dense.late_exchange = late
            dense.replicate(torch.device("cpu"))
            pooled, by_id, batch = fake_inputs(config, data_facts(config, None, 1), 8, (0, 4, 8))
            assert pooled is not None
            for tensor, value in ((batch.labels, 1), (batch.weights, 1), (pooled.values().detach(), -1)):
                tensor.fill_(value)
            pooled.values().detach()[:4] = 1
            for _ in range(2):
                dense.zero_grad()
                dense(pooled, [by_id], batch)
            by_order[late] = [layer.weight.grad for layer in dense.model.net]
            del dense
        assert by_order[True][1].any()
        torch.testing.assert_close(by_order[True], by_order[False])


class OfAllRows(Own):
    layer = nn.Linear(4, 1)
    loss_by_rows = False

    def forward(self, vectors: Any, floats: torch.Tensor) -> torch.Tensor:
        return self.net(vectors["user_id"][:, :4]).squeeze(1)


@pytest.mark.parametrize("bounds", [(0, 8), (0, 4, 8)])
def test_gpus_sort_their_buckets_before_any_loss(
    bounds: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an exchange. Of ranks with a micro-batch and with several, some would else be in that of a loss then."""
    config = load_config(config_of_own(tmp_path), [f"model.name={__name__}.OfAllRows"])
    with open_world(Device.cpu, 1):
        dense = build_dense_half(config, lambda: (torch.zeros(0), 0))
        dense.late_exchange = True
        dense.replicate(torch.device("cpu"))
        reducers, sorted_late = [dense._replica.reducer], list[bool]()

        def losses(*given: Any) -> Any:
            sorted_late.append(reducers[0]._rebuild_buckets())
            return Own.losses(*given)

        monkeypatch.setattr(OfAllRows, "losses", losses, raising=False)
        pooled, by_id, batch = fake_inputs(config, data_facts(config, None, 1), 8, bounds)
        for tensor in (batch.labels, batch.weights, pooled.values().detach()):
            tensor.fill_(1)
        for _ in range(2):
            dense.zero_grad()
            dense(pooled, [by_id], batch)
        assert sorted_late == [False, False]
        reducers.clear()
        del dense


class PicksRows(Own):
    layer = nn.Linear(4, 4)

    def forward(self, vectors: Any, floats: torch.Tensor) -> torch.Tensor:
        rows = vectors["user_id"][:, :4]
        return self.net(rows[rows[:, 0] > 0]).sum() + rows.sum(1)


@pytest.mark.parametrize(("model", "asked"), [("PicksRows", "aten.nonzero"), ("UsedByFirstRows", "aten._local_scalar")])
def test_a_model_that_goes_by_its_numbers_is_refused(model: str, asked: str, tmp_path: Path) -> None:
    config = load_config(config_of_own(tmp_path), [f"model.name={__name__}.{model}"])
    with pytest.raises(UserError, match=rf"'model\.name': the model branches on values \({asked}.*torch\.where"):
        rehearse_run(config)


@dataclass
class ReadsNoFeature(OwnConfig):
    def needs(self) -> Needs:
        return Needs(sequences=("user",))


class Undecorated(OwnConfig):
    width = 8


@dataclass(kw_only=True)
class WithoutDefault(ModelConfig):
    width: int


@dataclass
class OfAnotherType(ModelConfig):
    width: int = "eight"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (ReadsNoFeature, r"'model': .* each id of feature 'user', and no id feature .*'user_id'"),
        (
            Undecorated,
            r"^config key 'model\.name': the class Undecorated is not a dataclass, .* write @dataclass above it",
        ),
        (WithoutDefault, r"^config key 'model': the default in class WithoutDefault: .* argument: 'width'"),
        (OfAnotherType, r"^config key 'model\.width': the default in class OfAnotherType: Value 'eight' .* Integer$"),
    ],
)
def test_a_section_whose_class_makes_no_keys(
    section: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Own, "Config", section)
    with pytest.raises(UserError, match=said):
        load_config(config_of_own(tmp_path))


@dataclass
class OptionalDropout(OwnConfig):
    dropout: float | None = None


def test_compiling_asks_for_a_dropout_of_any_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Own, "Config", OptionalDropout)
    path, compiled = config_of_own(tmp_path), ["train.compile=true"]
    assert load_config(path, compiled).model.dropout is None
    with pytest.raises(UserError, match=r"'train\.compile': dropout masks depend on the step"):
        load_config(path, [*compiled, "model.dropout=0.1"])
