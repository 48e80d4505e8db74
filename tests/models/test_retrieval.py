"""The two-tower model: its loss by hand, and the same numbers on any number of ranks."""

from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from batches import batch_of
from launch import evaluate, must_train
from retrieval import NUM_ITEMS, NUM_USERS, Trained, assert_learns_alike, train, write_retrieval
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.checkpoint.state import Marker
from recsys.config import load_config
from recsys.config.choices import RetrievalLoss
from recsys.data.batch import Batch, Sampled
from recsys.data.checks import doubtful_lists
from recsys.data.facts import Facts, RowCounter
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.models import DenseInputs, retrieval, two_tower
from recsys.runtime.world import open_world
from recsys.training.build import log_shares


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_retrieval(tmp_path_factory.mktemp("retrieval"))
    # Four epochs of larger steps learn as much as twelve of the usual ones, on three ranks in a third of the time.
    quick = "\noptimizer: {dense: {learning_rate: 0.01}, tables: {learning_rate: 0.1}}\n"
    path.write_text(path.read_text().replace("epochs: 12", "epochs: 4") + quick)
    return path


# Three ranks have 21, 21 and 22 of 64 rows, so that batches of two are filled up.
@pytest.mark.parametrize("nproc", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6, 7, 8))])
def test_ranks_share_their_negatives(nproc: int, config: Path, one_process: Trained, tmp_path: Path) -> None:
    _, alone, losses = one_process
    metrics, losses_of_ranks = train(config, tmp_path, nproc=nproc)
    assert len(losses) == 4 * -(-600 // 64)
    torch.testing.assert_close(losses_of_ranks[:20], losses[:20], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses_of_ranks, losses, rtol=0, atol=1e-4)
    torch.testing.assert_close(metrics, alone, rtol=0, atol=1e-6)
    assert alone["users"] == NUM_USERS
    again = evaluate(tmp_path)
    torch.testing.assert_close(again["test"], alone, rtol=0, atol=1e-6)
    assert again["valid"] == again["test"]
    # At random 10 of the 45 items not seen, 5 of which are sought, hold 22% of them; of one's own half, 67%.
    assert alone["recall@10"] > 0.5


SAMPLED = "model.sampled_negatives=32", "model.sampling_power=0.5", "model.item_mlp=[8]", "train.epochs=3"


@pytest.mark.slow
def test_items_that_are_drawn_are_the_same_on_any_ranks_and_after_a_stop(config: Path, tmp_path: Path) -> None:
    alone = Trained(tmp_path / "1", *train(config, tmp_path / "1", *SAMPLED))
    assert_learns_alike(config, tmp_path / "3", alone, *SAMPLED, nproc=3)  # 10, 11 and 11 of them, and dropout
    assert_learns_alike(config, tmp_path / "pieces", alone, *SAMPLED, "train.micro_batch_size=19", nproc=1)
    train(config, tmp_path / "stopped", *SAMPLED, "train.max_steps=13")
    assert train(config, tmp_path / "stopped", *SAMPLED, "run.resume=true") == (alone.metrics, alone.losses)


def test_items_are_drawn_by_their_counts(config: Path) -> None:
    """From all of data.items, each with its own features, by its count in data.train to some power."""
    with open_world() as world:
        options = "model.sampled_negatives=3000", "model.sampling_power=1", "train.epochs=1"
        inputs = open_inputs(load_config(config, options), world)
        rows, shares = inputs.item_shares()
        assert len(rows) == NUM_ITEMS and set(shares) == {1 / NUM_ITEMS}, "before they are counted"
        counts = np.zeros(500, np.int64)
        counts[rows[:3]] = 10, 20, 40  # and 57 others that count as one
        inputs.facts = Facts(row_counts={"item": counts})
        loader = inputs.loader("train")
        batches = [(batch.ids["item"].values().numpy()[-3000:].copy(), batch) for batch in loader.batches()]
        item, year = (float(x) for x in (rows[1], 1))
        drawn, batch = batches[0]
        assert batch.sampled == Sampled(64, 64) and batch.num_rows == 64 and not batch.weights[64:].any()
        assert not batch.ids["user"].lengths()[64:].any() and not batch.ids["history"].lengths()[64:].any()
        assert set(batch.floats[64:, 0][torch.from_numpy(drawn == item)].tolist()) == {year}
    total = np.bincount(np.concatenate([each for each, _ in batches]), minlength=500)
    expected = total.sum() * np.bincount(rows, np.array([10, 20, 40, *[1] * 57]) / 127, 500)  # some rows hold two items
    assert not total[expected == 0].any()
    total, expected = total[expected > 0], expected[expected > 0]
    assert ((total - expected) ** 2 / expected).sum() < 110  # chi-squared of 59 degrees or less: 1 in 10,000
    assert not np.array_equal(batches[0][0], batches[1][0])


def test_items_that_share_a_row_share_its_count(config: Path) -> None:
    """Else a row would be drawn by its count times its items, as that of all rare ids of a vocabulary."""
    options = "model.sampled_negatives=16", "model.sampling_power=1", "tables.item.num_embeddings=9"
    with open_world() as world:
        inputs = open_inputs(load_config(config, options), world)
        counts = np.array([0, *range(100, 900, 100)])
        inputs.facts = Facts(row_counts={"item": counts})
        drawn = np.bincount(*inputs.item_shares(), 9)
    np.testing.assert_allclose(drawn, counts / counts.sum(), rtol=1e-12)


def test_shares_are_those_of_rows_and_of_what_is_drawn(config: Path) -> None:
    with open_world() as world:
        inputs = open_inputs(load_config(config, ["model.sampled_negatives=16"]), world)
        rows, _ = inputs.item_shares()
        counts = np.zeros(500, np.int64)
        counts[rows[0]] = 99
        counts[rows[1]] = 1
        inputs.facts = Facts(row_counts={"item": counts})
        shares = log_shares(inputs)[0].exp().numpy()
    drawn = np.bincount(rows, minlength=500) / NUM_ITEMS  # some rows hold two items
    assert shares[rows[0]] == pytest.approx((64 * 0.99 + 16 * drawn[rows[0]]) / 80)
    assert shares[rows[1]] == pytest.approx((64 * 0.01 + 16 * drawn[rows[1]]) / 80)


@pytest.mark.parametrize(
    ("history", "kind", "is_doubtful"),
    [("item", pa.list_(pa.int64()), False), ("user", pa.list_(pa.int64()), True), ("user", pa.int64(), False)],
)
def test_lists_in_a_table_of_the_users_own_are_told(
    history: str, kind: pa.DataType, is_doubtful: bool, config: Path
) -> None:
    schema = pa.schema({"user": pa.int64(), "history": kind, "item": pa.int64(), "year": pa.float32()})
    told = doubtful_lists(load_config(config, [f"features.history.table={history}"]), schema)
    assert told == [
        "config key 'features.history.table': the ids in its lists have the rows of tables.user that those of "
        "features.user have; if they are of items, set it to item"
    ] * is_doubtful  # fmt: skip


def test_what_is_drawn_needs_items(config: Path) -> None:
    with pytest.raises(UserError, match=r"'model.sampled_negatives' samples items from data.items, which is not set"):
        load_config(
            config, ["model.sampled_negatives=1", *(f"data.{role}=null" for role in ("valid", "test", "items"))]
        )


@pytest.mark.parametrize("ids", [pa.array([Decimal("1.5"), Decimal("2.0")]), pa.array([1.0, 0.5])], ids=str)
def test_ids_that_items_cannot_have_are_told_with_their_column(ids: pa.Array, config: Path, tmp_path: Path) -> None:
    pq.write_table(pa.table({"item": ids, "year": [1.0, 2.0]}), tmp_path / "items.parquet")
    changed = load_config(config, [f"data.items={tmp_path}"])
    with open_world() as world, pytest.raises(UserError, match=r"^config key 'data.items': column 'item': ids"):
        open_inputs(changed, world, roles=["items"])


def refuse_to_count() -> None:
    """In a process of its own, makes it an error to count rows."""

    def add(self: RowCounter, chunk: pa.Array) -> None:
        raise AssertionError("rows are counted again")

    RowCounter.add = add  # type: ignore[method-assign]


@pytest.mark.slow
def test_rows_are_counted_once(config: Path, tmp_path: Path) -> None:
    """What the correction goes by is kept with the run; runs that did not keep it count again, and keep it then."""
    train(config, tmp_path, "train.epochs=1", "train.max_steps=4")
    kept = tmp_path / "vocabulary" / "item.counts.parquet"
    counts = pq.read_table(kept)["count"].to_pylist()
    assert len(counts) == 500 and sum(counts) == 600
    resumed = [str(config), f"run.dir={tmp_path}", "run.resume=true", "train.epochs=1"]
    must_train(*resumed, "train.max_steps=6", before=refuse_to_count)
    assert evaluate(tmp_path)["test"]["users"] == NUM_USERS
    # As an earlier version has left it.
    for folder in tmp_path.glob("checkpoints/step-*"):
        replace(Marker.read(folder), facts={}).write(folder)
    kept.unlink()
    must_train(*resumed, "train.max_steps=8")
    assert pq.read_table(kept)["count"].to_pylist() == counts


WEIGHTS = [1.0, 2.0, 1.0, 0.5, 0.0]


def by_hand(num_sampled: int) -> tuple[torch.Tensor, torch.Tensor, list[int], Batch]:
    """Return vectors of users and of items, the table rows of the items, and the batch."""
    rows = 5 + num_sampled
    users, items = torch.randn(rows, 3, requires_grad=True), torch.randn(rows, 3, requires_grad=True)
    item_rows = [7, 2, 7, 4, 2]  # rows 0 and 2 hold the same item, and row 4 is fill
    item_rows += [2, 9, 9][:num_sampled]  # of what is drawn, the first is the item of row 1, and the last row is fill
    lengths = torch.ones(rows, dtype=torch.int32)
    lengths[8:] = 0
    ids = KeyedJaggedTensor(keys=["item"], values=torch.tensor(item_rows), lengths=lengths)
    drawn = Sampled(5, 64) if num_sampled else None
    return users, items, item_rows, batch_of(WEIGHTS + num_sampled * [0.0], ids=ids, sampled=drawn)


@pytest.mark.parametrize("scores_at_once", [1, 11, 1000])
@pytest.mark.parametrize("num_sampled", [0, 4])
@pytest.mark.parametrize("correct_own", [True, False])
def test_the_loss_by_hand(
    num_sampled: int, correct_own: bool, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "_SCORES", {"cpu": scores_at_once})
    users, items, item_rows, batch = by_hand(num_sampled)
    log_q, weights = torch.log(torch.arange(1, 11) / 55), WEIGHTS
    expected = published = torch.zeros(())
    for i in range(4):
        scores = {}
        for j in [0, 1, 2, 3, 5, 6, 7][: 4 + num_sampled]:
            if j == i or item_rows[j] != item_rows[i]:
                scores[j] = users[i] @ items[j] / 0.5 - log_q[item_rows[j]]
        if not correct_own:
            own = users[i] @ items[i] / 0.5
            others = torch.stack([score for j, score in scores.items() if j != i])
            others = others + (1 - log_q[item_rows[i]].exp()).log()  # Q'(d) = Q(d) / (1 - Q(p))
            estimate = own.exp() + others.exp().mean()  # of the sum over all items
            doubt = 1 - own.exp() / estimate
            published = published - weights[i] * doubt.detach() * (own - others.logsumexp(0))
            scores[i] = own + np.log(len(others)) - (1 - log_q[item_rows[i]].exp()).log()
        total = torch.stack([score.exp() for score in scores.values()]).sum()
        expected = expected - weights[i] * (scores[i] - total.log())

    with open_world():
        config = two_tower.TwoTowerConfig(
            user_features=["user"], item_features=["item"], item_id="item", temperature=0.5, correct_own=correct_own
        )
        model = two_tower.TwoTower(config, DenseInputs({"user": 4, "item": 4}, [], log_shares=log_q))
        loss = model.losses((users, items), batch)["softmax"]
        gradients = torch.autograd.grad(3 * loss, (users, items))
    torch.testing.assert_close(loss, expected)
    learned = expected if correct_own else published
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * learned, (users, items)))


