"""Ids in texts with a separator between them: the same lists, and the same run, as of columns of lists."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import fork_train, must_train, records_of

from recsys.config import load_config
from recsys.config.meaning import meaning
from recsys.data.checks import unsplit_texts
from recsys.data.inputs import open_inputs
from recsys.data.made import Made, lists_in, with_made
from recsys.data.parquet import read_head
from recsys.data.storage import BadDataError
from recsys.errors import UserError
from recsys.memory.sample import Sample
from recsys.runtime.world import World

CONFIG = """
features:
  item: {table: item}
  history: {table: item, separator: ",", max_length: 3}
  genres: {table: genre, separator: "|", nulls: empty}
  same: {column: genres, table: same}
  pair: {cross: [genres, item], table: pair}
  price: {type: float}
tables:
  item: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary, pooling: mean}
  genre: {num_embeddings: 50, embedding_dim: 8, num_hashes: 2}
  same: {num_embeddings: 50, embedding_dim: 8}
  pair: {num_embeddings: 50, embedding_dim: 8}
model: {name: dlrm, embedding_dim: 8, attention: {history: item}}
data: {label_column: label, num_streams: 6, filter: "price < 0.9 and (genres is None or genres != 'Drama')"}
train: {global_batch_size: 60, epochs: 2, log_every_steps: 1}
"""
LISTS = ("history", "genres")
RAW = "raw_genres"  # in the data with lists, whose cross and feature of whole texts need these


def ids_of(text: str | None, separator: str) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(separator) if part.strip()]


def write(folder: Path) -> None:
    """Write rows twice: with texts, and with the lists that Python makes of them."""
    dice = random.Random(5)

    def text(ids: list[str], separator: str, longest: int) -> str | None:
        parts = [dice.choice(["", " ", "\t"]) + dice.choice(ids) + dice.choice(["", "\u3000"]) for _ in range(longest)]
        parts = parts[: dice.randrange(longest + 1)] + dice.choice([[], [], [""], [" "]])
        return dice.choice([None, "", *[separator.join(parts)] * 8])

    items = [f"{number:03}" for number in range(40)]
    texts: dict[str, Any] = {
        "item": [dice.choice(items) for _ in range(700)],
        "history": [text(items, ",", 6) for _ in range(700)],
        "genres": [text(["Action", "Comedy", "Drama", "Süß, sauer"], "|", 3) for _ in range(700)],
        "price": [dice.random() for _ in range(700)],
        "label": [dice.randrange(2) for _ in range(700)],
    }
    lists = {**texts, RAW: texts["genres"]}
    for name, separator in (("history", ","), ("genres", "|")):
        lists[name] = pa.array([ids_of(cell, separator) for cell in texts[name]], pa.list_(pa.string()))
    for kind, columns in (("texts", texts), ("lists", lists)):
        for part, rows in (("train", slice(0, 500)), ("test", slice(500, 700))):
            (folder / kind).mkdir(exist_ok=True)
            table = pa.table(columns)[rows.start : rows.stop]
            # Plain texts in a file, and a dictionary.
            pq.write_table(table, folder / kind / f"{part}.parquet", row_group_size=130, use_dictionary=kind == "lists")
    (folder / "c.yaml").write_text(CONFIG)


def options_of(folder: Path, kind: str) -> list[str]:
    paths = [f"data.{part}={folder}/{kind}/{part}.parquet" for part in ("train", "test")]
    if kind == "texts":
        return paths
    in_lists = [f"features.{name}.separator=null" for name in LISTS]
    of_texts = [f"features.same.column={RAW}", f"features.pair.cross=[{RAW},item]"]
    return [*paths, *in_lists, *of_texts, f"data.filter=price < 0.9 and ({RAW} is None or {RAW} != 'Drama')"]


def split(texts: pa.Array | pa.ChunkedArray, integers: bool = False) -> pa.ChunkedArray:
    how = {"made": Made(("x",), "|", integers)}
    return with_made(pa.table({"x": texts}), how, "a.parquet", 5).column("made")


def test_what_is_an_id() -> None:
    texts = ["a|b", " a | b\t|", "", None, "|", "a", "ä\u00a0|\u3000ö", "1|01"]
    lists = [["a", "b"], ["a", "b"], [], None, [], ["a"], ["ä", "ö"], ["1", "01"]]
    assert lists_in(pa.array(texts), "|").to_pylist() == lists
    assert lists_in(pa.array(texts).slice(3, 3), "|").to_pylist() == lists[3:6]
    assert lists_in(pa.array(["a, b", "a,b"]), ", ").to_pylist() == [["a", "b"], ["a,b"]]
    assert lists_in(pa.array(["a b  c"]), " ").to_pylist() == [["a", "b", "c"]]
    assert lists_in(pa.nulls(2), "|").to_pylist() == [None, None]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_columns_of_any_kind(kind: pa.DataType) -> None:
    texts = pa.array(["c", "a|b", None, "b| a|b", "", "a|b"]).cast(kind)
    for column in (texts, texts.slice(1, 4), texts.slice(0, 0), texts.take(pa.array([*range(6)] * 3)).slice(1)):
        made = split(column).combine_chunks()
        plain = column.cast(pa.string()).to_pylist()
        assert made.to_pylist() == [ids_of(text, "|") for text in plain]
        assert made.type == pa.list_(pa.dictionary(pa.int32(), pa.string()))
        entries = made.values.dictionary.to_pylist()
        assert len(entries) == len({*entries}), "each is hashed once"
    chunks = pa.chunked_array([["a|b"], [None, "b"]])
    assert split(chunks).to_pylist() == [["a", "b"], None, ["b"]]


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_integers(kind: pa.DataType) -> None:
    texts = pa.array(["7", "12| -3", None, "|", "007|7", "12| -3", f"{2**63 - 1}"] * 3).cast(kind)
    lists = [[7], [12, -3], None, [], [7, 7], [12, -3], [2**63 - 1]] * 3
    made = split(texts, integers=True)
    assert made.type == pa.list_(pa.int64()) and made.to_pylist() == lists
    assert split(texts.slice(1, 4), integers=True).to_pylist() == lists[1:5]
    others = pa.array(["x", "7", "7"]).cast(kind).filter(pa.array([False, True, True]))  # may keep x as an entry
    assert split(others, integers=True).to_pylist() == [[7], [7]]


@pytest.mark.parametrize(
    ("text", "integers", "said"),
    [
        (
            b"a|\xff",
            False,
            "column 'x' of row group 5 of 'a.parquet' cannot be split into texts in UTF-8: Invalid UTF8",
        ),
        (b"7|x", True, r"split into integers of 64 bits .*: Failed to parse string: 'x'"),
        (b"7|1.5", True, r"split into integers of 64 bits .*: Failed to parse string: '1.5'"),
        (b"9223372036854775808", True, r"split into integers of 64 bits .*: Failed to parse string: '92"),
    ],
)
def test_texts_that_cannot_be_split(text: bytes, integers: bool, said: str) -> None:
    with pytest.raises(BadDataError, match=said):
        split(pa.array([text]), integers)


def test_first_rows_that_cannot_be_split_are_left_out_like_others(tmp_path: Path, world: World) -> None:
    texts, path = ["7|8"] * 40, tmp_path / "a.parquet"
    texts[3] = "7|x"
    pq.write_table(pa.table({"user": [*range(40)], "ids": texts, "label": [0, 1] * 20}), path, row_group_size=10)
    (tmp_path / "c.yaml").write_text(f"""
