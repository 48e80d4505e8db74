"""Reading footers and row groups, types that differ from file to file, and what a user is told."""

import os
import pickle
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from arrow_pool import arrow_pool
from conversion import refusal
from parquet_files import open_columns, write

from recsys.config import DataConfig
from recsys.data import decode, group_footers
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.parquet import open_dataset, read_column, read_head

USER = {"user": "config key 'features.user'"}


def open_users(*paths: Path, max_rows: int | None = None) -> Dataset:
    return open_dataset("data.train", [str(path) for path in paths], USER, max_rows)


# Footers


def test_row_groups_of_all_files_in_order_without_empty_ones(tmp_path):
    write(tmp_path / "b.parquet", {"user": list(range(5))}, row_group_rows=2)
    write(tmp_path / "a.parquet", {"user": [7]})
    write(tmp_path / "c.parquet", {"user": pa.array([], pa.int64())})
    with pq.ParquetWriter(tmp_path / "d.parquet", pa.schema([("user", pa.int64())])) as writer:
        for rows in ([1], [], [2, 3]):
            writer.write_table(pa.table({"user": pa.array(rows, pa.int64())}))
    dataset = open_users(tmp_path)
    groups = dataset.row_groups
    found = [
        (os.path.basename(groups.paths[file]), index, rows)
        for file, index, rows in zip(groups.file, groups.index, groups.num_rows, strict=True)
    ]
    assert found == [
        ("a.parquet", 0, 1),
        ("b.parquet", 0, 2),
        ("b.parquet", 1, 2),
        ("b.parquet", 2, 1),
        ("d.parquet", 0, 1),
        ("d.parquet", 2, 2),
    ]
    assert (dataset.num_rows, dataset.num_files) == (9, 3)


def test_bytes_are_those_of_a_window_with_the_columns_read(tmp_path):
    # Repetitive columns are small in the file, and each value takes 4 bytes in a window all the same.
    table = {
        "user": [7] * 1000,
        "his.tory": [[5] * 20] * 999 + [None],
        "name": ["x" * 100] * 1000,
        "unused": list(range(1000)),
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=1000)

    def num_bytes(*columns: str) -> int:
        dataset = open_columns(tmp_path, *columns, filter="unused >= 0")
        return int(dataset.row_groups.num_bytes[0])

    assert num_bytes("user") == num_bytes("name") == 4000
    assert num_bytes("his.tory") == 4 * (999 * 20 + 1) + 4000
    assert num_bytes("user", "his.tory") == num_bytes("user") + num_bytes("his.tory")


def test_max_rows(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", {"user": list(range(10))}, row_group_rows=4)
    dataset = open_users(tmp_path, max_rows=13)
    assert dataset.row_groups.num_rows.tolist() == [4, 4, 2, 3]
    assert read_column(dataset, "user").to_pylist() == [*range(10), 0, 1, 2]
    assert open_users(tmp_path, max_rows=1000).num_rows == 20


def test_fingerprint_is_of_names_and_footers(tmp_path):
    path = write(tmp_path / "x" / "a.parquet")
    first = open_users(path).fingerprint
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    os.utime(tmp_path / "y" / "a.parquet", (1, 1))
    assert open_users(tmp_path / "y").fingerprint == first
    assert open_users(path, max_rows=2).fingerprint != first
    (tmp_path / "y" / "a.parquet").rename(tmp_path / "y" / "b.parquet")
    assert open_users(tmp_path / "y").fingerprint != first
    # As many rows with the same least and most, in files of the same size.
    for number, users in enumerate(([1, 2, 3, 4], [1, 3, 2, 4])):
        pq.write_table(pa.table({"user": users}), tmp_path / f"{number}.parquet", compression="none")
    assert len({os.path.getsize(tmp_path / f"{number}.parquet") for number in (0, 1)}) == 1
    prints = set()
    for number in (0, 1):
        shutil.copy(tmp_path / f"{number}.parquet", tmp_path / "a.parquet")
        prints.add(open_users(tmp_path / "a.parquet").fingerprint)
    assert len(prints) == 2


def test_fingerprint_knows_the_partition_keys_that_are_read(tmp_path):
    for day in ("1", "2"):
        write(tmp_path / f"day={day}" / "a.parquet")
    both = [open_dataset("key", str(tmp_path / f"day={day}"), {"user": "", "day": ""}).fingerprint for day in "12"]
    assert both[0] != both[1]
    both = [open_dataset("key", str(tmp_path / f"day={day}"), {"user": ""}).fingerprint for day in "12"]
    assert both[0] == both[1]


def test_missing_column_names_file_key_and_nearest(tmp_path):
    write(tmp_path / "a.parquet")
    bad = write(tmp_path / "b.parquet", {"users": [1], "item": [2]})
    message = refusal(lambda: open_users(tmp_path))
    assert message.startswith("config key 'features.user': ")
    assert f"file '{bad}' has no column 'user'" in message
    assert "did you mean 'users'?" in message and "(it has: users, item)" in message


def test_two_columns_of_one_name(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], ["user", "user"]), tmp_path / "a.parquet")
    assert "2 columns 'user'" in refusal(lambda: open_users(tmp_path))


