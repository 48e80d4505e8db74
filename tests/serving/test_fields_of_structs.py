"""Whole runs on fields of structs: what is learned, predicted and exported is what columns of their own give."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, losses_of, run_recsys

from recsys.data.parquet import open_dataset, read_column
from recsys.datasets.interactions import LogOptions, convert_log
from recsys.errors import UserError
from recsys.serving.api import open_run
from recsys.serving.score import ExportError, Scorer, column

# Of the sample's columns those that are fields here. `history` is a list of structs, `what` lies in another struct.
FIELDS = {"user_id": "who.id", "device": "who.device.os", "item_id": "shown.what.id", "category": "shown.what.category"}
FIELDS |= {"price": "shown.price", "history": "events.item", "label": "outcome.click", "weight": "outcome.weight"}
FIELDS |= {"hour": "hour", "day": "day"}
CONFIG = """
data: {{train: {folder}/train, valid: {folder}/valid, labels: {{click: {label}}}, weight_column: {weight},
  filter: "{hour} != 3 and {device} is not None", num_streams: 2}}
features:
  user: {{table: user, column: {user_id}}}
  item: {{table: item, column: {item_id}}}
  history: {{table: item, column: {history}, max_length: 10}}
  device: {{table: device, column: {device}}}
  pair: {{table: pair, cross: [{device}, {category}]}}
  price: {{type: float, column: {price}, standardise: true, nulls: mean}}
tables:
  user: {{num_embeddings: 100, embedding_dim: 4, mapping: vocabulary}}
  item: {{num_embeddings: 100, embedding_dim: 4, mapping: vocabulary, pooling: mean}}
  device: {{num_embeddings: 20, embedding_dim: 4}}
  pair: {{num_embeddings: 100, embedding_dim: 4}}
