"""`tables.X.experts`: an id's vector is a gated sum of the tables that it is routed to; no other is looked up."""

import json
from collections import Counter
from contextlib import closing
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from exports import assert_recommends_alike, assert_scores_alike
from launch import ROOT, run_recsys, train_losses
from retrieval import train_towers
from torch import nn

from recsys.config import Config, Device, NullPolicy, ShardingChoice, config_text, load_config
from recsys.data.convert import convert_ids
from recsys.data.inputs import Inputs, open_inputs
from recsys.data.spec import IdColumn
from recsys.errors import UserError
from recsys.ids import FrequencyRoute, HashMapping, HashRoute, VocabularyMapping
from recsys.models.experts import ExpertSums
from recsys.runtime.world import open_world
from recsys.training.learning import learn_facts

# Users by a hash, two of three; items of a row and of a list by frequency, wide, narrow, and by hash to few rows.
EXPERTS = """\
base: {root}/configs/dlrm_sample.yaml
tables:
  user:
    num_embeddings: 50
    embedding_dim: 4
    projected_dim: 8
    experts: {{others: [user_2, user_3], by: hash, active: 2}}
  user_2: {{num_embeddings: 40, embedding_dim: 4, projected_dim: 8}}
  user_3: {{num_embeddings: 30, embedding_dim: 8, hash_seed: 3}}
  item:
    num_embeddings: 32
    mapping: vocabulary
    data_type: FP32
    experts: {{others: [item_mid, item_rest], gate: features}}
  item_mid: {{num_embeddings: 62, embedding_dim: 4, projected_dim: 8, mapping: vocabulary, pooling: mean}}
  item_rest: {{num_embeddings: 50, embedding_dim: 4, projected_dim: 8, pooling: mean}}
"""
TABLES = ("user", "user_2", "user_3", "item", "item_mid", "item_rest")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "experts.yaml"
    path.write_text(EXPERTS.format(root=ROOT))
    return path


def train(config: Path, run_dir: Path, *overrides: str, nproc: int = 1) -> list[float]:
    """Return the losses of the steps of a run."""
    settings = ("train.log_every_steps=1", "data.window_mib=1", "train.max_steps=12", "optimizer.tables.eps=1e-4")
    return train_losses(config, run_dir, *settings, *overrides, nproc=nproc)


def test_a_hash_chooses_so_many_of_the_experts_for_each_id() -> None:
    ids = pa.array(np.arange(6000))
    chosen = np.stack([HashRoute(4, 2, place).chosen(ids) for place in range(4)])
    assert (chosen.sum(0) == 2).all()
    counts = [int((chosen[a] & chosen[b]).sum()) for a, b in combinations(range(4), 2)]
    assert sum(counts) == 6000 and min(counts) > 900


