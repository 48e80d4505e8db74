"""What a resumed run takes from the cache of footers and counts, and what it reads again."""

import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from parquet_files import open_columns

from recsys.config import DataConfig
from recsys.data import footers
from recsys.data.dataset import Dataset
from recsys.data.decode import SegmentReader
from recsys.data.footer_cache import changed_files
from recsys.data.footers import FooterParser
from recsys.data.parquet import open_dataset, read_column


class Work:
    """Notes which footers are parsed and how many row groups are counted."""

    def __init__(self, monkeypatch, folder: Path) -> None:
        self.parsed: list[str] = []
        self.counted = 0
        self.folder = folder
        original = FooterParser.parse

        def parse(parser: FooterParser, name: str, content: bytes):
            self.parsed.append(os.path.basename(name))
            return original(parser, name, content)

        monkeypatch.setattr(FooterParser, "parse", parse)
        count = SegmentReader.count

        def counted(reader: SegmentReader, number: int) -> int:
            self.counted += 1
            return count(reader, number)

        monkeypatch.setattr(SegmentReader, "count", counted)

    def open(self, filter: str | None = "x >= 1", columns: str = "x", cache: str = "run/cache", **options) -> Dataset:
        self.parsed, self.counted = [], 0
        wanted = dict.fromkeys(columns, "key")
        cached = self.folder / cache
        return open_dataset("data.train", str(self.folder), wanted, filter=filter, cache=cached, **options)


def write(path: Path, values: list, kind: pa.DataType | None = None) -> None:
    pq.write_table(
        pa.table({"x": pa.array(values, kind), "y": values}), path, row_group_size=2, write_page_checksum=True
    )


@pytest.fixture
def work(tmp_path, monkeypatch) -> Work:
    for name in "abc":
        write(tmp_path / f"{name}.parquet", [0, 1, 1, 2, 0, 0])
    return Work(monkeypatch, tmp_path)


def test_nothing_is_found_twice(work):
    first = work.open()
    assert sorted(work.parsed) == ["a.parquet", "b.parquet", "c.parquet"] and work.counted == 3
    again = work.open()
    assert work.parsed == [] and work.counted == 0
    assert again.fingerprint == first.fingerprint and again.schema == first.schema
    assert again.row_groups.num_rows.tolist() == [1, 2] * 3
    assert again.row_groups.num_bytes.tolist() == first.row_groups.num_bytes.tolist() == [4, 8] * 3
    assert read_column(again, "x").to_pylist() == [1, 1, 2] * 3


def test_changed_and_new_files_are_read_again_and_vanished_ones_forgotten(work, tmp_path):
    work.open()
    write(tmp_path / "b.parquet", [5, 0])
    write(tmp_path / "d.parquet", [7, 0])
    (tmp_path / "a.parquet").unlink()
    assert read_column(work.open(), "x").to_pylist() == [5, 1, 1, 2, 7]
    assert sorted(work.parsed) == ["b.parquet", "d.parquet"] and work.counted == 2
    assert read_column(work.open(), "x").to_pylist() == [5, 1, 1, 2, 7]
    assert work.parsed == []


def test_a_file_with_another_time_is_read_again(work, tmp_path):
    work.open()
    os.utime(tmp_path / "c.parquet", ns=(1, 1))
    work.open()
    assert work.parsed == ["c.parquet"]


def test_other_filters_and_columns_find_anew(work):
    work.open()
    for options in ({"filter": "x >= 2"}, {"filter": None}, {"columns": "xy"}):
        work.open(**options)
        assert len(work.parsed) == 3, options


def test_max_rows_is_no_part_of_the_cache(work):
    assert work.open(filter=None, max_rows=3).num_rows == 3
    assert work.open(filter=None).num_rows == 18 and work.parsed == []


def test_counts_of_other_types_are_found_anew(work, tmp_path):
    """0.5 is compared with integers as `x >= 1`, and with floats as itself."""
    dataset = work.open(filter="x > 0.5")
    assert dataset.num_rows == 9
    write(tmp_path / "d.parquet", [0.75, 0.25], pa.float64())
    assert work.open(filter="x > 0.5").num_rows == 10
    assert work.parsed == ["d.parquet"] and work.counted == 10


def test_partitions_left_out_stay_so(work, tmp_path):
    for day in range(3):
        (tmp_path / f"day={day}").mkdir()
        write(tmp_path / f"day={day}" / "p.parquet", [day, day])
    for name in "abc":
        (tmp_path / f"{name}.parquet").unlink()
    assert read_column(work.open(filter="day >= 1"), "x").to_pylist() == [1, 1, 2, 2]
    assert len(work.parsed) == 2
    work.open(filter="day >= 1")
    assert not work.parsed


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "flipped", "other", "header"])
def test_a_damaged_cache_is_ignored(work, tmp_path, damage, caplog):
    first = work.open()
    cache = tmp_path / "run" / "cache"
    content = bytearray(cache.read_bytes())
    if damage == "other":
        pq.write_table(pa.table({"x": [1]}), cache)
    elif damage == "header":
        pq.write_table(pq.read_table(cache).replace_schema_metadata({"footers": "[]"}), cache)
    else:
        content[60] ^= 1
        cache.write_bytes({"empty": b"", "text": b"{}", "truncated": content[:-30], "flipped": content}[damage])
    assert work.open().fingerprint == first.fingerprint
    assert len(work.parsed) == 3 and "is damaged" in caplog.text
    work.open()
    assert work.parsed == []


