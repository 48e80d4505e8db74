"""What benchmark.py step takes of a profile."""

import benchmark_step as step
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)


def test_time_of_tables_is_counted_once() -> None:
    """FBGEMM's operators call others of nearly their names."""
    tables = SplitTableBatchedEmbeddingBagsCodegen([(50, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        tables(torch.arange(5), torch.arange(6)).sum().backward()
    for pattern in (step.LOOKUP, step.TABLE_BACKWARD):
        assert sum(event.count for event in found.key_averages() if pattern.search(event.key)) == 1, pattern
