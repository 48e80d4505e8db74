"""A start from another run: what may differ and what is said of it; single tables out to Parquet and in again."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from launch import ROOT, losses_of, must_train

from recsys.checkpoint import (
    Checkpoints,
    Marker,
    TableRows,
    TrainState,
    export_table,
    import_table,
    load_tensors,
    tensor_files,
)
from recsys.checkpoint.tensor_files import LocalShard, LocalTensor
from recsys.config import IdMappingType, TableConfig, load_config
from recsys.data.inputs import open_inputs
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.ids import KeptRows
from recsys.runtime.world import World
from recsys.tables.spec import fill_initial
from recsys.training.build import Built, build_model

YESTERDAY = """\
data: {train: data/sample/train, label_column: label, num_threads: 0}
features:
  user_id: {table: user}
  item_id: {table: item}
  device: {table: device}
  hour: {table: hour}
  price: {type: float}
tables:
  user: {num_embeddings: 100, embedding_dim: 8}
  item: {num_embeddings: 100, embedding_dim: 8, data_type: FP16}
  device: {num_embeddings: 20, embedding_dim: 8}
  hour: {num_embeddings: 24, embedding_dim: 8, mapping: identity}
model: {name: dlrm, bottom_mlp: [16], top_mlp: [32]}
"""
# One table more, one gone, one grown, one shrunk and of another type; so the dense part has another shape.
TODAY = YESTERDAY.replace("  device: {table: device}\n", "  category: {table: category}\n  history: {table: item}\n")
TODAY = TODAY.replace("device: {num_embeddings: 20", "category: {num_embeddings: 20").replace(
    "user: {num_embeddings: 100", "user: {num_embeddings: 150"
)
TODAY = TODAY.replace("item: {num_embeddings: 100, embedding_dim: 8, data_type: FP16",
                      "item: {num_embeddings: 60, embedding_dim: 8, data_type: FP32")  # fmt: skip


def build(folder: Path, text: str, world: World, *options: str) -> tuple[Built, Any]:
    path = folder / "config.yaml"
    path.write_text(text)
    config = load_config(path, options)
    return build_model(open_inputs(config, world)), config


@pytest.fixture
def saved(world: World, tmp_path: Path) -> Checkpoints:
    """A checkpoint of YESTERDAY, every tensor of the tables and dense weights full of numbers of its own."""
    built, _ = build(tmp_path, YESTERDAY, world)
    for value in built.tensors.to_load().values():
        value.shards[0].tensor.copy_(torch.randn(value.size))
    for parameter in built.dense_model.parameters():
        parameter.grad = torch.ones_like(parameter)
    built.dense_optimizer.step()
    (tmp_path / "checkpoints").mkdir()
    checkpoints = Checkpoints(tmp_path / "checkpoints", world, 1)
    checkpoints.save(built.tensors, TrainState(Position(), step=5))
    return checkpoints


def whole(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: value.shards[0].tensor.clone() for name, value in tensors.to_load().items()}


def test_each_difference_asks_for_its_option(saved: Checkpoints, world: World, tmp_path: Path) -> None:
    found = saved.newest_valid()
    assert found is not None
    options: list[str] = []
    while True:
        built, config = build(tmp_path, TODAY, world, "train.init_from=yesterday", *options)
        before = whole(built.tensors)
        try:
            report = load_tensors(*found, built.tensors, world, config)
            break
        except UserError as error:
            option = re.search(r"the config, or set (train\.init\.[a-z_]+=[a-z]+)$", str(error))
            assert option is not None and option[1] not in options, error
            # An error changes nothing.
            assert all(torch.equal(value, before[name]) for name, value in whole(built.tensors).items())
            options.append(option[1])
    wanted = {"resize_tables=true", "convert_tables=true", "tables=matching", "dense=matching"}
    assert {option.removeprefix("train.init.") for option in options} == wanted
    there, here = load_tables(found[0], ""), whole(built.tensors)
    for suffix in ("tables/user", "table_optimizer/user/momentum1"):
        assert torch.equal(here[suffix][:100], there[suffix])
        assert torch.equal(here[suffix][100:], before[suffix][100:])
    initial = torch.empty(150, 8)
    fill_initial(initial, 0, 0, config.seed, "user", 150**-0.5)
    assert torch.equal(here["tables/user"][100:], initial[100:])
    assert torch.equal(here["tables/item"], there["tables/item"][:60].float())
    assert torch.equal(here["tables/hour"], there["tables/hour"])
    assert torch.equal(here["tables/category"], before["tables/category"])
    assert report.loaded["tables/user"] == "rows 0 to 99, of 100 there, 150 here"
    assert report.loaded["tables/item"] == "rows 0 to 59, of 100 there, 60 here; float16 to float32"
    assert set(report.new) == {"tables/category", "table_optimizer/category/momentum1"}
    assert "tables/device" in report.left and "table_optimizer/device/momentum1" in report.left
    assert len(report.kept) == 1 and "of shape" in next(iter(report.kept.values()))  # top MLP: another width
    assert set(report.loaded) | set(report.kept) | set(report.left) >= set(there) - {
        name for name in there if name.startswith(("rng/", "ids/"))
    }
    kept = next(iter(report.kept)).removeprefix("dense/")
    states = built.dense_optimizer.state
    assert {name for name, parameter in built.tensors.parameters().items() if parameter not in states} == {kept}
    assert any(
        line.startswith("loaded: tables/user, table_optimizer/user/momentum1 (rows 0 to 99") for line in report.lines()
    )


def test_parts_are_dropped(saved: Checkpoints, world: World, tmp_path: Path) -> None:
    found = saved.newest_valid()
    assert found is not None
    there = load_tables(found[0], "")
    options = ("train.init_from=yesterday", "train.init.dense=none", "train.init.optimizers=none")
    built, config = build(tmp_path, YESTERDAY, world, *options)
    before = whole(built.tensors)
    report = load_tensors(*found, built.tensors, world, config)
    here = whole(built.tensors)
    for name, value in here.items():
        assert torch.equal(value, there[name] if name.startswith("tables/") else before[name]), name
    assert set(report.loaded) == {name for name in there if name.startswith("tables/")}
    assert not built.dense_optimizer.state


@pytest.mark.parametrize(
    "option, said",
    [
        ("optimizer.tables.name=adagrad", r"momentum1 of shape \(100,\), and the config \(100, 8\)"),
        ("optimizer.tables.name=sgd", "momentum1, which the config does not have"),
        ("optimizer.dense.name=sgd", "was trained with Adam for the dense part, and the config asks for SGD"),
        ("model.top_mlp=[16]", r"dense/.* of shape \(32, \d+\), and the config \(16, \d+\)"),
        ("tables.user.embedding_dim=16", "embedding_dim 8, but the config has 16; set tables.user.embedding_dim=8"),
        ("tables.user.num_embeddings=99", "num_embeddings 100, and the config 99"),
        ("tables.user.data_type=FP16", "table 'user' in float32, and the config in float16"),
    ],
)
def test_going_on_takes_no_other_config(
    option: str, said: str, saved: Checkpoints, world: World, tmp_path: Path
) -> None:
    found = saved.newest_valid()
    assert found is not None
    built, _ = build(tmp_path, YESTERDAY, world, option)
    with pytest.raises(UserError, match=said):
        load_tensors(*found, built.tensors, world)


def test_options_without_a_start_are_refused(tmp_path: Path, world: World) -> None:
    with pytest.raises(UserError, match=r"'train.init.dense' says how train.init_from may differ, which is not set"):
        build(tmp_path, YESTERDAY, world, "train.init.dense=none")
    with pytest.raises(UserError, match=r"there is no table 'users'; did you mean 'user'"):
        build(tmp_path, YESTERDAY, world, "train.init.from_parquet.users=x.parquet")


STILL = ("optimizer.dense.learning_rate=0", "optimizer.tables.learning_rate=0", "train.max_steps=1")
VOCABULARY = ("tables.user.mapping=vocabulary", "tables.user.num_buckets=3", "tables.user.min_count=10")


def train(run_dir: Path, *options: str, nproc: int = 1) -> str:
    fast = ("data.valid=null", "data.test=null", "run.num_threads=1")
    return must_train("configs/dlrm_sample.yaml", f"run.dir={run_dir}", *fast, *options, nproc=nproc).stdout


def test_a_start_from_a_run_learns_what_that_run_would_have(tmp_path: Path) -> None:
    settings = ("train.global_batch_size=3000", "train.epochs=9", "train.log_every_steps=1",
                "optimizer.tables.name=adam", "optimizer.tables.eps=1e-4")  # fmt: skip

    def losses(run: str, steps: int, *options: str) -> list[float]:  # of steps that all train all rows
        train(tmp_path / run, *settings, f"train.max_steps={steps}", *options)
        return losses_of(tmp_path / run)

    parts = losses("a", 4)
    parts += losses("b", 3, f"train.init_from={tmp_path}/a")
    assert parts == pytest.approx(losses("whole", 7), abs=1e-6)
    # A table that is new has had no update, whatever the others have had.
    losses("d", 1, f"train.init_from={tmp_path}/b", "features.month={column: hour, table: month}",
           "tables.month={num_embeddings: 24, embedding_dim: 8}", "train.init.tables=matching",
           "train.init.dense=matching", "train.init.optimizers=matching")  # fmt: skip
    state = Marker.read(tmp_path / "d/checkpoints/step-000000001").state
    assert (state.updates_of("user"), state.updates_of("month")) == (8, 1)


@pytest.mark.slow
def test_tables_go_out_and_in(tmp_path: Path) -> None:
    train(tmp_path / "a", *VOCABULARY, "train.max_steps=5")
    command = [sys.executable, "scripts/tables.py", "export", tmp_path / "a", "user", tmp_path / "user.parquet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert export_table(tmp_path / "a/checkpoints/step-000000005", "item", tmp_path / "item.parquet") == 1000
    with pytest.raises(UserError, match=r"has no table 'users'; did you mean 'user'\? \(known: category, device"):
        export_table(tmp_path / "a", "users", tmp_path / "users.parquet")
    there = load_tables(tmp_path / "a/checkpoints/step-000000005", "")
    user = pq.read_table(tmp_path / "user.parquet")
    ids = pq.read_table(tmp_path / "a/vocabulary/user.parquet").column("id")
    assert user.column("id").to_pylist() == [None, *ids.to_pylist(), None, None, None]
    assert user.column("bucket").to_pylist()[-4:] == [None, 0, 1, 2]
    assert np.array_equal(np.stack(user.column("vector").to_numpy()), there["tables/user"].numpy())
    assert np.array_equal(user.column("momentum1").to_numpy(), there["table_optimizer/user/momentum1"].numpy())

    files = (f"train.init.from_parquet.{table}={tmp_path}/{table}.parquet" for table in ("user", "item"))
    start = (f"train.init_from={tmp_path}/a", "train.init.tables=none", "train.init.optimizers=matching")
    said = train(tmp_path / "b", *VOCABULARY, *STILL, *start, *files, "tables.user.sharding_type=row_wise",
                 "tables.item.sharding_type=table_wise", nproc=2)  # fmt: skip
    assert "table item: 1,000 rows from" in said
    here = load_tables(tmp_path / "b/checkpoints/step-000000001", "")
    for name in ("tables/user", "tables/item"):
        assert torch.equal(here[name], there[name])
    assert not torch.equal(here["tables/hour"], there["tables/hour"])
    listed = json.loads((tmp_path / "b/loaded.json").read_text())
    assert listed["step"] == 5 and listed["kept"]["tables/hour"] == "train.init.tables=none"
    assert any(name.startswith("dense/") for name in listed["loaded"])
    assert re.search(r"^kept: tables/.*train.init.tables=none", said, re.MULTILINE)


@pytest.mark.parametrize(
    ("vectors", "dtype", "said"),
    [
        ([[1.0, 2.0, 3.0], [4.0]], torch.float32, "column 'vector' must have 2 numbers a row, and no null"),
        ([{"a": 1.0, "b": 2.0}] * 2, torch.float32, "column 'vector' must have 2 numbers a row, and no null"),
        ([[1.0, 2.0], [3.0, math.nan]], torch.float32, "holds nan, but must hold finite numbers that the table"),
        ([[1.0, 2.0], [-math.inf, 4.0]], torch.float32, "column 'vector' holds -inf"),
        ([[1.0, 2.0], [1e5, 4.0]], torch.float16, "holds 1e+05, but .* can store, up to 65504 for float16"),
    ],
)
def test_vectors_that_a_table_cannot_have_are_refused(
    vectors: list[Any], dtype: torch.dtype, said: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"row": [0, 1], "vector": vectors}), tmp_path / "t.parquet")
    table, tensor = TableConfig(num_embeddings=2, embedding_dim=2), torch.zeros(2, 2, dtype=dtype)
    with pytest.raises(UserError, match=f"'train.init.from_parquet.t': file '.*t.parquet'.*{said.replace('+', '[+]')}"):
        import_table(
            tmp_path / "t.parquet", "t", table, "adam", TableRows(table, None), {"tables/t": LocalTensor.of(tensor)}
        )
    assert not tensor.any()


KINDS = [pa.list_(pa.float64()), pa.large_list(pa.float16()), pa.list_(pa.float32(), 2), pa.list_view(pa.float32())]


@pytest.mark.parametrize("kind", [*KINDS, pa.large_list_view(pa.float64()), None], ids=str)
def test_vectors_may_be_lists_of_any_kind(kind: pa.DataType | None, tmp_path: Path) -> None:
    vectors = np.array([[1, 2], [3, 4]], np.float16 if kind == KINDS[1] else np.float64)
    column = pa.FixedShapeTensorArray.from_numpy_ndarray(vectors) if kind is None else pa.array(list(vectors), kind)
    pq.write_table(pa.table({"row": [1, 0], "vector": column}), tmp_path / "t.parquet")
    table, tensor = TableConfig(num_embeddings=2, embedding_dim=2), torch.zeros(2, 2)
    local = {"tables/t": LocalTensor.of(tensor)}
    found = import_table(tmp_path / "t.parquet", "t", table, "adam", TableRows(table, None), local).num_rows
    assert found == 2 and tensor.tolist() == [[3, 4], [1, 2]]


def test_state_of_an_optimizer_goes_with_its_vectors(tmp_path: Path) -> None:
    """What a file does not have of it begins anew in the rows that the file has: it was that of other vectors."""
    generator = torch.Generator().manual_seed(0)
    before = {name: torch.rand(4, 2, generator=generator) for name in ("momentum1", "momentum2")}
    of_rows = torch.rand(4, generator=generator)
    targets = {f"table_optimizer/t/{name}": state.clone() for name, state in before.items()}
    targets |= {"tables/t": torch.zeros(4, 2), "table_optimizer/t/of_rows": of_rows.clone()}
    given = {"row": [2, 1], "vector": [[1.0, 2.0], [3.0, 4.0]], "momentum2": [[5.0, 6.0], [7.0, 8.0]]}
    pq.write_table(pa.table(given), tmp_path / "t.parquet")
    table = TableConfig(num_embeddings=4, embedding_dim=2)
    local = {name: LocalTensor.of(tensor) for name, tensor in targets.items()}
    import_table(tmp_path / "t.parquet", "t", table, "adam", TableRows(table, None), local)
    assert targets["tables/t"].tolist() == [[0, 0], [3, 4], [1, 2], [0, 0]]
    assert targets["table_optimizer/t/momentum2"][[2, 1]].tolist() == given["momentum2"]
    for name, old in (("momentum1", before["momentum1"]), ("of_rows", of_rows)):
        state = targets[f"table_optimizer/t/{name}"]
        assert torch.equal(state[[0, 3]], old[[0, 3]]) and not state[1:3].any()


def test_state_of_another_optimizer_is_not_taken(saved: Checkpoints, tmp_path: Path) -> None:
    """Adam's averages may be below 0, and as Adagrad's sums of squares would make the first step's rows NaN."""
    path, file = saved.path(5), tmp_path / "user.parquet"
    replace(Marker.read(path), meaning={"tables.user.optimizer.name": "adam"}).write(path)
    export_table(path, "user", file)
    table, there = TableConfig(num_embeddings=100, embedding_dim=8), load_tables(path, "")
    for optimizer in ("adam", "adagrad"):
        tensors = {"tables/user": torch.zeros(100, 8), "table_optimizer/user/momentum1": torch.ones(100)}
        local = {name: LocalTensor.of(tensor) for name, tensor in tensors.items()}
        imported = import_table(file, "user", table, optimizer, TableRows(table, None), local)
        assert (imported.num_rows, imported.updates, imported.optimizer) == (100, 5, "adam")
        expected = there if optimizer == "adam" else {**there, "table_optimizer/user/momentum1": torch.zeros(100)}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def test_rows_are_found_by_id() -> None:
    vocabulary = pa.array(["b", "c", "a"])
    table = TableConfig(num_embeddings=6, embedding_dim=4, mapping=IdMappingType.vocabulary, num_buckets=2)
    batch = pa.record_batch(
        {
            "row": pa.array([0, 1, 2, 3, 4, 5]),
            "id": pa.array([None, "a", "unknown", None, None, "b"]),
            "bucket": pa.array([None, None, None, 1, 2, None]),
        }
    )
    assert TableRows(table, vocabulary).find(batch).tolist() == [0, 3, -1, 5, -1, 1]
    assert TableRows(table, vocabulary).find(batch.select(["id"])).tolist() == [-1, 3, -1, -1, -1, 1]
    identity = TableConfig(num_embeddings=9, embedding_dim=4, mapping=IdMappingType.identity)
    by_id, rows = pa.record_batch({"id": pa.array([7, None, 2])}), TableRows(identity, None)
    assert rows.find(by_id).tolist() == [7, -1, 2]
    pruned, kept = replace(identity, num_embeddings=3), KeptRows(pa.array([n in (0, 7) for n in range(9)]))
    assert TableRows(pruned, None, kept).find(by_id).tolist() == [1, -1, -1]
    for kind in (pa.int64(), pa.uint32(), pa.float64()):  # Polars counts rows in uint32; pandas has floats beside null
        assert rows.find(pa.record_batch({"row": pa.array([7, None, 2], kind)})).tolist() == [7, -1, 2]
        numbers = {name: batch.column(name).cast(kind) for name in ("row", "bucket")}
        found = TableRows(table, vocabulary).find(pa.record_batch({"id": batch.column("id"), **numbers}))
        assert found.tolist() == [0, 3, -1, 5, -1, 1]


