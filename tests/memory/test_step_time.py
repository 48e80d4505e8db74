"""How long a step takes: by hand-computed work, and what a dry run says of it."""

import json
import math
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import run_recsys

from recsys.config import load_config
from recsys.config.choices import DenseSharding, Device
from recsys.data.sources import find_files
from recsys.errors import TerminatedError, UserError
from recsys.memory.data_facts import data_facts
from recsys.memory.dry_run import format_dry_run, rehearse_run
from recsys.memory.operators import OperatorTrace
from recsys.memory.speeds import (
    DATA_AMOUNTS,
    MATMUL_SIDES,
    MOST_MATMUL_FLOPS,
    STEP_AMOUNTS,
    Speeds,
    interpolate,
)
from recsys.memory.step_time import fit_amounts, step_load
from recsys.memory.trace import rehearse
from recsys.runtime.files import prepare_json
from recsys.runtime.machine import topology_of
from recsys.runtime.world import World, open_world, rehearse_world
from recsys.tables.spec import Shard
from recsys.training import calibrate, device_speeds
from recsys.training.trainer import Trainer

FLAT = [(1.0, 1e-30), (1e12, 1e-30)]  # takes no time


def speeds(ranks: int = 1, **changes: Any) -> Speeds:
    """Devices on which all is done at once but for a step itself, of 10 ms."""
    sides = [(m, k, n) for m in MATMUL_SIDES for k in MATMUL_SIDES for n in MATMUL_SIDES]
    settings: dict[str, Any] = {
        "device": "test",
        "device_type": "cpu",
        "ranks": ranks,
        "local_ranks": ranks,
        "threads": 1,
        "matmul": {"float32": {f"{m} {k} {n}": 1e30 for m, k, n in sides if 2 * m * k * n <= MOST_MATMUL_FLOPS}},
        "batched": {"float32": [(1.0, 1e30), (1e12, 1e30)]},
        "moved": dict.fromkeys(("plain", "costly", "indexed", "drawn"), FLAT),
        "exchanged": {"all_to_all": FLAT, "all_reduce": FLAT} if ranks > 1 else {},
        "data": dict.fromkeys(DATA_AMOUNTS, 0.0),
        "step": {**dict.fromkeys(STEP_AMOUNTS, 0.0), "step": 0.01},
        "fits": [],
        "versions": {},
    }
    return Speeds(**settings | changes)


def config_file(folder: Path) -> Path:
    path = folder / "c.yaml"
    path.write_text(
        "data: {train: /no/such/place, label_column: label}\n"
        "features: {a: {table: a}, b: {table: b, max_length: 5}, x: {type: float}}\n"
        "tables: {a: {num_embeddings: 100, embedding_dim: 4}, b: {num_embeddings: 60, embedding_dim: 4}}\n"
        "model: {name: dlrm, top_mlp: [8]}\ntrain: {global_batch_size: 64}\n"
    )
    return path


def test_amounts_are_found_again() -> None:
    amounts = [{"step": 1.0, "id": float(i), "row": float(i * i)} for i in range(1, 6)]
    seconds = [0.5 + 2.0 * each["id"] for each in amounts]
    found = fit_amounts(amounts, ("step", "id", "row"), seconds, seconds)
    assert found == pytest.approx({"step": 0.5, "id": 2.0, "row": 0.0}, abs=1e-6)
    falling = fit_amounts(amounts, ("step", "id"), [1.0 / each["id"] for each in amounts], [1.0] * 5)
    assert falling["id"] == 0 and falling["step"] == pytest.approx(sum(1 / i for i in range(1, 6)) / 5)


