"""Autocast and its loss scale, micro-batches, activation checkpointing: how the dense part is computed."""

import json
import weakref
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from launch import ROOT, fork_train, losses_of, must_train
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from recsys.checkpoint import Marker
from recsys.config import Autocast, Config, Device, LabelConfig, PrecisionConfig
from recsys.data.batch import Batch
from recsys.data.order import Position
from recsys.data.pool import Fence
from recsys.models import DenseInputs, Model
from recsys.models.base import Vectors, checkpoint_mlps
from recsys.models.columns import Columns, PairwiseDots, beside
from recsys.models.dlrm import DLRM, DLRMConfig
from recsys.models.two_tower import TwoTower, TwoTowerConfig
from recsys.runtime.world import open_world
from recsys.step.loss_scale import LossScale
from recsys.step.micro_batches import Lookup, Part
from recsys.step.step import DenseHalf

CONFIG = "configs/dlrm_sample.yaml"
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("adagrad", "sgd", "adamw", "adafactor", "lamb")]
FP32 = tuple(f"tables.{name}.data_type=FP32" for name in ("user", "item", "category", "device", "hour"))


def train(run_dir: Path, *overrides: str, config: str = CONFIG, nproc: int = 1) -> tuple[list[float], dict[str, Any]]:
    must_train(config, f"run.dir={run_dir}", "train.log_every_steps=1", *overrides, nproc=nproc)
    saved = {name: value for name, value in load_tables(run_dir, "").items() if not name.startswith("rng/")}
    return losses_of(run_dir), saved


def assert_close(one: dict[str, Any], other: dict[str, Any], rtol: float, atol: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(
            value, other[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name} {text}"
        )


def tables_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name.startswith("tables/")}


def test_loss_scale() -> None:
    scale = LossScale(8.0, growth_steps=3)
    for expected in (8.0, 8.0, 16.0, 16.0):
        scale.good()
        assert scale.value == expected
    assert scale.overflow() and (scale.value, scale.good_steps) == (8.0, 0)
    assert [scale.overflow() for _ in range(4)] == [True, True, True, False] and scale.value == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", *SLOW[:2]])
def test_tables_never_see_the_loss_scale(optimizer: str, tmp_path: Path) -> None:
    """A scale that is 2**16 and falls to 2**12 midway trains what one of 2**12 trains, and nearly what FP32 trains."""
    rate = 5.0 if optimizer == "sgd" else 0.05
    options = (*FP32, "train.max_steps=20", f"optimizer.tables={{name: {optimizer}, eps: 1e-3, learning_rate: {rate}}}")
    fp16 = (*options, "precision.autocast=fp16", "precision.loss_scale_growth_steps=null")
    constant = train(tmp_path / "constant", *fp16, "precision.loss_scale=4096")
    higher = ("precision.loss_scale=65536", "train.max_steps=10")
    train(tmp_path / "changed", *fp16, *higher)
    checkpoint = tmp_path / "changed/checkpoints/step-000000010"
    marker = Marker.read(checkpoint)
    assert marker.state.loss_scale == 65536 and marker.state.overflows == 0
    marker.state.loss_scale = 4096.0
    marker.write(checkpoint)
    fork_train(CONFIG, f"run.dir={tmp_path}/changed", "train.log_every_steps=1", *fp16, "run.resume=true")
    changed = load_tables(tmp_path / "changed/checkpoints/step-000000020", "")
    plain = train(tmp_path / "plain", *options)
    start = train(tmp_path / "start", *options, "train.max_steps=1", "optimizer.tables.learning_rate=0")[1]
    for name, value in tables_of(constant[1]).items():
        moved = value - start[name]
        assert moved.abs().max() > 1e-3
        torch.testing.assert_close(changed[name] - start[name], moved, rtol=1e-3, atol=1e-3 * float(moved.abs().max()))
        exact = plain[1][name] - start[name]
        # FP16's rounding: below 0.2 of it on most CPUs, 0.21 on one with AVX512-FP16.
        assert (moved - exact).norm() < 0.3 * exact.norm()
    torch.testing.assert_close(constant[0], plain[0], rtol=0, atol=5e-3)


