"""UltraGCN: its loss by hand, the neighbours of items, and what data need no column of these."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from batches import batch_of
from exports import assert_recommends_alike
from launch import run_recsys
from retrieval import NUM_USERS, Trained, assert_learns_alike, write_retrieval
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.config import load_config
from recsys.data.batch import Sampled
from recsys.datasets.neighbours import neighbour_lists
from recsys.errors import UserError
from recsys.models import DenseInputs
from recsys.models.ultragcn import UltraGCN, UltraGCNConfig
from recsys.runtime.world import open_world

CONFIG = """
data: {train: DIR/train.parquet, valid: DIR/valid.parquet, test: DIR/valid.parquet, items: DIR/items.parquet}
features:
  user: {table: user}
  history: {table: item, column: seen}
  item: {table: item}
  neighbours: {table: item, weights: neighbour_weights}
tables:
  user: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary, init_range: 0.1, l2: 0.01}
  item: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary, init_range: 0.1}
model:
  name: ultragcn
  user_id: user
  history: history
  item_id: item
  neighbours: neighbours
  dim: 8
  sampled_negatives: 20
  negative_weight: 2
  neighbour_weight: 0.1
  top_k: [5]
optimizer:
  tables: {name: adam, learning_rate: 0.02, eps: 1e-4}