def test_products_are_interpolated_between_sizes() -> None:
    rates = {key: 1e9 for key in speeds().matmul["float32"]}
    of = speeds(matmul={"float32": {**rates, "64 64 64": 4e9}})
    assert of.matmul_seconds("float32", 64, 64, 64) == pytest.approx(2 * 64**3 / 4e9)
    # Halfway between 16 and 64 on a scale of powers: the rate is the root of both.
    assert of.matmul_seconds("float32", 32, 64, 64) == pytest.approx(2 * 32 * 64 * 64 / 2e9)
    assert of.matmul_seconds("bfloat16", 64, 64, 64) == of.matmul_seconds("float32", 64, 64, 64)  # not measured
    large = 16384
    assert of.matmul_seconds("float32", large, large, large) == pytest.approx(2 * large**3 / 1e9)
    assert interpolate([(1.0, 1.0), (100.0, 10.0)], 10.0) == pytest.approx(math.sqrt(10))
    assert interpolate([(1.0, 1.0), (100.0, 10.0)], 10_000.0) == pytest.approx(100.0)


def test_products_that_take_long_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sizes beyond, which a processor that is slow in a type would take minutes for."""
    sides: list[tuple[int, ...]] = []

    def seconds(action: partial[torch.Tensor], a: torch.Tensor, _world: World) -> float:
        sides.append((*a.shape, action.keywords["other"].shape[1]))
        return 2 * math.prod(sides[-1]) / 1e9

    monkeypatch.setattr(device_speeds, "_seconds", seconds)
    with rehearse_world(1, 1, torch.device("meta")) as world:
        rates = device_speeds._matmuls(torch.bfloat16, world)
    assert len(rates) == len(sides) > 300 and (1024, 64, 1024) in sides and max(map(math.prod, sides)) == 1 << 26
    of = speeds(matmul={"float32": rates})
    for rows in (1, 16, 16384):
        assert of.matmul_seconds("float32", rows, 1024, 4096) == pytest.approx(2 * rows * 1024 * 4096 / 1e9)


def test_operators_of_a_layer() -> None:
    """A product forward and two backward, and what is read and written beside them."""
    x, layer = torch.zeros(32, 6, requires_grad=True), torch.nn.Linear(6, 5)
    with OperatorTrace() as trace:
        torch.sigmoid(layer(x)).sum().backward()
    shapes = {("float32", 32, 6, 5): 1, ("float32", 32, 5, 6): 1, ("float32", 5, 32, 6): 1}
    assert trace.work.matmuls == shapes and not trace.work.batched
    assert trace.work.moved[("costly", 2 * 32 * 5 * 4)] == 1
    with OperatorTrace() as trace:
        torch.bmm(torch.zeros(17, 2, 3), torch.zeros(17, 3, 4)).view(-1)
        torch.bmm(torch.zeros(2, 32, 6), torch.zeros(2, 6, 5))
    assert trace.work.batched == {("float32", 2.0 * 2 * 3 * 4, 17): 1} and trace.work.num_operators >= 3
    assert trace.work.matmuls == {("float32", 32, 6, 5): 2}  # each by itself
    numbers, other = torch.zeros(7), torch.zeros(7)
    with OperatorTrace() as trace:
        torch.mul(numbers, other)
        torch.mul(numbers, other, out=other)
        numbers.mul_(other)
    assert trace.work.moved == {("plain", 3 * 7 * 4): 3}


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ([], (4, 4)),
        (["forward_wire=BF16"], (2, 4)),
        (["forward_wire=FP16", "backward_wire=BF16"], (2, 2)),
        (["output_dtype=FP16"], (2, 2)),
        (["output_dtype=BF16"], (4, 4)),  # which is FP32 on CPU
    ],
)
def test_narrow_vectors_are_fewer_bytes_to_send(tmp_path: Path, options: list[str], sizes: tuple[int, int]) -> None:
    precision = [f"precision.{option}" for option in options]
    config = load_config(config_file(tmp_path), ["topology.world_size=2", *precision])
    topology = topology_of(config)
    pieces = [
        Shard("a", 0, (0, 0), (100, 4), "table_wise", "fused"),
        Shard("b", 1, (0, 0), (60, 4), "table_wise", "fused"),
    ]
    with rehearse_world(2, 2, topology.device):
        data = data_facts(config, None, 2)
        load = step_load(config, data, rehearse(config, data, 32, topology.device), topology, pieces)
    sent = [size for name, size in load.sent if name == "all_to_all"]
    assert sent[1:] == [64 * 4 / 2 * size for size in sizes]


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_load_of_two_ranks(tmp_path: Path, kind: str) -> None:
    """64 rows, one id of a and five of b each, of 4 numbers; rank 0 has a and rank 1 has b, or both a half of each."""
    config = load_config(config_file(tmp_path), ["topology.world_size=2"])
    topology = topology_of(config)
    halves = {"a": 50, "b": 30}
    shards = [
        *(Shard("a", 0, (0, 0), (100, 4), kind, "fused"), Shard("b", 1, (0, 0), (60, 4), kind, "fused")),
    ]
    if kind == "row_wise":
        shards = [Shard(t, r, (r * n, 0), (n, 4), kind, "fused") for t, n in halves.items() for r in (0, 1)]
    with rehearse_world(2, 2, topology.device):
        data = data_facts(config, None, 2)
        dense = rehearse(config, data, 32, topology.device)
        load = step_load(config, data, dense, topology, shards)
        train = replace(config.train, dense_sharding=DenseSharding.optimizer)
        sharded = step_load(replace(config, train=train), data, dense, topology, shards)
    assert sharded.sent == (*load.sent, ("all_reduce", dense.parameter_bytes / 2))  # slices of weights
    assert load.amounts["id"] == 32 * 6 and load.amounts["row"] == 32 and load.amounts["float"] == 32
    assert load.amounts["feature"] == 2 and load.amounts["parameter"] * 4 == dense.parameter_bytes
    # What the busier rank looks up: all of b for all rows, or half of all.
    assert load.amounts["element"] == (64 * 5 * 4 if kind == "table_wise" else 64 * 6 * 4 / 2)
    vectors = 64 * 4 * (1 if kind == "table_wise" else 2)  # sums of lists: one a row and table
    sent = [size for name, size in load.sent if name == "all_to_all"]
    assert sent == [32 * 6 * data.id_bytes / 2, 4 * vectors / 2, 4 * vectors / 2]
    assert ("all_reduce", dense.gradient_bytes) in load.sent
    of = speeds(2, exchanged={"all_to_all": [(1.0, 1e-3)], "all_reduce": [(1.0, 5e-3)]})
    assert load.exchange_seconds(of) == pytest.approx(3e-3 + 5e-3)
    assert load.parts(of) == pytest.approx(
        {"data": 0, "dense": 0, "tables": 0, "exchange": 8e-3, "rest": 0.01}, abs=1e-9
    )


@pytest.mark.parametrize(
    ("kinds", "ranks", "changes", "shardings", "routed"),
    [
        (("table_wise", "table_wise"), 1, [], 0, 0),
        (("table_wise", "table_wise"), 2, [], 1, 32 * 6),  # b has lists, which go torchrec's way
        (("table_wise", "table_wise"), 2, ["features.b.max_length=1"], 0, 0),
        (("table_wise", "table_wise"), 2, ["features.b.max_length=1", "precision.forward_wire=FP16"], 1, 32 * 2),
        (("table_wise", "table_wise"), 1, ["precision.forward_wire=FP16"], 0, 0),
        (("row_wise", "table_wise"), 1, [], 2, 32 * 6),
        (("row_wise", "row_wise"), 2, [], 1, 32 * 6),
        (("table_wise", "table_wise"), 1, ["features.b.weights=w"], 0, 0),
        (("table_wise", "table_wise"), 2, ["features.b.max_length=1", "features.b.weights=w"], 1, 32 * 2),
    ],
)
def test_what_torchrec_takes_to_the_ranks(
    tmp_path: Path, kinds: tuple[str, str], ranks: int, changes: list[str], shardings: int, routed: int
) -> None:
    """Ids that `LocalLookup` and `ExchangingLookup` look up are not among them."""
    config = load_config(config_file(tmp_path), [f"topology.world_size={ranks}", *changes])
    config.train.global_batch_size = 32 * ranks
    shards = [
        Shard("a", 0, (0, 0), (100, 4), kinds[0], "fused"),
        Shard("b", ranks - 1, (0, 0), (60, 4), kinds[1], "fused"),
    ]
    topology = topology_of(config)
    with rehearse_world(ranks, ranks, topology.device):
        data = data_facts(config, None, ranks)
        dense = rehearse(config, data, 32, topology.device)
        load = step_load(config, data, dense, topology, shards)
    assert (load.amounts["sharding"], load.amounts["routed"]) == (shardings, routed)


def test_a_step_is_traced_as_it_is_computed(tmp_path: Path) -> None:
    """On a CPU one rank multiplies gradients by inputs in halves, and draws the masks of dropout itself."""
    config = load_config(config_file(tmp_path), ["model.dropout=0.5", "model.bottom_mlp=[40]", "model.top_mlp=[24]"])
    with rehearse_world(1, 1, topology_of(config).device):
        data = data_facts(config, None, 1)
        dense = rehearse(config, data, 64, topology_of(config).device)
        load = step_load(config, data, dense, topology_of(config), [])
    width = 4 + 3  # the vector of floats, and three pairs
    assert load.work.matmuls["float32", 24, 32, width] == 2 and ("float32", 24, 64, width) not in load.work.matmuls
    drawn = {size for kind, size in load.work.moved if kind == "drawn"}
    # Places of rows and columns, and a byte of each element, of both MLPs.
    assert drawn == {64 * 8 + width * 8 + 64 * width for width in (24, 40)}


def test_rows_beyond_those_traced_take_as_long(tmp_path: Path) -> None:
    config = load_config(config_file(tmp_path), ["train.global_batch_size=16384", "train.micro_batch_size=4096"])
    topology = topology_of(config)
    with rehearse_world(1, 1, topology.device):
        data = data_facts(config, None, 1)
        dense = rehearse(config, data, 16384, topology.device)
        load = step_load(config, data, dense, topology, [])
    assert load.repeats == 4 and ("float32", 4096, 8, 1) in load.work.matmuls


def test_dry_run_says_how_long_and_how_much(tmp_path: Path) -> None:
    speeds().save(tmp_path / "speeds.json")
    given = [f"topology.speeds={tmp_path}/speeds.json", f"run.dir={tmp_path}/run"]
    page = run_recsys("dry-run", "configs/dlrm_sample.yaml", *given, "--price-per-hour", "36")
    assert "About 25,600 samples/s: a step of 256 rows takes 10.0 ms (rest 100%), by the speeds of 1 × test" in page
    assert "An epoch of 3,000 rows takes 0:00:00 and costs 0.0012, without evaluations" in page
    found = json.loads((tmp_path / "run/memory/dry_run.json").read_text())["time"]
    assert found["step_s"] == pytest.approx(0.01) and found["epoch_s"] == pytest.approx(3000 / 25600)
    assert found["epoch_price"] == pytest.approx(36 / 3600 * 3000 / 25600)


def test_a_million_rows_where_the_data_are_not_here(tmp_path: Path) -> None:
    speeds(2).save(tmp_path / "speeds.json")
    given = [f"topology.speeds={tmp_path}/speeds.json", "topology.world_size=4", "topology.local_world_size=2"]
    page = format_dry_run(rehearse_run(load_config(config_file(tmp_path), given), 36.0))
    # 15,625 steps of 10 ms, on two machines.
    assert "A million rows cost 3.13" in page
    assert "samples/s" not in format_dry_run(rehearse_run(load_config(config_file(tmp_path), given[1:])))


def test_speeds_of_other_devices_are_refused(tmp_path: Path) -> None:
    path, config = tmp_path / "speeds.json", config_file(tmp_path)
    speeds().save(path)
    for overrides, price, said in (
        ([], 1.0, "--price-per-hour needs topology.speeds"),
        ([f"topology.speeds={path}", "topology.world_size=2"], None, "measured on one rank"),
        (
            [f"topology.speeds={path}", "topology.device=cuda", "topology.device_memory=80GiB"],
            None,
            "measured on cpu, but the ranks are to run on cuda",
        ),
        ([f"topology.speeds={config}"], None, "cannot read"),
        ([f"topology.speeds={tmp_path}/none.json"], None, "No such file"),
    ):
        with pytest.raises(UserError, match=said):
            rehearse_run(load_config(config, overrides), price)
    content = json.loads(path.read_text())
    some = dict.fromkeys(content["step"], 1.0)
    for damage in (
        *({"schema_version": 99}, {"step": {}}, {"matmul": {}}, {"data": None}, {"batched": {}}, {"threads": "two"}),
        *({"moved": {}}, {"moved": dict.fromkeys(content["moved"], ())}, {"moved": dict.fromkeys(content["moved"], 5)}),
        *({"step": some | {"row": "x"}}, {"step": some | {"row": math.nan}}, {"step": some | {"row": -1.0}}),
    ):
        path.write_text(json.dumps(content | damage))
        with pytest.raises(UserError, match="cannot read"):
            rehearse_run(load_config(config, [f"topology.speeds={path}"]))


def test_no_place_for_the_file_is_told_at_once(tmp_path: Path) -> None:
    assert "is not a folder, so x.json cannot be written there" in run_recsys(
        "calibrate", tmp_path / "none" / "x.json", status=1
    )
    assert f"OUT: '{tmp_path}' is a folder; name a file" in run_recsys("calibrate", tmp_path, status=1)


SLOW_NAMES = [
    pytest.param(name, marks=pytest.mark.slow) for name in ("null, c: 3", "a,b", "a #b", "a: b", "[a]", "{a}", "'a")
]


@pytest.mark.parametrize("name", ["a*[b], #c: {'d", *SLOW_NAMES])
def test_rows_of_a_calibration_are_read_from_a_folder_of_any_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where TMPDIR says: names that YAML or a glob would take for something else."""
    monkeypatch.setattr(calibrate, "_ROWS", 50)
    calibrate._write_rows(tmp_path / name)
    for config in calibrate._references(tmp_path / name):
        assert [*find_files("data.train", config.data.train).names] == [str(tmp_path / name / "part-0.parquet")]


