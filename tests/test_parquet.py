"""Finding files, reading footers and row groups, and what a user is told when they do not fit."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.order import Segment
from recsys.data.parquet import Dataset, SegmentReader, find_files, open_dataset, read_column, read_head
from recsys.errors import UserError

USER = {"user": "config key 'features.user'"}


def write(path: Path, table: pa.Table | dict | None = None, row_group_rows: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"user": [1, 2, 3]} if table is None else table
    pq.write_table(pa.table(data), path, row_group_size=row_group_rows, write_page_checksum=True)
    return path


def names(files: list[str], folder: Path) -> list[str]:
    return [os.path.relpath(file, folder) for file in files]


def open_users(*paths: Path, max_rows: int | None = None) -> Dataset:
    return open_dataset("data.train", [str(path) for path in paths], USER, max_rows)


def refusal(action) -> str:
    """Return the message of a UserError, which must be one line."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


# Finding


def test_find_searches_folders_in_depth_sorted_without_markers(tmp_path):
    for name in ("b.parquet", "a/z.parquet", "a/c.parquet", ".hidden.parquet", "_meta.parquet", "_tmp/x.parquet"):
        write(tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "notes.txt").touch()
    assert names(find_files("data.train", str(tmp_path)), tmp_path) == ["a/c.parquet", "a/z.parquet", "b.parquet"]


def test_find_below_a_hidden_folder(tmp_path):
    write(tmp_path / "_logs" / ".day" / "a.parquet")
    assert len(find_files("data.train", str(tmp_path / "_logs" / ".day"))) == 1


def test_find_takes_folders_that_are_named_like_files(tmp_path):
    write(tmp_path / "day.parquet" / "part-0.parquet")
    assert names(find_files("data.train", str(tmp_path)), tmp_path) == ["day.parquet/part-0.parquet"]


def test_find_keeps_the_order_of_a_list(tmp_path):
    for name in ("new/a.parquet", "old/a.parquet", "one.pq"):
        write(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("old", "one.pq", "new/*.parquet")]
    assert names(find_files("data.train", paths), tmp_path) == ["old/a.parquet", "one.pq", "new/a.parquet"]


def test_glob_matches_files_and_folders_sorted_without_markers(tmp_path):
    for name in ("2026-02/b.parquet", "2026-01/b.parquet", "2026-01/a.parquet", "2025-12/a.parquet", "2026-c.parquet"):
        write(tmp_path / name)
    found = names(find_files("data.train", str(tmp_path / "2026-*")), tmp_path)
    assert found == ["2026-01/a.parquet", "2026-01/b.parquet", "2026-02/b.parquet", "2026-c.parquet"]
    (tmp_path / "2026-01" / "_SUCCESS").touch()
    found = names(find_files("data.train", str(tmp_path / "2026-01" / "*")), tmp_path)
    assert found == ["2026-01/a.parquet", "2026-01/b.parquet"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    file = write(tmp_path / "day[1].parquet")
    assert find_files("data.train", str(file)) == [str(file)]


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "logs" / "a.parquet")
    assert find_files("data.train", "~/logs") == [str(file)]


@pytest.mark.parametrize("again", ["logs/a.parquet", "logs", "logs/*.parquet", "logs/../logs/a.parquet"])
def test_a_file_given_twice(tmp_path, again):
    file = write(tmp_path / "logs" / "a.parquet")
    message = refusal(lambda: find_files("data.valid", [str(file), str(tmp_path / again)]))
    assert "'data.valid'" in message and str(file) in message and "twice" in message


def test_path_that_does_not_exist_names_the_nearest(tmp_path):
    write(tmp_path / "logs" / "train" / "a.parquet")
    message = refusal(lambda: find_files("data.train", str(tmp_path / "logs" / "trian")))
    assert "'data.train'" in message and "does not exist" in message
    assert f"did you mean '{tmp_path / 'logs' / 'train'}'?" in message
    # The first folder that is wrong is the one to mend.
    message = refusal(lambda: find_files("data.train", str(tmp_path / "lgos" / "train" / "a.parquet")))
    assert f"did you mean '{tmp_path / 'logs'}'?" in message
    assert "did you mean" not in refusal(lambda: find_files("data.train", str(tmp_path / "zzz")))


def test_relative_path_that_does_not_exist(tmp_path, monkeypatch):
    write(tmp_path / "train.parquet")
    monkeypatch.chdir(tmp_path)
    assert "did you mean 'train.parquet'?" in refusal(lambda: find_files("data.train", "trian.parquet"))


def test_folder_without_parquet(tmp_path):
    assert "it is empty" in refusal(lambda: find_files("data.train", str(tmp_path)))
    (tmp_path / "clicks.csv").touch()
    message = refusal(lambda: find_files("data.train", str(tmp_path)))
    assert str(tmp_path) in message and "no *.parquet file" in message and "it holds clicks.csv" in message


def test_glob_without_match(tmp_path):
    pattern = str(tmp_path / "2026-*" / "*.parquet")
    message = refusal(lambda: find_files("data.test", pattern))
    assert "'data.test'" in message and f"no file matches '{pattern}'" in message


# Footers


