"""Ids that are hidden in a share of the rows of data.train: which rows these are, and what they and other data hold."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_export import KINDS

from recsys.config import NullPolicy, load_config
from recsys.data.batch import Batch
from recsys.data.inputs import ROLES, Given, open_inputs
from recsys.data.order import Segment, Window
from recsys.data.pool import BlockPool
from recsys.data.spec import BatchSpec, Hidden, IdColumn
from recsys.data.window import Ragged, convert_table, load_window
from recsys.errors import UserError
from recsys.ids import HashMapping
from recsys.runtime.counter_random import make_key, uniform_numbers
from recsys.runtime.world import open_world

SIZES = (700, 300, 500, 100, 400)  # of row groups
ROWS = sum(SIZES)
CONFIG = """
features:
  row: {table: row}
  position: {table: position, hidden: 0.25}
  other: {column: position, table: position, hidden: 0.25}
  expert: {column: position, table: expert, hidden: 0.25}
tables:
  row: {num_embeddings: 3000, embedding_dim: 8, mapping: identity}
  position: {num_embeddings: 20, embedding_dim: 8, mapping: vocabulary}
  expert: {num_embeddings: 5, embedding_dim: 8, mapping: vocabulary, experts: {others: [rest]}}
  rest: {num_embeddings: 20, embedding_dim: 8}
model: {name: dlrm}
data: {train: DIR/train.parquet, valid: DIR/valid.parquet, label_column: label, num_streams: 6}
train: {global_batch_size: 90}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hidden")
    rows = pa.table(
        {"row": range(ROWS), "position": [1 + i % 9 for i in range(ROWS)], "label": [i % 2 for i in range(ROWS)]}
    )
    with pq.ParquetWriter(folder / "train.parquet", rows.schema) as writer:
        for size, end in zip(SIZES, np.cumsum(SIZES), strict=True):
            writer.write_table(rows.slice(end - size, size))
    pq.write_table(rows.drop_columns("position"), folder / "valid.parquet")
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


def ids(batch: Batch, feature: str) -> list[list[int]]:
    lists = batch.ids[feature]
    return [part.tolist() for part in lists.values().split(lists.lengths().tolist())]


def hidden(config: Path, *options: str, feature: str = "position", epochs: int = 1) -> list[set[int]]:
    """Return, by epoch, the rows of data.train in which a feature has the row of null."""
    found: list[set[int]] = [set() for _ in range(epochs)]
    with open_world() as world:
        loader, epoch, seen = open_inputs(load_config(config, options), world).loader("train"), 0, 0
        for batch in loader.batches(num_epochs=epochs):
            for row, values in zip(ids(batch, "row"), ids(batch, feature), strict=True):
                found[epoch] |= {*row} if values == [0] else set()  # a row that fills up the batch has no ids
            seen += batch.num_rows
            epoch += seen == (epoch + 1) * ROWS
    return found


def drawn(feature: str, epoch: int, seed: int = 1) -> set[int]:
    """Return the rows that the generator draws by seed, feature, epoch, row group, and place in it."""
    rows: set[int] = set()
    for number, (size, end) in enumerate(zip(SIZES, np.cumsum(SIZES), strict=True)):
        key = make_key(make_key(seed, "hidden", feature), epoch, number)
        draws = uniform_numbers(key, np.arange(size), np.zeros(1, np.int64))[:, 0]
        rows |= {*(end - size + np.flatnonzero(draws < 0.25)).tolist()}
    return rows


@pytest.mark.parametrize(
    "options",
    [
        ["data.num_threads=0"],
        ["data.num_streams=1", "data.window_mib=1"],
        ["data.shuffle=false"],
        pytest.param(["data.processes=true"], marks=pytest.mark.slow),
        ["train.global_batch_size=64"],
    ],
)
def test_hidden_rows_are_those_that_are_drawn(options: list[str], config: Path) -> None:
    found = hidden(config, *options, epochs=2)
    assert found == [drawn("position", 0), drawn("position", 1)]
    assert all(abs(len(rows) - ROWS / 4) < 4 * (ROWS * 3 / 16) ** 0.5 for rows in found)


def test_each_feature_seed_and_epoch_draws_other_rows(config: Path) -> None:
    draws = [*hidden(config, epochs=2), *hidden(config, "seed=2"), *hidden(config, feature="other")]
    assert draws[2:] == [drawn("position", 0, seed=2), drawn("other", 0)]
    for i, one in enumerate(draws):
        for other in draws[:i]:  # a quarter of one is in the other
            assert abs(len(one & other) - ROWS / 16) < 4 * (ROWS / 16) ** 0.5


