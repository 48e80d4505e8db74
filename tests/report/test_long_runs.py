"""Runs of many lines: what their figures take of memory, and that figures which are numbers cost no words."""

import json
import tracemalloc
from pathlib import Path

import pytest

from recsys.report import shapes
from recsys.report.record import Record


def test_figures_of_many_lines_take_little_memory(tmp_path: Path) -> None:
    names, lines = [f"figure_{i}" for i in range(10)], []
    for step in range(1, 5001):
        lines.append({"kind": "train", "step": step, "time": 0.5, **{name: step + 0.5 for name in names}})
    lines[7]["figure_3"] = None
    lines += [{"kind": "valid", "step": step, "auc": step / 1000} for step in (100, 5000, 300)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = Record(tmp_path)
    tracemalloc.start()
    assert record.step == 5000
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 30 * 10 * 5000  # of each figure 16, with what arrays keep free
    curves = record.curves("train")
    assert list(curves) == names
    assert curves["figure_3"][6:9] == [(7, 7.5), (8, None), (9, 9.5)]
    assert record.curves("valid") == {"auc": [(100, 0.1), (5000, 5.0), (300, 0.3)]}
    assert record.figures.last["valid"]["auc"] == 0.3
    assert record.figures.curve("test", "auc") == []


def test_numbers_are_told_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "_word", lambda shape: pytest.fail("words on a figure that is one"))
    assert shapes.misfit({"auc": 0.5, "loss": 3}, {str: shapes.FIGURE}) == ""
