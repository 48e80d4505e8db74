"""`PermutedReader`: each value of the permuted columns once, and the others as they are, however the rows are cut."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.config import Device, load_config
from recsys.config.features import with_experts
from recsys.data.inputs import open_inputs
from recsys.data.order import Segment
from recsys.data.parquet import open_dataset
from recsys.data.permutation import Permutation, PermutedReader
from recsys.runtime.world import open_world

ROWS = 137


@pytest.mark.parametrize("filter", [None, "row >= 40"])
def test_a_permutation_is_the_same_for_all_cuts(filter: str | None, tmp_path: Path) -> None:
    rows = np.arange(ROWS)
    texts = pa.array([None if i % 9 == 0 else [f"text {i}", "x"] for i in rows], pa.list_(pa.string()))
    table = pa.table({"row": rows, "texts": texts, "other": rows * 2})
    for number, (start, stop) in enumerate([(0, 50), (50, 51), (51, ROWS)]):
        pq.write_table(table.slice(start, stop - start), tmp_path / f"{number}.parquet", row_group_size=20)
    dataset = open_dataset("DATA", str(tmp_path), dict.fromkeys(table.column_names, "test"), None, filter)
    reader = PermutedReader(dataset, ["row", "texts"], (7, 0))
    whole = pa.concat_tables(
        reader.read(dataset.row_groups.segment(i)).cast(
            pa.schema([*dataset.schema, ("row (permuted)", pa.int64()), ("texts (permuted)", texts.type)])
        )
        for i in range(len(dataset.row_groups))
    )
    kept = table if filter is None else table.slice(40)
    assert whole.select(table.column_names).equals(kept)
    permuted = whole["row (permuted)"].to_numpy()
    assert sorted(permuted) == kept["row"].to_pylist() and (permuted != kept["row"].to_numpy()).mean() > 0.9
    assert whole["texts (permuted)"].to_pylist() == [texts[i].as_py() for i in permuted]
    first = 0
    for i in range(len(dataset.row_groups)):
        count = int(dataset.row_groups.num_rows[i])
        group = dataset.row_groups.segment(i)
        part = reader.read(Segment(group.path, group.row_group, count // 3, count, i))
        assert part["row (permuted)"].to_pylist() == permuted[first + count // 3 : first + count].tolist()
        first += count
    again = PermutedReader(dataset, ["row"], (7, 1)).read(dataset.row_groups.segment(0))
    assert again["row (permuted)"].to_pylist() != permuted[: len(again)].tolist()


def test_the_experts_of_a_feature_are_permuted_together(tmp_path: Path) -> None:
    """Each id is looked up in one of two tables, and so is the one that a row is given in its place."""
    pq.write_table(pa.table({"item": np.arange(ROWS), "label": np.arange(ROWS) % 2}), tmp_path / "rows.parquet")
    (tmp_path / "config.yaml").write_text(
        f"data: {{train: {tmp_path}/rows.parquet, test: {tmp_path}/rows.parquet, label_column: label}}\n"
        "features: {item: {table: item}}\n"
        "tables:\n"
        "  item: {num_embeddings: 99, embedding_dim: 4, experts: {others: [other], by: hash, gate: none}}\n"
        "  other: {num_embeddings: 99, embedding_dim: 4}\n"
        "model: {name: dlrm, interaction: dot_and_embeddings}\n"
    )
    config = load_config(tmp_path / "config.yaml", [])
    with open_world(Device.cpu) as world:
        inputs = open_inputs(config, world)
        permutation = Permutation(with_experts(config, ["item"]), (7, 0))
        (batch,) = inputs.loader("test", None, permutation).batches()
    lengths = batch.ids.lengths().view(2, -1)
    assert lengths.sum(dim=0).equal(batch.weights.int()) and lengths.sum() == ROWS and (lengths.sum(dim=1) > 0).all()