def test_an_overflow_halves_the_scale_and_leaves_the_step_out(tmp_path: Path) -> None:
    options = ("precision.autocast=fp16", f"precision.loss_scale={2**24}", "train.max_steps=12")
    train(tmp_path, *options, nproc=2)
    result = json.loads((tmp_path / "result.json").read_text())
    assert 0 < result["overflows"] < 12 and result["bad_steps"] == 0
    assert result["state"]["loss_scale"] == 2.0 ** (24 - result["overflows"])
    assert result["data"]["epochs"][0]["skipped"] == 256 * result["overflows"]


@pytest.mark.slow
def test_bf16_trains_nearly_what_fp32_trains(tmp_path: Path) -> None:
    plain, half = train(tmp_path / "plain", *FP32), train(tmp_path / "half", *FP32, "precision.autocast=bf16")
    assert plain[0] != half[0]
    torch.testing.assert_close(plain[0], half[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("tables", ["rowwise_adagrad", *SLOW[:2]])
def test_micro_batches_learn_the_same(tables: str, tmp_path: Path) -> None:
    options = (*FP32, f"optimizer.tables.name={tables}", "optimizer.tables.eps=1e-6", "train.max_steps=10")
    whole = train(tmp_path / "whole", *options)
    parts = train(tmp_path / "parts", *options, "train.micro_batch_size=64")
    torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=1e-5)
    assert_close(parts[1], whole[1], 1e-5, 1e-5)


MODELS = {
    "dlrm": "",
    "micro-batches": "train: {micro_batch_size: 128}\nrun: {num_threads: 1}",
    "checkpointed": "train: {activation_checkpointing: true}\nmodel: {interaction: dot_and_embeddings}",
    "dcn": "model: {name: dcn, mlp: [32], bottom_mlp: [8]}",
    "low rank": "model: {name: dcn, mlp: [32], rank: 4}",
    "final_mlp": "model: {name: final_mlp, gate_1: [user_id], gate_2: [item_id], mlp_1: [32], mlp_2: [16]}",
    "normalised": "model: {name: dcn, mlp: [32, 16], layer_norm: true, dropout: 0.2}",
    "all rows": """tables:
  user: {l2_all_rows: 0.1}
  category: {l2_all_rows: 0.1}
  item: {sharding_type: data_parallel}
model: {name: final_mlp, gate_1: [user_id], gate_2: [item_id], mlp_1: [32], mlp_2: [16], layer_norm: true}
optimizer: {tables: {name: adam}}""",
    "deepfm": "model: {name: deepfm, mlp: [32]}",
    "wukong": "model: {name: wukong, num_layers: 3, fm_vectors: 5, rank: 6, dropout: 0.2}",
    "logistic_regression": "model: {name: logistic_regression}",
    "mmoe": "model: {name: mmoe, dots: true}",
    "experts": """tables:
  hot: {num_embeddings: 50, embedding_dim: 8}
  user: {experts: {others: [hot], by: hash, active: 2, gate: features}}""",
}


FAST_MODELS = ("dlrm",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST_MODELS else [pytest.mark.slow]) for name in MODELS]
)
def test_one_process_and_two_learn_the_same_to_the_last_bit(name: str, tmp_path: Path) -> None:
    """Two threads beside one in each of two processes; tables as they are planned: features lie in another order."""
    config = tmp_path / "config.yaml"
    config.write_text(f"base: {ROOT / CONFIG}\n{MODELS[name]}\n")
    one, two = (train(tmp_path / f"{nproc}", "train.max_steps=20", config=str(config), nproc=nproc) for nproc in (1, 2))
    # A loss is summed over the rows of a rank, which are as many on both in micro-batches alone.
    tolerance = 0 if name == "micro-batches" else 3e-7
    torch.testing.assert_close(one[0], two[0], rtol=tolerance, atol=tolerance)
    trained = [{name: each for name, each in state.items() if not name.startswith("ids/")} for _, state in (one, two)]
    assert_close(*trained, 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dense", ["adam", *SLOW])
def test_micro_batches_learn_the_same_with_each_dense_optimizer(dense: str, tmp_path: Path) -> None:
    options = (*FP32, f"optimizer.dense.name={dense}", "optimizer.tables.eps=1e-6", "train.max_steps=6")
    whole = train(tmp_path / "whole", *options)
    parts = train(tmp_path / "parts", *options, "train.micro_batch_size=64", "train.activation_checkpointing=true")
    assert_close(tables_of(parts[1]), tables_of(whole[1]), 1e-5, 1e-5)


@pytest.mark.slow
def test_the_towers_are_split_and_not_the_softmax(tmp_path: Path) -> None:
    config = tmp_path / "tower.yaml"
    config.write_text(
        "data: {train: data/sample/train, num_streams: 4}\n"
        "features: {user_id: {table: user}, device: {table: device}, item_id: {table: item}, price: {type: float}}\n"
        "tables: {user: {num_embeddings: 300, embedding_dim: 8}, item: {num_embeddings: 100, embedding_dim: 12},"
        " device: {num_embeddings: 20, embedding_dim: 4}}\n"
        "model: {name: two_tower, user_features: [user_id, device], item_features: [item_id, price],"
        " item_id: item_id, dropout: 0.2}\n"
        "optimizer: {tables: {eps: 1e-6}}\n"
        "train: {global_batch_size: 256, max_steps: 10}\n"
    )
    whole = train(tmp_path / "whole", config=str(config))
    for nproc in (1, 2):
        options = ("train.micro_batch_size=40", "train.activation_checkpointing=true")
        parts = train(tmp_path / f"parts-{nproc}", *options, config=str(config), nproc=nproc)
        torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=1e-5)
        assert_close(tables_of(parts[1]), tables_of(whole[1]), 1e-5, 1e-5)