data: {{train: {path}, label_column: label, num_streams: 1}}
features: {{user: {{table: user}}, ids: {{table: id, separator: "|", integers: true}}}}
tables: {{user: {{num_embeddings: 9, embedding_dim: 4}}, id: {{num_embeddings: 9, embedding_dim: 4}}}}
model: {{name: logistic_regression}}
train: {{global_batch_size: 10}}
""")
    inputs = open_inputs(load_config(tmp_path / "c.yaml", ["data.max_bad_rows=10"]), world)
    assert inputs.datasets["train"].head.row_group == 1
    with pytest.raises(BadDataError, match=r"column 'ids' of row group 0 of .* cannot be split into integers"):
        open_inputs(load_config(tmp_path / "c.yaml"), world)


@pytest.mark.slow
def test_training_is_that_of_lists_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path)
    for nproc, more in ((1, []), (3, []), (1, ["data.num_threads=3", "data.processes=true"])):
        runs = {}
        for kind in ("texts", "lists"):
            runs[kind] = tmp_path / f"{kind}-{nproc}-{len(more)}"
            words = [str(tmp_path / "c.yaml"), f"run.dir={runs[kind]}", *options_of(tmp_path, kind), *more]
            must_train(*words, nproc=nproc)
        steps = {kind: [(line["step"], line["loss"]) for line in records_of(run)] for kind, run in runs.items()}
        assert len(steps["texts"]) > 10 and steps["texts"] == steps["lists"]
        results = {kind: json.loads((run / "result.json").read_text()) for kind, run in runs.items()}
        assert results["texts"]["metrics"] == results["lists"]["metrics"]
        assert results["texts"]["data"]["ids"] == results["lists"]["data"]["ids"]


def test_what_is_known_before_training(tmp_path: Path, world: World) -> None:
    write(tmp_path)
    inputs = {}
    for kind in ("texts", "lists"):
        config = load_config(tmp_path / "c.yaml", options_of(tmp_path, kind))
        inputs[kind] = open_inputs(config, world)
    samples = {kind: Sample(of, "train") for kind, of in inputs.items()}
    texts, lists = samples["texts"], samples["lists"]
    # All rows are in the sample. Footers count an empty list as an element, so that they tell of more.
    lengths = {n: part.lengths.mean() for n, part in zip(lists.names, lists.columns.ids, strict=True) if n in LISTS}
    assert {name: texts.mean_ids()[name] for name in LISTS} == pytest.approx(lengths, rel=0.01)
    assert texts.row_bytes == pytest.approx(lists.columns.num_bytes / lists.rows, rel=0.01)
    assert [*texts.distinct_ids(500)] == [*lists.distinct_ids(500)]
    # Footers tell of the lists in files, and the first rows of those in texts.
    groups = {kind: of.datasets["train"].row_groups.num_bytes for kind, of in inputs.items()}
    np.testing.assert_allclose(groups["texts"], groups["lists"], rtol=0.25)


def test_another_separator_gives_rows_another_meaning(tmp_path: Path) -> None:
    write(tmp_path)
    here, there = (
        meaning(load_config(tmp_path / "c.yaml", [*options_of(tmp_path, "texts"), *more]))
        for more in ([], ["features.genres.separator=;"])
    )
    assert {key for key in here if here[key] != there[key]} == {"features.genres.separator"}


def test_a_separator_that_divides_no_text_is_told(tmp_path: Path, world: World) -> None:
    write(tmp_path)
    for separator, said in (("|", []), (";", ["'features.genres.separator': ';' divides none of the first 1"])):
        words = [*options_of(tmp_path, "texts"), f'features.genres.separator="{separator}"']
        config = load_config(tmp_path / "c.yaml", words)
        told = unsplit_texts(config, read_head(open_inputs(config, world).datasets["train"], 1000))
        assert len(told) == len(said) and all(map(str.__contains__, told, said)), told


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("features.genres.separator=''", "'features.genres.separator' is empty, but must be what stands between"),
        ("features.genres.boundaries=[1]", "boundaries' needs a column of numbers, but features.genres.separator"),
        ("features.item.integers=true", "'features.item.integers' is for ids in texts, and features.item.separator is"),
        ("features.price.integers=true", "'features.price.integers' is for features of type id; drop it"),
        ("features.genres.weights=price", "'features.genres.weights' needs lists in the data, but"),
        ("features.pair.separator=','", "'features.pair.cross' needs one id a row, but features.pair.separator makes"),
        ("features.price.separator=','", "'features.price.separator' is for features of type id"),
        ("tables.genre={mapping: identity, num_hashes: 1}", "identity takes integers, but features.genres.separator"),
    ],
)
def test_mistakes(override: str, said: str, tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError) as caught:
        load_config(tmp_path / "c.yaml", [*options_of(tmp_path, "texts"), override])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            {"genres": [["a"]]},
            "'data.train': column 'genres' is list<item: string>, but only texts have a separator",
        ),
        ({"genres": [1]}, "'data.train': column 'genres' is int64, but only texts have a separator in them; write it"),
        ({"item": [1]}, "in column 'history split at ,' of data.train and int64 in column 'item' of data.train; write"),
    ],
)
def test_columns_that_are_no_texts(columns: dict[str, list], said: str, tmp_path: Path) -> None:
    write(tmp_path)
    table = pq.read_table(tmp_path / "texts" / "train.parquet")
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), name, pa.array(values * len(table)))
    pq.write_table(table, tmp_path / "texts" / "train.parquet")
    words = [*options_of(tmp_path, "texts"), "data.filter=null", "data.test=null", "features.pair=null"]
    done = fork_train(str(tmp_path / "c.yaml"), *words, "tables.pair=null", f"run.dir={tmp_path}/run")
    assert done.returncode == 1 and said in done.stderr