def test_a_cache_that_cannot_be_written_ends_no_run(work, tmp_path, caplog):
    (tmp_path / "taken").touch()
    assert work.open(cache="taken/cache").num_rows == 9
    assert "cannot be written" in caplog.text


def test_bad_files_are_tried_again(work, tmp_path):
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    assert work.open(options=DataConfig(max_bad_files=1)).bad_files == (str(tmp_path / "b.parquet"),)
    write(tmp_path / "b.parquet", [9])
    dataset = work.open(options=DataConfig(max_bad_files=1))
    assert dataset.bad_files == () and work.parsed == ["b.parquet"]


def test_arrow_parses_each_schema_once_and_no_row_groups(tmp_path, monkeypatch):
    parsed: list[int] = []
    original = footers.parsed_footer
    monkeypatch.setattr(footers, "parsed_footer", lambda content: (parsed.append(len(content)), original(content))[1])
    schema = pa.schema({"x": pa.int64(), "l": pa.list_(pa.int64())})
    for i, n in enumerate((1, 70, 7, 0, 1000)):
        table = pa.table({"x": range(n), "l": [[0] * i for i in range(n)]}, schema)
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=30)
    wanted = {"x": "key", "l": "key"}
    dataset = open_dataset("data.train", str(tmp_path), wanted)
    assert len(parsed) == 1 and parsed[0] < (tmp_path / "3.parquet").stat().st_size  # where no row groups are
    expected = [pq.read_metadata(tmp_path / f"{i}.parquet") for i in range(5)]
    groups = [(file, i) for file, metadata in enumerate(expected) for i in range(metadata.num_row_groups)]
    rows = [expected[file].row_group(i).num_rows for file, i in groups]
    elements = [expected[file].row_group(i).column(1).num_values for file, i in groups]
    found = dataset.row_groups
    kept = [i for i, n in enumerate(rows) if n]
    assert found.num_rows.tolist() == [rows[i] for i in kept]
    assert found.num_bytes.tolist() == [4 * (2 * rows[i] + elements[i]) for i in kept]
    pq.write_table(pa.table({"l": [[1], []]}), tmp_path / "5.parquet")
    parsed.clear()
    assert open_columns(tmp_path / "5.parquet", "l").num_rows == 2 and len(parsed) == 2  # where no column tells rows
    pq.write_table(pa.table({"x": [1], "l": [[1]], "more": [1]}), tmp_path / "5.parquet")
    assert open_dataset("data.train", str(tmp_path), wanted).num_rows == 1079


def test_changed_files_are_named(work, tmp_path):
    first = work.open(filter=None)
    kept = tmp_path / "run/cache"
    assert changed_files(kept, first) == ""
    write(tmp_path / "b.parquet", [0, 1, 1, 2, 1, 0])
    again = work.open(filter=None, cache="other")
    assert again.fingerprint != first.fingerprint
    assert changed_files(kept, again) == f" ('{tmp_path}/b.parquet' was rewritten)"
    shutil.copytree(tmp_path, tmp_path / "moved", ignore=lambda *_: ["run", "other", "moved", "c.parquet"])
    moved = open_columns(tmp_path / "moved", "x")
    where = f"they lie in '{tmp_path}/moved', and lay in '{tmp_path}'; "
    assert changed_files(kept, moved) == f" ({where}'c.parquet' is gone; 'b.parquet' is another there)"
    shutil.rmtree(tmp_path / "moved")
    write(tmp_path / "d.parquet", [1])
    write(tmp_path / "a.parquet", [1, 2])
    said = changed_files(kept, work.open(filter=None, cache="third"))
    assert "d.parquet' is new; " in said and "a.parquet' has 2 rows, and had 6; " in said
    cut = open_columns(tmp_path, "x", max_rows=2)
    assert "gone" not in changed_files(kept, cut, all_rows=False)


def test_files_without_a_change_are_not_named_where_some_of_their_rows_are_left_out(work, tmp_path):
    work.open(filter="x == 2")
    write(tmp_path / "b.parquet", [0, 2, 1, 2, 1, 0])
    changed = changed_files(tmp_path / "run/cache", work.open(filter="x == 2", cache="other"))
    assert changed == f" ('{tmp_path}/b.parquet' was rewritten)"
    work.open(filter=None)
    cut = open_columns(tmp_path, "x", max_rows=3)
    assert changed_files(tmp_path / "run/cache", cut, all_rows=False) == ""


def test_files_that_do_not_tell_when_they_changed_are_read_again(work, tmp_path):
    for name in "abc":
        os.utime(tmp_path / f"{name}.parquet", (0, 0))
    work.open()
    work.open()
    assert len(work.parsed) == 3