run: {num_threads: 1}
train: {global_batch_size: 12, epochs: 12, log_every_steps: 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of users of two kinds, each of whom has 15 of the 30 items of a half."""
    folder = tmp_path_factory.mktemp("ultragcn")
    write_retrieval(folder)
    users = pq.read_table(folder / "valid.parquet")
    ids, weights = neighbour_lists(users["seen"].combine_chunks(), 4)
    columns = {"user": users["user"], "seen": users["seen"], "neighbours": ids, "neighbour_weights": weights}
    pq.write_table(pa.table(columns), folder / "train.parquet")
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


def test_it_learns_which_half_a_user_likes(one_process: Trained) -> None:
    _, metrics, losses = one_process
    assert losses[-1] < 0.95 * losses[0]
    assert metrics["recall@5"] > 0.25 and metrics["users"] == NUM_USERS, "5 of 15 of the half, or of 45 of all"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [
        (1, ["train.micro_batch_size=5"]),
        (2, ["tables.item.sharding_type=row_wise", "tables.user.sharding_type=data_parallel"]),
        (3, ["tables.item.sharding_type=column_wise", "train.micro_batch_ids=20"]),
    ],
    ids=["rows", "two", "three"],
)
def test_no_split_changes_what_is_learned(
    nproc: int, overrides: list[str], config: Path, one_process: Trained, tmp_path: Path
) -> None:
    assert len(one_process.losses) == 12 * -(-NUM_USERS // 12)
    assert_learns_alike(config, tmp_path, one_process, *overrides, nproc=nproc)


def test_the_loss_by_hand() -> None:
    """Users with 3, 0 and 2 items, the last of weight 2; drawn are items 2, 9, 9, 4, and nothing in the last row."""
    torch.manual_seed(0)
    history, drawn, near = [7, 9, 2, 5, 4], [2, 9, 9, 4], [1, 3, 1]
    tensors = [torch.randn(n, 4, requires_grad=True) for n in (8, 8, 5, 3)]
    users, items, found, neighbours = tensors
    by_feature = [3, 0, 2, 0, 0, 0, 0, 0], [0] * 3 + [1] * 4 + [0], [1, 0, 2, 0, 0, 0, 0, 0]
    ids = KeyedJaggedTensor(
        ["history", "item", "near"],
        torch.tensor(history + drawn + near),
        lengths=torch.tensor([n for lengths in by_feature for n in lengths], dtype=torch.int32),
        weights=torch.tensor([1.0] * 9 + [0.5, 0.25, 3.0]),
    )
    batch = batch_of([1.0, 1, 2] + 5 * [0.0], ids=ids, sampled=Sampled(3, 4))
    degrees = torch.tensor([1.0, 3, 8, 1, 2, 5, 1, 4, 1, 6])

    def weight(length: int, item: int, of_all: float, by_degrees: float) -> float:
        return of_all + by_degrees / length * ((length + 1) / (float(degrees[item]) + 1)) ** 0.5

    logit_of_zero = -math.log(5.0)
    squares = sum(items[3 + i][:3].square().sum() for i in range(4)) / 4
    expected = torch.zeros(())
    for row, places, of_row in ((0, (0, 1, 2), 1), (2, (3, 4), 2)):
        has, length = [history[i] for i in places], len(places)
        own = {i: F.softplus(-users[row] @ found[i] - logit_of_zero) for i in places}
        loss = sum(weight(length, history[i], 0.1, 2.0) * own[i] for i in places)
        for i, item in enumerate(drawn):
            if item not in has:
                score = users[row] @ items[3 + i]
                negative = weight(length, item, 0.3, 4.0) * F.softplus(score + logit_of_zero)
                loss = loss + length * 5.0 * negative / 4
        for i in {0: [0], 2: [1, 2]}[row]:
            score = users[row] @ neighbours[i]
            loss = loss + 0.7 * float(ids["near"].weights()[i]) * F.softplus(-score - logit_of_zero)
        loss = loss + length * 0.06 / 2 * squares
        expected = expected + of_row * loss

    section = UltraGCNConfig(
        user_id="user",
        history="history",
        item_id="item",
        neighbours="near",
        dim=4,
        sampled_negatives=4,
        positive_weights=[0.1, 2.0],
        negative_weights=[0.3, 4.0],
        negative_weight=5.0,
        neighbour_weight=0.7,
        item_bias=True,
        drawn_l2=0.06,
    )
    shares = (degrees / 40).log()
    model = UltraGCN(section, DenseInputs({}, [], log_shares=shares, num_counted=40))
    with open_world():
        result = model.losses(tuple(tensors), batch)["ultragcn"]
        gradients = torch.autograd.grad(result, tensors)
        assert model.denominator(batch).item() == 3 + 2 * 2
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, tensors))


def test_training_alone_has_vectors_of_lists() -> None:
    model = UltraGCN(
        UltraGCNConfig(user_id="user", history="history", item_id="item", neighbours="near", dim=4),
        DenseInputs({}, [], log_shares=torch.zeros(1)),
    )
    lists = {name: JaggedTensor(torch.randn(3, 4), lengths=torch.tensor([1, 2])) for name in ("history", "near")}
    vectors = {"user": torch.randn(2, 4), "item": torch.randn(2, 4), **lists}
    assert len(model(vectors, torch.zeros(2, 0))) == 4
    users, items = model.eval()(vectors, torch.zeros(2, 0))
    torch.testing.assert_close((users, items), (vectors["user"], vectors["item"]))


def test_a_bias_is_the_last_number_of_an_items_vector() -> None:
    section = UltraGCNConfig(user_id="user", history="history", item_id="item", dim=4, item_bias=True)
    model = UltraGCN(section, DenseInputs({}, [], log_shares=torch.zeros(1))).eval()
    vectors = {"user": torch.randn(2, 4), "item": torch.randn(2, 4)}
    outputs = model(vectors, torch.zeros(2, 0))
    expected = (vectors["user"][:, :3] * vectors["item"][:, :3]).sum(1) + vectors["item"][:, 3]
    torch.testing.assert_close(model.predictions(outputs)["score"], expected)


def test_neighbours_are_those_of_the_definition() -> None:
    """Against G = AᵀA and the paper's weights, with items that a list has twice."""
    generator = np.random.default_rng(0)
    lists = [list(range(12)), *(generator.choice(12, generator.integers(0, 6)).tolist() for _ in range(29))]
    ids, weights = neighbour_lists(pa.array([[f"item {i}" for i in each] for each in lists]), 3)
    has = np.zeros((30, 12))
    for row, each in enumerate(lists):
        has[row, each] = 1
    together = has.T @ has
    sums = together.sum(1)
    omega = together / np.maximum(1, sums - np.diag(together))[:, None] * np.sqrt(sums[:, None] / sums)
    np.fill_diagonal(omega, 0)
    best = {i: np.lexsort((np.arange(12), -omega[i]))[:3] for i in range(12)}
    for row, each in enumerate(lists):
        expected: dict[str, float] = {}
        for i in set(each):
            for k in (k for k in best[i] if omega[i, k] > 0):
                expected[f"item {k}"] = expected.get(f"item {k}", 0.0) + float(omega[i, k])
        found = dict(zip(ids[row].as_py(), weights[row].as_py(), strict=True))
        assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["features.neighbours.weights=null"], r"'features.neighbours': neighbours are items of tables.item with a we"),
        (["features.neighbours.table=user"], r"neighbours are items of tables.item .* found table user"),
        (["model.neighbours=null"], r"reads these distinct features: .*model.item_id; found"),
        (["model.positive_weights=[1]"], r"'model.positive_weights' must be two numbers"),
    ],
)
def test_mistakes_get_a_sentence(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(config, overrides)


@pytest.mark.slow
def test_an_export_recommends_what_the_run_does(config: Path, one_process: Trained, tmp_path: Path) -> None:
    assert_recommends_alike(one_process.run, config.parent / "valid.parquet", tmp_path)


def test_ids_of_the_table_are_found_in_data_without_the_columns_of_training(
    config: Path, one_process: Trained, tmp_path: Path
) -> None:
    """And in data with them: neighbours are read in training alone."""
    users, found = pq.read_table(config.parent / "valid.parquet"), list[pa.Table]()
    pq.write_table(users.append_column("neighbours", users["targets"]), tmp_path / "more.parquet")
    for data in (config.parent / "valid.parquet", tmp_path / "more.parquet"):
        words = ("embeddings", one_process.run, "tables.item", tmp_path / f"of-{data.name}", "--data", data)
        run_recsys(*words)
        found.append(pq.read_table(tmp_path / f"of-{data.name}"))
    assert set(found[0]["id"].to_pylist()) == {item for items in users["seen"].to_pylist() for item in items}
    assert found[1].equals(found[0])