def test_experts_of_a_table_hide_the_same_rows(config: Path) -> None:
    with open_world() as world:
        for batch in open_inputs(load_config(config), world).loader("train").batches():
            for own, rest in zip(ids(batch, "expert"), ids(batch, "expert+rest"), strict=True):
                assert len(own) + len(rest) <= 1, "null in the first, or the id in one of both"


def test_other_data_need_no_column_and_have_nulls(config: Path) -> None:
    for nulls, values in (("reserved", [0]), ("empty", [])):
        with open_world() as world:
            settings = load_config(config, [f"features.position.nulls={nulls}"])
            given = Given("rows", str(config.parent / "train.parquet"))
            inputs = open_inputs(settings, world, roles=ROLES, given=[given])
            for role in ("valid", "rows"):
                assert "position" not in inputs.datasets[role].schema.names
                batch = next(inputs.loader(role).batches())
                assert ids(batch, "position") == [values] * len(batch.weights)
                assert ids(batch, "row")[:5] == [[i] for i in range(5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("null", [NullPolicy.reserved, NullPolicy.empty])
def test_a_hidden_row_is_as_a_null_in_any_type(kind: str, null: NullPolicy) -> None:
    dtype, value = KINDS[kind]
    plain = dtype.value_type if pa.types.is_dictionary(dtype) else dtype
    values = [None if i % 7 == 0 else value(i) for i in range(90)]
    segments = tuple(Segment("a", i, 0, 30, i) for i in range(3))
    mask = Hidden(0.3, 5).rows(Window(segments, None))
    assert 10 < mask.sum() < 50

    def converted(values: list, hidden: Hidden | None) -> list[list[int]]:
        array = pa.array(values, plain)
        rows = pa.table({"x": array.dictionary_encode() if pa.types.is_dictionary(dtype) else array})
        spec = BatchSpec([IdColumn("x", "x", HashMapping(50, 0), null, hidden=hidden)], [])
        read = [rows.slice(30 * segment.number, 30) for segment in segments].__getitem__
        columns = load_window(Window(segments, (3,)), lambda segment: read(segment.number), spec, BlockPool())
        lists = columns.ids[0]
        if isinstance(lists, Ragged):
            return [lists.values[a:b].tolist() for a, b in zip(lists.offsets, lists.offsets[1:], strict=False)]
        return columns.scalars[lists].reshape(-1, 1).tolist()

    nulled = [None if is_hidden else value for value, is_hidden in zip(values, mask, strict=True)]
    assert converted(values, Hidden(0.3, 5)) == converted(nulled, None) != converted(values, None)


def test_lists_are_refused(config: Path, tmp_path: Path) -> None:
    rows = pq.read_table(config.parent / "train.parquet")
    place = rows.schema.get_field_index("position")
    pq.write_table(rows.set_column(place, "position", pa.array([[1]] * ROWS)), tmp_path / "a.parquet")
    with open_world() as world, pytest.raises(UserError, match=r"'features.position.hidden': column .* one id a row"):
        open_inputs(load_config(config, [f"data.train={tmp_path}"]), world)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["features.position.hidden=0"], "'features.position.hidden' must be at least"),
        (["features.position.hidden=1"], "'features.position.hidden' must be below 1"),
        (["features.position.weights=w"], "'features.position.weights' cannot be combined with .*hidden"),
        (["features.position.max_length=2"], "'features.position.max_length' cannot be combined with .*hidden"),
        (["features.position.nulls=refuse"], "'features.position.nulls' is refuse, but .* reserved or empty"),
        (["features.row.hidden=0.1"], "'features.row.hidden': .* tables.row.mapping=vocabulary, or .*nulls=empty"),
        (["features.position={type: float, table: null}"], "'features.position.hidden' is for features of type id"),
        (["features.x={table: rest, hidden: 0.1}", "model.attention={x: position}"], "'features.x.hidden': dlrm needs"),
    ],
)
def test_mistakes(options: list[str], said: str, config: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(config, options)


def test_a_segment_without_rows_to_hide_is_left_alone() -> None:
    spec = BatchSpec([IdColumn("x", "x", HashMapping(50, 0), hidden=Hidden(1e-6, 5))], [])
    assert (convert_table(pa.table({"x": range(1, 9)}), spec).scalars > 0).all()
