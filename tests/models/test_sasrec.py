"""Sequence models: attention and loss by hand, and the same numbers however lists are cut into ranks and batches."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from batches import batch_of
from checkpoints import load_tables
from exports import assert_recommends_alike
from launch import evaluate
from retrieval import Trained, train
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsys.config import load_config
from recsys.config.choices import SequenceLayer, SequenceLoss
from recsys.data.batch import Sampled
from recsys.errors import UserError
from recsys.models import DenseInputs, retrieval, sasrec, sequence_layers
from recsys.models.jagged import Lists
from recsys.runtime.world import open_world

NUM_ITEMS = 30
GBCE = ("model.loss=gbce", "model.num_items=30", "model.embedding_dropout=0.2")
CONFIG = """
data: {train: DIR/train.parquet, valid: DIR/valid.parquet, test: DIR/valid.parquet, items: DIR/items.parquet}
features:
  history: {table: item, max_length: 9}
  item: {table: item}
tables:
  item: {num_embeddings: 64, embedding_dim: 8, mapping: vocabulary, init_range: 0.1}
model:
  name: sasrec
  history: history
  item_id: item
  dim: 8
  max_length: 8
  num_heads: 2
  dropout: 0.1
  sampled_negatives: 16
  top_k: [1, 5]
optimizer:
  tables: {name: adam, learning_rate: 0.02, eps: 1e-4}
  dense: {learning_rate: 0.01}
