"""Labels: several at once, null ones that do not count, expressions; and losses that no number of ranks changes."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import fork_train, must_train, records_of

from recsys.config import load_config
from recsys.errors import UserError

ROWS, STEPS = 1200, 8
CONFIG = """
features:
  {{user: {{table: user}}, item: {{table: item}}, hour: {{type: float}}}}
tables:
  user: {{num_embeddings: 200, embedding_dim: 8}}
  item: {{num_embeddings: 100, embedding_dim: 8}}
model: {{name: {model}}}
data: {{train: {folder}/rows, test: {folder}/rows, num_streams: 6, window_mib: 1}}
train: {{global_batch_size: 120, max_steps: 8, log_every_steps: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with clicks, purchases that are known of clicked rows only, seconds watched, and names of events."""
    folder, rng = tmp_path_factory.mktemp("labels"), np.random.default_rng(0)
    clicked = rng.random(ROWS) < 0.5
    bought = clicked & (rng.random(ROWS) < 0.3)
    columns = {
        "user": rng.integers(0, 150, ROWS),
        "item": rng.integers(0, 80, ROWS),
        "hour": rng.normal(size=ROWS).astype(np.float32),
        "clicked": clicked.astype(np.int8),
        "bought": pa.array(bought.astype(np.int8), mask=~clicked),
        "bought_or_0": bought.astype(np.int8),
        "is_clicked": clicked.astype(np.float32),
        "seconds": np.where(clicked, rng.exponential(2, ROWS), 0).astype(np.float32),
        "event": np.where(bought, "purchase", np.where(clicked, "click", "view")),
    }
    (folder / "rows").mkdir()
    pq.write_table(pa.table(columns), folder / "rows" / "a.parquet", row_group_size=300)
    for model in ("dlrm", "mmoe"):
        (folder / f"{model}.yaml").write_text(CONFIG.format(folder=folder, model=model))
    return folder


def train(folder: Path, run: Path, *options: str, nproc: int = 1, model: str = "dlrm") -> tuple[list[dict], dict]:
    """Return the lines of metrics.jsonl of the steps, and the metrics of the test set."""
    must_train(str(folder / f"{model}.yaml"), f"run.dir={run}", *options, nproc=nproc)
    return records_of(run), json.loads((run / "result.json").read_text())["metrics"]


def losses(lines: list[dict]) -> list[float]:
    return [line["loss"] for line in lines]


def test_a_null_label_counts_as_a_row_of_weight_0(folder: Path, tmp_path: Path) -> None:
    unknown, metrics = train(folder, tmp_path / "a", "data.labels={buy: {column: bought, nulls: unknown}}")
    weighted, expected = train(folder, tmp_path / "b", "data.label_column=bought_or_0", "data.weight_column=is_clicked")
    assert losses(unknown) == pytest.approx(losses(weighted), rel=1e-5) and len(unknown) == STEPS
    assert metrics["test"] == pytest.approx(expected["test"], rel=1e-4)
    assert metrics["test"]["rows"] < ROWS


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        ("data.labels={click: clicked, buy: {column: late, nulls: unknown}}",),
        ("data.labels={buy: {column: late, nulls: unknown}}",),
        ("data.label_column=bought_or_0", "data.weight_column=is_late"),
    ],
    ids=["of several", "the only one", "no weight"],
)
def test_a_step_without_a_row_of_a_label_has_no_loss_of_it(
    options: tuple[str, ...], nproc: int, folder: Path, tmp_path: Path
) -> None:
    """Lines of metrics.jsonl have means over steps, which losses of 0 would pull down."""
    rows = pq.read_table(folder / "rows").slice(0, 480)
    is_late = np.arange(480) >= 240
    rows = rows.append_column("late", pa.array(rows["bought_or_0"].to_numpy(), mask=~is_late))
    pq.write_table(rows.append_column("is_late", pa.array(is_late.astype(np.float32))), tmp_path / "rows.parquet")
    data = (f"data.train={tmp_path}/rows.parquet", "data.test=null", "data.shuffle=false", "data.num_streams=1")
    lines, _ = train(folder, tmp_path / "run", *data, *options, nproc=nproc)
    if "click" in options[-1]:
        assert [[*line["losses"]] for line in lines] == [["click"]] * 2 + [["click", "buy"]] * 2
        assert None not in losses(lines)
    else:
        first, second, *late = losses(lines)
        assert first is None and second is None and min(late) > 0.3


@pytest.mark.slow
def test_an_expression_is_the_column_that_it_says(folder: Path, tmp_path: Path) -> None:
    said, _ = train(folder, tmp_path / "a", "data.labels={buy: \"event == 'purchase'\"}")
    column, _ = train(folder, tmp_path / "b", "data.label_column=bought_or_0")
    assert losses(said) == losses(column)


LABELS = (
    "data.labels={click: clicked, buy: {column: bought, nulls: unknown, weight: 0.5}, "
    "watch: {column: seconds, loss: squared, weight: 0.1}}"
)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "mmoe"])
def test_several_labels_on_any_ranks_and_in_micro_batches(model: str, folder: Path, tmp_path: Path) -> None:
    alone, metrics = train(folder, tmp_path / "1", LABELS, model=model)
    for line in alone:
        shares = line["losses"]
        assert line["loss"] == pytest.approx(shares["click"] + 0.5 * shares["buy"] + 0.1 * shares["watch"], rel=1e-4)
    for number, (nproc, options) in enumerate(((2, ()), (3, ()), (1, ("train.micro_batch_size=50",)))):
        lines, again = train(folder, tmp_path / f"other{number}", LABELS, *options, nproc=nproc, model=model)
        assert losses(lines) == pytest.approx(losses(alone), rel=1e-5)
        assert again["test"] == pytest.approx(metrics["test"], rel=1e-4)
    clicked = pq.read_table(folder / "rows")["clicked"].to_numpy()
    assert metrics["test"]["buy.rows"] == clicked.sum() and metrics["test"]["click.rows"] == ROWS
    assert metrics["test"]["watch.rmse"] > 0 and 0 < metrics["test"]["click.auc"] < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["data.labels={buy: bought}"], ["(data.labels.buy) holds", "nulls"]),
        (["data.labels={buy: event ==}"], ["config key 'data.labels.buy'", "cannot be understood"]),
        (["data.labels={buy: evnt == 'purchase'}"], ["'data.labels.buy'", "evnt"]),
        (["data.labels={a: clicked, b: clicked}", "data.label_column=clicked"], ["exclude each other"]),
        (["data.labels={a: {weight: 0, column: clicked}}"], ["every weight is 0"]),
        (["data.labels={a: {column: clicked, expression: clicked == 1}}"], ["'data.labels.a'", "keep one"]),
        (["data.labels={a/b: clicked}"], ["'data.labels'", "'a/b' is not a valid name"]),
        (["data.labels={a: {colum: clicked}}"], ["did you mean", "column"]),
    ],
)
def test_mistakes(options: list[str], said: list[str], folder: Path, tmp_path: Path) -> None:
    try:
        load_config(folder / "dlrm.yaml", options)
    except UserError as error:
        text = str(error)
    else:
        done = fork_train(str(folder / "dlrm.yaml"), f"run.dir={tmp_path}/run", *options)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        text = done.stderr.strip().splitlines()[-1]
    assert all(part in text for part in said), text