model: {{name: dlrm, bottom_mlp: [8], top_mlp: [8]}}
train: {{global_batch_size: 256, epochs: 1, log_every_steps: 1}}
"""


def nested(table: pa.Table) -> pa.Table:
    """The sample's rows with structs; one whose fields are all null is null itself."""

    def struct(**columns: pa.Array) -> pa.Array:
        columns = {name: c.combine_chunks() if isinstance(c, pa.ChunkedArray) else c for name, c in columns.items()}
        is_null = np.logical_and.reduce([np.asarray(column.is_null()) for column in columns.values()])
        return pa.StructArray.from_arrays([*columns.values()], [*columns], mask=pa.array(is_null))

    history = table["history"].combine_chunks()
    events = struct(item=history.values, unread=pa.array(["x"] * len(history.values)))
    return pa.table(
        {
            "who": struct(id=table["user_id"], device=struct(os=table["device"])),
            "shown": struct(what=struct(id=table["item_id"], category=table["category"]), price=table["price"]),
            "events": pa.ListArray.from_arrays(history.offsets, events),
            "outcome": struct(click=table["label"], weight=table["weight"]),
            "hour": table["hour"],
            "day": table["day"],
        }
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sample with structs, and with columns of the names of their fields; each with the same config."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ("nested", "flat")}
    for role in ("train", "valid", "test"):
        for path in sorted((ROOT / "data/sample" / role).glob("*.parquet")):
            table = pq.read_table(path).select([*FIELDS])
            for kind, folder in folders.items():
                (folder / role).mkdir(exist_ok=True)
                rows = nested(table) if kind == "nested" else table.rename_columns([*FIELDS.values()])
                pq.write_table(rows, folder / role / path.name, row_group_size=500)
    for folder in folders.values():
        (folder / "c.yaml").write_text(CONFIG.format(folder=folder, **FIELDS))
    return folders


@pytest.mark.slow
def test_two_ranks_learn_what_they_learn_of_flat_columns(folders: dict[str, Path], tmp_path: Path) -> None:
    """Over a stop, and with the metrics of each value of a field at the end."""
    told: dict[str, list[object]] = {}
    for kind, folder in folders.items():
        run = tmp_path / kind
        run_recsys("train", folder / "c.yaml", f"run.dir={run}", "train.max_steps=6", nproc=2)
        run_recsys("train", folder / "c.yaml", f"run.dir={run}", "run.resume=true", nproc=2)
        losses = losses_of(run)
        ids = json.loads((run / "result.json").read_text())["data"]["ids"]
        run_recsys("evaluate", run, f"data.test={folder}/test", "--by", "shown.what.category")
        (result,) = run.glob("evaluations/*/result.json")
        evaluated = json.loads(result.read_text())
        told[kind] = [losses, ids, evaluated["metrics"], evaluated["by"]]
    assert len(losses) > 6 and told["nested"] == told["flat"]


@pytest.fixture(scope="module")
def run(folders: dict[str, Path]) -> Path:
    run_recsys("train", folders["nested"] / "c.yaml", f"run.dir={folders['nested']}/run", "train.max_steps=5")
    return folders["nested"] / "run"


def test_predictions_of_structs_and_of_columns_of_their_names(run: Path, folders: dict[str, Path]) -> None:
    keep = ["who.id", "events.item", "shown.price", "outcome.click"]
    opened = open_run(run)
    nested_rows, flat_rows = (opened.predict(str(folder / "test"), keep) for folder in folders.values())
    assert nested_rows.equals(flat_rows) and nested_rows.column_names == [*keep, "score"]
    assert opened.predict(pq.read_table(folders["nested"] / "test"), keep).equals(flat_rows)
    by_default = opened.predict(str(folders["nested"] / "test")).column_names
    assert by_default == ["who.id", "shown.what.id", "who.device.os", "score"]
    vectors = opened.embeddings("user", str(folders["nested"] / "test"))
    assert vectors.equals(opened.embeddings("user", str(folders["flat"] / "test")))


def test_exports_take_structs_and_columns_of_their_names(run: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    run_recsys("export", run, tmp_path / "export")
    scorer = Scorer(tmp_path / "export")
    rows, flat = (pq.read_table(folder / "test") for folder in folders.values())
    scores, read = scorer.score(rows), [name for name in flat.column_names if name != "outcome.click"]
    np.testing.assert_allclose(scores["score"], open_run(run).predict(rows)["score"], atol=1e-5)
    assert scores.equals(scorer.score(flat)) and scores.equals(scorer.score(flat.select(read).to_pydict()))
    large = rows.set_column(2, "events", rows["events"].cast(pa.large_list(rows["events"].type.value_type)))
    for other in (large, pa.concat_tables([rows.slice(0, 70), rows.slice(70)])):
        assert scorer.score(other).equals(scores)
    assert scorer.score(rows.slice(33)).equals(scorer.score(flat.slice(33)))
    for missing in ("who", "events"):
        with pytest.raises(ExportError, match=r"column '(who.id|who.device.os|events.item)' is missing"):
            scorer.score(rows.drop_columns([missing]))
    with pytest.raises(ExportError, match=r"column '\['who.id'\]' is missing"):
        column(rows, ["who.id"])  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"column 'price' is missing; the columns are 'what'"):
        scorer.score(rows.set_column(1, "shown", pa.array([{"what": {"id": 1, "category": "a"}}] * len(rows))))


def of(name: str, value: object) -> pa.Array:
    """A struct of one row, whose field may be a struct again."""
    return pa.StructArray.from_arrays([value if isinstance(value, pa.Array) else pa.array([value])], [name])


@pytest.mark.parametrize(
    "columns",
    [
        {"device.info": of("os", "a")},
        {"device": of("info.os", "a")},
        {"device": of("info", "x"), "device.info": of("os", "a")},
        {"device": of("info", of("os", "a")), "device.info": of("os", "b")},
        {"device.info": of("os", "a"), "device": of("info", of("os", "b"))},
        {"device": of("info", of("os", "b")), "device.info.os": pa.array(["a"])},
        {"device": pa.array(["x"]), "device.info": pa.DictionaryArray.from_arrays(pa.array([0]), of("os", "a"))},
        {"device": pa.array([["x"]]), "device.info": pa.array([[{"os": "a"}]], pa.large_list(of("os", "a").type))},
    ],
)
def test_structs_whose_own_names_have_dots(columns: dict[str, pa.Array], tmp_path: Path) -> None:
    """Of several that a name may mean, an export takes the one that training takes."""
    name, table = "device.info.os", pa.table(columns)
    found = column(table, name).to_pylist()
    assert found in (["a"], [["a"]])
    if not any(map(pa.types.is_dictionary, table.schema.types)):  # which Parquet holds none of
        pq.write_table(table, tmp_path / "a.parquet")
        assert read_column(open_dataset("DATA", f"{tmp_path}/a.parquet", {name: "DATA"}), name).to_pylist() == found


def test_a_field_that_is_not_there_is_missing() -> None:
    for columns in ({"device.info": of("os", "a")}, {"device": pa.array([1])}, {"device.": of("x", "a")}):
        for name in ("device.info.x", "device.info.", "device..os", "."):
            with pytest.raises(ExportError, match="is missing; the columns are"):
                column(pa.table(columns), name)


def test_a_table_of_many_columns_tells_some_of_them() -> None:
    with pytest.raises(ExportError, match=r"'price' is missing; the columns are 'c0', .*, 'c19' …$"):
        column(pa.table({f"c{i}": [i] for i in range(25)}), "price")


def test_a_log_of_structs_becomes_retrieval_data(folders: dict[str, Path], tmp_path: Path) -> None:
    options = LogOptions(FIELDS["user_id"], FIELDS["item_id"], "day", ["who.device.os"], ["shown.what.category"])
    options.where = "outcome.click == 1 and who.device.os is not None"
    for kind, folder in folders.items():
        convert_log([folder / "train"], tmp_path / kind, options)
    for part in ("train", "valid", "test", "items"):
        found, wanted = (pq.read_table(tmp_path / kind / part) for kind in folders)
        assert found.equals(wanted) and len(found)


def test_one_of_two_columns_of_a_name_is_not_chosen(tmp_path: Path) -> None:
    columns = [pa.array([{"id": number}] * 5) for number in range(3)]
    pq.write_table(pa.Table.from_arrays(columns, ["who", "what", "what"]), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="has 2 columns 'what'; keep only one"):
        convert_log([tmp_path / "a.parquet"], tmp_path / "out", LogOptions("who.id", "what.id"))