def test_ids_of_another_type_are_told_with_their_file(tmp_path: Path) -> None:
    table = TableConfig(num_embeddings=6, embedding_dim=2, mapping=IdMappingType.vocabulary)
    pq.write_table(pa.table({"id": ["7"], "vector": [[1.0, 2.0]]}), tmp_path / "t.parquet")
    rows, local = TableRows(table, pa.array([7, 8])), {"tables/t": LocalTensor.of(torch.zeros(6, 2))}
    with pytest.raises(
        UserError, match=r"'train.init.from_parquet.t': file '.*': column 'id': ids of type string cannot"
    ):
        import_table(tmp_path / "t.parquet", "t", table, "adam", rows, local)


def test_large_tensors_are_written_and_read_some_rows_at_a_time(
    saved: Checkpoints, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is held besides them is bounded."""
    before = load_tables(saved.path(5), "")
    built, _ = build(tmp_path, YESTERDAY, world)
    found = saved.newest_valid()
    assert found is not None
    load_tensors(*found, built.tensors, world)
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 7 * 8 * 4)
    saved.save(built.tensors, TrainState(Position(rows_before=1), step=6))
    after = load_tables(saved.path(6), "")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [len(rows) for rows in tensor_files._contents(torch.zeros(9, 8))] == [7 * 8 * 4, 2 * 8 * 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_is_written_is_no_copy(dtype: torch.dtype) -> None:
    table = torch.arange(12, dtype=dtype).view(6, 2)
    scalars = torch.arange(2, dtype=dtype)  # a part of one storage too, as LAMB's are
    for tensor in (table[2:5], scalars[1]):
        (content,) = tensor_files._contents(tensor)
        assert content.ctypes.data == tensor.data_ptr() and content.nbytes == tensor.nbytes


def test_what_was_written_in_pieces_is_read_in_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "CHUNK_BYTES", 48)
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows, columns = (int(generator.integers(1, 12)) for _ in range(2))
        table, scalar = torch.rand(rows, columns), torch.tensor(3.5)
        there, here = (_cut(rows, columns, generator) for _ in range(2))
        parts = tuple(LocalShard(table[a:b, c:d].contiguous(), (a, c)) for a, b, c, d in there)
        saved = {"table": LocalTensor((rows, columns), table.dtype, parts), "scalar": LocalTensor.of(scalar)}
        entries, (num_bytes, _) = tensor_files.write_tensors(tmp_path / "rank_0.bin", saved)
        tensor_files.check_entries(entries, {"rank_0.bin": num_bytes})
        into, alone = torch.zeros(rows, columns, dtype=torch.float64), torch.zeros(())
        local = tuple(LocalShard(into[a:b, c:d], (a, c)) for a, b, c, d in here)
        targets = {"table": LocalTensor((rows, columns), into.dtype, local), "scalar": LocalTensor.of(alone)}
        tensor_files.read_tensors(tmp_path, entries, targets)
        assert torch.equal(into, table.double()) and alone == scalar


def _cut(rows: int, columns: int, generator: np.random.Generator) -> list[tuple[int, int, int, int]]:
    """Return (first row, stop, first column, stop) of parts that cover a table, each element once; some are empty."""
    cuts = [0, *sorted(generator.integers(0, rows + 1, 2).tolist()), rows]
    middle = int(generator.integers(0, columns + 1))
    return [(a, b, c, d) for a, b in pairwise(cuts) for c, d in ((0, middle), (middle, columns))]
