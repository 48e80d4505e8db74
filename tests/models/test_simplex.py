"""SimpleX: its losses by hand, and the same numbers however users are cut into ranks and batches."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from batches import batch_of
from exports import assert_recommends_alike
from retrieval import NUM_USERS, Trained, assert_learns_alike, train, write_retrieval
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.config import load_config
from recsys.config.choices import RetrievalLoss
from recsys.data.batch import Sampled
from recsys.errors import UserError
from recsys.models import DenseInputs
from recsys.models.simplex import SimpleX, SimpleXConfig
from recsys.runtime.world import open_world

CONFIG = """
data: {train: DIR/valid.parquet, valid: DIR/valid.parquet, test: DIR/valid.parquet, items: DIR/items.parquet}
features:
  user: {table: user}
  history: {table: item, column: seen}
  item: {table: item}
tables:
  user: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary, init_range: 0.1, l2: 0.01}
  item: {num_embeddings: 100, embedding_dim: 8, mapping: vocabulary, init_range: 0.1}
model:
  name: simplex
  user_id: user
  history: history
  item_id: item
  dim: 8
  item_bias: true
  leave_one_out: true
  dropout: 0.1
  sampled_negatives: 20
  top_k: [5]
optimizer:
  tables: {name: adam, learning_rate: 0.02, eps: 1e-4}
  dense: {learning_rate: 0.01}
