"""Indices of ids, which take memory for every id, exist once, whatever inputs a run makes of others."""

import gc
from pathlib import Path

from retrieval import write_retrieval

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.ids import IndexMapping
from recsys.memory.advice import fit_inputs
from recsys.runtime.world import open_world
from recsys.training.learning import learn_facts


def num_indices() -> int:
    return sum(isinstance(thing, IndexMapping) for thing in gc.get_objects())


def test_items_and_vocabularies_have_one_index_each(tmp_path: Path) -> None:
    table = ("tables.item.mapping=vocabulary", "tables.item.num_buckets=8")
    config = load_config(write_retrieval(tmp_path), ["memory.fit=true", *table])
    before = num_indices()
    with open_world(Device.cpu, 1) as world:
        opened = open_inputs(config, world)  # stays, as in a run
        learned = learn_facts(opened, tmp_path)
        fitted, _ = fit_inputs(learned)
        gc.collect()
        assert num_indices() - before == 2
        assert opened.facts is None and fitted.facts is learned.facts is not None
        assert fitted.config.memory == learned.config.memory and fitted.statistics.keys() == opened.statistics.keys()
