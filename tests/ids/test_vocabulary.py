"""Looking ids up in lists, and making, choosing and keeping the lists."""

import pickle
import tracemalloc
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from arrow_pool import arrow_pool

from recsys.errors import UserError
from recsys.ids import (
    IdCounter,
    IdMapping,
    IdStatistics,
    IndexMapping,
    VocabularyMapping,
    add_up,
    choose_vocabulary,
    hash_column,
    hashing,
    index_bytes,
    num_again,
    read_vocabulary,
    write_vocabulary,
)
from recsys.runtime import loops


def rows_of(mapping: IdMapping, ids: pa.Array) -> list[int]:
    out = np.full(len(ids), -77, np.int64)
    mapping.map(ids, out)
    return out.tolist()


# Lookup


@pytest.mark.parametrize("known", [pa.array([30, -1, 20]), pa.array([30, -1, 20]).dictionary_encode()], ids=["", "d"])
def test_index_is_the_position(known):
    assert rows_of(IndexMapping(known), pa.array([20, 7, 30, -1, 20])) == [2, -1, 0, 1, 2]
    assert rows_of(IndexMapping(known), pa.array([20, 30], pa.uint8()).dictionary_encode()) == [2, 0]
    assert rows_of(IndexMapping(known), pa.array([], pa.int32())) == []


def test_index_of_text():
    mapping = IndexMapping(pa.array(["b", "a"]))
    assert rows_of(mapping, pa.array(["a", "c", "b"], pa.large_string())) == [1, -1, 0]
    assert rows_of(mapping, pa.array(["a", "c"]).dictionary_encode()) == [1, -1]
    assert rows_of(mapping, pa.array([b"a", b"", b"b"], pa.binary_view())) == [1, -1, 0]


@pytest.mark.parametrize(
    ("known", "ids", "positions"),
    [
        (pa.array([1, 44], pa.int8()), pa.array([300, 1, -129, 44]), [-1, 0, -1, 1]),
        (pa.array([1, 2**64 - 1], pa.uint64()), pa.array([-1, 1]), [-1, 0]),
        (pa.array([1, -1], pa.int64()), pa.array([2**64 - 1, 1], pa.uint64()), [-1, 0]),
        (pa.array([1, 2**64 - 1], pa.uint64()), pa.array([-1, 1], pa.int8()), [-1, 0]),
        (pa.array([255, -1], pa.int16()), pa.array([255, 1], pa.uint8()), [0, -1]),
    ],
    ids=["narrow", "negative", "big", "narrow-negative", "narrow-big"],
)
def test_index_of_numbers_beyond_the_type_of_the_list(known, ids, positions):
    assert rows_of(IndexMapping(known), ids) == positions


def test_index_of_ids_that_do_not_compare():
    for known, ids in ((pa.array([1]), pa.array(["1"])), (pa.array(["1"]), pa.array([1]))):
        with pytest.raises(UserError, match=f"ids of type {ids.type} cannot be compared with ids of type {known.type}"):
            rows_of(IndexMapping(known), ids)
    with pytest.raises(TypeError, match="found struct"):
        rows_of(IndexMapping(pa.array([1])), pa.array([{"a": 1}]))
    with pytest.raises(UserError, match="are not all whole numbers within 64 bits; write them as strings"):
        IndexMapping(pa.array([Decimal("1.5"), Decimal("2.0")]))


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 1000, 1024, 50_000])
def test_index_finds_all_and_nothing_else(size):
    generator = np.random.default_rng(size)
    values = np.unique(generator.integers(-(2**63), 2**63, 2 * size + 10))
    generator.shuffle(values)
    mapping = IndexMapping(pa.array(values[:size]))
    ids = generator.permutation(len(values))
    expected = np.where(ids < size, ids, -1)
    assert rows_of(mapping, pa.array(values[ids])) == expected.tolist()
    # The same of text, whose values here are the numbers' digits.
    texts = pa.array(values.astype(str))
    assert rows_of(IndexMapping(texts[:size]), texts.take(pa.array(ids))) == expected.tolist()


def test_many_small_indices():
    # So few places that ids are often in each other's way.
    generator = np.random.default_rng(0)
    for size in [*range(1, 9)] * 100:
        values = generator.integers(0, 2**40, 20)
        found = rows_of(IndexMapping(pa.array(values[:size])), pa.array(values))
        assert found == [*range(size), *[-1] * (20 - size)]


