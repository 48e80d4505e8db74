"""The text beside a profiler's trace: shares by hand, and of a run."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch import must_train

from recsys.runtime.profiling import profile_text


def event(name: str, own_us: float, parent: Any = None, thread: int = 1) -> Any:
    return SimpleNamespace(name=name, self_cpu_time_total=own_us, cpu_parent=parent, thread=thread)


def test_each_event_counts_for_its_part() -> None:
    step = event("ProfilerStep#13", 1000)
    update, wait = event("## tables: update ##", 500, step), event("## Request wait() ##", 0, step)
    events = [
        *(step, update, wait, event("aten::copy_", 1500, wait)),  # of the exchange, since it is called in that
        event("fbgemm::split_embedding_backward_codegen_sgd_cpu", 1500, update),
        event("fbgemm::split_embedding_codegen_lookup", 1000, event("[lookup]_[embeddings]_[row_wise]", 0, step)),
        *(event("aten::mm", 3000, step), event("## next_batch ##", 500, step)),
        event("aten::mm", 9e9, None),  # outside the steps
        event("aten::mm", 9e9, step, thread=2),
    ]
    text = profile_text([*events, event("ProfilerStep#14", 1000)], "rank 3")
    lines = text.splitlines()
    assert len(lines) == 10 and lines[0] == "rank 3: 2 steps of 5.00 ms"
    shares = dict(re.findall(r"^(\S.*?) +([\d.]+)% ", text, re.MULTILINE))
    assert shares == {
        "waiting for data": "5.0",
        "exchange": "15.0",
        "update": "20.0",
        "lookup": "10.0",
        "dense": "30.0",
        "Python and the rest": "20.0",
    }
    assert [line.split(": try ")[0] for line in lines[-3:]] == ["dense", "update", "Python and the rest"]


@pytest.mark.slow
def test_a_profiled_run_says_where_its_time_went(tmp_path: Path) -> None:
    must_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}/run", "run.profile_steps=3", nproc=2)
    for rank in range(2):
        lines = (tmp_path / "run" / "profile" / f"rank_{rank}.txt").read_text().splitlines()
        assert len(lines) == 10 and lines[0].startswith(f"rank {rank}: 3 steps of ")
        shares = {line[:20].strip(): float(re.findall(r"([\d.]+)%", line)[0]) for line in lines[1:7]}
        assert abs(sum(shares.values()) - 100) < 0.5 and all(
            shares[name] > 0 for name in ("exchange", "lookup", "dense")
        )
    assert "3 steps of" in (tmp_path / "run" / "report.html").read_text()