def test_an_id_goes_to_the_first_expert_that_has_it_and_to_the_last_if_none_does() -> None:
    first, second = (VocabularyMapping(pa.array(texts), 1, 0) for texts in (["a", "b"], ["b", "c"]))
    ids = pa.array(["a", "b", "c", "d"])
    routes = FrequencyRoute([], first), FrequencyRoute([first], second), FrequencyRoute([first, second], None)
    assert [route.chosen(ids).astype(int).tolist() for route in routes] == [[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


def test_gated_sums(config: Path) -> None:
    sums = ExpertSums(load_config(config))
    widths = [sum(p.shape[1] for p in gate.parameters() if p.dim() > 1) for gate in sums.values()]
    assert widths == [0, 5 * 8, 5 * 8]
    names = ("user_id", "item_id", "history", "category", "device", "hour")
    vectors = {name: torch.randn(2, 8) for name in names}
    for name, tables in (("user_id", ("user_2", "user_3")), *((f, ("item_mid", "item_rest")) for f in names[1:3])):
        vectors |= {f"{name}+{table}": torch.randn(2, 8) for table in tables}
    user_gate, _, history_gate = sums.values()
    with torch.no_grad():
        user_gate.bias.copy_(torch.tensor([0.0, 1.0, -1.0]))
        history_gate.weight[0, 8:16] = torch.arange(8.0)  # of item_id
    found, _ = sums(nn.Module(), (vectors, torch.zeros(2, 0)))
    assert set(found) == set(names)
    user = [vectors[name] for name in ("user_id", "user_id+user_2", "user_id+user_3")]
    sigmoid = 1 / (1 + np.exp(-1))
    torch.testing.assert_close(found["user_id"], user[0] + 2 * sigmoid * user[1] + 2 * (1 - sigmoid) * user[2])
    item = vectors["item_id"] + vectors["item_id+item_mid"] + vectors["item_id+item_rest"]
    torch.testing.assert_close(found["item_id"], item)
    factor = 2 * (item @ torch.arange(8.0)).sigmoid()[:, None]
    rest = vectors["history+item_mid"] + vectors["history+item_rest"]
    torch.testing.assert_close(found["history"], factor * vectors["history"] + rest)


def opened(config: Config, folder: Path) -> Inputs:
    with open_world(Device.cpu, 1) as world:
        return learn_facts(open_inputs(config, world), folder)


def test_ids_that_are_sent_follow_the_active_experts_and_classes_the_counts(config: Path, tmp_path: Path) -> None:
    inputs = opened(load_config(config), tmp_path)
    plain = opened(load_config(ROOT / "configs/dlrm_sample.yaml"), tmp_path)
    with closing(inputs.loader("train").batches()) as ours, closing(plain.loader("train").batches()) as theirs:
        for _ in range(3):
            sent, whole = next(ours).ids, next(theirs).ids
            number = {name: len(sent[name].values()) for name in sent.keys()}  # noqa: SIM118
            assert number["user_id"] + number["user_id+user_2"] + number["user_id+user_3"] == 2 * 256
            for name in ("item_id", "history"):
                parts = [sent[each].lengths() for each in (name, f"{name}+item_mid", f"{name}+item_rest")]
                assert sum(parts).equal(whole[name].lengths())
    data = pq.read_table("data/sample/train", columns=["item_id", "history"])
    ids = [*data["item_id"].to_pylist(), *chain(*(items for items in data["history"].to_pylist() if items))]
    assert inputs.facts is not None
    counts, rows = Counter(ids), inputs.facts.vocabularies
    hot, mid = (set(rows[name].to_pylist()) for name in ("item", "item_mid"))
    assert len(hot) == 30 and len(mid) == 60 and not hot & mid
    assert min(counts[i] for i in hot) >= max(counts[i] for i in mid)
    assert min(counts[i] for i in mid) >= max(counts[i] for i in counts if i not in hot | mid)


def test_a_missing_column_of_weights_is_told_by_the_feature(config: Path) -> None:
    message = r"'features\.history\.weights': .* no column 'nowhere'"
    with open_world(Device.cpu, 1) as world, pytest.raises(UserError, match=message):
        open_inputs(load_config(config, ["features.history.weights=nowhere"]), world)


def test_a_null_has_a_row_of_the_first_expert_alone() -> None:
    ids = pa.array([[7, None], [], [8, 7, 9]])
    head = IdColumn("f", "f", HashMapping(10, 0), route=FrequencyRoute([], VocabularyMapping(pa.array([7]), 1, 0)))
    known = convert_ids(ids, head, np.dtype(np.int32))
    assert known.lengths is not None and known.lengths.tolist() == [2, 0, 1]
    assert known.values[1] == 0 and known.values[0] == known.values[2] > 0
    rest = replace(head, null=NullPolicy.empty, route=FrequencyRoute([VocabularyMapping(pa.array([7]), 1, 0)], None))
    weights = pa.array([[1.0, 2.0], [], [3.0, 4.0, 5.0]])
    others = convert_ids(ids, replace(rest, weights="w"), np.dtype(np.int32), weights=weights)
    assert others.lengths is not None and others.weights is not None
    assert others.lengths.tolist() == [0, 0, 2] and others.weights.tolist() == [3.0, 5.0]


KINDS = [choice.name for choice in ShardingChoice if choice is not ShardingChoice.auto]


@pytest.mark.slow
def test_two_ranks_and_pieces_learn_what_one_does_and_a_resumed_run_the_same(config: Path, tmp_path: Path) -> None:
    one = train(config, tmp_path / "one")
    assert sum(one[-3:]) < sum(one[:3])
    assert train(config, tmp_path / "two", "train.micro_batch_size=50", nproc=2) == pytest.approx(one, abs=1e-5)
    for rank in range(2):
        memory = json.loads((tmp_path / "two" / "memory" / f"rank_{rank}.json").read_text())
        assert all(line["predicted_bytes"] == line["measured_bytes"] for line in memory["lines"])
    train(config, tmp_path / "parts", "train.max_steps=5")
    assert train(config, tmp_path / "parts", "run.resume=true")[-7:] == one[-7:]
    use = json.loads((tmp_path / "one" / "result.json").read_text())["data"]["experts"]
    assert sum(expert["lookups"] for expert in use["user"].values()) == 2 * 3000
    assert all(abs(expert["share"] - 1 / 3) < 0.1 for expert in use["user"].values())
    assert list(use["item"]) == ["item", "item_mid", "item_rest"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_type_learns_the_same(kind: str, config: Path, tmp_path: Path) -> None:
    optimizer = ("optimizer.tables={name: adagrad}",)
    one = train(config, tmp_path / "one", *optimizer)
    for nproc in (2, 4) if kind in ("row_wise", "table_wise") else (2,):
        kinds = (f"tables.{table}.sharding_type={kind}" for table in TABLES)
        assert train(config, tmp_path / str(nproc), *optimizer, *kinds, nproc=nproc) == pytest.approx(one, abs=1e-5)


@pytest.mark.slow
def test_it_is_compressed_exported_and_scored_without_torch(config: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    train(config, tmp_path / "run")

    run_recsys("compress", tmp_path / "run", tmp_path / "small", "--max-loss", "0.05")
    report = json.loads((tmp_path / "small" / "compression.json").read_text())
    assert "prune" in str(report)
    for run in ("run", "small"):
        assert_scores_alike(tmp_path / run, tmp_path / run)


@pytest.mark.slow
def test_experts_of_both_towers(tmp_path: Path) -> None:
    """The gates of a tower read that tower alone, and a list of items is the same without torch."""
    pytest.importorskip("onnxruntime")
    overrides = (
        "features.kind={column: year, table: kind}",
        "model.item_features=[item,kind,year]",
        "tables.kind={num_embeddings: 5, embedding_dim: 8, experts: {others: [kind_2], by: hash, gate: features}}",
        "tables.kind_2={num_embeddings: 4, embedding_dim: 4, projected_dim: 8}",
        "tables.user={experts: {others: [user_2, user_3], by: hash, active: 2, gate: features}}",
        "tables.user_{2..3}={num_embeddings: 100, embedding_dim: 4, projected_dim: 8}",
    )
    run = train_towers(tmp_path, *overrides, "train.epochs=2")
    assert_recommends_alike(run, tmp_path / "valid.parquet", tmp_path)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tables.item.experts.others=[item_mid,item_far]", "there is no table 'item_far'"),
        ("tables.item.experts.others=[]", "must name other tables"),
        ("tables.user.experts.others=[user_2,item_rest]", "an expert belongs to one table only"),
        ("tables.item_mid.projected_dim=16", "set tables.item_mid.projected_dim=8"),
        ("tables.item_mid.pooling=sum", "must have the same pooling"),
        ("tables.item_mid={mapping: hash}", "set tables.item_mid.mapping=vocabulary"),
        ("tables.item.experts.active=2", "must be 1 with by: frequency"),
        ("tables.user.experts.active=4", "at most the number of experts, 3"),
        ("model.attention={history: item_id}", "experts work with features whose lists are summed"),
    ],
)
def test_mistakes(override: str, said: str, config: Path) -> None:
    with pytest.raises(UserError, match=said):
        load_config(config, [override])


def test_a_saved_config_has_what_was_given(config: Path, tmp_path: Path) -> None:
    loaded = load_config(config)
    (tmp_path / "saved.yaml").write_text(config_text(loaded))
    assert "+" not in config_text(loaded) and load_config(tmp_path / "saved.yaml") == loaded
