"""Exports of random two towers: scores and lists are those of the run, for users that training did not see too."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from launch import run_recsys
from random_export import write_random_towers

pytest.importorskip("onnxruntime")

from recsys.serving.score import Scorer

_CLOSE = 2e-5


def is_close(ours: list[float], theirs: list[float], largest: float) -> bool:
    """Where vectors are long, scores are small differences of numbers as large as the largest of them."""
    return len(ours) == len(theirs) and np.allclose(ours, theirs, rtol=_CLOSE, atol=_CLOSE + 1e-6 * largest)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_towers(seed: int, tmp_path: Path) -> None:
    """Of items whose scores are as good as equal, such as those whose ids share a row, either may come first."""
    run_recsys("train", write_random_towers(tmp_path, seed), f"run.dir={tmp_path}/run", "train.epochs=2")
    run_recsys("export", tmp_path / "run", tmp_path / "out")
    scorer, users = Scorer(tmp_path / "out"), pq.read_table(tmp_path / "test.parquet")
    run_recsys("predict", tmp_path / "run", tmp_path / "test.parquet", tmp_path / "predicted", "--keep", "seen")
    scores = pq.read_table(tmp_path / "predicted")["score"].to_pylist()
    largest = max(map(abs, scores))
    assert is_close(scorer.score(users)["score"].to_pylist(), scores, largest)
    run_recsys("recommend", tmp_path / "run", tmp_path / "test.parquet", tmp_path / "best", "--k", 7, "--keep", "seen")
    ours, theirs = scorer.recommend(users, k=7).to_pylist(), pq.read_table(tmp_path / "best").to_pylist()
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert is_close(mine["scores"], other["scores"], largest)
        places = {item: place for place, item in enumerate(other["items"])}
        for item, score in zip(mine["items"], mine["scores"], strict=True):
            assert is_close(
                [score], [other["scores"][places.get(item, -1)]], largest
            )  # or it is as good as their last one