@pytest.mark.slow
def test_tables_of_several_widths(tmp_path: Path) -> None:
    """Narrower ones are projected to the widest, or all to the width that the model is given."""
    widths = ("tables.user.embedding_dim=16", "tables.item.embedding_dim=4", "optimizer.tables.eps=1e-6")
    one = train(tmp_path / "one", *FP32, *widths)
    two = train(tmp_path / "two", *FP32, *widths, "tables.item.sharding_type=row_wise", nproc=2)
    torch.testing.assert_close(two[0], one[0], rtol=0, atol=1e-5)
    assert one[1]["dense/projections.item_id.weight"].shape == (16, 4)
    assert "dense/projections.user_id.weight" not in one[1]
    narrow = train(tmp_path / "narrow", *FP32, *widths, "model.embedding_dim=8", "train.max_steps=3")
    assert narrow[1]["dense/projections.user_id.weight"].shape == (8, 16)


@pytest.mark.slow
def test_a_batch_without_an_id_of_a_list_travels_in_fp16(tmp_path: Path) -> None:
    rows = pq.read_table(ROOT / "data/sample/train")
    empty = pa.array([[]] * len(rows), rows["history"].type)
    pq.write_table(rows.set_column(rows.column_names.index("history"), "history", empty), tmp_path / "rows.parquet")
    settings = (f"data.train={tmp_path}/rows.parquet", "model.attention={history: item_id}", "train.max_steps=2")
    one, _ = train(tmp_path / "one", *settings)
    two, _ = train(tmp_path / "two", *settings, "precision.backward_wire=FP16", "train.micro_batch_size=100", nproc=2)
    assert two == pytest.approx(one, abs=1e-3)


def test_a_batch_without_any_id_in_fp16() -> None:
    config, lengths = DLRMConfig(bottom_mlp=[16], top_mlp=[8]), torch.zeros(32, dtype=torch.int32)
    model = DLRM(config, DenseInputs({"a": 16}, ["x", "y"], {"label": LabelConfig()}))
    ids = KeyedJaggedTensor(["a"], torch.zeros(0, dtype=torch.int64), lengths=lengths)
    vectors, precision = JaggedTensor(torch.zeros(0, 16), lengths=lengths), PrecisionConfig(autocast=Autocast.fp16)
    with open_world(Device.cpu, 1):
        half = DenseHalf(model, Config(model=config, features={}, tables={}, precision=precision))
        half.forward(None, [{"a": vectors}], replace(made_up(32, [*"abcd"], (0, 32))[1], ids=ids))
        half.backward()
    assert not half.skipped and all(parameter.grad.isfinite().all() for parameter in model.parameters())


