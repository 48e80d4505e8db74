"""Looking ids up on a single rank gives what torchrec's sharded collection gives, bit by bit."""

from contextlib import closing
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.runtime.world import open_world
from recsys.step.pipeline import CopyingPipeline, GatedOptimizer, PlainPipeline
from recsys.tables.spec import local_shards
from recsys.tables.updates import table_tensors
from recsys.training.build import build_model

# Two features of one table, a list, a mean, two number types: FBGEMM gets two groups, in another order than batches.
CONFIG = """\
data: {train: data/sample/train, label_column: label, window_mib: 1}
features:
  user_id: {table: user}
  item_id: {table: item}
  history: {table: item, max_length: 10}
  category: {table: category}
  price: {type: float}
tables:
  user: {num_embeddings: 300, embedding_dim: 16}
  item: {num_embeddings: 100, embedding_dim: 8, data_type: FP16}
  category: {num_embeddings: 30, embedding_dim: 16, pooling: mean}
model: {name: dlrm, bottom_mlp: [16], top_mlp: [16]}
train: {global_batch_size: 256}
"""


def trained(
    folder: Path, by_torchrec: bool, *overrides: str, of_class: type[PlainPipeline] = PlainPipeline
) -> tuple[bool, list[float], dict[str, torch.Tensor]]:
    """Whether the lookup was local, the losses of some steps, and the tables after these."""
    path = folder / "local.yaml"
    path.write_text(CONFIG)
    config = load_config(path, overrides)
    with open_world(Device.cpu, 1) as world:
        inputs = open_inputs(config, world)
        built = build_model(inputs)
        is_local = not built.step.exchanges
        if by_torchrec:
            built.step.local, built.step.local_by_id = None, []
        built.table_updates.begin(1.0, lambda table: 0)
        gated = GatedOptimizer(built.dense_optimizer, built.step.dense)
        pipeline = of_class(built.model, gated, world.device)
        with closing(inputs.loader("train").batches()) as batches:
            some = islice(batches, 8)
            losses = [pipeline.progress(some).loss for _ in range(8)]
            with pytest.raises(StopIteration):
                pipeline.progress(some)
            more = islice(batches, 1)  # a pipeline goes on, as after an evaluation
            losses.append(pipeline.progress(more).loss)
        pieces = {name: local_shards(each) for name, each in table_tensors(built.model).items()}
        return is_local, losses, {name: torch.cat([each for each, _ in found]) for name, found in pieces.items()}


BY_ID = ("model.attention={history: item_id}", "tables.user.quantize=INT8")  # of two dimensions, and a pooled table


@pytest.mark.parametrize(
    ("options", "of_class"),
    [((), CopyingPipeline), (BY_ID, CopyingPipeline), ((*BY_ID, "tables.category.quantize=INT4"), PlainPipeline)],
)
def test_the_same_as_torchrec(options: tuple[str, ...], of_class: type[PlainPipeline], tmp_path: Path) -> None:
    """Of pooled tables, of those with a vector for each id, and of both."""
    is_local, losses, tables = trained(tmp_path, False, *options, of_class=of_class)
    _, expected, by_torchrec = trained(tmp_path, True, *options)
    assert is_local
    assert losses == expected
    assert tables.keys() == by_torchrec.keys() == {"user", "item", "category"}
    assert all(torch.equal(table, by_torchrec[name]) for name, table in tables.items())


@pytest.mark.parametrize("attention", ["{}", "{history: item_id}"])
def test_weighted_ids_are_the_same(attention: str, tmp_path: Path) -> None:
    rows = ds.dataset("data/sample/train").to_table()
    weights = [[0.5 + place for place in range(len(ids or []))] for ids in rows["history"].to_pylist()]
    pq.write_table(rows.append_column("by_age", pa.array(weights)), tmp_path / "rows.parquet")
    options = [f"data.train={tmp_path}/rows.parquet", "features.history.weights=by_age", "tables.category.pooling=sum"]
    options.append(f"model.attention={attention}")
    is_local, losses, tables = trained(tmp_path, False, *options)
    _, expected, by_torchrec = trained(tmp_path, True, *options)
    assert is_local
    assert losses == expected
    assert all(torch.equal(table, by_torchrec[name]) for name, table in tables.items())


@pytest.mark.parametrize(("kind", "alone"), [("row_wise", True), ("column_wise", True), ("data_parallel", False)])
def test_one_rank_splits_no_table(tmp_path: Path, kind: str, alone: bool) -> None:
    """Replicas are left to torchrec."""
    is_local, losses, _ = trained(tmp_path, False, "optimizer.tables.name=sgd", f"tables.user.sharding_type={kind}")
    assert is_local == alone
    assert losses == pytest.approx(trained(tmp_path, False, "optimizer.tables.name=sgd")[1], abs=1e-6)