def test_row_groups_of_all_files_in_order_without_empty_ones(tmp_path):
    write(tmp_path / "b.parquet", {"user": list(range(5))}, row_group_rows=2)
    write(tmp_path / "a.parquet", {"user": [7]})
    write(tmp_path / "c.parquet", {"user": pa.array([], pa.int64())})
    with pq.ParquetWriter(tmp_path / "d.parquet", pa.schema([("user", pa.int64())])) as writer:
        for rows in ([1], [], [2, 3]):
            writer.write_table(pa.table({"user": pa.array(rows, pa.int64())}))
    dataset = open_users(tmp_path)
    found = [(os.path.basename(group.path), group.index, group.num_rows) for group in dataset.row_groups]
    assert found == [
        ("a.parquet", 0, 1),
        ("b.parquet", 0, 2),
        ("b.parquet", 1, 2),
        ("b.parquet", 2, 1),
        ("d.parquet", 0, 1),
        ("d.parquet", 2, 2),
    ]
    assert (dataset.num_rows, dataset.num_files) == (9, 3)


def test_bytes_are_those_of_the_columns_read(tmp_path):
    table = {
        "user": list(range(1000)),
        "his.tory": [[i] * 20 for i in range(1000)],
        "unused": ["x" * 100 + str(i) for i in range(1000)],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet", use_dictionary=False)

    def num_bytes(*columns: str) -> int:
        return open_dataset("data.train", str(tmp_path), dict.fromkeys(columns, "key")).row_groups[0].num_bytes

    assert 8_000 <= num_bytes("user") < 9_000
    assert num_bytes("his.tory") >= 160_000
    assert num_bytes("user", "his.tory") == num_bytes("user") + num_bytes("his.tory")


def test_max_rows(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.parquet", {"user": list(range(10))}, row_group_rows=4)
    dataset = open_users(tmp_path, max_rows=13)
    assert [group.num_rows for group in dataset.row_groups] == [4, 4, 2, 3]
    assert read_column(dataset, "user").to_pylist() == [*range(10), 0, 1, 2]
    assert open_users(tmp_path, max_rows=1000).num_rows == 20


def test_fingerprint_notices_other_rows(tmp_path):
    first = open_users(write(tmp_path / "x" / "a.parquet"))
    assert first.fingerprint == open_users(write(tmp_path / "y" / "a.parquet")).fingerprint
    assert first.fingerprint != open_users(write(tmp_path / "z" / "a.parquet", {"user": [1, 2]})).fingerprint
    assert first.fingerprint != open_users(tmp_path / "x" / "a.parquet", max_rows=2).fingerprint


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


def test_schema_holds_the_types_of_all_files(tmp_path):
    for name, kind in (("a", pa.null()), ("b", pa.int8()), ("c", pa.int64()), ("d", pa.null())):
        write(tmp_path / f"{name}.parquet", {"user": pa.array([None], kind)})
    assert open_users(tmp_path).schema == pa.schema([("user", pa.int64())])


def test_types_that_do_not_go_together(tmp_path):
    write(tmp_path / "a.parquet", {"user": pa.array([1], pa.int32())})
    write(tmp_path / "b.parquet", {"user": pa.array([1], pa.int64())})
    bad = write(tmp_path / "c.parquet", {"user": ["1"]})
    message = refusal(lambda: open_users(tmp_path))
    assert f"column 'user' is string in '{bad}', but int64 in the files before it" in message


# Rows


def test_reader_gives_the_rows_of_a_segment(tmp_path):
    file = str(write(tmp_path / "a.parquet", {"user": list(range(10)), "other": ["x"] * 10}, row_group_rows=4))
    table = SegmentReader(["user"]).read(Segment(file, 1, 1, 3))
    assert table.column_names == ["user"]
    assert table.column("user").to_pylist() == [5, 6]


def test_streams_in_one_row_group_decode_it_once(tmp_path, monkeypatch):
    file = str(write(tmp_path / "a.parquet", {"user": list(range(80))}))
    decoded = []
    start = threading.Barrier(8)
    original = SegmentReader._decode

    def count(reader: SegmentReader, path: str, index: int) -> pa.Table:
        decoded.append((path, index))
        return original(reader, path, index)

    monkeypatch.setattr(SegmentReader, "_decode", count)
    reader = SegmentReader(["user"])

    def read(i: int) -> list[int]:
        start.wait(10)
        return reader.read(Segment(file, 0, 10 * i, 10 * i + 10)).column("user").to_pylist()

    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(read, range(8)))
    assert [user for piece in pieces for user in piece] == list(range(80))
    assert decoded == [(file, 0)]


def test_reader_keeps_few_row_groups(tmp_path):
    file = str(write(tmp_path / "a.parquet", {"user": list(range(100))}, row_group_rows=1))
    reader = SegmentReader(["user"])
    values = [reader.read(Segment(file, i % 100, 0, 1)).column("user")[0].as_py() for i in range(150)]
    assert values == [i % 100 for i in range(150)]
    assert len(reader._recent) <= 4


def test_damaged_row_group_is_named(tmp_path):
    file = write(tmp_path / "a.parquet", {"user": list(range(100))}, row_group_rows=50)
    footer = pq.read_metadata(file).row_group(1).column(0)
    content = bytearray(file.read_bytes())
    content[(footer.dictionary_page_offset or footer.data_page_offset) + footer.total_compressed_size - 1] ^= 1
    file.write_bytes(content)
    reader = SegmentReader(["user"])
    assert reader.read(Segment(str(file), 0, 0, 50)).num_rows == 50
    message = refusal(lambda: reader.read(Segment(str(file), 1, 0, 50)))
    assert f"row group 1 of '{file}' cannot be read" in message


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
    assert f"'{file}' cannot be read" in refusal(lambda: read_head(dataset, 1))


def test_a_path_that_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "'data.train'" in refusal(lambda: find_files("data.train", str(tmp_path / "pipe")))