class LiveBytes:
    """Counts the bytes of what autograd keeps for the backward pass, the parameters aside, and their peak."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._aside = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._kept: dict[int, int] = {}
        self.now = self.peak = 0

    def pack(self, tensor: torch.Tensor) -> Any:
        place = tensor.untyped_storage().data_ptr()
        holder = Holder(tensor)
        if place not in self._aside:
            self._kept[place] = self._kept.get(place, 0) + 1
            if self._kept[place] == 1:
                self.now += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self.now)
            weakref.finalize(holder, self._drop, place, tensor.untyped_storage().nbytes())
        return holder

    def _drop(self, place: int, num_bytes: int) -> None:
        self._kept[place] -= 1
        if not self._kept[place]:
            self.now -= num_bytes


class Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("kind", ["dlrm", "two_tower"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_four_micro_batches_keep_a_quarter(kind: str, checkpointing: bool) -> None:
    rows, names = 4096, ["a", "b", "c", "d"]
    if kind == "dlrm":
        config = DLRMConfig(bottom_mlp=[64], top_mlp=[64, 32], dropout=0.1)
        model: Model = DLRM(config, DenseInputs(dict.fromkeys(names, 16), ["x", "y"], {"label": LabelConfig()}))
    else:
        tower = TwoTowerConfig(user_features=["a", "b"], item_features=["c", "d"], item_id="c", user_mlp=[128, 64])
        model = TwoTower(tower, DenseInputs(dict.fromkeys(names, 16), []))
        rows = 512  # the softmax, which is not split, takes rows * rows
    if checkpointing:
        checkpoint_mlps(model)
    peaks, gradients = [], []
    with open_world(Device.cpu, 1):
        for parts in (1, 4):
            half = DenseHalf(model, Config(model=config if kind == "dlrm" else tower, features={}, tables={}))
            model.zero_grad()
            pooled, batch = made_up(rows, names, tuple(range(0, rows + 1, rows // parts)))
            live = LiveBytes(model.parameters())
            with torch.autograd.graph.saved_tensors_hooks(live.pack, lambda holder: holder.tensor):
                half.forward(pooled, [], batch)
            assert live.now == 0
            peaks.append(live.peak)
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        del half
    if kind == "dlrm":  # of two towers, the peak is that of the softmax
        # The dots keep the vectors, here as parts of those of all rows, which are there anyway.
        vectors = pooled.values().nbytes
        assert peaks[1] - vectors <= 0.33 * (peaks[0] - vectors)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


class TypesOfProducts(TorchDispatchMode):
    """Notes the types in which batches of matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.bmm.default:
            self.found.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def made_up(rows: int, names: list[str], bounds: tuple[int, ...]) -> tuple[KeyedTensor, Batch]:
    torch.manual_seed(1)
    ids = KeyedJaggedTensor(names, torch.randint(100, (4 * rows,)), lengths=torch.ones(4 * rows, dtype=torch.int32))
    batch = Batch(
        ids, torch.randn(rows, 2), torch.randint(2, (rows, 1)).float(), torch.ones(rows), None, rows, 0, bounds,
        Position(), Fence(),
    )  # fmt: skip
    return KeyedTensor(names, [16] * 4, torch.randn(rows, 64)), batch


