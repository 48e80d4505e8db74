"""Finding files on local and remote file systems, Hive partitions in paths, and retries."""

import os
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as fs
import pytest
from conversion import refusal
from parquet_files import open_columns, write

from recsys.data import storage
from recsys.data.decode import SegmentReader
from recsys.data.parquet import open_dataset, read_column
from recsys.data.sources import find_files
from recsys.data.storage import BadDataError, Storage, partition_keys


def find(paths, folder: Path) -> list[str]:
    """Return the names found, relative to a folder."""
    return [os.path.relpath(name, folder) for name in find_files("data.train", paths).names]


# Local files


def test_find_searches_folders_in_depth_sorted_without_markers(tmp_path):
    for name in ("b.parquet", "a/z.parquet", "a/c.parquet", ".hidden.parquet", "_meta.parquet", "_tmp/x.parquet"):
        write(tmp_path / name)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "notes.txt").touch()
    assert find(str(tmp_path), tmp_path) == ["a/c.parquet", "a/z.parquet", "b.parquet"]


def test_find_below_a_hidden_folder(tmp_path):
    write(tmp_path / "_logs" / ".day" / "a.parquet")
    assert find(str(tmp_path / "_logs" / ".day"), tmp_path) == ["_logs/.day/a.parquet"]


def test_find_takes_folders_that_are_named_like_files(tmp_path):
    write(tmp_path / "day.parquet" / "part-0.parquet")
    assert find(str(tmp_path), tmp_path) == ["day.parquet/part-0.parquet"]


def test_find_keeps_the_order_of_a_list(tmp_path):
    for name in ("new/a.parquet", "old/a.parquet", "one.pq"):
        write(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("old", "one.pq", "new/*.parquet")]
    assert find(paths, tmp_path) == ["old/a.parquet", "one.pq", "new/a.parquet"]


def test_glob_matches_files_and_folders_sorted_without_markers(tmp_path):
    for name in ("2026-02/b.parquet", "2026-01/b.parquet", "2026-01/a.parquet", "2025-12/a.parquet", "2026-c.parquet"):
        write(tmp_path / name)
    found = find(str(tmp_path / "2026-*"), tmp_path)
    assert found == ["2026-01/a.parquet", "2026-01/b.parquet", "2026-02/b.parquet", "2026-c.parquet"]
    (tmp_path / "2026-01" / "_SUCCESS").touch()
    for slash in ("/", "//"):
        found = find(str(tmp_path / "2026-01") + slash + "*", tmp_path)
        assert found == ["2026-01/a.parquet", "2026-01/b.parquet"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path):
    file = write(tmp_path / "day[1].parquet")
    assert find_files("data.train", str(file)).names == (str(file),)


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "logs" / "a.parquet")
    assert find_files("data.train", "~/logs").names == (str(file),)


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


def test_a_path_that_is_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refusal(lambda: find_files("data.train", str(tmp_path / "pipe")))


@pytest.mark.parametrize("target", ["gone", "link"])
def test_a_link_that_leads_nowhere_is_told_as_one(tmp_path, target):
    link = tmp_path / "link"
    link.symlink_to(target)
    assert f"is a link to '{target}', which leads nowhere" in refusal(lambda: find_files("data.train", str(link)))


def test_links_to_folders_are_followed_once(tmp_path):
    write(tmp_path / "elsewhere" / "a.parquet")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "day").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "logs")
    assert find(str(tmp_path / "logs"), tmp_path) == ["logs/day/a.parquet"]


def test_a_glob_over_folders_and_what_they_hold_names_each_file_once(tmp_path):
    write(tmp_path / "logs" / "a" / "b.parquet")
    (tmp_path / "logs" / "empty").mkdir()
    assert find(str(tmp_path / "logs" / "**"), tmp_path) == ["logs/a/b.parquet"]


def test_sizes_and_times_are_those_of_the_files(tmp_path):
    file = write(tmp_path / "a.parquet")
    for path in (tmp_path, file, tmp_path / "*.parquet"):
        files = find_files("data.train", str(path))
        assert files.sizes.tolist() == [file.stat().st_size]
        assert files.times.tolist() == [file.stat().st_mtime_ns]


def test_file_uri_is_a_local_path(tmp_path):
    file = write(tmp_path / "my logs" / "day=1" / "a.parquet")
    for uri in (f"file://{tmp_path}/my logs", (tmp_path / "my logs").as_uri(), f"file://localhost{file}"):
        assert find_files("data.train", uri).names == (str(file),)
    assert open_columns((tmp_path / "my logs").as_uri(), "user", "day").num_rows == 3
    assert "file:///logs" in refusal(lambda: find_files("data.train", "file://logs"))


