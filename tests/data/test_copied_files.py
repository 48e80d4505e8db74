"""Copies among the files of data.train are told."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.checks import copied_files
from recsys.data.parquet import open_dataset


def told(folder: Path) -> list[str]:
    return copied_files(open_dataset("data.train", str(folder), {"x": "features.x"}))


@pytest.mark.parametrize("rows", [3, 1000])
def test_copies(rows: int, tmp_path: Path) -> None:
    """Of few rows two files may be alike by chance, and files without a row are."""
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"x": np.arange(rows) * day}), tmp_path / f"day={day}/a.parquet")
        pq.write_table(pa.table({"x": np.arange(0)}), tmp_path / f"day={day}/none.parquet")
    assert not told(tmp_path)
    (tmp_path / "backup").mkdir()
    shutil.copy(tmp_path / "day=1/a.parquet", tmp_path / "backup")
    if rows < 100:
        assert not told(tmp_path)
        return
    (sentence,) = told(tmp_path)
    assert (
        "'data.train'" in sentence
        and "day=1/a.parquet' is a copy of" in sentence
        and "backup/a.parquet', whose" in sentence
    )
    shutil.copytree(tmp_path / "day=2", tmp_path / "day=2 copy")
    (sentence,) = told(tmp_path)
    assert "and 1 more files are copies" in sentence
