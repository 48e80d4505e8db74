"""Indices of ids, which take memory for every id, exist once, whatever inputs a run makes of others."""

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from retrieval import NUM_ITEMS, write_retrieval

from recsys.checkpoint import TableRows
from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.ids import IndexMapping
from recsys.memory.advice import fit_inputs
from recsys.runtime.world import open_world
from recsys.training.build import build_model
from recsys.training.learning import learn_facts
from recsys.training.resume import start_training


def num_indices() -> int:
    gc.collect()
    return sum(isinstance(thing, IndexMapping) for thing in gc.get_objects())


def test_items_and_vocabularies_have_one_index_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vectors = pa.FixedSizeListArray.from_arrays(np.ones(8 * NUM_ITEMS, np.float32), 8)
    pq.write_table(pa.table({"id": [f"item-{i}" for i in range(NUM_ITEMS)], "vector": vectors}), tmp_path / "v.parquet")
    table = ("tables.item.mapping=vocabulary", f"train.init.from_parquet.item={tmp_path}/v.parquet")
    config = load_config(write_retrieval(tmp_path), ["memory.fit=true", *table])
    before, find, during = num_indices(), TableRows.find, list[int]()

    def counting(self: TableRows, batch: Any) -> np.ndarray:
        during.append(num_indices() - before)
        return find(self, batch)

    monkeypatch.setattr(TableRows, "find", counting)
    with open_world(Device.cpu, 1) as world:
        opened = open_inputs(config, world)  # stays, as in a run
        learned = learn_facts(opened, tmp_path)
        fitted, _ = fit_inputs(learned)
        assert num_indices() - before == 2
        assert opened.facts is None and fitted.facts is learned.facts is not None
        built = build_model(fitted)
        start_training(fitted, built, None, tmp_path)
        assert during == [2]
        rows = built.tensors.tables()["item"].local_shards()[0].tensor[1 : 1 + len(fitted.facts.vocabularies["item"])]
        assert len(rows) and (rows == 1).all()
        del built, rows