run: {num_threads: 1}
train: {global_batch_size: 12, epochs: 12, log_every_steps: 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of users of two kinds, each of whom has 15 of the 30 items of a half."""
    folder = tmp_path_factory.mktemp("simplex")
    write_retrieval(folder)
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [
        (1, ["train.micro_batch_size=5"]),
        (2, ["tables.item.sharding_type=row_wise", "tables.user.sharding_type=row_wise"]),
        (3, ["tables.item.sharding_type=column_wise", "train.micro_batch_ids=20"]),
    ],
    ids=["rows", "two", "three"],
)
def test_no_split_changes_what_is_learned(
    nproc: int, overrides: list[str], config: Path, one_process: Trained, tmp_path: Path
) -> None:
    assert len(one_process.losses) == 12 * -(-NUM_USERS // 12)
    assert_learns_alike(config, tmp_path, one_process, *overrides, nproc=nproc)


@pytest.mark.slow
def test_pairs_learn_the_same_on_any_ranks(config: Path, tmp_path: Path) -> None:
    of_bpr = "model.loss=bpr", "train.epochs=3"
    _, alone = train(config, tmp_path / "1", *of_bpr)
    assert alone[-1] < alone[0]
    for nproc, others in ((2, []), (3, ["tables.item.sharding_type=column_wise"]), (1, ["train.micro_batch_size=5"])):
        _, losses = train(config, tmp_path / f"{nproc}{len(others)}", *of_bpr, *others, nproc=nproc)
        torch.testing.assert_close(losses, alone, rtol=0, atol=1e-5)


def test_it_learns_which_half_a_user_likes(one_process: Trained) -> None:
    _, metrics, losses = one_process
    assert losses[-1] < losses[0] - 0.3
    assert metrics["recall@5"] > 0.25 and metrics["users"] == NUM_USERS, "5 of 15 of the half, or of 45 of all"


def model_of(**settings: object) -> SimpleX:
    config = SimpleXConfig(user_id="user", history="history", item_id="item", dim=4, **settings)  # type: ignore[arg-type]
    return SimpleX(config, DenseInputs({"user": 4, "history": 4, "item": 4}, []))


def cosines(users: list[torch.Tensor], items: torch.Tensor) -> torch.Tensor:
    """Return those of all but the last column, [users, items]."""
    return F.normalize(torch.stack(users)[:, :-1], dim=1) @ F.normalize(items[:, :-1], dim=1).T


def test_a_users_vector_is_their_own_and_the_mean_of_their_items() -> None:
    torch.manual_seed(0)
    user, item, values = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4)
    history = JaggedTensor(values, lengths=torch.tensor([2, 0, 1], dtype=torch.int32))
    model = model_of(history_share=0.25)
    torch.nn.init.normal_(model.map.weight)
    vectors = {"user": user, "history": history, "item": item}
    users, items, found, searching = model(vectors, torch.zeros(3, 0))
    expected = [0.75 * user[0] + 0.25 * model.map.weight @ ((values[0] + values[1]) / 2), user[1] * 0.75]
    expected.append(0.75 * user[2] + 0.25 * model.map.weight @ values[2])
    torch.testing.assert_close(users, F.normalize(torch.stack(expected), dim=1))
    torch.testing.assert_close((items, found), (F.normalize(item, dim=1), F.normalize(values, dim=1)))
    torch.testing.assert_close(searching, users[[0, 0, 2]])
    model.config.item_bias = True
    users, items, found, _ = model(vectors, torch.zeros(3, 0))
    torch.testing.assert_close(users @ items.T, cosines(expected, item) + 0.1 * item[:, -1])
    torch.testing.assert_close(users @ found.T, cosines(expected, values) + 0.1 * values[:, -1])
    model.config.item_bias, model.config.leave_one_out = False, True
    _, _, _, searching = model(vectors, torch.zeros(3, 0))
    others = [0.75 * user[0] + 0.25 * model.map.weight @ values[i] for i in (1, 0)]
    torch.testing.assert_close(searching, F.normalize(torch.stack([*others, 0.75 * user[2]]), dim=1))
    model.dropout.p, model.dropout.rows = 0.5, torch.arange(3)
    _, _, _, searching = model(vectors, torch.zeros(3, 0))
    kept = model.dropout(torch.ones(3, 4))[0]
    others = [0.75 * user[0] + 0.25 * model.map.weight @ (kept * values[i]) for i in (1, 0)]
    torch.testing.assert_close(searching, F.normalize(torch.stack([*others, 0.75 * user[2]]), dim=1))


def test_an_only_item_keeps_the_gradient_of_negatives() -> None:
    torch.manual_seed(0)
    values, negative = torch.randn(3, 4, requires_grad=True), torch.randn(4)
    history = JaggedTensor(values, lengths=torch.tensor([1, 2], dtype=torch.int32))
    vectors = {"user": torch.randn(2, 4), "history": history, "item": torch.randn(2, 4)}
    users, _, found, searching = model_of(history_share=1.0, leave_one_out=True)(vectors, torch.zeros(2, 0))
    # What is left of the list without its only item is 0, and has no part in the item's gradient.
    (whole,) = torch.autograd.grad((users @ negative).sum() + (searching * found)[:1].sum(), values, retain_graph=True)
    (of_negatives,) = torch.autograd.grad((users @ negative).sum(), values)
    torch.testing.assert_close(whole[0], of_negatives[0])


@pytest.mark.parametrize("loss", list(RetrievalLoss))
def test_the_loss_by_hand(loss: RetrievalLoss) -> None:
    """Users with 3, 0, 1 and 2 items, the last of weight 2; drawn are items 2, 9, 9, 4, and nothing in the last row."""
    torch.manual_seed(0)
    history, drawn = [7, 9, 2, 5, 4, 1], [2, 9, 9, 4]
    users, items, found, searching = tensors = [torch.randn(n, 4, requires_grad=True) for n in (9, 9, 6, 6)]
    lengths = torch.tensor([3, 0, 1, 2, 0, 0, 0, 0, 0] + 4 * [0] + 4 * [1] + [0], dtype=torch.int32)
    ids = KeyedJaggedTensor(["history", "item"], torch.tensor(history + drawn), lengths=lengths)
    batch = batch_of([1.0, 1, 1, 2] + 5 * [0.0], ids=ids, sampled=Sampled(4, 4))

    def loss_of(own: torch.Tensor, negatives: list[torch.Tensor]) -> torch.Tensor:
        if loss is RetrievalLoss.softmax:
            return torch.stack([own, *negatives]).div(0.5).logsumexp(0) - own / 0.5
        if loss is RetrievalLoss.bpr:
            return -sum(((own - s) / 0.5).sigmoid().log() for s in negatives) / 4
        if loss is RetrievalLoss.contrastive:
            return 1 - own + 3 * sum((s - 0.2).clamp(min=0) for s in negatives) / 4
        return -(own / 0.5).sigmoid().log() - 3 * sum((-s / 0.5).sigmoid().log() for s in negatives) / 4

    expected = torch.zeros(())
    for row, places, weight in ((0, (0, 1, 2), 1), (2, (3,), 1), (3, (4, 5), 2)):
        has = [history[i] for i in places]
        negatives = [users[row] @ items[4 + i] for i in range(4) if drawn[i] not in has]
        expected = expected + weight * sum(loss_of(searching[i] @ found[i], negatives) for i in places)

    with open_world():
        model = model_of(loss=loss, sampled_negatives=4, temperature=0.5, margin=0.2, negative_weight=3.0)
        model._scores = 8  # of two items of the lists, in pieces
        result = model.losses(tuple(tensors), batch)[loss.name]
        gradients = torch.autograd.grad(3 * result, tensors)
        assert model.denominator(batch).item() == 8
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected, tensors))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.dim=12"], r"'model.dim' must be 8, the width of tables.user' vectors, found 12"),
        (["tables.item.projected_dim=16"], r"'model.dim' must be 16, the width of tables.item' vectors, found 8"),
        (["model.history=histroy"], r"'model.history': there is no feature 'histroy'; did you mean 'history'"),
        (["model.user_id=item"], r"these distinct features: model.user_id, model.history, model.item_id; found"),
        (["features.history.table=user"], r"tables.user and tables.item"),
        (["data.items=null"], r"'data.items' is not set, but negatives are sampled"),
        (["features.history.weights=w"], r"'features.history.weights': model simplex reads none"),
    ],
)
def test_mistakes_get_a_sentence(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(config, overrides)


def test_narrow_tables_that_are_widened_to_its_dimension(config: Path) -> None:
    narrow = [f"tables.{name}.{key}" for name in ("user", "item") for key in ("embedding_dim=4", "projected_dim=8")]
    assert load_config(config, narrow).model.dim == 8


@pytest.mark.slow
def test_an_export_recommends_what_the_run_does(config: Path, one_process: Trained, tmp_path: Path) -> None:
    assert_recommends_alike(one_process.run, config.parent / "valid.parquet", tmp_path)
