"""Peaks of steps in which updates take most, or vectors of another type."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import benchmark_peaks as peaks
import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from launch import ROOT
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsys.config import FeatureConfig, TableConfig, TableOptimizerConfig, load_config
from recsys.config.table_optimizers import TableOptimizer
from recsys.memory.dry_run import rehearse_run
from recsys.memory.lookups import Lookups
from recsys.memory.trace import LivePeak
from recsys.tables.lookup import UpdateGate
from recsys.tables.spec import Shard
from recsys.tables.torch_update import TorchTable, _update

_LISTS = ("train.global_batch_size=16384", "train.max_steps=3", "data.prefetch_batches=0")
_WIDE = {"top_mlp": [4096, 4096]}


@pytest.mark.parametrize(
    ("nproc", "optimizer"),
    [(1, "tables.name=adam"), (2, "tables.name=ftrl"), (1, "dense.name=lamb"), (1, "dense.name=adafactor")],
)
@pytest.mark.slow
def test_what_updates_take_besides_is_predicted(nproc: int, optimizer: str, tmp_path: Path) -> None:
    """A gradient by each id of a pooled list, where rules in torch train tables; updates of the widest layer or all."""
    if optimizer.startswith("tables"):
        case = peaks.Case(40_000, ids=2, lists=2, length=25, num_embeddings=20_000, nproc=nproc, overrides=_LISTS)
    else:
        small = ("train.global_batch_size=64", "train.max_steps=2")
        case = peaks.Case(2000, ids=2, num_embeddings=100, dim=8, model=_WIDE, nproc=nproc, overrides=small)
    for peak in peaks.measure(case, tmp_path, f"optimizer.{optimizer}", "run.num_threads=1"):
        assert peak["by_kind_predicted"]["update_temporaries"] > 48 * peaks.MIB
        assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak


@pytest.mark.slow
def test_vectors_in_fp16_are_read_in_fp32(tmp_path: Path) -> None:
    """A batch to evaluate has both; in steps gradients take more."""
    batches = ("train.global_batch_size=1024", "train.eval_batch_size=65536", "train.max_steps=3")
    wide = (*batches, "data.valid=${data.train}", "precision.output_dtype=FP16", "run.num_threads=1")
    case = peaks.Case(140_000, ids=6, num_embeddings=2000, dim=128, model={"top_mlp": [16]}, overrides=wide)
    for peak in peaks.measure(case, tmp_path):
        assert peaks.is_near(peak["predicted_bytes"], peak["measured_bytes"]), peak


@pytest.mark.parametrize("output", [pytest.param("FP32", marks=pytest.mark.slow), "BF16"])
def test_gradients_that_weights_change_are_there_twice(output: str) -> None:
    """On each of 16 GPUs, with parts of the vectors of all rows, that is more than what its own rows take."""
    tables = ("user", "item", "category", "device", "hour")
    topology = ("device=cuda", "world_size=16", "device_memory=8GiB")
    options = [*(f"topology.{key}" for key in topology), *(f"tables.{name}.sharding_type=row_wise" for name in tables)]
    options += [
        "train.global_batch_size=65536",
        f"precision.output_dtype={output}",
        "data.valid=null",
        "data.test=null",
    ]
    config = load_config(str(ROOT / "configs/dlrm_sample.yaml"), options)
    (predicted,) = {
        rank.phases["step"]["device"]["looked_up_gradient"] for rank in rehearse_run(config).prediction.ranks
    }
    numbers, dtype = 65536 * 6 * 8, {"FP32": torch.float32, "BF16": torch.bfloat16}[output]
    gate, scale = UpdateGate(), torch.tensor(0.5)
    vectors, gradient = torch.zeros(numbers, dtype=dtype, requires_grad=True), torch.ones(numbers, dtype=dtype)
    gate.output_dtype = dtype
    torch.autograd.backward([gate.cut(vectors.view_as(vectors))], [gradient])
    with LivePeak((vectors,)) as live:
        gate.open(scale)
    assert predicted == live.highest + gradient.nbytes


@pytest.mark.parametrize(("output", "given", "sent"), [("FP32", 4, 4), ("FP16", 4, 2), ("BF16", 2, 2)])
def test_vectors_have_the_bytes_that_fbgemm_gives(output: str, given: int, sent: int) -> None:
    """FP16 ones are rounded behind it."""
    config = load_config(str(ROOT / "configs/dlrm_sample.yaml"), [f"precision.output_dtype={output}"])
    means = {name: 1.0 for name in config.features}
    shard = Shard("item", 0, (0, 0), (1000, 8), "table_wise", "fused")
    lookups = Lookups(config, [shard], 4, on_gpu=True)
    assert lookups.of_ranks(64, means) == (4 * 64 * 2 * 8 * given, 0, 4 * 64 * 2)  # item_id and history
    assert lookups.pooled(64, means) == 64 * 6 * 8 * sent


@pytest.mark.parametrize("by_id", [False, True])
def test_a_part_of_a_table_gives_the_vectors_of_its_ids_or_adds_up_those_of_all_rows(by_id: bool) -> None:
    options = ["model.attention={history: item_id}"] if by_id else []
    config = load_config(str(ROOT / "configs/dlrm_sample.yaml"), options)
    means, rows = dict.fromkeys(config.features, 1.0) | {"history": 10.0}, config.tables["item"].num_embeddings
    lookups = Lookups(config, [Shard("item", 0, (0, 0), (rows // 4, 8), "row_wise", "fused")], 4, on_gpu=False)
    ids, lists = 4 * 64 * (1 + 10) // 4, 4 * 64 * 2
    assert lookups.of_ranks(64, means) == ((ids * 32, 0, ids) if by_id else (lists * 32, lists * 32, ids))


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_by_id_are_there_for_one_feature_at_a_time(weighted: bool) -> None:
    """Three features of lists, two of them of one table: what the update takes is what is predicted of it."""
    keys, rows, length, sizes = ["a", "b", "c"], 500, 20, {"x": 100, "y": 300}
    config = load_config(str(ROOT / "configs/dlrm_sample.yaml"), [])
    settings = TableOptimizerConfig(name=TableOptimizer.adam)
    tables = {name: TableConfig(num_embeddings=size, embedding_dim=16) for name, size in sizes.items()}
    features = {key: FeatureConfig(table=table) for key, table in zip(keys, "xyy", strict=True)}
    optimizer = replace(config.optimizer, tables=settings)
    config = replace(config, tables=tables, features=features, optimizer=optimizer)
    shards = [Shard(name, 0, (0, 0), (size, 16), "table_wise", "fused") for name, size in sizes.items()]
    predicted = Lookups(config, shards, 1, on_gpu=False).update_temporaries(rows, dict.fromkeys(keys, float(length)))
    ids = torch.cat([torch.arange(rows * length) % sizes[features[key].table or ""] for key in keys])
    weights = torch.rand(len(ids)) if weighted else None
    jagged = KeyedJaggedTensor(keys, ids, weights, lengths=torch.full((3 * rows,), length))
    kernel = SimpleNamespace(feature_table_map=[0, 1, 1], pooling_mode=PoolingMode.SUM)
    trained = [TorchTable(name, torch.zeros(size, 16), settings) for name, size in sizes.items()]
    gradient = torch.ones(rows, 48)
    jagged.length_per_key()  # cached, as in a step
    state = [tensor for table in trained for tensor in (table.weights, *table.state)]
    outside = (gradient, jagged.values(), jagged.lengths(), *([] if weights is None else [weights]), *state)
    with LivePeak(outside) as live:
        _update(kernel, trained, jagged, gradient)
    assert live.highest == pytest.approx(predicted, rel=1e-3)