def unmixed(number: int) -> int:
    """The number whose SplitMix64 hash with seed 0 is `number`."""
    x = number
    x ^= x >> 31 ^ x >> 62
    x = x * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x ^= x >> 27 ^ x >> 54
    x = x * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    x ^= x >> 30 ^ x >> 60
    return (x - 0x9E3779B97F4A7C15) % 2**64


@pytest.mark.parametrize("listed", [True, False])
def test_hashes_that_share_places(listed):
    # Nine in one place, and the least and the greatest hash there is, which also stands at the end.
    hashes = [0, *((1 << 60) + i for i in range(8)), 2**64 - 1]
    ids = pa.array([unmixed(number) for number in hashes], pa.uint64())
    assert hash_column(ids).tolist() == hashes
    mapping = IndexMapping(ids if listed else ids[1:])
    assert rows_of(mapping, ids) == (list(range(10)) if listed else list(range(-1, 9)))


@pytest.mark.parametrize("ids", [pa.array([3, 1, 3]), pa.array(["x", "y", "x"]), pa.array(["x", "x", "x"])], ids=str)
def test_list_with_an_id_twice(ids):
    for listed in (ids, ids.dictionary_encode()):
        with pytest.raises(UserError, match=r"id [3x] occurs twice in a list of distinct ids"):
            IndexMapping(listed)


def test_texts_with_one_hash(monkeypatch):
    """One that is asked for is told from the one in the list; a list may not have two."""
    monkeypatch.setattr(loops, "_compiled", None)  # which calls XXH3 by itself
    monkeypatch.setattr(hashing.xxhash, "xxh3_64_intdigest", lambda text, seed: len(text))
    known, ids = pa.array(["b", "aa"]), pa.array(["a", "b", "aa", "cc", "", "ddd"])
    assert rows_of(IndexMapping(known), ids) == [-1, 0, 1, -1, -1, -1]
    assert rows_of(VocabularyMapping(known, 5, 0), ids) == [3 + 1, 1, 2, 3 + 2, 3 + 0, 3 + 3]
    with pytest.raises(UserError, match="ids b and c have the same 64-bit hash; rename one of them"):
        IndexMapping(pa.array(["b", "aa", "c"]))


# Vocabularies


def test_vocabulary_rows():
    mapping = VocabularyMapping(pa.array([50, 7, -3]), 10, 2)
    assert mapping.num_rows == 14
    ids = pa.array([7, 8, 50, 9, -3])
    others = 4 + hash_column(pa.array([8, 9]), 2) % np.uint64(10)
    statistics = IdStatistics()
    out = np.empty(5, np.int32)
    for column in (ids, ids.dictionary_encode()):
        mapping.map(column, out, statistics)
        assert out.tolist() == [2, others[0], 1, others[1], 3]
    assert statistics.num_ids == 10
    assert statistics.num_out_of_vocabulary == 4


def test_vocabulary_of_text():
    mapping = VocabularyMapping(pa.array(["x", "y"]), 100, 7)
    bucket = 3 + xxhash.xxh3_64_intdigest(b"z", 7) % 100
    assert rows_of(mapping, pa.array(["y", "z", "x", "z"])) == [2, bucket, 1, bucket]


@pytest.mark.parametrize("ids", [pa.array([4]), pa.array(["x"]), pa.array([Decimal("1.5"), Decimal(2)])], ids=str)
def test_empty_vocabulary(ids):
    mapping = VocabularyMapping(pa.array([], pa.int64()), 1, 0)
    assert mapping.num_rows == 2
    assert rows_of(mapping, ids) == [1] * len(ids)


def as_dict(counts: pa.Table) -> dict[object, int]:
    return dict(zip(counts.column("id").to_pylist(), counts.column("count").to_pylist(), strict=True))


def test_counts_of_numbers():
    counter = IdCounter()
    counter.add(pa.array([3, 3, -1], pa.int32()))
    counter.add(pa.array([3, 200, None], pa.uint8()))
    counter.add(pa.array([200.0]))
    counter.add(pa.array([], pa.null()))
    counter.add(pa.DictionaryArray.from_arrays(pa.array([0, 1, 3, 3]), pa.array([-1, None, 5, 3])))
    counts = counter.to_table()
    assert counts.schema.types == [pa.int64(), pa.int64()]
    assert as_dict(counts) == {3: 5, -1: 2, 200: 2}
    counter.add(pa.array([3]))
    assert as_dict(counter.to_table()) == {3: 6, -1: 2, 200: 2}


