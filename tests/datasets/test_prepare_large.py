"""Logs whose texts and lists are more than one Arrow array holds: they are made in parts, and nothing else changes."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.datasets import logs, retrieval
from recsys.datasets.interactions import LogOptions, convert_log


def _log(path: Path) -> Path:
    draw = np.random.default_rng(1)
    users, items = draw.integers(0, 40, 2000), draw.integers(0, 60, 2000)
    titles = [f"title of {item}" for item in items]
    table = {"user_id": users, "item_id": [f"item {item}" for item in items], "timestamp": range(2000), "title": titles}
    pq.write_table(pa.table(table), path)
    return path


def _written(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.parquet"))}


@pytest.mark.parametrize(
    "options",
    [{}, {"hold_out": "random", "history": 7}, {"hold_out": "time"}, {"train_rows": "windows", "history": 5}],
)
def test_lists_are_the_same_some_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, object]
) -> None:
    log, given = _log(tmp_path / "log.parquet"), LogOptions(time="timestamp", item_features=["title"], **options)
    convert_log([log], tmp_path / "whole", given)
    most: list[int] = []
    write = retrieval.write_parts

    def write_parts(tables, folder, *sizes):  # type: ignore[no-untyped-def]
        held = list(tables)
        most.extend(table.num_rows for table in held if folder.name != "items" and given.train_rows == "interactions")
        write(held, folder, *sizes)

    monkeypatch.setattr(retrieval, "write_parts", write_parts)
    monkeypatch.setattr(retrieval, "_VALUES_AT_ONCE", 200)
    convert_log([log], tmp_path / "parts", given)
    assert max(most, default=0) <= 200 // given.history
    assert _written(tmp_path / "parts") == _written(tmp_path / "whole")


def test_texts_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = _log(tmp_path / "log.parquet")
    options = LogOptions(time="timestamp", item_features=["title"], tokens=["title"])
    convert_log([log], tmp_path / "small", options)
    monkeypatch.setattr(logs, "_TEXT_BYTES", 0)
    convert_log([log], tmp_path / "large", options)
    for part in ("train", "valid", "test", "items"):
        small, large = (pq.read_table(tmp_path / size / part) for size in ("small", "large"))
        assert large.to_pylist() == small.to_pylist()
