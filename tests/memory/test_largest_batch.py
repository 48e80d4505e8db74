"""The search for the largest batch that fits, whose rehearsals take seconds if there are hundreds of tables."""

from typing import Any

import pytest

from recsys.config import load_config
from recsys.memory import trace
from recsys.memory.dry_run import rehearse_run


def test_no_number_of_rows_is_rehearsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prediction has rehearsed the config's rows; if the largest batch is near these, others come again too."""
    rehearse, rows = trace.rehearse, list[int]()

    def counting(config: Any, data: Any, of_rank: int, device: Any) -> Any:
        rows.append(of_rank)
        return rehearse(config, data, of_rank, device)

    monkeypatch.setattr(trace, "rehearse", counting)
    options = ["topology.device=cpu", "topology.host_memory=700MiB", "train.global_batch_size=8192"]
    largest = rehearse_run(load_config("configs/dlrm_sample.yaml", options)).largest_batch
    assert largest and rows[0] == 8192 and len(rows) == len(set(rows)), rows