def test_counts_of_text():
    counter = IdCounter()
    counter.add(pa.array(["a", "b", "a"]))
    counter.add(pa.array(["b", None, "ü"]).dictionary_encode())
    counter.add(pa.array([b"a"], pa.large_binary()))
    counts = counter.to_table()
    assert counts.schema.field("id").type == pa.string()
    assert as_dict(counts) == {"a": 3, "b": 2, "ü": 1}
    counter.add(pa.array([b"\xff"]))
    assert as_dict(counter.to_table()) == {b"a": 3, b"b": 2, "ü".encode(): 1, b"\xff": 1}


def test_counts_of_many_parts():
    generator = np.random.default_rng(0)
    parts = [generator.integers(0, 300_000, 200_000) for _ in range(12)]  # merged several times on the way
    counter, one, two = IdCounter(), IdCounter(), IdCounter()
    for i, part in enumerate(parts):
        counter.add(pa.array(part))
        (one if i % 3 else two).add(pa.array(part))
    expected = np.bincount(np.concatenate(parts), minlength=300_000)
    assert as_dict(counter.to_table()) == {i: n for i, n in enumerate(expected.tolist()) if n}
    tables = [one.to_table(), IdCounter().to_table(), two.to_table()]
    assert as_dict(add_up(tables)) == as_dict(counter.to_table())
    order = np.lexsort([np.arange(300_000), -expected])[:5000]
    for counts in (add_up(tables), counter.to_table()):
        assert choose_vocabulary(counts, 10, 5000).to_pylist() == order.tolist()


def test_counts_go_to_other_ranks_once():
    """Of a column's slices pickle takes all of the memory that they share, each time."""
    counter = IdCounter()
    for part in np.random.default_rng(0).permutation(400_000).reshape(20, -1):
        counter.add(pa.array(part))
    table = counter.to_table()
    assert len(pickle.dumps(table)) < 1.1 * table.nbytes


@pytest.mark.parametrize("ids", [pa.array(range(70_000)), pa.array([f"user {i}" for i in range(1000)])], ids=["i", "s"])
def test_bytes_of_an_index(ids):
    index = IndexMapping(ids, seed=1)
    own = index._keys.numbers.nbytes + index._keys.texts.nbytes
    assert index_bytes(len(ids), own) == own + index._hashes.nbytes + index._numbers.nbytes + index._starts.nbytes


@pytest.mark.parametrize("as_text", [False, True])
def test_an_index_is_made_in_hardly_more_memory_than_it_keeps(as_text):
    """For that of 3 million numbers 210 MiB were taken and 66 kept, and 1.5 million texts were searched for repeats."""
    ids = pa.array(np.arange(500_000) * 10**12).cast(pa.string() if as_text else pa.int64())
    tracemalloc.start()
    with arrow_pool() as pool:
        index = IndexMapping(ids)
        most = tracemalloc.get_traced_memory()[1] + pool.max_memory()
    tracemalloc.stop()
    assert most < 1.6 * index_bytes(len(ids), index._keys.texts.nbytes)


def test_row_groups_of_the_default_size_are_counted_in_a_hash_table_that_is_not_larger_than_needed():
    """One of 2**20 distinct ids took 250 MB: for the last of them, Arrow made its table four times as large."""
    with arrow_pool() as pool:
        IdCounter().add(pa.array(np.arange(1 << 20) * 10**12))
        assert pool.max_memory() < 120 << 20


def test_choice_by_count_then_id():
    counter = IdCounter()
    counter.add(pa.array(["b", "c", "a", "c", "B", "a", "d", "d", "d"]))
    counts = counter.to_table()
    assert choose_vocabulary(counts, 1, 100).to_pylist() == ["d", "a", "c", "B", "b"]
    assert choose_vocabulary(counts, 2, 100).to_pylist() == ["d", "a", "c"]
    assert choose_vocabulary(counts, 2, 2).to_pylist() == ["d", "a"]
    assert choose_vocabulary(counts, 4, 2).to_pylist() == []
    assert choose_vocabulary(IdCounter().to_table(), 1, 2).to_pylist() == []


def test_numbers_beyond_int64():
    counter = IdCounter()
    counter.add(pa.array([2**64 - 1, 2**64 - 1, 5], pa.uint64()))
    counter.add(pa.array([5, 7]))
    assert choose_vocabulary(counter.to_table(), 1, 10).to_pylist() == [5, 2**64 - 1, 7]
    counter.add(pa.array([-1]))
    with pytest.raises(UserError, match="negative in one place and beyond 2\\*\\*63 in another"):
        counter.to_table()


