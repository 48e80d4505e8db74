"""How memory is written on pages, and in reports."""

import pytest
import torch

from recsys.config import load_config
from recsys.memory import RankMemory, Timeline
from recsys.memory.page import describe_plan, few_lines, kind_rows, rank_table
from recsys.memory.report import _machines, rank_report
from recsys.report.text import duration, listed, size
from recsys.runtime.machine import topology_of
from recsys.tables.spec import Shard


def test_sizes_have_three_digits_and_a_unit_that_suits() -> None:
    sizes = {0: "0", 12: "12 bytes", 1023: "1,023 bytes", 1536: "1.50 KiB", 10 << 20: "10.0 MiB", 999 << 20: "999 MiB"}
    sizes |= {61 << 30: "61.0 GiB", 5 << 40: "5.00 TiB", 3000 << 50: "3,000 PiB", -(5 << 20): "-5.00 MiB"}
    assert {number: size(number) for number in sizes} == sizes and size(None) == "–"


def test_no_part_of_a_time_is_sixty() -> None:
    times = {8.46: "8.5 s", 59.96: "1 min 0 s", 119.7: "2 min 0 s", 3599.6: "1 h 0 min", 7499: "2 h 4 min"}
    assert {seconds: duration(seconds) for seconds in times} == times


def test_ranks_are_listed_in_runs() -> None:
    assert listed([3, 0, 1, 2, 5]) == "ranks 0-3, 5" and listed([7], "machine") == "machine 7"


def test_ranks_that_nearly_agree_share_a_column() -> None:
    gib = 1 << 30
    kinds = [{"weight": 40 * gib, "ids": 5}, {"ids": 7}, {"weight": 40 * gib + 1000, "ids": 9}, {}]
    lines = rank_table("kind", kind_rows(kinds), 0.02)
    assert lines[0] == "| kind | ranks 0, 2 | ranks 1, 3 |"
    assert lines[2:] == ["| weight | 40.0 GiB | 0 |", "| ids | 9 bytes | 7 bytes |"]
    assert rank_table("", {"phase": ["step", "save"]}, 0.02)[0] == "|  | rank 0 | rank 1 |"
    assert rank_table("", {"a": [(5, 900), (None, 900), (5, 900)]}, 0.02)[0] == "|  | ranks 0, 2 | rank 1 |"


@pytest.mark.parametrize("num", [8, 9, 40])
def test_of_many_kinds_of_ranks_the_fullest_is_shown(num: int) -> None:
    lines = rank_table("kind", {"weight": [(1 << (rank * 7 % num),) for rank in range(num)]}, 0.001)
    shown = lines[2].split("|")[2:-1]
    assert len(shown) <= 8 and size(max(1 << (rank * 7 % num) for rank in range(num))) in lines[2]
    assert ("the fullest, the emptiest and the first" in lines[-1]) == (num > 8)


def test_the_plan_names_ranks_with_equal_pieces_once() -> None:
    pieces = [Shard("a", rank, (0, 0), (100 if rank < 3 else 90, 8), "row_wise", "fused") for rank in range(4)]
    pieces += [Shard("b", 1, (0, column), (50, 4), "column_wise", "fused") for column in (0, 4)]
    assert describe_plan(pieces) == [
        "a row_wise (fused): 100 × 8 on ranks 0-2; 90 × 8 on rank 3",
        "b column_wise (fused): 50 × 4 and 50 × 4 on rank 1",
    ]


@pytest.mark.parametrize("num", [1, 40, 41, 1000])
def test_a_plan_of_many_tables_or_pieces_stays_readable(num: int) -> None:
    lines = [f"t{table} row_wise (fused): " + "; ".join(["1 × 8 on rank 0"] * num) for table in range(num)]
    shown = few_lines(lines)
    assert len(shown) == min(num, 41) and all(len(line) < 240 for line in shown)
    assert [line.split()[0] for line in shown[:40]] == [f"t{table}" for table in range(min(num, 40))]
    assert num <= 40 or shown[-1] == f"… and {num - 40} more"
    assert num == 1 or f"… ({num} pieces)" in shown[0]


def test_kinds_add_up_to_the_peak_that_they_are_of() -> None:
    """What lies in other processes is no part of it, though it may make another phase the highest."""
    step = {"process": 99, "activations": 5, "loader_processes": 20}
    phases = {"step": {"device": {}, "host": step}, "save": {"device": {}, "host": {"process": 99, "heap": 7}}}
    timeline = Timeline(torch.device("cpu"))
    timeline.close()
    topology = topology_of(load_config("configs/dlrm_sample.yaml"))
    for kinds in (phases, {"step": phases["step"]}):
        peak = rank_report(RankMemory(0, {}, kinds), topology, timeline, {})["peak"]
        assert sum(peak["by_kind_predicted"].values()) == peak["predicted_bytes"] == (7 if "save" in kinds else 5)
        assert peak["predicted_phase"] == ("save" if "save" in kinds else "step")
    assert peak["beside_predicted"] == {"loader_processes": 20}


def test_ranks_of_several_machines_are_told_apart() -> None:
    reports = [{"identity": {"rank": rank, "host": host}} for rank, host in enumerate(["a", "a", "b"])]
    assert _machines(reports) == ["Machines: ranks 0-1 on a; rank 2 on b"]
    assert _machines(reports[:2]) == []
