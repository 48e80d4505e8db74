"""What is refused before training of the columns that a config names: the sentence names them, and what to do."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import must_train

from recsys.config import load_config
from recsys.data.filters import parse_filter, written
from recsys.data.inputs import open_inputs
from recsys.data.label_checks import constant_labels, unordered_labels
from recsys.data.parquet import read_head
from recsys.errors import UserError
from recsys.runtime.world import World

ROWS = 60
CONFIG = """
data: {{train: {folder}/train, valid: {folder}/valid, num_streams: 2}}
features: {{user: {{table: user}}}}
tables: {{user: {{num_embeddings: 100, embedding_dim: 4}}}}
model: {{name: logistic_regression}}
train: {{global_batch_size: 20, max_steps: 2}}
"""
COLUMNS = {
    "user": pa.array(range(ROWS)),
    "label": pa.array([i % 2 for i in range(ROWS)]),
    "half": pa.array(np.arange(ROWS) % 2, pa.float16()),
    "text": pa.array(["yes"] * ROWS),
    "seconds": pa.array([None if i % 3 else i for i in range(ROWS)], pa.float64()),
    "late": pa.array([None] * (ROWS - 1) + [1]),
    "never": pa.nulls(ROWS, pa.int64()),
    "untyped": pa.nulls(ROWS),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for role in ("train", "valid"):
        (tmp_path / role).mkdir()
        pq.write_table(pa.table(COLUMNS), tmp_path / role / "a.parquet", row_group_size=20)
    (tmp_path / "c.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def rows_of(world: World, folder: Path, *options: str) -> int:
    return open_inputs(load_config(folder / "c.yaml", options), world).datasets["train"].num_rows


def refusal(world: World, folder: Path, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        rows_of(world, folder, *options)
    return str(caught.value)


# Labels


@pytest.mark.parametrize("label", ["{column: never}", "{column: untyped}", "{expression: never > 1}"])
def test_a_label_that_is_never_known_is_refused(label: str, world: World, folder: Path) -> None:
    known = "data.labels={a: label, b: " + label[:-1] + ", nulls: unknown}}"
    named = "the condition of data.labels.b" if "expression" in label else f"column '{label[9:-1]}' (data.labels.b)"
    said = f"config key 'data.train': {named} is null in every row, so nothing can be learned from it; remove the label"
    assert said in refusal(world, folder, known)


def test_a_label_that_is_known_of_some_rows_is_taken(world: World, folder: Path) -> None:
    """Of one in the last row group; and data.valid need not have it."""
    valid = pa.table({**COLUMNS, "late": pa.nulls(ROWS, pa.int64())})
    pq.write_table(valid, folder / "valid/a.parquet")
    assert rows_of(world, folder, "data.labels={a: label, b: {column: late, nulls: unknown}}") == ROWS


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ("{a: label}", []),
        (
            "{a: label, b: 'user >= 0', c: {expression: text == 'no', nulls: unknown}}",
            ["data.labels.b is True", "data.labels.c is False"],
        ),
        ("{a: {column: late, nulls: unknown}}", ["column 'late' (data.labels.a) is 1"]),  # in the last row
        ("{a: {column: user, loss: squared}}", []),
        ("{a: user == 59}", []),  # in the last row too
    ],
)
def test_a_label_that_is_the_same_in_every_row_is_told(
    labels: str, told: list[str], world: World, folder: Path
) -> None:
    inputs = open_inputs(load_config(folder / "c.yaml", [f"data.labels={labels}"]), world)
    found = constant_labels(inputs.datasets["train"], inputs.spec("train"))
    assert len(found) == len(told)
    for sentence, part in zip(found, told, strict=True):
        assert f"{part} in every row, so a model learns no more than that" in sentence


def test_a_label_that_is_the_same_in_all_rows_that_are_evaluated_is_told(folder: Path) -> None:
    pq.write_table(pa.table({**COLUMNS, "label": pa.array([0] * ROWS)}), folder / "valid/a.parquet", row_group_size=20)
    words, run = ("data.label_column=label", "train.eval_every_epochs=1"), folder / "run"
    trained = must_train(str(folder / "c.yaml"), f"run.dir={run}", *words).stdout
    evaluated = must_train("evaluate", str(run), program="recsys").stdout
    for said in (trained, evaluated):
        assert said.count("'data.valid': column 'label' (data.label_column) is 0 in every row, so AUC and other") == 1
        assert "auc nan" in said


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        ("{shown: label, far: label == 1 and half > 0}", ""),
        (
            "{far: label == 1 and user < 0, shown: label}",
            "column 'label' (data.labels.shown) is positive in 10 of the first 20 rows",
        ),
        (
            "{shown: user < 0, all: user >= 0}",
            "the condition of data.labels.all is positive in 20 of the first 20 rows",
        ),
        ("{late: {column: late, nulls: unknown}, shown: label}", ""),
    ],
)
def test_labels_in_another_order_than_they_happen_in_are_told(
    labels: str, told: str, world: World, folder: Path
) -> None:
    for model, expected in (("esmm", told), ("mmoe", "")):
        inputs = open_inputs(
            load_config(folder / "c.yaml", [f"data.labels={labels}", f"model={{name: {model}}}"]), world
        )
        found = unordered_labels(inputs.config, read_head(inputs.datasets["train"], 1000), inputs.spec("train"))
        assert [expected in sentence for sentence in found] == [True] * bool(expected)


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("seconds > 5", "the condition of data.labels.b holds 13 nulls, but none are allowed; "),
        ("seconds", "column 'seconds' (data.labels.b) holds 13 nulls, but none are allowed; "),
    ],
)
def test_nulls_of_a_label_are_told_with_what_allows_them(label: str, said: str, world: World, folder: Path) -> None:
    out = 'leave such rows out by data.filter="seconds is not None", or set data.labels.b.nulls=unknown'
    assert said + out in refusal(world, folder, f"data.labels={{b: {label}}}")
    assert rows_of(world, folder, "data.labels={b: seconds > 5}", "data.filter=seconds is not None") == 20


def advised_in(told: str) -> str:
    """Return the first word behind `such as`, as a shell reads it."""
    return shlex.split(told.partition("such as ")[2].partition(", or ")[0].partition(" (")[0])[0]


@pytest.mark.parametrize(
    "name", ["label", "device.os", "my label", "day-1", "is", "true", "日付", "it's", "a > b", "1"]
)
def test_a_condition_that_a_message_advises_is_of_the_column(name: str, world: World, folder: Path) -> None:
    """Whatever a column is called: what is said in place of ratings, and of texts, is taken as it stands."""
    assert parse_filter(f"{written(name)} > 0").columns() == {name}
    for values, said in ((pa.array([1, 5] * 30), "holds 5, "), (pa.array(["yes", "no"] * 30), "found string; ")):
        for role in ("train", "valid"):
            pq.write_table(pa.table({"user": COLUMNS["user"], name: values}), folder / role / "a.parquet")
        told = refusal(world, folder, f"data.labels={{a: {{column: {json.dumps(name)}}}}}")
        assert said in told
        assert rows_of(world, folder, advised_in(told)) == ROWS


@pytest.mark.parametrize(
    "pair",
    [("0", "1"), ("false", "true"), ("shown", "bought"), (b"-", b"+"), (1, 2), (-1, 1), (0.25, 0.75), ("a'b", "yes")],
    ids=str,
)
@pytest.mark.parametrize("is_encoded", [False, True])
def test_a_condition_that_a_message_advises_is_true_of_some_rows(
    pair: tuple[Any, Any], is_encoded: bool, world: World, folder: Path
) -> None:
    values = pa.array([*pair, pair[1]] * 20)
    values = values.dictionary_encode() if is_encoded else values
    pq.write_table(pa.table({"user": COLUMNS["user"], "outcome": values}), folder / "train/a.parquet")
    told = refusal(world, folder, "data.label_column=outcome", "data.valid=null")
    options = (advised_in(told), "data.valid=null")
    inputs = open_inputs(load_config(folder / "c.yaml", options), world)
    assert not constant_labels(inputs.datasets["train"], inputs.spec("train"))


def test_negatives_are_left_out_by_a_label_of_halves(world: World, folder: Path) -> None:
    assert ROWS / 2 <= rows_of(world, folder, "data.label_column=half", "data.keep_negatives=0.2") < ROWS * 0.8


def test_what_is_wrong_with_the_filter_of_negatives_names_its_key(world: World, folder: Path) -> None:
    options = "data.label_column=text", "data.keep_negatives=0.2"
    said = "column 'text' is string, and cannot be compared with 0"
    assert refusal(world, folder, *options).startswith(f"config key 'data.keep_negatives': {said}")
    both = refusal(world, folder, *options, "data.filter=user > 3")
    assert both.startswith(f"config keys 'data.filter' and 'data.keep_negatives': {said}")
    alone = refusal(world, folder, "data.label_column=text", "data.filter=text > 0")
    assert alone.startswith("config key 'data.filter': column 'text' is string")


# Ids


def test_large_integers_beside_floats_are_no_ids(world: World, folder: Path) -> None:
    """As float64, 2**53 + 1 is 2**53: another user's row. The file that makes floats of all is named."""
    pq.write_table(pa.table(COLUMNS | {"user": pa.array([2**53 + 1] * ROWS)}), folder / "train/a.parquet")
    floats = pa.table(COLUMNS | {"user": pa.array([None, *map(float, range(ROWS - 1))])})
    pq.write_table(floats, folder / "train/b.parquet")
    message = refusal(world, folder, "data.label_column=label", "data.valid=null")
    assert message.startswith(
        f"config key 'data.train': column 'user' (feature 'user', with floats in {folder}/train/b.parquet): ids "
        "must be whole numbers, found 9007199254740992.0, but double is exact only below 2**53"
    )
    pq.write_table(pa.table(COLUMNS), folder / "train/a.parquet")
    assert rows_of(world, folder, "data.label_column=label", "data.valid=null") == 2 * ROWS