@pytest.mark.parametrize("content", [b"", b"user,item\n1,2\n", b"PAR1 and then nothing PAR1"])
def test_file_that_is_not_parquet(tmp_path, content):
    file = tmp_path / "a.parquet"
    file.write_bytes(content)
    message = refusal(lambda: open_users(tmp_path))
    assert "'data.train'" in message and f"'{file}' is not a readable Parquet file" in message


def test_files_without_rows(tmp_path):
    write(tmp_path / "a.parquet", {"user": pa.array([], pa.int64())})
    message = refusal(lambda: open_users(tmp_path))
    assert "'data.train'" in message and str(tmp_path) in message and "no rows" in message


# Rows


def test_reader_gives_the_rows_of_a_segment(tmp_path):
    file = write(tmp_path / "a.parquet", {"user": list(range(10)), "other": ["x"] * 10}, row_group_rows=4)
    dataset = open_users(file)
    table = SegmentReader(dataset).read(dataset.row_groups.segment(1, 1, 3))
    assert table.to_pydict() == {"user": [5, 6]}


def test_reader_gives_the_columns_asked_for_in_their_order(tmp_path):
    write(tmp_path / "a.parquet", {"a": [1], "a.b": [2], "c": [3]})
    columns = {"c": "key", "a": "key"}
    dataset = pickle.loads(pickle.dumps(open_dataset("data.train", str(tmp_path), columns)))
    assert SegmentReader(dataset).read(dataset.row_groups.segment(0)).to_pydict() == {"c": [3], "a": [1]}
    assert SegmentReader(dataset, ["a"]).read(dataset.row_groups.segment(0)).to_pydict() == {"a": [1]}
    assert list(SegmentReader(dataset).read(dataset.row_groups.segment(0)).column_names) == ["c", "a"]


def test_streams_in_one_row_group_decode_it_once(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet", {"user": list(range(80))})
    decoded = []
    start = threading.Barrier(8)
    original = SegmentReader.row_group

    def count(reader: SegmentReader, number: int) -> pa.Table:
        decoded.append(number)
        return original(reader, number)

    monkeypatch.setattr(SegmentReader, "row_group", count)
    dataset = open_users(file)
    reader = SegmentReader(dataset)

    def read(i: int) -> list[int]:
        start.wait(10)
        return reader.read(dataset.row_groups.segment(0, 10 * i, 10 * i + 10)).column("user").to_pylist()

    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(read, range(8)))
    assert [user for piece in pieces for user in piece] == list(range(80))
    assert decoded == [0]


def test_reader_keeps_few_row_groups(tmp_path):
    dataset = open_users(write(tmp_path / "a.parquet", {"user": list(range(100))}, row_group_rows=2))
    reader = SegmentReader(dataset)
    values = [reader.read(dataset.row_groups.segment(i % 50, 1, 2)).column("user")[0].as_py() for i in range(80)]
    assert values == [2 * (i % 50) + 1 for i in range(80)]
    assert len(reader._recent) == 2
    for i in range(50):  # nobody else wants rows of these
        reader.read(dataset.row_groups.segment(i))
    assert list(reader._recent) == [28, 29]