run: {num_threads: 1}
train: {global_batch_size: 32, epochs: 8, log_every_steps: 1}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the config of users who take every second item, or every third, of a circle of items."""
    folder, generator = tmp_path_factory.mktemp("sequences"), np.random.default_rng(0)
    rows, queries = [], []
    for user in range(150):
        start, length = generator.integers(0, NUM_ITEMS), generator.integers(1, 13)
        items = [f"item {(start + i * (2 + user % 2)) % NUM_ITEMS}" for i in range(length + 1)]
        rows.append({"history": items[:-1]})
        queries.append({"history": items[:-1], "targets": items[-1:], "seen": items[:-1]})
    corpus = [{"item": f"item {i}"} for i in range(NUM_ITEMS)]
    for name, content in (("train", rows), ("valid", queries), ("items", corpus)):
        pq.write_table(pa.Table.from_pylist(content), folder / f"{name}.parquet", row_group_size=41)
    (folder / "config.yaml").write_text(CONFIG.replace("DIR", str(folder)))
    return folder / "config.yaml"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "overrides"),
    [
        (2, ["tables.item.sharding_type=row_wise", "train.micro_batch_size=9"]),
        (1, ["train.micro_batch_ids=40", "train.activation_checkpointing=true"]),
        (2, ["tables.item.sharding_type=row_wise"]),
        (3, ["tables.item.sharding_type=column_wise", "train.micro_batch_ids=20"]),
    ],
    ids=["rows on two", "ids", "two", "three"],
)
def test_no_split_changes_what_is_learned(
    nproc: int,
    overrides: list[str],
    config: Path,
    one_process: Trained,
    tmp_path: Path,
) -> None:
    metrics, losses = train(config, tmp_path, *overrides, nproc=nproc)
    assert len(losses) == 8 * -(-150 // 32)
    torch.testing.assert_close(losses[:20], one_process.losses[:20], rtol=0, atol=1e-5)
    torch.testing.assert_close(losses, one_process.losses, rtol=0, atol=1e-4)  # roundings grow from step to step
    torch.testing.assert_close(metrics, one_process.metrics, rtol=0, atol=1e-6)


def test_it_learns_what_comes_next(one_process: Trained) -> None:
    _, metrics, losses = one_process
    assert abs(losses[0] - np.log(1 + 16 * 29 / 30)) < 0.1, "a mean over positions, of 17 items less those barred"
    assert metrics["recall@5"] > 0.3 and metrics["users"] == 150


@pytest.mark.parametrize("settings", [pytest.param((), marks=pytest.mark.slow), (*GBCE, "model.layer=original")])
def test_one_process_and_two_learn_the_same_to_the_last_bit(
    settings: tuple[str, ...], config: Path, tmp_path: Path
) -> None:
    """One computes the first half of the lists, then the second; by a row more of 150 they would be cut otherwise."""
    common = (*settings, "train.global_batch_size=30", "train.epochs=3", "train.keep_checkpoints=1")
    one = train(config, tmp_path / "1", *common, "run.num_threads=2")
    two = train(config, tmp_path / "2", *common, nproc=2)
    assert one[1] == pytest.approx(two[1], rel=1e-6), "losses, which are added up otherwise"
    weights = [load_tables(tmp_path / nproc / "checkpoints/step-000000015", "dense") for nproc in ("1", "2")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(found, weights[1][name]) for name, found in weights[0].items())


@pytest.mark.slow
def test_negatives_that_ranks_cannot_share_out_evenly_weigh_the_same(config: Path, tmp_path: Path) -> None:
    """Of 16 each of three ranks has six rows, two of which hold nothing."""
    one, three = (train(config, tmp_path / f"{nproc}", *GBCE, "train.max_steps=6", nproc=nproc)[1] for nproc in (1, 3))
    assert three == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_resumed_equals_uninterrupted(config: Path, one_process: Trained, tmp_path: Path) -> None:
    train(config, tmp_path, "train.max_steps=13")
    assert train(config, tmp_path, "run.resume=true") == one_process[1:]
    again = evaluate(tmp_path, nproc=2)
    torch.testing.assert_close(again["test"], one_process.metrics, rtol=0, atol=1e-6)


@pytest.mark.parametrize("lengths", [[3, 0, 7, 7, 1, 20, 6, 2, 2, 2], [0, 0], [1], []])
def test_attention_on_jagged_lists_is_that_on_padded_ones(lengths: list[int]) -> None:
    torch.manual_seed(0)
    lists = Lists.of(np.array(lengths, np.int64), torch.device("cpu"))
    num_ids, heads, width = sum(lengths), 2, 6
    assert sum(number * length for number, length in lists.buckets) <= 1.25 * num_ids
    qkv = torch.randn(num_ids, 3 * width, requires_grad=True)
    result = lists.attend(qkv, heads)
    parts = []
    for rows in qkv.split(lengths):
        padded = F.pad(rows, (0, 0, 0, 25 - len(rows))).view(25, 3, heads, width // heads).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(*padded, is_causal=True)
        parts.append(attended.transpose(0, 1).reshape(25, width)[: len(rows)])
    expected = torch.cat([qkv[:0, :width], *parts])
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    factors = torch.randn_like(result)
    gradients = [torch.autograd.grad((each * factors).sum(), qkv)[0] for each in (result, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)
    within = [i for length in lengths for i in reversed(range(length))]
    assert lists.from_end.tolist() == within
    assert lists.row.tolist() == [row for row, length in enumerate(lengths) for _ in range(length)]


def model_of(**settings: object) -> sasrec.SASRec:
    config = sasrec.SASRecConfig(history="history", item_id="item", dim=4, max_length=6, **settings)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return sasrec.SASRec(config, DenseInputs({"history": 4, "item": 4}, []))


@pytest.mark.parametrize("layer", list(SequenceLayer))
def test_a_later_item_changes_no_earlier_state(layer: SequenceLayer) -> None:
    model = model_of(layer=layer, dropout=0.0)
    lengths = torch.tensor([3, 6, 1], dtype=torch.int32)
    vectors = torch.randn(10, 4)

    def states(values: torch.Tensor) -> torch.Tensor:
        return model({"history": JaggedTensor(values, lengths=lengths), "item": torch.zeros(3, 4)}, torch.zeros(3, 0))[
            0
        ]

    changed = vectors.clone()
    changed[5] += torch.randn(4)  # the third item of the second list
    before, after = states(vectors), states(changed)
    same = [*range(5), 9]
    torch.testing.assert_close(after[same], before[same], rtol=0, atol=0)
    assert ((after - before).abs().amax(1) > 1e-4).nonzero().flatten().tolist() == [5, 6, 7, 8]
    model.eval()
    users, _ = model({"history": JaggedTensor(vectors, lengths=lengths), "item": torch.zeros(3, 4)}, torch.zeros(3, 0))
    # As users they are one position further on than as states of training, but where all is alike: the last item.
    shorter = JaggedTensor(vectors[[0, 1, 2]], lengths=torch.tensor([3, 0], dtype=torch.int32))
    alone, _ = model({"history": shorter, "item": torch.zeros(2, 4)}, torch.zeros(2, 0))
    torch.testing.assert_close(alone[0], users[0])
    assert not alone[1].any(), "of nothing there is no state"


@pytest.mark.parametrize("layer", ["sasrec", "original", "ligr"])
def test_a_layer_of_attention_by_hand(layer: str) -> None:
    """Of lists of 3, 1 and 2 items. Of `ligr` a gate goes before; of `original` it is added to the normalised."""
    block, lengths = model_of(layer=SequenceLayer(layer), dropout=0.0, num_heads=2, num_blocks=1).blocks[0], [3, 1, 2]
    for norm in block.norms:
        torch.nn.init.normal_(norm.weight)
    x = torch.randn(6, 4)
    result = block(x, Lists.of(np.array(lengths), torch.device("cpu")))
    for rows, found in zip(x.split(lengths), result.split(lengths), strict=True):
        normed, attended = block.norms[0](rows), []
        if layer == "original":
            queries, (keys, values) = block.query(normed), block.key_value(rows).chunk(2, dim=1)
        else:
            queries, keys, values = block.qkv(normed).chunk(3, dim=1)
        for i in range(len(rows)):
            heads = [slice(0, 2), slice(2, 4)]
            shares = [(queries[i, head] @ keys[: i + 1, head].T / 2**0.5).softmax(0) for head in heads]
            attended.append(torch.cat([s @ values[: i + 1, head] for s, head in zip(shares, heads, strict=True)]))
        halves = [lambda _, attended=attended: block.output(torch.stack(attended)), block.feed_forward]
        for number, half in enumerate(halves):
            normed = block.norms[number](rows)
            gate = block.gates[number](rows).sigmoid() if layer == "ligr" else 1
            rows = (normed if layer == "original" else rows) + gate * half(normed)
        torch.testing.assert_close(found, rows)


@pytest.mark.parametrize("at_once", [1, 50, 1000])
def test_hstu_by_hand(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of lists of 3, 3, 1 and 2 items, whose attention is computed all together or in pieces."""
    monkeypatch.setattr(sequence_layers, "_FACTORS_AT_ONCE", {"cpu": at_once})
    model = model_of(layer=SequenceLayer.hstu, dropout=0.0, num_heads=2, num_blocks=1)
    block, lengths = model.blocks[0], [3, 3, 1, 2]
    torch.nn.init.normal_(block.distances)
    x = torch.randn(9, 4)
    result = block(x, Lists.of(np.array(lengths), torch.device("cpu")))
    for rows, found in zip(x.split(lengths), result.split(lengths), strict=True):
        gate, queries, keys, values = F.silu(block.inner(block.norms[0](rows))).chunk(4, dim=1)
        for i in range(len(rows)):
            heads = []
            for head in (slice(0, 2), slice(2, 4)):
                products = [queries[i, head] @ keys[j, head] + block.distances[i - j] for j in range(i + 1)]
                heads.append(sum(F.silu(product) / 6 * values[j, head] for j, product in enumerate(products)))
            expected = rows[i] + block.outer(block.norms[1](torch.cat(heads)) * gate[i])
            torch.testing.assert_close(found[i], expected)
    with torch.no_grad():  # which computes in place
        torch.testing.assert_close(block(x, Lists.of(np.array(lengths), torch.device("cpu"))), result)


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