@pytest.mark.parametrize("bad_part", [0, 1, 3, None])
def test_a_gradient_that_only_tables_would_see_is_found_in_any_micro_batch(
    bad_part: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FP16 may overflow behind the last weight, where neither the loss nor a gradient of the dense part shows it."""
    names, part_rows = ["a", "b", "c", "d"], 32
    config = DLRMConfig(bottom_mlp=[16], top_mlp=[8])
    model = DLRM(config, DenseInputs(dict.fromkeys(names, 16), ["x", "y"], {"label": LabelConfig()}))
    vectors_of = Lookup.vectors

    def vectors(self: Lookup, part: Part, tensors: list[torch.Tensor], *rest: Any) -> Vectors:
        if bad_part is not None and part.rows[0] == bad_part * part_rows:
            tensors[0].register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([5]), torch.inf))
        return vectors_of(self, part, tensors, *rest)

    monkeypatch.setattr(Lookup, "vectors", vectors)
    with open_world(Device.cpu, 1):
        half = DenseHalf(model, Config(model=config, features={}, tables={}))
        pooled, batch = made_up(4 * part_rows, names, tuple(range(0, 4 * part_rows + 1, part_rows)))
        tables, rows = torch.nn.Identity(), pooled.values().requires_grad_()
        half.gate.guard(tables)
        pooled = KeyedTensor(pooled.keys(), pooled.length_per_key(), tables(rows))
        _, output = half.forward(pooled, [], replace(batch, num_rows=2**24 + 1, num_bad_rows=2**24 - 1))
        assert rows.grad is None
        half.backward()
        assert (output.num_rows, output.num_bad_rows) == (2**24 + 1, 2**24 - 1), "FP32 takes no more than 2^24"
        assert output.loss > 0 and output.skipped == (bad_part is not None) == (not output.finite_here)
        assert (rows.grad is None) == output.skipped


@pytest.mark.parametrize("device", [None, "cuda"])
@pytest.mark.parametrize("lie", ["all but the first", "all", "none"])
def test_dots_of_pairs_and_their_gradient(lie: str, device: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of vectors that are columns of one tensor, or copies of them; in blocks of three rows."""
    torch.manual_seed(1)
    monkeypatch.setattr("recsys.models.columns._ELEMENTS_AT_ONCE", 60)
    vectors, first = (torch.randn(7, width, dtype=torch.double, requires_grad=True) for width in (16, 4))
    split = [each.clone() for each in vectors.split(4, 1)] if lie == "none" else Columns.apply(vectors, [4] * 4)
    if lie == "all":
        first, *split = Columns.apply(torch.cat([first, vectors], dim=1), [4] * 5)
    stacked = torch.stack([first, *split], 1)
    rows, columns = torch.tril_indices(5, 5, offset=-1)
    expected = torch.bmm(stacked, stacked.mT)[:, rows, columns]
    dots = PairwiseDots()
    dots.like = device
    found = dots([first, *split])
    torch.testing.assert_close(found, expected)
    gradient = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, (first, vectors), gradient, retain_graph=True),
        torch.autograd.grad(expected, (first, vectors), gradient),
    )


def test_columns_are_one_where_they_lie_beside_each_other() -> None:
    whole = torch.arange(24.0).view(3, 8)
    a, b, c = whole.split([2, 4, 2], 1)
    (joined,) = beside([a, b, c])
    assert torch.equal(joined, whole) and joined.data_ptr() == whole.data_ptr()
    for apart in ([a, c], [b, a], [a.clone(), b], [a, b.clone()], [a, whole.T[:3]], [a, whole.double()[:, 2:]]):
        assert len(beside(apart)) == 2


@pytest.mark.parametrize("num_vectors", [4, 60])
def test_gpus_take_the_dots_in_the_type_of_autocast(num_vectors: int) -> None:
    """The same numbers as on CPU, where gradients are FP32 products."""
    torch.manual_seed(1)
    names = [f"f{i}" for i in range(num_vectors)]
    model = DLRM(DLRMConfig(), DenseInputs(dict.fromkeys(names, 16), [], {"label": LabelConfig()}))
    vectors = torch.randn(8, num_vectors, 16, requires_grad=True)
    found: dict[str, list[torch.Tensor]] = {}
    for device in ("cpu", "cuda"):
        model.rehearse(torch.device(device))
        for dtype in (torch.float32, torch.bfloat16):
            types = TypesOfProducts()
            with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16), types:
                logits = model(dict(zip(names, vectors.unbind(1), strict=True)), torch.zeros(8, 0))
            with types:
                (gradient,) = torch.autograd.grad(logits.float().sum(), vectors)
            found[f"{device} {dtype}"] = [logits.float(), gradient]
            assert types.found == [dtype, dtype if device == "cuda" else torch.float32]
    plain = found.pop("cpu torch.float32")
    for name, values in found.items():
        torch.testing.assert_close(values, plain, rtol=0, atol=1e-5 if "float32" in name else 0.3)