@pytest.mark.parametrize("scores_at_once", [1, 1000])
@pytest.mark.parametrize("num_sampled", [0, 4])
def test_the_loss_of_pairs_by_hand(num_sampled: int, scores_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_SCORES", {"cpu": scores_at_once})
    users, items, item_rows, batch = by_hand(num_sampled)
    expected = torch.zeros(())
    for i in range(4):
        candidates = [0, 1, 2, 3, 5, 6, 7][: 4 + num_sampled]
        margins = [users[i] @ (items[i] - items[j]) / 0.5 for j in candidates if item_rows[j] != item_rows[i]]
        expected = expected - WEIGHTS[i] * torch.stack(margins).sigmoid().log().mean()
    with open_world():
        config = two_tower.TwoTowerConfig(
            user_features=["user"], item_features=["item"], item_id="item", temperature=0.5, loss=RetrievalLoss.bpr
        )
        loss = two_tower.TwoTower(config, DenseInputs({"user": 4, "item": 4}, [])).losses((users, items), batch)["bpr"]
        gradients = torch.autograd.grad(3 * loss, (users, items))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected, (users, items)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.loss=bpr"], r"'model.logq_correction' corrects the softmax; with loss bpr, set it to false"),
        (["model.loss=contrastive"], r"'model.loss': contrastive belongs to model simplex; use softmax or bpr"),
    ],
)
def test_losses_that_do_not_fit_get_a_sentence(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(config, overrides)


@pytest.mark.slow
def test_pairs_learn_the_same_on_any_ranks(config: Path, tmp_path: Path) -> None:
    settings = "model.loss=bpr", "model.logq_correction=false", "train.epochs=6"
    alone = Trained(tmp_path / "1", *train(config, tmp_path / "1", *settings))
    assert_learns_alike(config, tmp_path / "3", alone, *settings, nproc=3)
    assert alone.losses[-1] < alone.losses[0] and alone.metrics["recall@10"] > 0.4, "at random .22"
