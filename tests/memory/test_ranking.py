"""What it takes to rank items for users, in predictions and where settings are chosen by them."""

import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from recsys.config import load_config
from recsys.data.inputs import open_inputs
from recsys.memory import DataFacts
from recsys.memory.autofit import Fitter, planned_shards
from recsys.memory.data_facts import data_facts
from recsys.memory.levers import Change, with_changes
from recsys.memory.ranking import items_bytes, ranking_bytes, ranking_peak
from recsys.memory.trace import predict_run
from recsys.models.items import ItemVectors
from recsys.runtime.logs import quiet_libraries
from recsys.runtime.machine import topology_of
from recsys.runtime.world import rehearse_world


def write_towers(folder: Path) -> Path:
    """Write a config of two towers, 7 users and 5000 items."""
    pq.write_table(pa.table({"user": np.arange(100) % 7, "item": np.arange(100)}), folder / "rows.parquet")
    pq.write_table(pa.table({"item": np.arange(5000)}), folder / "items.parquet")
    lists = pa.array([[number, number + 1] for number in range(7)])
    pq.write_table(pa.table({"user": np.arange(7), "targets": lists, "seen": lists}), folder / "users.parquet")
    files = {"train": "rows", "valid": "users", "items": "items"}
    places = {role: str(folder / f"{name}.parquet") for role, name in files.items()}
    content = {
        "data": {**places, "label_column": None},
        "features": {name: {"table": name} for name in ("user", "item")},
        "tables": {name: {"num_embeddings": 1000, "embedding_dim": 8} for name in ("user", "item")},
        "model": {"name": "two_tower", "user_features": ["user"], "item_features": ["item"], "item_id": "item"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(content))
    return folder / "config.yaml"


def ranking_of(facts: DataFacts, rows: int, *ranks: str, config: Path) -> int:
    settings = load_config(config, ranks)
    return ranking_bytes(settings, facts, rows, topology_of(settings))


def test_no_more_scores_are_expected_than_a_batch_has_users(tmp_path: Path) -> None:
    config, many = write_towers(tmp_path), DataFacts({}, 4, 0, (), {"valid": 1 << 22}, "", num_items=5000)
    found = {users: ranking_of(many, users, config=config) for users in (10, 20, 1 << 20)}
    assert found[20] - found[10] == 10 * (4 + 1) * 5000  # a score and a mark for each item
    assert found[1 << 20] - found[10] < (4 + 1) * (1 << 21)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_rows_that_fill_a_batch_have_no_lists(num_ranks: int, tmp_path: Path) -> None:
    """The users of a data set are as many as they are, whatever a batch could hold; items are another one."""
    config, ranks = write_towers(tmp_path), (f"topology.world_size={num_ranks}", "topology.device=cpu")
    facts = DataFacts({}, 4, 0, (), {"valid": 1000, "items": 5000}, "", num_items=5000, listed_items=300.0)
    found = [ranking_of(facts, rows, *ranks, config=config) for rows in (500, 1000, 2000)]
    assert found[0] < found[1] == found[2]
    # A rank has the pairs of all ranks' users at hand, of 16 bytes, beside what it takes to find its own items.
    more = replace(facts, listed_items=301)
    of_item = (ranking_of(more, 1000, *ranks, config=config) - found[1]) / 1000
    assert of_item >= 16 * (1 + (num_ranks if num_ranks > 1 else 0)) + 16


@pytest.mark.parametrize(("listed", "is_ranking"), [(0.0, False), (2000.0, True)])
def test_items_are_ranked_after_the_forward_pass(listed: float, is_ranking: bool, tmp_path: Path) -> None:
    """What computed the vectors of users is gone by then: the larger of the two makes the peak."""
    config = load_config(write_towers(tmp_path), ["model.user_mlp=[1024]", "train.eval_batch_size=2000"])
    topology = topology_of(config)
    with rehearse_world(1, 1, torch.device("cpu")) as world:
        facts = data_facts(config, open_inputs(config, world), 1)
        facts = replace(facts, eval_rows={"valid": 2000, "items": 5000}, listed_items=listed)
        prediction = predict_run(config, facts, topology, planned_shards(config, topology))
    forward = max(prediction.dense.eval_bytes) + items_bytes(config, facts, topology)
    ranking = ranking_peak(config, facts, 2000, topology)
    assert (ranking > forward) == is_ranking and forward > 2000 * 1024 * 4
    assert prediction.ranks[0].phases["evaluation"]["host"]["activations"] == max(forward, ranking)


def test_vectors_of_items_are_held_once() -> None:
    """In the order of the corpus, and not as they came as well."""
    vectors = torch.rand(10, 4)
    given = weakref.ref(vectors)
    with rehearse_world(1, 1, torch.device("cpu")) as world:
        items = ItemVectors(vectors, torch.arange(10), 10, world)
        del vectors
        assert len(items) == 10 and given() is None


def test_facts_of_users_and_items_follow_from_the_data(tmp_path: Path) -> None:
    config = load_config(write_towers(tmp_path))
    with rehearse_world(1, 1, torch.device("cpu")) as world:
        facts = data_facts(config, open_inputs(config, world), 1)
    assert (facts.num_items, facts.listed_items, dict(facts.eval_rows)) == (5000, 4.0, {"valid": 7, "items": 5000})


def test_smaller_batches_of_users_take_less(tmp_path: Path) -> None:
    """Where settings are tried one after another, what ranking takes follows the batch that is tried."""
    quiet_libraries()
    config = load_config(write_towers(tmp_path), ["train.eval_batch_size=4096"])
    with rehearse_world(1, 1, torch.device("cpu")) as world:
        facts = data_facts(config, open_inputs(config, world), 1)
        facts = replace(facts, eval_rows={"valid": 1 << 20}, listed_items=2000.0)
        fitter = Fitter(config, facts, topology_of(config))
        smaller = with_changes(config, [Change({"train.eval_batch_size": 512}, "")])
        saved = fitter.fullest(config) - fitter.fullest(smaller)
    of_ranking = [ranking_of(facts, rows, config=tmp_path / "config.yaml") for rows in (4096, 512)]
    assert saved >= of_ranking[0] - of_ranking[1] > 0.8 * (4096 - 512) * 2000 * 65
