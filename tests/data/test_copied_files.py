"""Copies among the files of data.train are told, and files of data.valid that are trained on."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.checks import copied_files, trained_files
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


@pytest.mark.parametrize(
    ("valid", "filters", "shared"),
    [
        ("day=1", (None, None), 0),
        ("day=2", (None, None), 1),
        ("day=[12]", (None, None), 1),
        ("copy", (None, None), 1),
        ("day=2", ("x < 900", None), 1),
        ("day=2", ("x < 900", "x < 900"), 1),
        ("day=2", ("x < 900", "x >= 900"), 0),
    ],
)
def test_files_of_valid_that_are_trained_on(
    valid: str, filters: tuple[str | None, str | None], shared: int, tmp_path: Path
) -> None:
    for day in (1, 2, 3):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"x": np.arange(1000) * day}), tmp_path / f"day={day}/a.parquet")
    shutil.copytree(tmp_path / "day=3", tmp_path / "copy")
    datasets = {
        role: open_dataset(f"data.{role}", f"{tmp_path}/{days}/", {"x": "features.x"}, filter=condition)
        for (role, days), condition in zip({"train": "day=[23]", "valid": valid}.items(), filters, strict=True)
    }
    sentences = trained_files(datasets)
    assert len(sentences) == shared
    for sentence in sentences:
        assert f"'data.valid': 1 of its {datasets['valid'].num_files} files are trained on too" in sentence
        assert f"'{tmp_path}/{valid.replace('[12]', '2')}/a.parquet'" in sentence