# Targets of a retrieval model

TOWERS = """
data: {{train: {folder}/train, valid: {folder}/targets.parquet, items: {folder}/items.parquet, seen_column: null}}
features: {{user: {{table: user}}, item: {{table: item}}}}
tables: {{user: {{num_embeddings: 100, embedding_dim: 4}}, item: {{num_embeddings: 100, embedding_dim: 4}}}}
model:
  {{name: two_tower, user_features: [user], item_features: [item], item_id: item, user_mlp: [], item_mlp: [],
   output_dim: 4}}
train: {{global_batch_size: 20, max_steps: 2}}
"""


@pytest.mark.parametrize(
    ("targets", "refused"),
    [
        ([[100 + i] for i in range(2000)], True),
        ([100 + i for i in range(2000)], True),  # one a row, and not in a list
        ([0, *range(100, 2099)], False),
        ([None] * 1000 + [100] * 1000, False),
        ([[]] * 1500 + [[1]] * 500, False),  # users without a target come first
    ],
)
def test_targets_that_are_no_items_are_refused(targets: list[Any], refused: bool, world: World, folder: Path) -> None:
    pq.write_table(pa.table({**COLUMNS, "item": COLUMNS["user"]}), folder / "train/a.parquet")
    pq.write_table(pa.table({"item": range(ROWS)}), folder / "items.parquet")
    pq.write_table(pa.table({"user": range(2000), "targets": targets}), folder / "targets.parquet")
    (folder / "c.yaml").write_text(TOWERS.format(folder=folder))
    if refused:
        said = refusal(world, folder)
        assert said.startswith("config key 'data.valid': column 'targets' shares no id of its first 1000 rows with")
        assert said.endswith("; name the column that has such ids as data.targets_column, or add the items")
    else:
        assert rows_of(world, folder) == ROWS
