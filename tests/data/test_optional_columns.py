"""Columns that some files lack: null there where `data.optional_columns` names them, and a mistake elsewhere."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.config import DataConfig, Device, load_config
from recsys.data.batch import Batch
from recsys.data.checks import absent_columns
from recsys.data.dataset import Dataset
from recsys.data.inputs import open_inputs
from recsys.data.parquet import open_dataset, read_column, read_head
from recsys.errors import UserError
from recsys.runtime.world import open_world

CONFIG = """
data:
  {{train: {folder}/train, valid: {folder}/valid, num_streams: 2, shuffle: false, optional_columns: {optional},
  labels: {{click: click, watch: {{column: seconds, loss: squared, nulls: unknown}}}}}}
features:
  user: {{table: user}}
  channel: {{table: user, nulls: {nulls}}}
  tags: {{table: tag, max_length: 2}}
  price: {{type: float, nulls: mean}}
  vector: {{type: float, dim: 2}}
  version: {{type: float, column: device.version, fill: 7}}
  pair: {{cross: [user, channel], table: tag}}
tables: {{user: {{num_embeddings: 100, embedding_dim: 4}}, tag: {{num_embeddings: 100, embedding_dim: 4}}}}
model: {{name: logistic_regression}}
train: {{global_batch_size: 8}}
"""
OPTIONAL = ["channel", "device.version", "price", "seconds", "tags", "vector"]
LATER = {
    "channel": pa.array(["feed", "mail", None, "feed"]),
    "tags": pa.array([[1, 2, 3], [], None, [4]]),
    "price": pa.array([1.5, None, 2.5, 4.0]),
    "vector": pa.array([[0.5, 1.0], None, [2.0, 3.0], []]),
    "seconds": pa.array([10, None, 30, 40]),
    "device": pa.array([{"os": "a", "version": 3}, {"os": "b", "version": None}, None, {"os": "c", "version": 5}]),
}


def write(folder: Path, days: str, fill: bool) -> None:
    """Write a file a day, of which `a` and `b` lack the later columns, or with `fill` have nulls there."""
    folder.mkdir(parents=True)
    for day in days:
        columns = {"user": pa.array([f"{day}{i}" for i in range(4)]), "click": pa.array([0, 1, 0, 1])}
        later = LATER if day > "b" else {name: pa.nulls(4, column.type) for name, column in LATER.items() if fill}
        if day == "b" and not fill:
            later = {"device": pa.array([{"os": "a"}] * 4)}
        pq.write_table(pa.table({**columns, **later}), folder / f"{day}.parquet")


def batches(folder: Path, nulls: str, optional: list[str]) -> list[Batch]:
    (folder / "c.yaml").write_text(CONFIG.format(folder=folder, nulls=nulls, optional=optional))
    config = load_config(folder / "c.yaml")
    with open_world(Device.cpu) as world:
        inputs = open_inputs(config, world)
        return [batch for role in ("train", "valid") for batch in inputs.loader(role).batches()]


@pytest.mark.parametrize("nulls", ["reserved", "empty"])
@pytest.mark.parametrize("valid", ["abd", "ab", "d"])
def test_rows_are_those_of_files_with_nulls(valid: str, nulls: str, tmp_path: Path) -> None:
    """Also where a whole data set lacks the columns, which then have no type."""
    of_both = []
    for name, fill in (("lacking", False), ("filled", True)):
        write(tmp_path / name / "train", "abcd", fill)
        write(tmp_path / name / "valid", valid, fill)
        of_both.append(batches(tmp_path / name, nulls, [] if fill else OPTIONAL))
    for lacking, filled in zip(*of_both, strict=True):
        assert lacking.ids.values().tolist() == filled.ids.values().tolist()
        assert lacking.ids.lengths().tolist() == filled.ids.lengths().tolist()
        for name in ("floats", "labels", "weights"):
            assert getattr(lacking, name).tolist() == getattr(filled, name).tolist(), name


def opened(folder: Path, column: str, *optional: str, **settings: object) -> Dataset:
    options = DataConfig(optional_columns=[*optional])
    return open_dataset("data.train", str(folder), {column: "config key 'features.x'"}, options=options, **settings)


def test_what_is_not_named_is_a_mistake(tmp_path: Path) -> None:
    """Also where an earlier start, whose footers are kept, was told otherwise."""
    write(tmp_path / "log", "ac", fill=False)
    cache = tmp_path / "footers"
    for optional in ((), ("chanel",)):
        with pytest.raises(UserError, match=r"a.parquet' has no column 'channel'.*; data.optional_columns takes those"):
            opened(tmp_path / "log", "channel", *optional, cache=cache)
    values = [None] * 4 + LATER["channel"].to_pylist()
    for _ in range(2):
        assert read_column(opened(tmp_path / "log", "channel", "channel", cache=cache), "channel").to_pylist() == values
    with pytest.raises(UserError, match="has no column 'channel'"):
        opened(tmp_path / "log", "channel", cache=cache)


@pytest.mark.parametrize(
    ("condition", "users"),
    [
        ("channel == 'feed'", ["c0", "c3"]),
        ("channel is None", ["a0", "a1", "a2", "a3", "c2"]),
        ("channel > 'feed'", ["c1"]),
    ],
)
def test_filters_see_nulls(condition: str, users: list[str], tmp_path: Path) -> None:
    write(tmp_path / "log", "ac", fill=False)
    dataset = opened(tmp_path / "log", "user", "channel", filter=condition)
    assert read_column(dataset, "user").to_pylist() == users


def test_first_rows_stand_for_all_where_they_have_all_columns(tmp_path: Path) -> None:
    """Else predictions of memory would take lists that all later files have for empty ones."""
    write(tmp_path / "log", "acd", fill=False)
    assert read_head(opened(tmp_path / "log", "tags", "tags"), 2)["tags"].to_pylist() == [[1, 2, 3], []]


def test_a_key_that_some_paths_lack(tmp_path: Path) -> None:
    write(tmp_path / "log", "a", fill=False)
    write(tmp_path / "log" / "day=3", "b", fill=False)
    assert read_column(opened(tmp_path / "log", "day", "day"), "day").to_pylist() == [None] * 4 + [3] * 4
    assert not absent_columns(opened(tmp_path / "log", "day", "day"))


def test_a_column_that_no_file_has_is_told(tmp_path: Path) -> None:
    write(tmp_path / "log", "a", fill=False)
    dataset = opened(tmp_path / "log", "chanel", "channel", "chanel", "click")
    assert read_column(dataset, "chanel").null_count == 4
    (sentence,) = absent_columns(dataset)
    assert "'data.optional_columns': no file of data.train has column 'chanel'" in sentence