@pytest.mark.parametrize("uri", ["ftp://host/logs", "s4://bucket/logs", "https://host/a.parquet"])
def test_unknown_scheme(uri):
    message = refusal(lambda: find_files("data.train", uri))
    assert "'data.train'" in message and f"'{uri.split(':')[0]}://'" in message and "s3://, gs://, hdfs://" in message


def test_one_key_has_one_file_system(tmp_path):
    message = refusal(lambda: find_files("data.train", [str(tmp_path), "s3://bucket/logs"]))
    assert "local files and 's3://bucket'" in message


def test_file_system_that_cannot_be_opened():
    assert "'s3://bucket'" in refusal(lambda: find_files("data.train", "s3://key:secret@bucket/logs?colour=red"))
    message = refusal(lambda: find_files("data.train", "s3://key:secret@bucket/logs?colour=red"))
    assert "secret" not in message and "colour" in message


# Remote file systems


class Flaky(fs.FileSystemHandler):
    """A local folder as a remote file system, whose operations fail as often as `failures` says."""

    def __init__(self, folder: Path, failures: dict[str, int]) -> None:
        self.inner = fs.SubTreeFileSystem(str(folder), fs.LocalFileSystem())
        self.failures, self.calls = failures, []

    def _call(self, operation: str, *args):
        self.calls.append((operation, *args))
        if self.failures.get(operation, 0) > 0:
            self.failures[operation] -= 1
            raise OSError("connection reset by peer")
        return getattr(self.inner, operation)(*args)

    def get_type_name(self):
        return "flaky"

    def normalize_path(self, path):
        return path

    def get_file_info(self, paths):
        return self._call("get_file_info", paths)

    def get_file_info_selector(self, selector):
        return self._call("get_file_info", selector)

    def open_input_file(self, path):
        return self._call("open_input_file", path)

    def _unsupported(self, *args):
        raise NotImplementedError

    create_dir = delete_dir = delete_dir_contents = delete_root_dir_contents = delete_file = _unsupported
    move = copy_file = open_input_stream = open_output_stream = open_append_stream = _unsupported


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """A bucket in the folder `bucket`, s3://bucket, that fails when told to; waits are noted instead of slept."""
    handler = Flaky(tmp_path, {})
    handler.waits = []
    monkeypatch.setattr(storage, "filesystem_of", lambda root, retries: (fs.PyFileSystem(handler), "bucket"))
    monkeypatch.setattr(storage.time, "sleep", handler.waits.append)
    (tmp_path / "bucket").mkdir()
    return handler


def test_remote_folders_files_and_globs(tmp_path, remote):
    for name in ("d=1/a.parquet", "d=1/_x.parquet", "d=1/_tmp/y.parquet", "d=2/b.parquet", "d=2/notes.txt", "c.pq"):
        write(tmp_path / "bucket" / "logs" / name)

    def found(*paths: str) -> list[str]:
        return [name.removeprefix("s3://bucket/logs/") for name in find_files("data.train", list(paths)).names]

    root = "s3://bucket/logs"
    assert found(root) == found(f"{root}/") == ["d=1/a.parquet", "d=2/b.parquet"]
    assert found(f"{root}/c.pq", f"{root}/d=2") == ["c.pq", "d=2/b.parquet"]
    assert found(f"{root}/d=*") == found(f"{root}/*/*.parquet") == found(f"{root}/**/*.parquet")
    assert found(f"{root}/d=*") == ["d=1/a.parquet", "d=2/b.parquet"]
    assert found(f"{root}/d=2/*") == ["d=2/b.parquet", "d=2/notes.txt"]
    assert found(f"{root}/*") == ["c.pq", "d=1/a.parquet", "d=2/b.parquet"]
    assert found(f"{root}/d=[2-9]/b*") == ["d=2/b.parquet"]
    assert found(f"{root}/d=1/_x*") == ["d=1/_x.parquet"]


@pytest.mark.parametrize("end", ["**", "**/*.parquet", "*", "*/*", "*/*/*", "d=*/*.pq", "_*/a*", "*/_[a-z]*/*"])
def test_globs_find_the_same_here_and_elsewhere(tmp_path, remote, end):
    for folder in (".", "d=1", "d=1/_tmp/0", "d=1/.tmp", "d=2/e.parquet", "_log"):
        for name in ("a.parquet", "_b.parquet", "_SUCCESS", "c.pq"):
            write(tmp_path / "bucket" / folder / name)
    elsewhere = find_files("data.train", f"s3://bucket/{end}").names
    assert sorted(find(f"{tmp_path}/bucket/{end}", tmp_path)) == [name.removeprefix("s3://") for name in elsewhere]


