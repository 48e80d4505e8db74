"""Compares what an export computes without torch with what the run itself writes."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from launch import ROOT, run_recsys

from recsys.serving.score import Scorer


def assert_scores_alike(run: Path, folder: Path, atol: float = 1e-5) -> None:
    """Export a run to a folder, and compare its scores of the sample's test rows with those of `recsys predict`."""
    rows = ROOT / "data/sample/test"
    run_recsys("export", run, folder / "export")
    run_recsys("predict", run, rows, folder / "predicted")
    ours, theirs = Scorer(folder / "export").score(pq.read_table(rows)), pq.read_table(folder / "predicted")
    assert ours.column_names == [name for name in theirs.column_names if name.startswith("score")]
    for name in ours.column_names:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=atol)


def assert_recommends_alike(run: Path, users: Path, folder: Path, num_tied: int = 0) -> None:
    """Export a run to a folder, and compare its best items and their scores with those of `recsys recommend`.

    Args:
        num_tied: number of first users for whom all items are equally good, and so may come in any order.
    """
    run_recsys("export", run, folder / "export")
    run_recsys("recommend", run, users, folder / "recommended")
    ours, theirs = Scorer(folder / "export").recommend(pq.read_table(users)), pq.read_table(folder / "recommended")
    assert ours["items"].to_pylist()[num_tied:] == theirs["items"].to_pylist()[num_tied:]
    np.testing.assert_allclose(*(each["scores"].combine_chunks().flatten() for each in (ours, theirs)), atol=1e-5)
