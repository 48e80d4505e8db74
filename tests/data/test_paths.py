"""Paths of data that are not there, and names in them that are no text; training and exports refuse the same ones."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.sources import find_files
from recsys.data.storage import partition_keys
from recsys.errors import UserError
from recsys.serving.score import files_of, partitions_of


def refusal(path: str) -> str:
    with pytest.raises(UserError) as told:
        find_files("data.train", path)
    return str(told.value)


def test_a_relative_path_that_is_not_there_is_told_with_the_folder_it_is_seen_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run reads data by the paths of its config, from whichever folder a command is given in."""
    monkeypatch.chdir(tmp_path)
    for path, wrong in (("data/nowhere", "does not exist"), ("data/*/x.parquet", "no file matches")):
        message = refusal(path)
        assert wrong in message and f"'{path}'" in message and f", seen from '{tmp_path}'" in message
        assert "seen from" not in refusal(f"{tmp_path}/{path}")


@pytest.mark.parametrize("folder", [b"day=\xff", b"day=%FF", b"%E4=1", b"city=M%FCnchen", b"day=%ED%A0%80"])
def test_a_partition_key_that_is_no_text_is_refused(folder: bytes, tmp_path: Path) -> None:
    """Read as well as it goes, M%FCnchen and M%E4nchen were one value, without a word."""
    path = Path(os.fsdecode(folder))
    (tmp_path / path).mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    (tmp_path / "a.parquet").rename(tmp_path / path / "a.parquet")
    message = refusal(str(tmp_path))
    assert "UTF-8" in message and "; rename " in message
    with pytest.raises(UnicodeError):
        partitions_of(files_of(str(tmp_path)), ["day", "city"])


@pytest.mark.parametrize("value", ["München", "50%", "%zz", "a=b", "", "%FF"])
def test_other_values_are_what_they_were(value: str) -> None:
    """Of the name of a file nothing is decoded."""
    escaped = value if value in ("50%", "%zz") else value.replace("%", "%25")
    for written in (escaped, escaped.replace("ü", "%C3%BC")):
        path = f"logs/day={written}/%FF=1.parquet"
        assert partition_keys(path) == {"day": value}
        assert {key: one.as_py() for key, one in partitions_of([path], ["day"])[path].items()} == {"day": value}