def test_remote_mistakes(tmp_path, remote):
    write(tmp_path / "bucket" / "logs" / "train" / "a.parquet")
    (tmp_path / "bucket" / "text").mkdir()
    (tmp_path / "bucket" / "text" / "a.csv").touch()
    message = refusal(lambda: find_files("data.train", "s3://bucket/logs/trian/b.parquet"))
    assert "'s3://bucket/logs/trian/b.parquet' does not exist; did you mean 's3://bucket/logs/train'?" in message
    assert "no file matches" in refusal(lambda: find_files("data.train", "s3://bucket/logs/*/*.csv"))
    assert "it holds a.csv" in refusal(lambda: find_files("data.train", "s3://bucket/text"))
    message = refusal(lambda: find_files("data.train", ["s3://bucket/logs", "s3://bucket/logs/train/a.parquet"]))
    assert "'s3://bucket/logs/train/a.parquet' twice" in message


def test_remote_files_are_read_like_local_ones(tmp_path, remote):
    write(tmp_path / "bucket" / "day=3" / "a.parquet", {"user": [1, 2, 3], "name": ["x", "y", "x"]})
    columns = dict.fromkeys(("user", "name", "day"), "key")
    dataset = pickle.loads(pickle.dumps(open_dataset("data.train", "s3://bucket", columns, filter="user > 1")))
    table = SegmentReader(dataset).read(dataset.row_groups.segment(0))
    assert table.to_pydict() == {"user": [2, 3], "name": ["y", "x"], "day": [3, 3]}
    assert dataset.row_groups.paths == ("s3://bucket/day=3/a.parquet",)
    cached = open_dataset("data.train", "s3://bucket", columns, filter="user > 1", cache=tmp_path / "cache")
    remote.calls.clear()
    again = open_dataset("data.train", "s3://bucket", columns, filter="user > 1", cache=tmp_path / "cache")
    assert again.fingerprint == cached.fingerprint == dataset.fingerprint
    assert {call[0] for call in remote.calls} == {"get_file_info"}


def test_remote_reads_are_retried_with_growing_waits(tmp_path, remote):
    write(tmp_path / "bucket" / "a.parquet")
    remote.failures.update(get_file_info=2, open_input_file=3)
    dataset = open_columns("s3://bucket", "user")
    assert remote.waits == [0.1, 0.2, 0.1, 0.2, 0.4]
    remote.waits.clear()
    remote.failures["open_input_file"] = 1
    assert read_column(dataset, "user").to_pylist() == [1, 2, 3]
    assert remote.waits == [0.1]


def test_remote_reads_fail_in_the_end(tmp_path, remote):
    write(tmp_path / "bucket" / "a.parquet")
    remote.failures["get_file_info"] = 4
    message = refusal(lambda: find_files("data.train", "s3://bucket", retries=3))
    assert "'s3://bucket' cannot be listed (connection reset by peer)" in message
    dataset = open_columns("s3://bucket", "user")
    remote.failures["open_input_file"] = 100
    with pytest.raises(BadDataError, match=r"'s3://bucket/a.parquet' cannot be read \(connection") as caught:
        read_column(dataset, "user")
    assert (caught.value.path, caught.value.row_group) == ("s3://bucket/a.parquet", 0)
    remote.failures.clear()
    remote.waits.clear()
    (tmp_path / "bucket" / "a.parquet").unlink()
    assert "does not exist" in refusal(lambda: read_column(dataset, "user"))
    assert remote.waits == []  # waiting brings no file back


def test_local_reads_are_not_retried(tmp_path, monkeypatch):
    file = write(tmp_path / "a.parquet")
    dataset = open_columns(file, "user")
    file.write_bytes(bytes(len(file.read_bytes())))
    waits: list[float] = []
    monkeypatch.setattr(storage.time, "sleep", waits.append)
    refusal(lambda: read_column(dataset, "user"))
    assert waits == []


def test_s3_takes_the_options_of_its_uri_and_our_retries(monkeypatch):
    uri = "s3://key:secret@bucket?endpoint_override=localhost:1&scheme=http&region=eu-west-1"
    filesystem, path = storage.filesystem_of(uri, 5)
    assert (filesystem.region, path) == ("eu-west-1", "bucket")
    attempts = []
    strategy = fs.AwsStandardS3RetryStrategy
    monkeypatch.setattr(
        fs, "AwsStandardS3RetryStrategy", lambda max_attempts: attempts.append(max_attempts) or strategy(1)
    )
    storage.filesystem_of(uri, 5)
    assert attempts == [6]
    message = refusal(lambda: find_files("data.valid", "s3://bucket/logs?region=eu-west-1&regoin=eu-west-1"))
    assert message.startswith("config key 'data.valid': the file system of 's3://bucket' cannot be opened (")
    again = pickle.loads(pickle.dumps(Storage(uri, 5)))
    assert (again, again.shown) == (Storage(uri, 5), "s3://bucket")
    assert again.path(again.name("bucket/a")) == "bucket/a" and again.name("bucket/a") == "s3://bucket/a"


