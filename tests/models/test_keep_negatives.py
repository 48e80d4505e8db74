"""Down-sampling of negatives: the same rows on any number of ranks and after a stop, and unchanged mean losses."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import fork_train
from retrieval import train

from recsys.config import load_config
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.runtime.world import open_world

ROWS = 6000
CONFIG = """
features: {{user: {{table: user}}, item: {{table: item}}}}
tables:
  user: {{num_embeddings: 100, embedding_dim: 8}}
  item: {{num_embeddings: 100, embedding_dim: 8}}
model: {{name: dlrm}}
data: {{train: {folder}/train, test: {folder}/test, label_column: clicked, keep_negatives: 0.2, num_streams: 6}}
train: {{global_batch_size: 120, log_every_steps: 1}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of which a tenth are clicked, more of some items than of others."""
    folder, rng = tmp_path_factory.mktemp("negatives"), np.random.default_rng(0)
    for name in ("train", "test"):
        items = rng.integers(0, 40, ROWS)
        clicked = rng.random(ROWS) < 0.02 + 0.004 * items
        bought = pa.array(clicked & (rng.random(ROWS) < 0.3), mask=rng.random(ROWS) < 0.1)
        columns = {"user": rng.integers(0, 30, ROWS), "item": items, "clicked": clicked, "bought": bought}
        (folder / name).mkdir()
        pq.write_table(pa.table(columns), folder / name / "a.parquet", row_group_size=1000)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "config.yaml"


def batches(config: Path, *options: str, role: str = "train") -> tuple[np.ndarray, np.ndarray]:
    """Return labels, [rows, labels], and weights of the rows of an epoch."""
    with open_world() as world:
        loader = open_inputs(load_config(config, options), world).loader(role)
        found = [(batch.labels.numpy().copy(), batch.weights.numpy().copy()) for batch in loader.batches()]
    labels, weights = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
    return labels[weights > 0], weights[weights > 0]


@pytest.mark.parametrize(
    "labels",
    [
        "data.max_rows=null",
        "data.labels={click: clicked, buy: {column: bought, nulls: unknown}}",
        "data.labels={some: user > 20, other: {expression: clicked == True}}",
    ],
)
def test_positives_stay_and_negatives_count_for_those_left_out(config: Path, labels: str) -> None:
    options = labels, *(["data.label_column=null"] if "data.labels" in labels else [])
    every, ones = batches(config, *options, "data.keep_negatives=null")
    kept, weights = batches(config, *options)
    assert len(every) == ROWS and set(ones) == {1}
    is_positive = (kept > 0).any(axis=1)
    num_positive = (every > 0).any(axis=1).sum()
    assert is_positive.sum() == num_positive and set(weights[is_positive]) == {1}
    num_negative = ROWS - num_positive
    assert set(weights[~is_positive]) == {5}
    assert abs(len(kept) - num_positive - 0.2 * num_negative) < 4 * (0.16 * num_negative) ** 0.5
    given = "data.weight_column=item"
    assert set(batches(config, *options, given)[1][:200]) <= {*range(40), *range(0, 200, 5)}
    again, _ = batches(config, *options, role="test")
    assert len(again) == ROWS, "all rows are evaluated"


@pytest.mark.parametrize("filter", ["sampled(0.5, 1)", "not sampled(0.5, 1)", "sampled(0.5, 2)"])
def test_negatives_are_not_drawn_as_a_filter_draws_rows(filter: str, config: Path) -> None:
    """By one seed, that of the config, both would choose the same rows."""
    options = f"data.filter={{train: '{filter}'}}", "seed=1"
    every, _ = batches(config, *options, "data.keep_negatives=null")
    kept, weights = batches(config, *options)
    num_negative = (every == 0).sum()
    assert abs(weights[kept[:, 0] == 0].sum() - num_negative) < 4 * 5 * (0.16 * num_negative) ** 0.5


@pytest.mark.slow
def test_any_ranks_and_a_stop_train_the_same(config: Path, tmp_path: Path) -> None:
    metrics, alone = train(config, tmp_path / "1")
    assert 14 <= len(alone) < ROWS / 120 / 3, "fewer steps than all rows would take"
    for nproc in (2, 3):
        again, losses = train(config, tmp_path / str(nproc), nproc=nproc)
        assert losses == pytest.approx(alone, rel=1e-5)
        assert again == pytest.approx(metrics, rel=1e-5)
    train(config, tmp_path / "stopped", "train.max_steps=6")
    again, losses = train(config, tmp_path / "stopped", "run.resume=true")
    assert (losses, again) == (alone, metrics)


def test_losses_stay_those_of_all_rows(config: Path, tmp_path: Path) -> None:
    one_step = "train.global_batch_size=6000", "train.max_steps=1"
    _, (of_all,) = train(config, tmp_path / "a", *one_step, "data.keep_negatives=null")
    _, (of_some,) = train(config, tmp_path / "b", *one_step)
    assert of_some == pytest.approx(of_all, rel=0.02)


@pytest.mark.slow
def test_what_is_predicted_stays_that_of_all_rows(config: Path, tmp_path: Path) -> None:
    rate = "optimizer.dense.learning_rate=0.003"
    all_rows, _ = train(config, tmp_path / "c", rate, "data.keep_negatives=null")
    some_rows, _ = train(config, tmp_path / "d", rate, "train.epochs=3")
    # Without weights, chances would come out four times as high, and normalized entropy at 1.5.
    assert some_rows["normalized_entropy"] == pytest.approx(all_rows["normalized_entropy"], abs=0.02)
    assert some_rows["normalized_entropy"] < 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["data.keep_negatives=0"], "'data.keep_negatives' must be at least"),
        (["data.keep_negatives=1.5"], "'data.keep_negatives' must be at most 1"),
        (
            ["data.labels={x: {column: item, loss: squared}}", "data.label_column=null"],
            "needs a label with loss: binary",
        ),
    ],
)
def test_mistakes(options: list[str], said: str, config: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(config, options)


def test_an_expression_of_a_label_is_of_values(config: Path, tmp_path: Path) -> None:
    done = fork_train(
        str(config), f"run.dir={tmp_path}", "data.labels={x: 'sampled(0.1, 7)'}", "data.label_column=null"
    )
    assert done.returncode == 1 and "config key 'data.labels.x': sampled(…) chooses rows" in done.stderr