def test_hstu_takes_few_parts_of_fake_tensors() -> None:
    """A dry run waits for each: for the parts that real lists are cut into it took a minute."""
    with FakeTensorMode(), torch.no_grad(), Products() as products:
        block = model_of(layer=SequenceLayer.hstu, num_heads=2).blocks[0]
        assert block._attention(*[torch.empty(20_000, 2, 200, 2)] * 3).shape == (20_000, 2, 200, 2)
    assert 2 <= products.number <= 8


@pytest.mark.parametrize("layer", list(SequenceLayer))
def test_shared_layers_are_one_block_several_times(layer: SequenceLayer) -> None:
    shared, apart = (model_of(layer=layer, dropout=0.0, num_blocks=3, share_layers=share) for share in (True, False))
    assert len(shared.blocks) == 1 and len(apart.blocks) == 3
    apart.load_state_dict(
        {name.replace("blocks.0.", f"blocks.{i}."): x for i in range(3) for name, x in shared.state_dict().items()}
    )
    history = JaggedTensor(torch.randn(5, 4), lengths=torch.tensor([4, 1], dtype=torch.int32))
    vectors = {"history": history, "item": torch.zeros(2, 4)}
    torch.testing.assert_close(shared(vectors, torch.zeros(2, 0)), apart(vectors, torch.zeros(2, 0)))


@pytest.mark.slow
def test_hstu_learns_the_same_on_any_ranks_and_resumed(config: Path, tmp_path: Path) -> None:
    layers = "model.layer=hstu", "model.share_layers=true", "train.epochs=3"
    metrics, losses = train(config, tmp_path / "1", *layers)
    assert losses[-1] < losses[0]
    for nproc, others in ((1, ["train.micro_batch_ids=40"]), (2, []), (3, ["tables.item.sharding_type=column_wise"])):
        found = train(config, tmp_path / f"{nproc}{len(others)}", *layers, *others, nproc=nproc)
        torch.testing.assert_close(found[1], losses, rtol=0, atol=1e-4)
        torch.testing.assert_close(found[0], metrics, rtol=0, atol=1e-5)
    train(config, tmp_path / "parts", *layers, "train.max_steps=7")
    assert train(config, tmp_path / "parts", *layers, "run.resume=true") == (metrics, losses)