def test_reader_keeps_few_footers_and_parses_them_once(tmp_path, monkeypatch):
    for i in range(30):
        write(tmp_path / f"{i:02}.parquet", {"user": [i, i]}, row_group_rows=1)
    dataset = open_users(tmp_path)
    reader = SegmentReader(dataset)
    monkeypatch.setattr(group_footers, "_KEPT_BYTES", 3 * pq.read_metadata(tmp_path / "00.parquet").serialized_size)
    values = [reader.read(dataset.row_groups.segment(i)).column("user")[0].as_py() for i in range(60)]
    assert values == [i // 2 for i in range(60)]
    kept = reader._footers._kept
    assert [os.path.basename(path) for path, _, _ in kept] == ["27.parquet", "28.parquet", "29.parquet"]
    assert reader._footers._num_bytes == sum(footer.serialized_size for _, footer, _ in kept.values())


def test_damaged_row_group_is_named(tmp_path):
    file = write(tmp_path / "a.parquet", {"user": list(range(100))}, row_group_rows=50)
    footer = pq.read_metadata(file).row_group(1).column(0)
    content = bytearray(file.read_bytes())
    content[(footer.dictionary_page_offset or footer.data_page_offset) + footer.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
    dataset = open_users(file)
    reader = SegmentReader(dataset)
    assert reader.read(dataset.row_groups.segment(0)).num_rows == 50
    message = refusal(lambda: reader.read(dataset.row_groups.segment(1)))
    assert f"column 'user' of row group 1 of '{file}' cannot be read (the checksum of a page is wrong)" in message
    unchecked = open_dataset("data.train", str(file), USER, options=DataConfig(verify_checksums=False))
    assert SegmentReader(unchecked).read(unchecked.row_groups.segment(1)).num_rows == 50


def test_read_column_joins_files_and_types(tmp_path):
    write(tmp_path / "a.parquet", {"user": pa.array([1, 2], pa.int8())}, row_group_rows=1)
    write(tmp_path / "b.parquet", {"user": pa.array([300], pa.int64())})
    column = read_column(open_users(tmp_path), "user")
    assert isinstance(column, pa.Array)
    assert column.to_pylist() == [1, 2, 300]


def test_read_column_joins_dictionaries(tmp_path):
    write(tmp_path / "a.parquet", {"user": pa.array(["x", "y"]).dictionary_encode()})
    write(tmp_path / "b.parquet", {"user": pa.array(["z", "x"]).dictionary_encode()})
    assert read_column(open_users(tmp_path), "user").to_pylist() == ["x", "y", "z", "x"]


def test_read_head(tmp_path):
    write(tmp_path / "a.parquet", {"user": [5, 6, 7], "other": [0, 0, 0]}, row_group_rows=2)
    for num_rows, users in ((1, [5]), (2, [5, 6]), (100, [5, 6])):
        assert read_head(open_users(tmp_path), num_rows).to_pydict() == {"user": users}


def test_read_head_of_a_damaged_file(tmp_path):
    file = write(tmp_path / "a.parquet")
    dataset = open_users(file)
    file.write_bytes(b"")
    assert f"'{file}' is not what it was" in refusal(lambda: read_head(dataset, 1))


def test_read_head_stops_early(tmp_path):
    write(tmp_path / "a.parquet", {"user": list(range(1000)), "name": [str(i % 7) for i in range(1000)]})
    dataset = open_columns(tmp_path, "user", "name", filter="name == '3'")
    assert read_head(dataset, 3).to_pydict() == {"user": [3, 10, 17], "name": ["3", "3", "3"]}
    whole = [i for i in range(1000) if i % 7 == 3]
    assert read_head(dataset, 10_000).column("user").to_pylist() == whole


def test_read_head_holds_a_dictionary_once(tmp_path):
    names = [f"name {i}" for i in range(20_000)]
    write(tmp_path / "a.parquet", {"user": list(range(20_000)), "name": names})
    head = read_head(open_columns(tmp_path, "user", "name", filter="user >= 15000"), 10)
    assert head["user"].to_pylist() == list(range(15_000, 15_010))
    dictionaries = [chunk.dictionary for chunk in head["name"].chunks]  # a copy for each batch that Arrow reads
    assert len(dictionaries) == 1


# Types that differ from file to file

D = pa.dictionary(pa.int32(), pa.string())
DRIFTS = [
    ([pa.array([1, 2], pa.int32()), pa.array([2**40], pa.int64())], pa.int64(), [1, 2, 2**40]),
    ([pa.array([1], pa.uint8()), pa.array([-1], pa.int8())], pa.int16(), [1, -1]),
    ([pa.array([0.5], pa.float32()), pa.array([0.1])], pa.float64(), [0.5, 0.1]),
    ([pa.array([2**60 + 1]), pa.array([0.5])], pa.float64(), [float(2**60 + 1), 0.5]),
    ([pa.array(["a"]), pa.array(["b"], pa.large_string())], pa.string(), ["a", "b"]),
    ([pa.array(["a"]), pa.array(["b"], pa.string_view())], pa.string(), ["a", "b"]),
    ([pa.array(["a"]), pa.array(["b", None]).dictionary_encode(), pa.array(["c"])], pa.string(), ["a", "b", None, "c"]),
    ([pa.array(["b"]).dictionary_encode(), pa.array(["a"], pa.large_string())], pa.string(), ["b", "a"]),
    ([pa.array([[1], None]), pa.array([[2]], pa.large_list(pa.int64()))], pa.list_(pa.int64()), [[1], None, [2]]),
    (
        [pa.array([[1], []]), pa.array([[2, 3], None], pa.list_(pa.int64(), 2))],
        pa.list_(pa.int64()),
        [[1], [], [2, 3], None],
    ),
    (
        [pa.array([[1, 2]], pa.list_(pa.int32(), 2)), pa.array([[3]], pa.list_(pa.int64(), 1))],
        pa.list_(pa.int64()),
        [[1, 2], [3]],
    ),
    ([pa.array([["a"]]), pa.array([["b"]], pa.list_(D))], pa.list_(pa.string()), [["a"], ["b"]]),
    ([pa.array([1], pa.timestamp("s")), pa.array([1], pa.timestamp("us"))], pa.timestamp("us"), None),
    (
        [pa.array([1], pa.timestamp("us", "UTC")), pa.array([1], pa.timestamp("us", "Asia/Tokyo"))],
        pa.timestamp("us", "UTC"),
        None,
    ),
    ([pa.nulls(2), pa.array([3])], pa.int64(), [None, None, 3]),
    ([pa.array([[3]]), pa.nulls(1)], pa.list_(pa.int64()), [[3], None]),
    ([pa.nulls(1), pa.array(["x"])], pa.string(), [None, "x"]),
]


@pytest.mark.parametrize(
    ("arrays", "kind", "values"), DRIFTS, ids=[str(kind) + str(i) for i, (_, kind, _) in enumerate(DRIFTS)]
)
def test_types_that_differ(tmp_path, arrays, kind, values):
    for i, array in enumerate(arrays):
        write(tmp_path / f"{i}.parquet", {"user": array})
    dataset = open_users(tmp_path)
    assert dataset.schema.field("user").type == kind
    column = read_column(dataset, "user")
    assert column.type == kind
    if values is None:
        values = pa.chunked_array([array.cast(kind) for array in arrays]).to_pylist()
    assert column.to_pylist() == values
    for i, array in enumerate(arrays):
        found = SegmentReader(dataset).read(dataset.row_groups.segment(i)).schema.field("user").type
        assert decode.plain_type(found) == kind
        assert SegmentReader(dataset, ["user"]).head(i, 9).num_rows == len(array)


INCOMPATIBLE = [
    (pa.array([1]), pa.array(["1"])),
    (pa.array([1]), pa.array([[1]])),
    (pa.array([True]), pa.array([1])),
    (pa.array([1], pa.timestamp("us")), pa.array([1], pa.timestamp("us", "UTC"))),
    (pa.array([1], pa.timestamp("us")), pa.array([1], pa.date32())),
    (pa.array([["a"]]), pa.array([[1]])),
    (pa.array([{"a": 1}]), pa.array([1])),
]


@pytest.mark.parametrize(("first", "second"), INCOMPATIBLE)
def test_types_that_do_not_go_together(tmp_path, first, second):
    write(tmp_path / "a.parquet", {"user": first})
    write(tmp_path / "b.parquet", {"user": pa.nulls(1)})
    bad = write(tmp_path / "c.parquet", {"user": second})
    message = refusal(lambda: open_users(tmp_path))
    plain = [decode.plain_type(array.type) for array in (first, second)]
    assert f"column 'user' is {plain[1]} in '{bad}', but {plain[0]} in the files before it" in message


def test_a_value_that_no_common_type_holds(tmp_path):
    write(tmp_path / "a.parquet", {"user": pa.array([-1])})
    bad = write(tmp_path / "b.parquet", {"user": pa.array([2**63], pa.uint64())})
    message = refusal(lambda: read_column(open_users(tmp_path), "user"))
    assert f"column 'user' of row group 0 of '{bad}' is uint64" in message and "not int64" in message


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "head"])
def test_a_row_group_takes_little_beyond_itself_while_it_is_decoded(tmp_path, whole):
    lists = pa.ListArray.from_arrays(pa.array(range(0, 480_001, 24), pa.int32()), pa.array(range(480_000), pa.int64()))
    names = [f"list{i}" for i in range(12)]
    write(tmp_path / "a.parquet", dict.fromkeys(names, lists), row_group_rows=20_000)
    dataset = open_dataset("data.train", str(tmp_path), dict.fromkeys(names, "config key 'features'"))
    with arrow_pool() as pool:
        reader = SegmentReader(dataset, names)
        decoded = (reader.row_group(0) if whole else reader.head(0, 20_000)).nbytes
    assert decoded < pool.max_memory() < 1.5 * decoded
