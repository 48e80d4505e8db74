"""Damaged and odd files: each is read as it was meant, or ends in one sentence that names it."""

import gzip
import logging
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from parquet_files import open_columns, read_all
from thread_ranks import ALONE

from recsys.config import DataConfig
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.facts import measure
from recsys.data.parquet import open_dataset, read_column, read_head
from recsys.data.spec import FloatColumn
from recsys.data.storage import BadDataError
from recsys.data.thrift import read_fields
from recsys.errors import UserError

USERS = pa.table({"user": list(range(100)), "name": [f"n{i % 7}" for i in range(100)]})


def write(path: Path, table: pa.Table | dict = USERS, **options) -> Path:
    pq.write_table(pa.table(table), path, **{"write_page_checksum": True, "row_group_size": 50, **options})
    return path


def refusal(action, kind: type[UserError] = UserError) -> UserError:
    """Return the error, whose message must be one line."""
    with pytest.raises(kind) as caught:
        action()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    return caught.value


# Files that cannot be opened


def footer_start(content: bytes) -> int:
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def cut_footer(content: bytes) -> bytes:
    return content[: footer_start(content) + 40]


def zeroed_footer(content: bytes) -> bytes:
    start = footer_start(content)
    return content[:start] + bytes(len(content) - 8 - start) + content[-8:]


def torn_footer(content: bytes) -> bytes:
    start = footer_start(content) + 200
    return content[:start] + bytes(64) + content[start + 64 :]


def random_footer(content: bytes) -> bytes:
    start = footer_start(content)
    return content[:start] + random.Random(1).randbytes(len(content) - 8 - start) + content[-8:]


