"""`recsys recommend`: the best items of users by raw id, as the evaluation of the same run ranks them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import evaluate, run_recsys
from retrieval import NUM_ITEMS, NUM_USERS, train_towers

from recsys.serving import score
from recsys.serving.score import Scorer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("retrieval")
    train_towers(folder, "train.epochs=6")
    (folder / "train.parquet").unlink()
    return folder / "run"


def recommended(run: Path, out: Path, *arguments: str, nproc: int = 1) -> pa.Table:
    run_recsys("recommend", run, run.parent / "valid.parquet", out, *arguments, nproc=nproc)
    return pq.read_table(out)


def recall(table: pa.Table) -> float:
    rows = table.to_pylist()
    return float(np.mean([len({*row["items"]} & {*row["targets"]}) / len(row["targets"]) for row in rows]))


def test_the_lists_are_those_that_the_run_was_evaluated_by(run: Path, tmp_path: Path) -> None:
    metrics = evaluate(run)["valid"]
    alone = recommended(run, tmp_path / "one", "--k", "10", "--keep", "user,seen,targets")
    assert alone["user"].to_pylist() == list(range(NUM_USERS))
    assert recall(alone) == pytest.approx(metrics["recall@10"], abs=1e-12)
    for row in alone.to_pylist():
        assert len(row["items"]) == 10 and not {*row["items"]} & {*row["seen"]}
        assert row["scores"] == sorted(row["scores"], reverse=True)


@pytest.mark.parametrize("nproc", [3, *(pytest.param(number, marks=pytest.mark.slow) for number in (2, 4))])
def test_any_number_of_ranks(nproc: int, run: Path, tmp_path: Path) -> None:
    alone = recommended(run, tmp_path / "one", "--k", "10")
    on_some = recommended(run, tmp_path / "some", "--k", "10", nproc=nproc)
    assert on_some.column_names == ["user", "items", "scores"] and on_some["user"].equals(alone["user"])
    scores = [table["scores"].combine_chunks().values.to_numpy() for table in (alone, on_some)]
    np.testing.assert_allclose(*scores, rtol=0, atol=1e-6)
    for row, other in zip(alone.to_pylist(), on_some.to_pylist(), strict=True):
        score = dict(zip(row["items"], row["scores"], strict=True))
        same = [score.get(item, row["scores"][-1]) for item in other["items"]]  # in another order where they tie
        np.testing.assert_allclose(same, row["scores"], rtol=0, atol=1e-6)


def test_what_users_lose_when_a_feature_is_permuted(run: Path, tmp_path: Path) -> None:
    metrics = evaluate(run, "--importance", f"run.dir={tmp_path}")["valid"]
    (written,) = (tmp_path / "evaluations").glob("*/result.json")
    losses = json.loads(written.read_text())["importance"]["valid"]
    assert set(losses) == {"user", "history"} and set(losses["user"]) == set(metrics) - {"users"}
    assert max(each["recall@5"] for each in losses.values()) > 0.1


def test_candidates_and_seen(run: Path, tmp_path: Path) -> None:
    everything = recommended(run, tmp_path / "all", "--k", "100", "data.seen_column=null")
    assert all(len(items) == NUM_ITEMS for items in everything["items"].to_pylist())
    assert recommended(run, tmp_path / "few", "--k", "100")["items"].combine_chunks().value_lengths()[0].as_py() == 45
    chosen = recommended(run, tmp_path / "some", "--keep", "targets", "data.candidates_column=targets")
    assert all({*row["items"]} == {*row["targets"]} for row in chosen.to_pylist())
    by_item = dict(zip(everything["items"][3].as_py(), everything["scores"][3].as_py(), strict=True))
    assert [by_item[item] for item in chosen["items"][3].as_py()] == pytest.approx(
        chosen["scores"][3].as_py(), abs=1e-6
    )


def test_the_scores_of_pairs_are_those_of_the_lists(run: Path, tmp_path: Path) -> None:
    best = recommended(run, tmp_path / "best", "--k", "3", "--keep", "user,history")
    rows = [
        {
            "user": row["user"],
            "history": row["history"],
            "item": item,
            "year": float(int(item[5:]) % 7),
            "of_list": score,
        }
        for row in best.to_pylist()
        for item, score in zip(row["items"], row["scores"], strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    run_recsys("predict", run, tmp_path / "pairs.parquet", tmp_path / "scores", "--keep", "of_list")
    scores = pq.read_table(tmp_path / "scores")
    np.testing.assert_allclose(scores["score"], scores["of_list"], rtol=0, atol=1e-6)


class Numbers(Scorer):
    """A scorer of users and items that are rows of two arrays, with pairs of users and items that they have seen."""

    def __init__(self, users: np.ndarray, items: np.ndarray, pairs: np.ndarray) -> None:
        self._users, self._item_vectors, self._pairs = users, items, pairs
        self._items, self._item_ids = {"seen": "seen", "candidates": None}, pa.array(range(len(items)))

    def outputs(self, graph: str, table: pa.Table) -> list[np.ndarray]:
        return [self._users]

    def _positions(self, users: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
        return self._pairs[0], self._pairs[1]


@pytest.mark.parametrize("users_at_once", [1, 2, 7, 8, 100])
def test_blocks_of_users_of_an_export(users_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first and last users have seen items, one in between none, and one all."""
    generator = np.random.default_rng(0)
    users, items = generator.normal(size=(8, 4)), generator.normal(size=(11, 4))
    seen = [[3], [], [*range(11)], [0, 10], [], [5, 5], [2], [1, 7]]
    pairs = np.array([(user, item) for user, of_user in enumerate(seen) for item in of_user]).T
    monkeypatch.setattr(score, "SCORES_AT_ONCE", 11 * users_at_once)
    best = Numbers(users, items, pairs).recommend({"user": range(8)}, k=20).to_pydict()
    for user, of_user, found in zip(users, seen, best["items"], strict=True):
        assert found == [item for item in np.argsort(-(items @ user)).tolist() if item not in of_user]
