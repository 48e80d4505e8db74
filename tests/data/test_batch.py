"""Windows put into their order, and slices of them joined to batches."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from conversion import refusal

import recsys.data.window as window_module
from recsys.config import NullPolicy
from recsys.data import collate as collating
from recsys.data.batch import Batch, MicroBatches, _moved
from recsys.data.order import Position, Segment, Window
from recsys.data.pool import BlockPool
from recsys.data.spec import BatchSpec, FloatColumn, IdColumn
from recsys.data.storage import BadDataError
from recsys.data.window import Columns, Ragged, convert_table, load_window
from recsys.ids import HashMapping, IdentityMapping, IndexMapping
from recsys.ids.hashing import hash_integers

IDENTITY, Chunk = IdentityMapping(1000), collating.Chunk
START = Position()


def collate(chunks: list[Chunk], num_rows: int, spec: BatchSpec, position: Position) -> Batch:
    return collating.collate(chunks, num_rows, spec, position, BlockPool(), MicroBatches())


def lists(columns: Columns, part: int | Ragged) -> list[list[int]]:
    if isinstance(part, int):
        return [[n] for n in columns.scalars[part].tolist()]
    assert part.offsets.tolist() == np.cumsum([0, *part.lengths]).tolist()
    return [part.values[a:b].tolist() for a, b in pairwise(part.offsets.tolist())]


# Windows


def test_feature_without_a_column_is_always_empty():
    columns = convert_table(pa.table({"h": [1, 2, 3]}), BatchSpec([IdColumn("other", None, IDENTITY)], []))
    assert lists(columns, columns.ids[0]) == [[], [], []]


def label_and_weight(**columns: Any) -> tuple[list[float], list[float]]:
    parts = {name: FloatColumn(name, name, None) for name in columns}
    table = pa.table({"rows": [0, 0, 0], **columns})
    labels = [parts.get("label", FloatColumn("label", None))]
    converted = convert_table(table, BatchSpec([], [], labels, parts.get("weight")))
    return converted.floats[-2].tolist(), converted.floats[-1].tolist()


def test_a_label_that_may_be_null_says_where_it_is_known():
    spec = BatchSpec([], [], [FloatColumn("a", "a", may_be_unknown=True), FloatColumn("b", "b", None)])
    converted = convert_table(pa.table({"a": [1, None, 0], "b": [0.5, 2.0, 3.0]}), spec)
    assert converted.floats.tolist() == [[1, 0, 0], [0.5, 2, 3], [1, 0, 1], [1, 1, 1], [1, 1, 1]]
    pool = BlockPool()
    batch = collating.collate([Chunk(converted, 0, 3, 0)], 4, spec, Position(), pool, MicroBatches())
    assert batch.labels.tolist() == [[1, 0.5], [0, 2], [0, 3], [0, 0]]
    assert batch.known_labels.tolist() == [[1, 1], [0, 1], [1, 1], [0, 0]] and batch.weights.tolist() == [1, 1, 1, 0]
    assert batch.dense_rows(1, 3).label_weights(0).tolist() == [0, 1]


def test_labels_and_weights():
    assert label_and_weight() == ([0, 0, 0], [1, 1, 1])
    labels = pa.array([True, False, True])
    assert label_and_weight(label=labels, weight=[0.5, 0.0, 2.0]) == ([1, 0, 1], [0.5, 0, 2])


def test_null_labels_and_weights_are_refused():
    assert "column 'label' (label) holds 1 null" in refusal(lambda: label_and_weight(label=[1, None, 0]))
    assert "column 'weight' (weight) holds 2 nulls" in refusal(lambda: label_and_weight(weight=[1, None, None]))


def test_negative_weights_are_refused():
    message = refusal(lambda: label_and_weight(weight=[1.0, -0.5, 2.0]))
    assert message == "column 'weight' (weight) holds -0.5, but a weight must be 0 or more"


WINDOW_SPEC = BatchSpec(
    ids=[
        IdColumn("user", "user", IDENTITY),
        IdColumn("history", "history", IDENTITY, max_length=2),
        IdColumn("seldom", "seldom", IDENTITY, NullPolicy.empty),
        IdColumn("twice", "user", HashMapping(50, 0, num_hashes=2)),
    ],
    floats=[FloatColumn("price", "price")],
    labels=[FloatColumn("label", "label")],
)


def window_table(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "user": pa.array(numbers, pa.int16() if first else pa.uint32()),
            "history": pa.array([list(range(n, n + n % 4)) for n in numbers], pa.list_(pa.int64())),
            "seldom": pa.array([n if n % 3 else None for n in numbers], pa.int64()),
            "price": [n / 2 for n in numbers],
            "label": [n % 2 for n in numbers],
        }
    )


@pytest.mark.parametrize("seed", [None, (1, 2, 3)])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("joined", [0, 2, 10, 1 << 14])
def test_a_window_is_its_segments_in_its_order(seed, cached, joined, monkeypatch):
    monkeypatch.setattr(window_module, "_JOINED_ROWS", joined)
    window = Window((Segment("a", 0, 0, 20), Segment("a", 1, 5, 6), Segment("b", 0, 0, 9)), seed)
    tables = dict(zip(window.segments, (window_table(0, 20), window_table(20, 1), window_table(21, 9)), strict=True))
    pool = BlockPool()
    if cached:  # memory that another window has written to
        load_window(Window((Segment("x", 0, 0, 40),), seed), lambda _: window_table(100, 40), WINDOW_SPEC, pool)
    columns = load_window(window, tables.__getitem__, WINDOW_SPEC, pool)
    order = range(30) if seed is None else window.permutation()
    user, history, seldom, twice = (lists(columns, part) for part in columns.ids)
    for at, n in enumerate(order):
        assert user[at] == [n]
        assert history[at] == list(range(n, n + n % 4))[-2:]
        assert seldom[at] == ([n] if n % 3 else [])
        assert len(twice[at]) == 2
        assert columns.floats[:, at].tolist() == [n / 2, n % 2, 1]
    assert twice == [twice[list(order).index(n)] for n in order]
    assert columns.scalars.dtype == np.int32
    assert columns.bad is None


@pytest.mark.parametrize(("filled", "with_lists"), [(6, False), (5, False), (6, True), (0, False)])
def test_lists_begin_where_their_lengths_say(filled, with_lists):
    """Of one id each, of none in rows that nothing fills, of any number."""
    spec = WINDOW_SPEC if with_lists else BatchSpec([WINDOW_SPEC.ids[0], IdColumn("price", "price", IDENTITY)], [])
    table = pa.table(
        {**{name: window_table(0, 6)[name] for name in ("user", "history", "seldom", "label")}, "price": range(6)}
    )
    columns = convert_table(table, spec)
    chunks = [Chunk(columns, 0, 2, 0), Chunk(columns, 2, filled, 2)] if filled else []
    batch = collating.collate(chunks, 6, spec, Position(), BlockPool(), MicroBatches())
    lengths, offsets = batch.ids.lengths(), batch.ids.offsets()
    assert offsets.tolist() == [0, *lengths.cumsum(0).tolist()]
    assert batch.ids.length_per_key() == lengths.view(len(spec.ids), 6).sum(1).tolist()


def test_dictionaries_of_joined_segments():
    spec = BatchSpec([IdColumn("name", "name", HashMapping(1 << 30, 0))], [])
    texts = [[f"{letter}{i}" for i in range(100)] for letter in "abc"]  # with 8 bits, an index counts to 127
    arrays = [pa.DictionaryArray.from_arrays(pa.array(range(100), pa.int8()), pa.array(each)) for each in texts]
    segments = [Segment(letter, 0, 0, 100) for letter in "abc"]
    for tables in ([pa.table({"name": each}) for each in arrays], [pa.table({"name": each}) for each in texts]):
        found = dict(zip(segments, tables, strict=True))
        columns = load_window(Window(tuple(segments), None), found.__getitem__, spec, BlockPool())
        whole = convert_table(pa.table({"name": [text for each in texts for text in each]}), spec)
        assert np.array_equal(columns.scalars, whole.scalars)


def test_tables_past_31_bits_are_held_in_64():
    spec = BatchSpec([IdColumn("user", "user", IdentityMapping(1 << 40))], [])
    columns = convert_table(pa.table({"user": [1 << 39, 3]}), spec)
    assert columns.scalars.tolist() == [[1 << 39, 3]]


def test_rows_of_a_bad_segment_are_marked_and_without_weight():
    window = Window((Segment("a", 0, 0, 4), Segment("b", 7, 0, 3), Segment("c", 0, 0, 2)), (5,))

    def read(segment: Segment) -> pa.Table:
        if segment.path == "b":
            raise BadDataError("row group 7 of 'b' cannot be read", "b", 7)
        return window_table(0 if segment.path == "a" else 7, segment.num_rows)

    with pytest.raises(BadDataError):
        load_window(window, read, WINDOW_SPEC, BlockPool())
    columns = load_window(window, read, WINDOW_SPEC, BlockPool(), skip_bad=True)
    order = np.array(window.permutation())
    assert columns.bad is not None and columns.bad.tolist() == [4 <= n < 7 for n in order]
    batch = collate([Chunk(columns, 0, 9, 0)], 9, WINDOW_SPEC, START)
    assert (batch.num_rows, batch.num_bad_rows) == (6, 3)
    for at, n in enumerate(order.tolist()):
        bad = 4 <= n < 7
        assert [keyed(batch.ids, key)[at] for key in ("user", "history")] == (
            [[], []] if bad else [[n], list(range(n, n + n % 4))[-2:]]
        )
        assert float(batch.weights[at]) == float(not bad)
        assert batch.floats[at].tolist() == [0.0 if bad else n / 2]


def test_errors_say_where_the_rows_are():
    window = Window((Segment("a", 0, 0, 4), Segment("b", 7, 0, 3)), (5,))
    tables = {"a": pa.table({"user": [1, 2, 3, 4]}), "b": pa.table({"user": [1, 1000, 3]})}
    spec = BatchSpec([IdColumn("user", "user", IDENTITY)], [])
    message = refusal(lambda: load_window(window, lambda s: tables[s.path], spec, BlockPool()))
    assert message.startswith("column 'user' (feature 'user'): id 1000 is outside 0 … 999")
    assert message.endswith("(in row group 7 of b)")


def test_weights_of_ids_travel_with_them():
    spec = BatchSpec([IdColumn("h", "h", IDENTITY, weights="w", max_length=2), IdColumn("user", "user", IDENTITY)], [])
    table = pa.table(
        {"h": [[1, 2, 3], [], [4], [5, 6]], "w": [[0.1, 0.2, 0.3], [], [0.4], [0.5, 0.6]], "user": [7, 8, 9, 10]}
    )
    window = Window((Segment("a", 0, 0, 4),), (3,))
    columns = load_window(window, lambda _: table, spec, BlockPool())
    batch = collate([Chunk(columns, 1, 4, 0)], 4, spec, START)
    expected = {7: [(2, 0.2), (3, 0.3)], 8: [], 9: [(4, 0.4)], 10: [(5, 0.5), (6, 0.6)]}
    users, ids = keyed(batch.ids, "user"), keyed(batch.ids, "h")
    weights = [row.tolist() for row in batch.ids["h"].to_dense_weights()]
    for user, row, weight in list(zip(users, ids, weights, strict=True))[:3]:
        assert row == [n for n, _ in expected[user[0]]]
        assert weight == pytest.approx([w for _, w in expected[user[0]]])
    assert users[3] == ids[3] == []
    assert [row.tolist() for row in batch.ids["user"].to_dense_weights()][:3] == [[1.0]] * 3


# Batches

SPEC = BatchSpec(
    ids=[
        IdColumn("user", "user", IDENTITY),
        IdColumn("history", "history", IDENTITY),
        IdColumn("none", None, IDENTITY),
    ],
    floats=[FloatColumn("price", "price"), FloatColumn("seven", None, 7.0)],
    labels=[FloatColumn("label", "label")],
    weight=FloatColumn("weight", "weight"),
    lists=[IdColumn("targets", "targets", IndexMapping(pa.array([8, 9])))],
)


def some_rows(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table(
        {
            "user": numbers,
            "history": pa.array([list(range(n % 4)) for n in numbers], pa.list_(pa.int64())),
            "price": [n / 2 for n in numbers],
            "label": [n % 2 for n in numbers],
            "weight": [1.0 + n for n in numbers],
            "targets": pa.array([[9, n] for n in numbers], pa.list_(pa.int64())),
        }
    )


def keyed(batch_lists: Any, key: str) -> list[list[int]]:
    return [row.tolist() for row in batch_lists[key].to_dense()]


def check_row(batch: Batch, at: int, n: int) -> None:
    assert keyed(batch.ids, "user")[at] == [n]
    assert keyed(batch.ids, "history")[at] == list(range(n % 4))
    assert keyed(batch.ids, "none")[at] == []
    assert batch.floats[at].tolist() == [n / 2, 7.0]
    assert (batch.labels[at], batch.weights[at]) == (n % 2, 1 + n)
    assert batch.lists is not None
    assert keyed(batch.lists, "targets")[at] == [1, {8: 0, 9: 1}.get(n, -1)]


def test_pieces_are_joined_at_their_places_and_the_rest_is_fill():
    first, second = convert_table(some_rows(0, 10), SPEC), convert_table(some_rows(100, 5), SPEC)
    batch = collate([Chunk(first, 3, 6, 0), Chunk(second, 0, 2, 3), Chunk(first, 9, 10, 7)], 9, SPEC, START)
    for at, n in {0: 3, 1: 4, 2: 5, 3: 100, 4: 101, 7: 9}.items():
        check_row(batch, at, n)
    assert batch.ids.keys() == ["user", "history", "none"]
    assert batch.num_rows == 6
    for at in (5, 6, 8):
        assert [keyed(batch.ids, key)[at] for key in batch.ids.keys()] == [[], [], []]  # noqa: SIM118
        assert batch.floats[at].tolist() == [0, 0]
        assert (batch.labels[at], batch.weights[at]) == (0, 0)
        assert batch.lists is not None and keyed(batch.lists, "targets")[at] == []


def test_batch_without_any_row():
    batch = collate([], 4, SPEC, START)
    assert batch.weights.tolist() == [0] * 4
    assert batch.ids.lengths().tolist() == [0] * 12
    assert batch.ids.values().numel() == batch.num_rows == 0


def test_types_of_a_batch():
    batch = collate([Chunk(convert_table(some_rows(0, 4), SPEC), 0, 4, 0)], 4, SPEC, Position(1, 2, 3))
    assert batch.ids.values().dtype == torch.int32
    assert batch.ids.lengths().dtype == torch.int32
    assert {t.dtype for t in (batch.floats, batch.labels, batch.weights)} == {torch.float32}
    assert batch.position == Position(1, 2, 3)
    without = BatchSpec(SPEC.ids, SPEC.floats)
    assert collate([], 4, without, START).lists is None


def test_rows_beyond_31_bits_are_wide():
    spec = BatchSpec([IdColumn("big", "big", HashMapping(2**40, 0)), IdColumn("small", "big", HashMapping(8, 0))], [])
    raw = np.arange(1000)
    columns = convert_table(pa.table({"big": raw}), spec)
    batch = collate([Chunk(columns, 0, 1000, 0)], 1000, spec, START)
    assert batch.ids.values().dtype == torch.int64
    expected = (hash_integers(raw) % np.uint64(2**40 - 1)).astype(np.int64) + 1
    assert batch.ids["big"].values().tolist() == expected.tolist() and expected.max() > 2**32


def test_a_batch_does_not_share_memory_with_the_next():
    columns = convert_table(some_rows(0, 4), SPEC)
    pool = BlockPool()
    one, other = (collating.collate([Chunk(columns, 0, 4, 0)], 4, SPEC, START, pool, MicroBatches()) for _ in range(2))
    for tensor in (one.floats, one.labels, one.weights, one.ids.values()):
        tensor.zero_()
    check_row(other, 3, 3)


def test_moving_a_batch_keeps_everything():
    batch = collate([Chunk(convert_table(some_rows(0, 4), SPEC), 0, 4, 0)], 4, SPEC, Position(1, 2, 3))
    moved = batch.to(torch.device("meta"))
    tensors = [moved.ids.values(), moved.floats, moved.labels, moved.weights]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert moved.lists is not None and moved.lists.values().device.type == "meta"
    assert (moved.num_rows, moved.position) == (4, Position(1, 2, 3))
    check_row(batch.to(torch.device("cpu")), 3, 3)


def test_spec_names_each_column_once():
    spec = BatchSpec(
        ids=[IdColumn("a", "x", IDENTITY), IdColumn("b", "x", IDENTITY), IdColumn("c", None, IDENTITY)],
        floats=[FloatColumn("d", "y"), FloatColumn("e", None)],
        labels=[FloatColumn("label", "l")],
        weight=FloatColumn("weight", "y"),
        lists=[IdColumn("t", "z", IDENTITY)],
    )
    assert sorted(spec.columns()) == ["l", "x", "y", "z"]


# Micro-batches


@pytest.mark.parametrize(
    ("max_rows", "max_ids", "bounds"),
    [
        (None, None, (0, 6)),
        (4, None, (0, 4, 6)),
        (3, None, (0, 3, 6)),
        (None, 5, (0, 2, 3, 6)),
        (None, 9, (0, 2, 4, 6)),
        (2, 100, (0, 2, 4, 6)),
        (1, 1, (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_micro_batches_are_bounded_by_rows_and_ids(max_rows, max_ids, bounds):
    lengths = np.array([[2, 1, 9, 0, 0, 1], [1, 1, 0, 0, 4, 0]])
    assert MicroBatches(max_rows, max_ids).bounds(lengths) == bounds


def test_a_batch_says_how_it_may_be_split():
    columns = convert_table(some_rows(0, 8), SPEC)  # histories of 0, 1, 2, 3, 0, 1, 2, 3 ids, and a user each
    batch = collating.collate([Chunk(columns, 0, 8, 0)], 10, SPEC, START, BlockPool(), MicroBatches(None, 6))
    assert batch.micro_batches == (0, 3, 5, 7, 10)
    part = batch.dense_rows(3, 5)
    assert part.floats.tolist() == batch.floats[3:5].tolist()
    assert part.labels.tolist() == [[1], [0]] and part.weights.tolist() == [4, 5]


# Copies to a GPU


def test_a_batch_is_copied_at_once():
    parts = [IdColumn("a", "a", IDENTITY), IdColumn("b", "b", IDENTITY, weights="w")]
    spec = BatchSpec(parts, [], [FloatColumn("label", "label", may_be_unknown=True)])
    rows = {"a": [1, 2, 3], "b": [[4], [], [5, 6]], "w": [[0.5], [], [1.0, 2.0]], "label": [1, None, 0]}
    batch = collate([Chunk(convert_table(pa.table(rows), spec), 0, 3, 0)], 4, spec, START)
    copy = replace(batch, **{n: _moved(v, batch.content, batch.content.clone()) for n, v in batch._tensors().items()})
    assert copy.ids.to_dict().keys() == batch.ids.to_dict().keys() == {"a", "b"}
    for of in (lambda b: b.ids.values(), lambda b: b.ids.lengths(), lambda b: b.ids.weights(), lambda b: b.floats,
               lambda b: b.labels, lambda b: b.weights, lambda b: b.known_labels):  # fmt: skip
        assert of(copy).equal(of(batch)) and (of(copy).data_ptr() != of(batch).data_ptr() or not of(batch).numel())
    assert copy.ids.length_per_key() == [3, 3] == batch.ids._length_per_key
    on_device = batch.to(torch.device("meta"))
    values = [v for v in on_device._tensors().values() if isinstance(v, torch.Tensor)]
    values += [on_device.ids.values(), on_device.ids.lengths(), on_device.ids.weights()]
    assert len({value.untyped_storage()._cdata for value in values}) == 1 and on_device.content is None


def test_no_block_is_given_out_before_its_copy_is_done(monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []

    class Event:
        def record(self) -> None:
            events.append("recorded")

        def synchronize(self) -> None:
            events.append("waited for")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    pool = BlockPool()
    block = pool.take(5000)
    memory = block._memory.ctypes.data
    block.fence.record()
    other = pool.take(5000)  # the first is in use
    assert other._memory.ctypes.data != memory and events == ["recorded"]
    del block
    again = pool.take(5000)
    assert again._memory.ctypes.data == memory and events == ["recorded", "waited for"]
    again.fence.wait()
    assert len(events) == 2  # once