def feather(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.feather.write_feather(USERS, sink)
    return sink.getvalue().to_pybytes()


UNREADABLE = {
    "empty": (lambda c: b"", "it is empty"),
    "magic only": (lambda c: b"PAR1", "it begins as one, but is cut off"),
    "twice magic": (lambda c: b"PAR1PAR1", "it begins as one, but is cut off"),
    "three bytes": (lambda c: b"PAR", "it does not end as one does"),
    "text": (lambda c: b"user,item\n1,2\n", "it does not end as one does"),
    "json": (lambda c: b'{"user": 1}\n' * 1000, "it does not end as one does"),
    "feather": (feather, "it does not end as one does"),
    "gzipped": (gzip.compress, "it does not end as one does"),
    "cut in the data": (lambda c: c[: len(c) // 3], "it begins as one, but is cut off"),
    "cut in the footer": (cut_footer, "it begins as one, but is cut off"),
    "cut in the last bytes": (lambda c: c[:-1], "it begins as one, but is cut off"),
    "more at the end": (lambda c: c + b"\n", "it begins as one, but is cut off"),
    "zeros at the end": (lambda c: c + bytes(4096), "it begins as one, but is cut off"),
    "footer longer than the file": (lambda c: c[:-8] + b"\xff\xff\xff\x7fPAR1", "its footer is longer than the file"),
    "footer of no length": (lambda c: c[:-8] + b"\0\0\0\0PAR1", ""),
    "footer too short": (lambda c: c[:-8] + b"\x20\0\0\0PAR1", ""),
    "footer too long": (lambda c: c[:-8] + (len(c) - 20).to_bytes(4, "little") + b"PAR1", ""),
    "zeroed footer": (zeroed_footer, ""),
    "torn footer": (torn_footer, ""),
    "random footer": (random_footer, ""),
    "encrypted footer": (lambda c: c[:-4] + b"PARE", "it is encrypted"),
    "zeros": (lambda c: bytes(len(c)), "it does not end as one does"),
}


@pytest.mark.parametrize("damage", UNREADABLE)
def test_footers_that_cannot_be_read(tmp_path, damage, caplog):
    file = write(tmp_path / "a.parquet")
    change, why = UNREADABLE[damage]
    file.write_bytes(change(file.read_bytes()))
    error = refusal(lambda: open_columns(file, "user", "name"), BadDataError)
    assert f"'data.train': '{file}' is not a readable Parquet file ({why}" in str(error)
    assert (error.path, error.row_group) == (str(file), None)
    write(tmp_path / "b.parquet")
    with caplog.at_level(logging.WARNING, "recsys"):
        dataset = open_columns(tmp_path, options=DataConfig(max_bad_files=1))
    assert dataset.bad_files == (str(file),) and dataset.num_rows == 100
    assert [record.getMessage() for record in caplog.records if str(file) in record.getMessage()]


def test_links_to_nowhere_pipes_and_what_may_not_be_read(tmp_path):
    (tmp_path / "a.parquet").symlink_to(tmp_path / "gone")
    assert "it does not exist" in str(refusal(lambda: open_columns(tmp_path), BadDataError))
    assert "'a.parquet" in str(refusal(lambda: open_columns(tmp_path / "a.parquet"))).replace(str(tmp_path) + "/", "")
    assert "it does not exist" in str(refusal(lambda: open_columns(tmp_path / "*.parquet"), BadDataError))
    (tmp_path / "a.parquet").unlink()
    os.mkfifo(tmp_path / "a.parquet")
    assert "it is empty" in str(refusal(lambda: open_columns(tmp_path), BadDataError))
    (tmp_path / "a.parquet").unlink()
    (tmp_path / "a.parquet").mkdir()
    assert "no *.parquet file; it is empty" in str(refusal(lambda: open_columns(tmp_path / "a.parquet")))
    if os.geteuid():
        write(tmp_path / "b.parquet").chmod(0)
        assert "there is no permission to read it" in str(refusal(lambda: open_columns(tmp_path / "b.parquet")))


def test_more_bad_files_than_allowed(tmp_path):
    for i in range(6):
        write(tmp_path / f"{i}.parquet")
    for i in (1, 3, 4):
        (tmp_path / f"{i}.parquet").write_bytes(b"")
    message = str(refusal(lambda: open_columns(tmp_path, options=DataConfig(max_bad_files=2)), BadDataError))
    assert f"'{tmp_path / '1.parquet'}' is not a readable" in message
    assert "nor are 2 more, of 6 files in all" in message and "data.max_bad_files=3" in message
    dataset = open_columns(tmp_path, options=DataConfig(max_bad_files=3))
    assert dataset.num_files == 3 and len(dataset.bad_files) == 3


def test_bad_data_errors_cross_processes():
    error = pickle.loads(pickle.dumps(BadDataError("it is broken", "a.parquet", 3)))
    assert (str(error), error.path, error.row_group) == ("it is broken", "a.parquet", 3)


# Files that change after they were opened


def test_files_that_change_or_vanish(tmp_path):
    file = write(tmp_path / "a.parquet")
    content = file.read_bytes()
    dataset = open_columns(file, "user", "name")

    def message() -> str:
        for read in (read_head, lambda dataset, _: read_all(dataset), lambda dataset, _: read_column(dataset, "name")):
            error = refusal(lambda: read(dataset, 10), BadDataError)  # noqa: B023
            assert str(file) in str(error) and "row group 0" in str(error)
            assert (error.path, error.row_group) == (str(file), 0)
        return str(error)

    file.unlink()
    assert "not what it was when the run began (it does not exist any more)" in message()
    file.write_bytes(content[:-100])
    assert f"it has {len(content) - 100:,} bytes, and had {len(content):,}" in message()
    file.write_bytes(b"")
    assert "it has 0 bytes" in message()
    write(file, {"user": list(range(1000)), "name": ["x"] * 1000})
    assert "start the run again" in message()
    file.write_bytes(content)
    assert read_all(dataset) == USERS.set_column(1, "name", read_all(dataset)["name"])
    file.unlink()
    file.mkdir()
    assert f"'{file}' cannot be read" in str(refusal(lambda: read_all(dataset), BadDataError))


def test_a_file_of_the_same_size_with_other_rows_or_columns(tmp_path):
    """Padded to one size by a remark in the footer."""

    def padded(table: dict, row_group_size: int = 50) -> Path:
        file, remark, size = tmp_path / "a.parquet", 500, 4000
        for _ in range(2):
            data = pa.table(table)
            with pq.ParquetWriter(file, data.schema, store_schema=False, compression="none") as writer:
                writer.write_table(data, row_group_size)
                writer.add_key_value_metadata({"remark": "x" * remark})
            remark += size - file.stat().st_size
        assert file.stat().st_size == size
        return file

    dataset = open_columns(padded({"user": range(100)}))
    padded({"user": range(60)}, 30)
    assert "it has 30 rows there, and had 50" in str(refusal(lambda: read_all(dataset), BadDataError))
    padded({"item": range(100)})
    assert "it has no column 'user' any more" in str(refusal(lambda: read_all(dataset), BadDataError))
    for other in (range(50), [*range(99), None]):
        padded({"user": other})
        assert "(its footer is another); start the run again" in str(refusal(lambda: read_all(dataset), BadDataError))


# Flipped bits


def pages(content: bytes, metadata: pq.FileMetaData) -> Iterator[tuple[int, str, int, int, int]]:
    """Yield (row group, column, start of the header, start of the body, end) of all pages."""
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            start = chunk.dictionary_page_offset or chunk.data_page_offset
            stop = start + chunk.total_compressed_size
            while start < stop:
                header, body = read_fields(content, start)
                assert 4 in header  # the checksum
                yield group, metadata.schema.column(number).path.split(".")[0], start, body, body + header[3]
                start = body + header[3]


class Flipped:
    """A file written by our writer, of which single bits are flipped and mended again."""

    def __init__(self, path: Path, num_rows: int, row_group_rows: int) -> None:
        rng = np.random.default_rng(0)
        lengths = rng.integers(0, 4, num_rows)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        ids = pa.array(rng.integers(0, 1000, lengths.sum()))
        table = {
            **{f"id{i}": rng.integers(0, 10 ** (3 * i), num_rows) for i in range(1, 5)},
            "small": pa.array(rng.integers(0, 5, num_rows), pa.int8()),
            "float": rng.random(num_rows).astype(np.float32),
            "double": rng.random(num_rows),
            "bool": rng.integers(0, 2, num_rows).astype(bool),
            "name": pa.array(rng.integers(0, 50, num_rows)).cast(pa.string()),
            "text": pa.array(rng.integers(0, 10**9, num_rows)).cast(pa.string()),
            "nullable": pa.array(rng.integers(0, 9, num_rows), mask=rng.random(num_rows) < 0.3),
            "list": pa.ListArray.from_arrays(offsets, ids),
            "names": pa.ListArray.from_arrays(offsets, ids.cast(pa.string())),
        }
        pq.write_table(
            pa.table(table), path, row_group_size=row_group_rows, compression="zstd", write_page_checksum=True
        )
        self.path, self.content = path, path.read_bytes()
        self.pages = list(pages(self.content, pq.read_metadata(path)))
        self.dataset = open_columns(path, *table)

    def read(self, place: int, bit: int, group: int) -> pa.Table:
        """Return a row group while a bit is flipped."""
        with open(self.path, "r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes([self.content[place] ^ 1 << bit]), place)
            try:
                return SegmentReader(self.dataset).read(self.dataset.row_groups.segment(group))
            finally:
                os.pwrite(file.fileno(), self.content[place : place + 1], place)


@pytest.mark.parametrize("key", ["data.train", "data.valid"])
def test_rows_that_may_be_left_out_stop_no_pass_over_the_training_data(tmp_path, key):
    """A head, counts of a filter, and means are of what can be read; the rest counts as matching, for training."""
    file = write(tmp_path / "a.parquet", {"x": [*range(40)], "y": [1.0] * 40}, row_group_size=10)
    content = bytearray(file.read_bytes())
    for group, name, _, start, end in pages(content, pq.read_metadata(file)):
        if (group, name) in [(0, "y"), (1, "x")]:
            content[(start + end) // 2] ^= 1
    file.write_bytes(content)

    def opened(most: int, cache: Path = tmp_path / "footers") -> Dataset:
        options = DataConfig(max_bad_rows=most)
        return open_dataset(key, str(file), {"y": "y"}, filter="x < 12 or x > 35", options=options, cache=cache)

    for _ in range(2 if key == "data.train" else 0):
        dataset = opened(20)
        assert dataset.row_groups.num_rows.tolist() == [10, 10, 4] and dataset.head.number == 2
        assert [table.num_rows for table in SegmentReader(dataset).tables()] == [4]
        assert read_head(dataset, 9).num_rows == 4
        assert measure(dataset, {}, [FloatColumn("y", "y")], ALONE).floats["y"].mean == 1
        assert opened(19).head.number == 0
    # Footers keep no count of rows that could not be read.
    assert f"column 'x' of row group 1 of '{file}' cannot be read" in str(refusal(lambda: opened(0), BadDataError))
    if key == "data.valid":
        refusal(lambda: opened(20), BadDataError)


def test_each_of_120_flipped_bits_in_pages_is_found(tmp_path):
    flipped = Flipped(tmp_path / "a.parquet", 44_000, 22_000)
    kinds = {name for _, name, *_ in flipped.pages}
    assert len(kinds) == 13 and len(flipped.pages) > 2 * 2 * 13
    rng = random.Random(0)
    chosen = flipped.pages + rng.choices(flipped.pages, k=120 - len(flipped.pages))
    for group, column, _, start, stop in chosen:
        place, bit = rng.randrange(start, stop), rng.randrange(8)
        error = refusal(lambda: flipped.read(place, bit, group), BadDataError)  # noqa: B023
        assert f"column '{column}' of row group {group} of '{flipped.path}' cannot be read (the check" in str(error)
        assert (error.path, error.row_group) == (str(flipped.path), group)


@pytest.mark.slow
def test_flipped_bits_in_page_headers_change_no_values(tmp_path):
    """No checksum covers these. A flip is found, or it changes what nobody reads."""
    flipped = Flipped(tmp_path / "a.parquet", 90, 50)
    whole = list(SegmentReader(flipped.dataset).tables())
    places = [(place, group, name) for group, name, start, body, _ in flipped.pages for place in range(start, body)]
    rng = random.Random(0)
    found = 0
    for place, group, name in rng.choices(places, k=600):
        bit = rng.randrange(8)
        try:
            table = flipped.read(place, bit, group)
        except BadDataError as error:
            unread = f"column '{name}' of row group {group} of '{flipped.path}' cannot be read"
            # The digest of a footer is of what is read with it too, so that a file that is short is changed by any bit.
            assert unread in str(error) or "is not what it was when the run began" in str(error)
            found += 1
            continue
        assert table.to_pydict() == whole[group].to_pydict(), (place, bit, name)
    assert found > 250


def test_first_rows_do_not_refer_to_entries_that_a_dictionary_lacks(tmp_path):
    """Of pages without a checksum: who looks such an entry up reads any memory."""
    names = [f"n{i % 5}" for i in range(100)]  # of which three bits tell each
    table = {"name": names, "names": [[name] * (i % 3) for i, name in enumerate(names)]}
    path = write(tmp_path / "a.parquet", table, write_page_checksum=False, compression="none")
    dataset, content, found = open_columns(path, *table), path.read_bytes(), 0
    for number, column in enumerate(table):
        chunk = pq.read_metadata(path).row_group(0).column(number)
        stop = (chunk.dictionary_page_offset or chunk.data_page_offset) + chunk.total_compressed_size
        for place in range(stop - 20, stop):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :])
            try:
                read_head(dataset, 30)[column].cast(dataset.schema.field(column).type).validate(full=True)
            except BadDataError as error:
                assert f"column '{column}' of row group 0 of '{path}' cannot be read" in str(error)
                found += "its dictionary does not have" in str(error)
            path.write_bytes(content)
    assert found > 10


def test_texts_that_are_not_read_as_a_dictionary_are_not_to_blame(tmp_path):
    encoding = {"name": "DELTA_BYTE_ARRAY", "user": "PLAIN"}
    options = {"use_dictionary": False, "column_encoding": encoding, "compression": "none"}
    path = write(tmp_path / "a.parquet", USERS.select(["name", "user"]), **options)
    dataset, content = open_columns(path, "name", "user"), path.read_bytes()
    place = content.index(np.arange(10).tobytes())
    path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
    for action in (lambda: read_all(dataset), lambda: read_head(dataset, 9)):
        assert f"column 'user' of row group 0 of '{path}' cannot be read (the check" in str(refusal(action))


@pytest.mark.slow
def test_flipped_bits_in_footers_end_no_process(tmp_path):
    """A footer has no checksum either; values that are read without an error are right but for their types."""
    flipped = Flipped(tmp_path / "a.parquet", 40, 20)
    whole = read_all(flipped.dataset)
    rng = random.Random(0)
    start = footer_start(flipped.content)
    found = retyped = 0
    for _ in range(400):
        content = bytearray(flipped.content)
        content[rng.randrange(start, len(content))] ^= 1 << rng.randrange(8)
        flipped.path.write_bytes(content)
        try:
            dataset = open_columns(flipped.path, *whole.column_names)
            table = read_all(dataset)
        except UserError as error:
            assert str(flipped.path) in str(error) and "\n" not in str(error)
            found += 1
            continue
        retyped += dataset.schema != flipped.dataset.schema
        assert dataset.schema != flipped.dataset.schema or table.to_pydict() == whole.to_pydict()
    assert found > 120 and retyped < 10  # of Arrow's schema, which is a good part of a footer, nothing is read