@pytest.mark.parametrize("scores_at_once", [1, 11, 1000])
@pytest.mark.parametrize("loss", list(SequenceLoss))
@pytest.mark.parametrize("exclude_listed", [False, True])
def test_the_loss_by_hand(
    exclude_listed: bool, loss: SequenceLoss, scores_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of 3, 0, 1 and 2 items, the last of weight 2; drawn are items 2, 9, 9, 4, and nothing in the last row."""
    monkeypatch.setattr(retrieval, "_SCORES", {"cpu": scores_at_once})
    torch.manual_seed(0)
    history, drawn = [7, 2, 7, 5, 4, 1], [2, 9, 9, 4]
    states, vectors, items = (torch.randn(n, 4, requires_grad=True) for n in (6, 6, 9))
    lengths = torch.tensor([3, 0, 1, 2, 0, 0, 0, 0, 0] + 4 * [0] + 4 * [1] + [0], dtype=torch.int32)
    ids = KeyedJaggedTensor(["history", "item"], torch.tensor(history + drawn), lengths=lengths)
    batch = batch_of([1.0, 1, 1, 2] + 5 * [0.0], ids=ids, sampled=Sampled(4, 4))
    share = 5 / 11
    beta = share * (0.5 * (1 - 1 / share) + 1 / share)

    expected = torch.zeros(())
    for at, weight, own in ((0, 1, {7, 2}), (1, 1, {7, 2}), (4, 2, {4, 1})):
        positive = states[at] @ vectors[at + 1]
        left_out = own if exclude_listed else {history[at + 1]}
        negatives = [states[at] @ items[4 + i] for i in range(4) if drawn[i] not in left_out]
        if loss is SequenceLoss.softmax:
            expected = expected + weight * (torch.stack([positive, *negatives]).logsumexp(0) - positive)
        else:
            others = sum(-(1 - negative.sigmoid()).log() for negative in negatives)
            expected = expected + weight * (others - beta * positive.sigmoid().log()) / 6

    with open_world():
        settings = {"loss": loss, "exclude_listed": exclude_listed}
        model = model_of(**settings, sampled_negatives=5, num_items=12, calibration=0.5)
        result = model.losses((states, vectors, items, lengths[:9]), batch)[loss.name]
        gradients = torch.autograd.grad(3 * result, (states, vectors, items))
        assert model.denominator(batch).item() == 4
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected, (states, vectors, items)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["features.history.max_length=8"], r"must be model.max_length \+ 1 = 9.* found 8"),
        (["features.history.max_length=null"], r"must be model.max_length \+ 1 = 9.* found None"),
        (["model.dim=12"], r"'model.dim' must be tables.item.embedding_dim=8.* found 12"),
        (["model.num_heads=3"], r"a multiple of model.num_heads=3, found 8"),
        (["model.history=histroy"], r"'model.history': there is no feature 'histroy'; did you mean 'history'"),
        (["features.user.table=item"], r"reads two features, model.history and model.item_id, found"),
        (["data.items=null"], r"'data.items' is not set, but negatives are sampled"),
        (["model.layer=hstu", "model.feed_forward=8"], r"'model.feed_forward': layer hstu has no feed-forward part"),
        (["model.loss=gbce"], r"'model.num_items' is not set, but gbce"),
        (["train.compile=true", "model.dropout=0"], r"'train.compile': lists have another shape"),
        (["features.history.weights=w"], r"'features.history.weights': model sasrec reads none"),
    ],
)
def test_mistakes_get_a_sentence(config: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(config, overrides)


@pytest.mark.slow
@pytest.mark.parametrize("layer", list(SequenceLayer))
def test_an_export_recommends_what_the_run_does(layer: SequenceLayer, config: Path, tmp_path: Path) -> None:
    """Lists are padded to one length in it, and in buckets in the run; one of the users has no items."""
    train(config, tmp_path / "run", f"model.layer={layer.name}", "train.epochs=2")
    users = pq.read_table(config.parent / "valid.parquet").slice(0, 40)
    none = pa.array([[], *users["history"].to_pylist()[1:]], users["history"].type)
    pq.write_table(users.set_column(0, "history", none), tmp_path / "users.parquet")
    # All scores of the user without items are 0.
    assert_recommends_alike(tmp_path / "run", tmp_path / "users.parquet", tmp_path, num_tied=1)
