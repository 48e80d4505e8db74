"""The position at which an item was shown explains clicks, and is hidden when rows are scored: any ranks and a resumed
run learn the same, and scores need no position and are nearer to what users want."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import evaluate, losses_of, run_recsys
from retrieval import train

import recsys
from recsys.serving.score import Scorer

USERS, ITEMS, SHOWN = 60, 40, 8
CONFIG = """
features: {user: {table: user}, item: {table: item}, position: {table: position, hidden: 0.1}}
tables:
  user: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary}
  item: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary}
  position: {num_embeddings: 20, embedding_dim: 8, mapping: vocabulary}
model: {name: dlrm}
data: {train: DIR/train, test: DIR/test, label_column: clicked, num_streams: 6}
train: {global_batch_size: 300, epochs: 2, log_every_steps: 1}
optimizer: {dense: {learning_rate: 0.004}, tables: {learning_rate: 0.1}}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log in which items that a wrong ranking shows first are clicked more often, and pairs with what users want."""
    folder, rng = tmp_path_factory.mktemp("positions"), np.random.default_rng(0)
    wanted = 1 / (1 + np.exp(-rng.normal(size=(USERS, 1)) - 1.5 * rng.normal(size=ITEMS)))
    ranking = rng.normal(size=ITEMS)
    for name, requests in (("train", 1500), ("logged", 1000)):
        user, item = rng.integers(0, USERS, requests), rng.integers(0, ITEMS, (requests, SHOWN))
        order = np.argsort(ranking[item] + rng.normal(size=item.shape) / 2, axis=1)
        item, position = np.take_along_axis(item, order, 1), np.arange(1, SHOWN + 1)
        clicked = rng.random(item.shape) < wanted[user[:, None], item] / position
        columns = {"user": np.repeat(user, SHOWN), "item": item.ravel(), "position": np.tile(position, len(user))}
        write(folder / name, columns | {"clicked": clicked.ravel()})
    user, item = rng.integers(0, USERS, 4000), rng.integers(0, ITEMS, 4000)
    write(folder / "test", {"user": user, "item": item, "clicked": rng.random(4000) < wanted[user, item]})
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


def write(folder: Path, columns: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=1000)


@pytest.fixture(scope="module")
def run(config: Path) -> Path:
    train(config, config.parent / "run")
    return config.parent / "run"


def metrics(run: Path) -> dict[str, float]:
    return json.loads((run / "result.json").read_text())["metrics"]["test"]


def evaluation(run: Path, *words: object) -> Path:
    """Evaluate a run, and return the path of what that writes."""
    return Path(run_recsys("evaluate", run, *words).splitlines()[-2].removeprefix("done: "))


def test_what_users_want_is_ranked_better_than_without_the_position(config: Path, run: Path, tmp_path: Path) -> None:
    train(config, tmp_path / "without", "features.position=null", "tables.position=null")
    wanted, clicked, clicked_first = [], [], []
    for each in (run, tmp_path / "without"):
        wanted.append(metrics(each)["auc"])
        told = json.loads(evaluation(each, config.parent / "logged", "--by", "position").read_text())
        clicked.append(told["metrics"]["test"]["auc"])
        clicked_first.append(told["by"]["position"]["test"]["1"]["auc"])
    assert wanted == pytest.approx([0.814, 0.756], abs=0.01)
    # Clicks of the log favour the items that were shown first; those at one position do not.
    assert clicked == pytest.approx([0.732, 0.742], abs=0.006) and clicked[0] < clicked[1]
    assert clicked_first == pytest.approx([0.816, 0.766], abs=0.01)


def test_scores_are_the_same_whatever_positions_are_given(config: Path, run: Path, tmp_path: Path) -> None:
    rows = pq.read_table(config.parent / "test")
    with_positions = rows.append_column("position", pa.array([f"not {i}" for i in range(len(rows))]))
    write(tmp_path / "rows", with_positions)
    run_recsys("predict", run, config.parent / "test", tmp_path / "without")
    run_recsys("predict", run, tmp_path / "rows", tmp_path / "with", "--keep", "position")
    predicted, kept = pq.read_table(tmp_path / "without"), pq.read_table(tmp_path / "with")
    assert predicted.column_names == ["user", "item", "score"]
    assert kept["position"].equals(with_positions["position"]) and kept["score"].equals(predicted["score"])
    given = recsys.open_run(run)
    assert given.predict(rows).equals(given.predict(with_positions)) and given.predict(rows).equals(predicted)
    run_recsys("export", run, tmp_path / "export")
    scorer = Scorer(tmp_path / "export")
    scores = scorer.score(rows.select(["user", "item"]))
    assert scores.equals(scorer.score(with_positions))
    np.testing.assert_allclose(scores["score"], predicted["score"], rtol=0, atol=1e-5)


def test_evaluation_needs_no_position_and_tells_no_importance_of_it(run: Path) -> None:
    told = evaluate(run)["test"]
    assert told == pytest.approx(metrics(run), rel=1e-6)
    result = json.loads(evaluation(run, "--importance", "1").read_text())
    assert result["importance"]["test"].keys() == {"user", "item"}


def test_vectors_of_positions_are_found_by_the_positions_in_data(config: Path, run: Path, tmp_path: Path) -> None:
    run_recsys("embeddings", run, "position", tmp_path / "all")
    run_recsys("embeddings", run, "position", tmp_path / "some", "--data", config.parent / "train")
    for name in ("all", "some"):
        assert {*range(1, SHOWN + 1)} <= {*pq.read_table(tmp_path / name)["id"].to_pylist()}


@pytest.mark.slow
def test_any_ranks_and_a_stop_learn_the_same(config: Path, run: Path, tmp_path: Path) -> None:
    alone = losses_of(run)
    for nproc in (2, 3):
        told, losses = train(config, tmp_path / str(nproc), nproc=nproc)
        assert losses == pytest.approx(alone, rel=1e-5)
        assert told == pytest.approx(metrics(run), rel=1e-5)
    train(config, tmp_path / "stopped", "train.max_steps=50")
    again = train(config, tmp_path / "stopped", "run.resume=true")
    assert again == (metrics(run), alone)


@pytest.mark.slow
def test_compressed_runs_score_without_positions(run: Path, tmp_path: Path) -> None:
    for by in ("count", "gradient"):
        options = ("--steps", "quantize,prune", "--max-loss", "20%", "--prune-by", by)
        run_recsys("compress", run, tmp_path / by, *options, "data.valid=null")
        told = json.loads((tmp_path / by / "compression.json").read_text())
        assert evaluate(tmp_path / by)["test"]["auc"] == pytest.approx(told["stages"][-1]["metrics"]["auc"], abs=1e-6)


def test_a_run_that_goes_on_keeps_the_share_and_another_may_change_it(config: Path, run: Path, tmp_path: Path) -> None:
    words = ("train", config, f"run.dir={run}", "run.resume=true", "train.epochs=3", "features.position.hidden=0.2")
    assert "'features.position.hidden' is 0.2, and was 0.1" in run_recsys(*words, status=1)
    start = f"train.init_from={run}", "train.max_steps=2"
    for share in ("0.2", "null"):
        data = "data.test=null" if share == "null" else "data.drop_last=true"
        train_only = ("train", config, f"run.dir={tmp_path}/{share}", *start, f"features.position.hidden={share}", data)
        run_recsys(*train_only)