def test_a_signal_in_a_training_ends_the_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_ROWS", 500)

    def begin(trainer: Trainer) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_begin_updates", begin)
    calibrate._write_rows(tmp_path / "data")
    (config, *_) = calibrate._references(tmp_path / "data")
    with open_world(Device.cpu) as world, pytest.raises(TerminatedError):
        calibrate._trained(config, world, tmp_path)


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    """As `recsys calibrate CONFIG` would, by its likeness to `recsys train CONFIG`."""
    path = tmp_path / "x.yaml"
    for content in ("data: {train: logs}", '["a"]', '{"schema_version": 1}'):
        path.write_text(content)
        told = run_recsys("calibrate", path, status=1)
        assert f"OUT: '{path}' exists and was not written by `recsys calibrate`" in told
        assert path.read_text() == content
    for content in ("", '{"schema_version": 0, "device": "x", "ranks": 1}'):
        path.write_text(content)
        prepare_json(path, "recsys calibrate", "schema_version", "device", "ranks")
    prepare_json(tmp_path / "none", "recsys calibrate", "schema_version")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_devices_are_measured(tmp_path: Path, ranks: int) -> None:
    """All ranks measure, one file is written, and by it the trainings that it comes from take what they took."""
    path = tmp_path / "speeds.json"
    run_recsys("calibrate", path, "--threads", "1", nproc=ranks, timeout=400)
    found = Speeds.load(path)
    assert found.ranks == ranks and found.threads == 1 and bool(found.exchanged) == (ranks > 1)
    ratios = sorted(fit["fitted_s"] / fit["measured_s"] for fit in found.fits)
    assert len(ratios) > 8 and 0.7 < ratios[len(ratios) // 2] < 1.4
    given = [f"topology.speeds={path}", f"topology.world_size={ranks}", f"run.dir={tmp_path}/run"]
    run_recsys("dry-run", "configs/dlrm_sample.yaml", *given)
    parts = json.loads((tmp_path / "run/memory/dry_run.json").read_text())["time"]["parts_s"]
    assert all(seconds > 0 for name, seconds in parts.items() if name != "exchange" or ranks > 1)