# Partitions


def test_partition_keys_of_a_path():
    assert partition_keys("s3://b/day=2026-11-01/country=de/part=0.parquet") == {"day": "2026-11-01", "country": "de"}
    assert partition_keys("a/city=S%C3%A3o%20Paulo/x=__HIVE_DEFAULT_PARTITION__/f") == {"city": "São Paulo", "x": None}
    assert partition_keys("a/b=c=d/f") == {"b": "c=d"}
    assert partition_keys("a.parquet") == {}


@pytest.mark.parametrize(
    "values",
    [["1", "2"], ["01", "-5"], ["1", "x"], ["2147483648"], ["2026-11-01"], ["1.5"], [None, "7"], ["+1"], ["true"]],
)
def test_partition_types_are_those_of_pyarrow(tmp_path, values):
    for i, value in enumerate(values):
        folder = "__HIVE_DEFAULT_PARTITION__" if value is None else value
        write(tmp_path / f"key={folder}" / f"{i}.parquet")
    expected = ds.dataset(str(tmp_path), partitioning="hive").schema.field("key").type
    dataset = open_columns(tmp_path, "key")
    theirs = ds.dataset(str(tmp_path), partitioning="hive").to_table(columns=["key"])["key"].to_pylist()
    assert dataset.schema.field("key").type == expected
    assert sorted(read_column(dataset, "key").to_pylist(), key=str) == sorted(theirs, key=str)


def test_partition_keys_are_columns_where_the_file_has_none(tmp_path):
    write(tmp_path / "day=5" / "country=de" / "a.parquet", {"user": [1, 2]})
    write(tmp_path / "day=6" / "country=__HIVE_DEFAULT_PARTITION__" / "a.parquet", {"user": [3], "day": [60]})
    dataset = open_columns(tmp_path, "country", "user", "day")
    assert dataset.schema == pa.schema([("country", pa.string()), ("user", pa.int64()), ("day", pa.int64())])
    tables = list(SegmentReader(dataset).tables())
    assert tables[0].to_pydict() == {"country": ["de", "de"], "user": [1, 2], "day": [5, 5]}
    assert tables[1].to_pydict() == {"country": [None], "user": [3], "day": [60]}
    assert tables[0].schema.field("day").type == pa.int64()
    assert pa.types.is_dictionary(tables[0].schema.field("country").type)
    # Of each row 4 bytes for each of the three columns.
    assert dataset.row_groups.num_bytes.tolist() == [24, 12]
    only_keys = open_columns(tmp_path / "day=5", "country")
    assert read_column(only_keys, "country").to_pylist() == ["de", "de"]


def test_a_column_in_neither_file_nor_path(tmp_path):
    write(tmp_path / "day=5" / "a.parquet")
    message = refusal(lambda: open_dataset("data.train", str(tmp_path), {"dya": "config key 'features.dya'"}))
    assert message.startswith("config key 'features.dya': ")
    assert "did you mean 'day'?" in message and "it has: user, day" in message


def test_partitions_that_do_not_match_are_not_opened(tmp_path):
    for day in range(1, 9):
        write(tmp_path / f"day=2026-11-{day:02}" / "a.parquet", {"user": [day, day]})
    for day in range(2, 8):  # no footer could be read
        (tmp_path / f"day=2026-11-{day:02}" / "a.parquet").write_bytes(b"broken")
    dataset = open_columns(tmp_path, "user", filter="day >= '2026-11-08'")
    assert read_column(dataset, "user").to_pylist() == [8, 8]
    assert np.all(dataset.row_groups.num_rows == 2) and dataset.schema.names == ["user"]
    dataset = open_columns(tmp_path, "user", filter="not ('2026-11-02' <= day < '2026-11-08')")
    assert read_column(dataset, "user").to_pylist() == [1, 1, 8, 8]
    # The first file tells which columns are keys, but its rows need not be wanted either.
    write(tmp_path / "day=2026-11-01" / "a.parquet", {"other": [1]})
    for first in ("day=2026-10-31", "day=2026-10-30"):
        last = open_columns(tmp_path, "user", filter="day >= '2026-11-08'")
        assert read_column(last, "user").to_pylist() == [8, 8]
        (tmp_path / first).mkdir()
        (tmp_path / first / "a.parquet").write_bytes(b"broken")
    message = refusal(lambda: open_columns(tmp_path, "user", filter="day == '2027-01-01'"))
    assert "that can match 'day == '2027-01-01'' (data.filter) by their path hold no rows" in message
