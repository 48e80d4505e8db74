"""Vectors of items that ranks share: the best of them are those of one rank that holds all."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import batch_of
from launch import must_train

from recsys.config import Device
from recsys.models import items as items_module
from recsys.models.items import ItemVectors, _best
from recsys.runtime.world import open_world
from recsys.serving.score import best_places

ITEMS, USERS, DIM = 50, 23, 8


CASES = [(k, keys) for k in (7, 60) for keys in (["seen"], ["candidates", "seen"])]


def best(rank: int, ranks: int) -> list[list[list[list[float]]]]:
    """Return by case scores and positions of the best items of this rank's users, who are not as many on each."""
    rng, shares = np.random.default_rng(5), np.random.default_rng(6)
    # Small integers, whose products are exact: many are equal, as of ids that share a table row.
    items, users = (torch.from_numpy(rng.integers(-2, 3, (n, DIM)).astype(np.float32)) for n in (ITEMS, USERS))
    listed = {
        key: [rng.integers(-1, ITEMS, rng.integers(0, 30)).tolist() for _ in range(USERS)]
        for key in ("seen", "candidates")
    }
    owners = shares.integers(0, ranks if ranks < 3 else ranks - 1, ITEMS)  # the last of three has none
    bounds = [0, 11, 11, USERS] if ranks == 3 else np.linspace(0, USERS, ranks + 1).round().astype(int)
    mine = slice(bounds[rank], bounds[rank + 1])
    own = torch.from_numpy(shares.permutation(np.flatnonzero(owners == rank)))
    answers = []
    with open_world(Device.cpu) as world:
        vectors = ItemVectors(items[own], own, ITEMS, world)
        assert torch.equal(vectors.whole(), items)
        for k, keys in CASES:
            batch = batch_of(np.ones(len(users[mine])), lists={key: listed[key][mine] for key in keys})
            answers.append([each.tolist() for each in vectors.best(users[mine], k, batch)])
    return answers


@pytest.mark.parametrize("at_once", [1, 12, 100])
def test_blocks_of_items_give_the_best_of_all(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of millions of items some are scored at a time: one user with all of them takes three times as long."""
    expected = best(0, 1)
    monkeypatch.setattr(items_module, "_SCORES_AT_ONCE", {"cpu": at_once})
    monkeypatch.setattr(items_module, "_FEWEST_USERS", 4)
    users, items = items_module.block_of_scores(ITEMS, "cpu")
    assert users == 4 and items < ITEMS
    for (scores, places), (all_scores, all_places) in zip(best(0, 1), expected, strict=True):
        known = np.array(all_scores) > -np.inf
        assert scores == all_scores and (np.array(places)[known] == np.array(all_places)[known]).all()


def test_rows_that_fill_up_a_batch_are_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items_module, "_SCORES_AT_ONCE", {"cpu": 1})
    monkeypatch.setattr(items_module, "_FEWEST_USERS", 4)
    scored: list[int] = []
    of_block = ItemVectors._best_of_block
    monkeypatch.setattr(
        ItemVectors,
        "_best_of_block",
        lambda self, users, *rest: scored.append(len(users)) or of_block(self, users, *rest),
    )
    with open_world(Device.cpu) as world:
        items = ItemVectors(torch.eye(DIM), torch.arange(DIM), DIM, world)
        scores, places = items.best(torch.eye(DIM).repeat(4, 1), 1, batch_of([1.0] * 6 + [0.0] * 26))
    assert scored == [4, 4] and scores.flatten().tolist() == [1.0] * 6 + [-np.inf] * 26
    assert places[:6].flatten().tolist() == list(range(6))


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_ranks_find_the_best_of_all_items(ranks: int, tmp_path: Path) -> None:
    must_train(str(tmp_path), nproc=ranks, program="tests/models/test_items.py")
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    for case, (scores, positions) in enumerate(best(0, 1)):
        of_ranks, where = ([row for each in found for row in each[case][i]] for i in (0, 1))
        np.testing.assert_allclose(of_ranks, scores, rtol=1e-5)
        known = np.array(scores) > -np.inf
        assert known.any() and (np.array(where)[known] == np.array(positions)[known]).all()


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(best(rank, int(os.environ["WORLD_SIZE"]))))


def test_threads_that_ask_at_once_get_their_own_users_best() -> None:
    """Another asks wherever the first one has noted something."""
    items, users, others = (torch.randn(n, DIM, generator=torch.Generator().manual_seed(n)) for n in (50, 20, 21))
    batches = {n: SimpleNamespace(lists=None, weights=torch.ones(n)) for n in (20, 21)}

    class Interrupted(ItemVectors):
        is_asked = False

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if self.is_asked and name != "is_asked":
                self.is_asked = False
                assert_best(self, others)

    def assert_best(vectors: ItemVectors, asking: torch.Tensor) -> None:
        for _ in range(2):  # the second time as slices of a batch do
            assert torch.equal(vectors.best(asking, 3, batches[len(asking)])[1], (asking @ items.T).topk(3).indices)

    with open_world(Device.cpu) as world:
        vectors = Interrupted(items, torch.arange(50), 50, world)
        vectors.is_asked = True
        assert_best(vectors, users)
        assert not vectors.is_asked


@pytest.mark.parametrize("k", [1, 3, 6])
def test_of_equal_scores_the_first_comes_first(k: int) -> None:
    """In `recommend` and in exports, by sorting whole rows."""
    scores = torch.randint(0, 4, (500, 6), generator=torch.Generator().manual_seed(k)).float()
    scores[scores == 0] = -torch.inf
    found, places = _best(scores, k)
    order = scores.sort(dim=1, descending=True, stable=True)
    assert torch.equal(found, order.values[:, :k])
    known = found > -torch.inf
    assert torch.equal(places[known], order.indices[:, :k][known])
    for row, best in zip(scores.numpy(), places, strict=True):
        assert best_places(row, k).tolist() == [place for place in best.tolist() if row[place] > -np.inf]


def test_no_ties_are_broken_for_rows_that_fill_up_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of 100 users in batches of 8,192 took 6 s, nearly all of it for ties of rows without ids."""
    items, users = (torch.randn(n, DIM, generator=torch.Generator().manual_seed(n)) for n in (50, 9))
    fill = torch.tensor([True, False, False, True, True, False, False, False, True])
    users[fill] = 0
    batch = batch_of(np.ones(9), lists={"seen": [[] if is_fill else [i, 20] for i, is_fill in enumerate(fill)]})
    with open_world(Device.cpu) as world:
        ranked = ItemVectors(items, torch.arange(50), 50, world).best(users, 7, batch)
        monkeypatch.setattr(torch.Tensor, "cumsum", None)  # which breaking ties would call
        batch.weights = (~fill).float()
        scores, positions = ItemVectors(items, torch.arange(50), 50, world).best(users, 7, batch)
    assert torch.equal(scores[~fill], ranked[0][~fill]) and torch.equal(positions[~fill], ranked[1][~fill])
    assert (scores[fill] == -torch.inf).all() and (ranked[0][fill] == 0).all()