def test_ids_of_two_kinds():
    counter = IdCounter()
    counter.add(pa.array(["a"]))
    with pytest.raises(UserError, match="numbers in one place and texts in another"):
        counter.add(pa.array([1]))
    other = IdCounter()
    other.add(pa.array([1]))
    with pytest.raises(UserError, match="numbers in one place and texts in another"):
        add_up([counter.to_table(), other.to_table()])
    with pytest.raises(UserError, match="are not all whole numbers"):
        other.add(pa.array([Decimal("1.5"), Decimal("1.0")]))


@pytest.mark.parametrize(
    "ids",
    [
        pa.array([5, -7, 2**60 + 1]),
        pa.array([1, 2**64 - 1], pa.uint64()),
        pa.array(["b", "ä", ""]),
        pa.array([b"\xff"]),
    ],
    ids=lambda ids: str(ids.type),
)
def test_vocabulary_file(tmp_path, ids):
    path = tmp_path / "item.parquet"
    write_vocabulary(path, ids)
    assert read_vocabulary(path).equals(ids)
    pq.write_table(pa.table({"id": ids, "count": range(len(ids))}), path, write_page_checksum=True)
    assert read_vocabulary(path).equals(ids)
    write_vocabulary(path, ids)
    assert [each.name for each in tmp_path.iterdir()] == ["item.parquet"]
    broken = bytearray(path.read_bytes())
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    broken[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(broken)
    with pytest.raises(UserError, match=r"vocabulary file .* cannot be read"):
        read_vocabulary(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"ID": [1], "count": [1]}), "has the columns ID, count, but must have one called id"),
        (pa.table({"id": [0.5]}), "has ids of type double, which must be integers or strings"),
        (pa.table({"id": [1, None]}), "holds 1 null as ids"),
        (pa.table({"id": ["a", "b", "a"]}), "lists 1 id again, and may list each once"),
    ],
)
def test_files_that_are_no_vocabulary(tmp_path, table, message):
    path = tmp_path / "item.parquet"
    with pytest.raises(UserError, match=r"vocabulary file .* cannot be read"):
        read_vocabulary(path)
    pq.write_table(table, path)
    with pytest.raises(UserError, match=message):
        read_vocabulary(path)


def test_vocabulary_by_other_hands(tmp_path):
    path = tmp_path / "item.parquet"
    pq.write_table(pa.table({"id": pa.array(["x", "y"]).dictionary_encode()}), path)
    assert read_vocabulary(path).equals(pa.array(["x", "y"]))
    pq.write_table(pa.table({"id": pa.array([3, 1], pa.int16())}), path)
    assert read_vocabulary(path).equals(pa.array([3, 1]))


def test_a_file_of_uuids_holds_what_a_column_of_uuids_does(tmp_path):
    """DuckDB writes such for its type; a run reads the ids of its data as these bytes."""
    pq.write_table(pa.table({"id": pa.array([b"\xff" * 16, b"b" * 16], pa.uuid())}), tmp_path / "v.parquet")
    assert read_vocabulary(tmp_path / "v.parquet").to_pylist() == [b"\xff" * 16, b"b" * 16]


def test_ids_of_a_vocabulary_are_read_without_a_hash_table_of_them(tmp_path):
    """It takes 200 bytes for each: of 20 million ids a resumed run took 4 GiB where 1.5 were predicted."""
    ids = np.random.default_rng(0).permutation(200_000) * 10**12
    write_vocabulary(tmp_path / "item.parquet", pa.array(ids))
    with arrow_pool() as pool:
        assert (read_vocabulary(tmp_path / "item.parquet").to_numpy() == ids).all()
        assert pool.max_memory() < 60 * len(ids)
    write_vocabulary(tmp_path / "item.parquet", texts := pa.array(ids).cast(pa.string()))
    with arrow_pool() as pool:
        assert read_vocabulary(tmp_path / "item.parquet").equals(texts)
        assert pool.max_memory() < 80 * len(ids)
    for numbers in ([7, 3, 7, -1, 3, 7], pa.chunked_array([[7, 3, 7], [-1, 3, 7]]), ["a", "b", "a", "a", "b", "c"]):
        assert num_again(pa.array(numbers) if isinstance(numbers, list) else numbers) == 3
    assert num_again(pa.chunked_array([["a", "b"], ["b"]])) == 1 and num_again(pa.array([], pa.string())) == 0
