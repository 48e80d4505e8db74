"""Lookups by id as sums of lists of one give and train what FBGEMM's own kernel for them does."""

from itertools import accumulate, chain
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torchrec.optim.fused import FusedOptimizerModule

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.runtime.world import open_world
from recsys.tables.by_id import look_up_as_sums
from recsys.tables.updates import kernels
from recsys.training.build import build_model

LISTS, DIM = 9, 16
KINDS = [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD]


def module(rows: list[int], features: list[int], kind: EmbOptimType, weights: SparseType) -> torch.nn.Module:
    torch.manual_seed(0)
    specs = [(count, DIM, EmbeddingLocation.HOST, ComputeDevice.CPU) for count in rows]
    by_id = SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        feature_table_map=features,
        pooling_mode=PoolingMode.NONE,
        optimizer=kind,
        weights_precision=weights,
        learning_rate=0.1,
    )
    by_id.init_embedding_weights_uniform(-1, 1)
    return by_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [SparseType.FP32, SparseType.FP16])
@pytest.mark.parametrize("rows, features", [([50], [0]), ([50, 7, 30], [0, 1, 2]), ([50, 7, 30], [0, 0, 1, 2, 2])])
def test_the_same_as_fbgemm(rows: list[int], features: list[int], kind: EmbOptimType, weights: SparseType) -> None:
    both = [module(rows, features, kind, weights) for _ in range(2)]
    look_up_as_sums(both[1])
    for step in range(5):
        # Lists of many lengths, and a batch without any id.
        lengths = torch.randint(0, 4, (len(features), LISTS)) * (step != 3)
        ids = torch.cat(
            [torch.randint(0, rows[table], (int(n),)) for table, n in zip(features, lengths.sum(1), strict=True)]
        )
        offsets = torch.tensor([0, *accumulate(lengths.flatten().tolist())])
        found = [each(indices=ids, offsets=offsets) for each in both]
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
        gradient = torch.randn_like(found[0])
        for vectors in found:
            vectors.backward(gradient)
    states = [[*each.split_embedding_weights(), *chain.from_iterable(each.split_optimizer_states())] for each in both]
    for expected, trained in zip(*states, strict=True):
        torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-6)
        assert trained.shape == expected.shape


def test_tables_of_lists_are_looked_up_so(tmp_path: Path) -> None:
    overrides = ["data.valid=null", "data.test=null", "model.attention={history: item_id}", f"run.dir={tmp_path}"]
    with open_world(Device.cpu, 1) as world:
        built = build_model(open_inputs(load_config("configs/dlrm_sample.yaml", overrides), world))
        modes = {kernel.emb_module.pooling_mode for kernel in kernels(built.model, FusedOptimizerModule)}
        assert modes == {PoolingMode.SUM}
