"""`recsys.train`, `recsys.open_run`: a run from Python, with Arrow tables."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, fork_train
from omegaconf import OmegaConf
from retrieval import NUM_ITEMS, train_towers, write_retrieval

import recsys
from recsys.data import inputs
from recsys.errors import UserError


@pytest.mark.slow
def test_a_ranker(tmp_path: Path) -> None:
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/dlrm_sample.yaml"))
    for role in ("train", "valid", "test"):
        config["data"][role] = str(ROOT / "data/sample" / role)
    run = recsys.train(config, "train.max_steps=10", f"run.dir={tmp_path}/run")
    rows = pq.read_table(ROOT / "data/sample/test")
    table = run.predict(rows, keep=["user_id", "price"])
    assert table.drop_columns("score").equals(rows.select(["user_id", "price"]))
    done = fork_train("predict", f"{tmp_path}/run", str(ROOT / "data/sample/test"), f"{tmp_path}/out", program="recsys")
    assert done.returncode == 0, done.stderr[-3000:]
    by_command = pq.read_table(tmp_path / "out")
    np.testing.assert_allclose(table["score"], by_command["score"], rtol=0, atol=1e-6)
    again = run.predict(rows.slice(3, 5))
    np.testing.assert_allclose(again["score"], table["score"].slice(3, 5), rtol=0, atol=1e-6)
    assert run.embeddings("hour").num_rows == 24
    for wrong, said in ((7, "DATA is a int"), (rows.drop_columns("price"), "has no column 'price'")):
        with pytest.raises(UserError, match=said):
            run.predict(wrong)
    with pytest.raises(UserError, match="has no vectors of items"):
        run.recommend(rows)
    other = recsys.open_run(f"{tmp_path}/run", "run.device=cpu")  # in the same group of one process
    assert other.predict(rows.slice(3, 5)).equals(again)
    with pytest.raises(UserError, match="this process has a run open on cpu"):
        recsys.open_run(f"{tmp_path}/run", "run.device=cuda")
    with pytest.raises(UserError, match=r"^RUN: 'nowhere' does not exist"):
        recsys.open_run("nowhere")


def test_items_are_read_once_and_for_recommendations_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, users = train_towers(tmp_path, "train.epochs=1"), pq.read_table(tmp_path / "valid.parquet")
    reads, read = list[str](), inputs.read_corpus
    monkeypatch.setattr(inputs, "read_corpus", lambda config, items: reads.append(items.key) or read(config, items))
    without, opened = recsys.open_run(run, "data.items=nowhere"), recsys.open_run(run)
    pairs = pq.read_table(tmp_path / "train.parquet").slice(0, 40)
    assert without.predict(pairs).equals(opened.predict(pairs)) and not reads
    with pytest.raises(UserError, match=r"config key 'data.items': 'nowhere' does not exist"):
        without.recommend(users)
    best = opened.recommend(users, k=5)
    assert opened.recommend(users.slice(7, 2), k=5).equals(best.slice(7, 2)) and reads == ["data.items"]
    assert opened.embeddings("item", pq.read_table(tmp_path / "items.parquet").slice(0, 3)).num_rows == 3
    assert opened.recommend(users, k=5).equals(best)


@pytest.mark.slow
def test_two_towers(tmp_path: Path) -> None:
    run = recsys.train(write_retrieval(tmp_path), "train.epochs=2", f"run.dir={tmp_path}/run")
    users = pq.read_table(tmp_path / "valid.parquet")
    best = run.recommend(users, k=5)
    items, of_users = run.embeddings("item"), run.embeddings("user", users)
    assert best.column_names == ["user", "items", "scores"] and items.num_rows == NUM_ITEMS
    vectors = [np.stack(table["vector"].to_numpy(zero_copy_only=False)) for table in (of_users, items)]
    scores = vectors[0] @ vectors[1].T
    place = {item: number for number, item in enumerate(items["item"].to_pylist())}
    for row, seen, own in zip(best.to_pylist(), users["seen"].to_pylist(), scores, strict=True):
        own[[place[item] for item in seen]] = -np.inf
        np.testing.assert_allclose(np.sort(own)[-5:][::-1], row["scores"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(own[[place[item] for item in row["items"]]], row["scores"], rtol=0, atol=1e-6)
    assert isinstance(best, pa.Table)
