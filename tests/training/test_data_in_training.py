"""What the data path promises, seen in whole runs: row counts, vocabularies, bad files, other numbers of ranks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import ROOT, losses_of, run_recsys

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.runtime.world import open_world

SAMPLE = "configs/dlrm_sample.yaml"
EACH_STEP = ("train.log_every_steps=1", "data.window_mib=1", "data.valid=null", "data.test=null")


def train(run_dir: Path, *overrides: str, config: str | Path = SAMPLE, nproc: int = 1) -> dict[str, Any]:
    """Train to the end and return result.json."""
    run_recsys("train", config, f"run.dir={run_dir}", *EACH_STEP, *overrides, nproc=nproc)
    return json.loads((run_dir / "result.json").read_text())


# Rounding of FP16 tables would hide, or look like, other rows; dropout goes by the row of the global batch.
TWO_EPOCHS = ("train.epochs=2", "tables.item.data_type=FP32", "model.dropout=0.1", "data.test=data/sample/test")


def write(table: pa.Table, path: Path, row_group_rows: int = 1000) -> None:
    path.parent.mkdir(exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_rows, write_page_checksum=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    """Two epochs in one process."""
    run_dir = tmp_path_factory.mktemp("whole")
    result = train(run_dir, *TWO_EPOCHS)
    return losses_of(run_dir), result


def test_every_epoch_counts_its_rows_and_ids(whole: tuple[list[float], dict[str, Any]]) -> None:
    data = whole[1]["data"]
    assert data["epochs"] == [{"expected": 3000, "seen": 3000, "bad": 0, "skipped": 0}] * 2
    users = pq.read_table(ROOT / "data/sample/train")["user_id"].to_numpy()
    found = data["ids"]["user_id"]
    assert found["distinct_ids"] == len(np.unique(users)) and found["exact"]
    assert found["ids"] == 2 * 3000 and found["out_of_vocabulary_share"] == 0


@pytest.mark.slow
def test_micro_batches_change_nothing_but_rounding(whole: tuple[list[float], dict[str, Any]], tmp_path: Path) -> None:
    train(tmp_path, *TWO_EPOCHS, "train.micro_batch_size=50", "train.micro_batch_ids=300", nproc=2)
    torch.testing.assert_close(losses_of(tmp_path), whole[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("nproc", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6, 7, 8))])
def test_any_number_of_ranks_trains_the_same(
    nproc: int, whole: tuple[list[float], dict[str, Any]], tmp_path: Path
) -> None:
    result = train(tmp_path, *TWO_EPOCHS, nproc=nproc)
    torch.testing.assert_close(losses_of(tmp_path), whole[0], rtol=0, atol=1e-5)
    assert result["data"] == whole[1]["data"], "rows and ids are counted once"
    torch.testing.assert_close(result["metrics"], whole[1]["metrics"], rtol=0, atol=1e-5)
    told = "multiple of" in (tmp_path / "logs" / "rank_0.log").read_text()
    assert told == (8 % nproc > 0)


@pytest.mark.slow
def test_any_chain_of_ranks_trains_the_same(whole: tuple[list[float], dict[str, Any]], tmp_path: Path) -> None:
    train(tmp_path, *TWO_EPOCHS, "train.max_steps=5", nproc=2)
    train(tmp_path, *TWO_EPOCHS, "run.resume=true", "train.max_steps=17", nproc=3)
    result = train(tmp_path, *TWO_EPOCHS, "run.resume=true")
    torch.testing.assert_close(losses_of(tmp_path), whole[0], rtol=0, atol=1e-5)
    assert result["data"]["epochs"] == whole[1]["data"]["epochs"]


def test_drop_last_of_all_rows_is_refused(tmp_path: Path) -> None:
    options = (f"run.dir={tmp_path}/run", "data.drop_last=true", "data.max_rows=255")
    assert "'data.drop_last' leaves out all 255 rows of data.train" in run_recsys("train", SAMPLE, *options, status=1)
    assert not (tmp_path / "run").exists()


ROWS = 2000


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of two days in partitions, with rare users, weighted histories, nulls, and numbers of any size."""
    folder = tmp_path_factory.mktemp("logs")
    generator = np.random.default_rng(2)
    for day in (1, 2):
        lengths = generator.integers(0, 5, ROWS)
        history = [generator.integers(0, 30, n).tolist() for n in lengths]
        table = pa.table(
            {
                "user": [f"u{n}" if n else None for n in generator.zipf(1.3, ROWS) % 500],
                "history": pa.array(history, pa.list_(pa.int32())),
                "share": pa.array([[0.5] * n for n in lengths], pa.list_(pa.float32())),
                "amount": [None if n < 0.1 else 1000 * n for n in generator.random(ROWS)],
                "hour": generator.integers(0, 24, ROWS).astype(np.int8),
                "clicked": generator.integers(0, 2, ROWS).astype(bool),
            }
        )
        path = folder / "rows" / f"day=2026-11-0{day}"
        path.mkdir(parents=True)
        write(table, path / "part-0.parquet", 250)
    (folder / "logs.yaml").write_text(
        f"data: {{train: {folder}/rows, label_column: clicked}}\n"
        "features:\n"
        "  user: {table: user}\n"
        "  history: {table: item, weights: share, max_length: 3, keep: first}\n"
        "  day: {table: day}\n"
        "  hour: {table: hour, boundaries: [6, 12, 18]}\n"
        "  amount: {type: float, nulls: mean, log1p: true, standardise: true}\n"
        "tables:\n"
        "  user: {num_embeddings: 5000, embedding_dim: 8, mapping: vocabulary, min_count: 3, num_buckets: 10}\n"
        "  item: {num_embeddings: 60, embedding_dim: 8, mapping: quotient_remainder, num_ids: 500}\n"
        "  day: {num_embeddings: 100, embedding_dim: 8, num_hashes: 2}\n"
        "  hour: {num_embeddings: 4, embedding_dim: 8, mapping: identity}\n"
        "model: {name: dlrm}\n"
        "train: {global_batch_size: 200, epochs: 2}\n"
    )
    return folder


@pytest.mark.slow
def test_all_kinds_of_columns_and_mappings_on_two_ranks(logs: Path, tmp_path: Path) -> None:
    config = logs / "logs.yaml"
    one = train(tmp_path / "one", config=config)
    two = train(tmp_path / "two", config=config, nproc=2)
    torch.testing.assert_close(losses_of(tmp_path / "one"), losses_of(tmp_path / "two"), rtol=0, atol=1e-5)
    users = pq.read_table(logs / "rows")["user"].drop_null().to_pylist()
    counts = {user: users.count(user) for user in set(users)}
    frequent = {user for user, count in counts.items() if count >= 3}
    vocabulary = pq.read_table(tmp_path / "two" / "vocabulary" / "user.parquet")["id"].to_pylist()
    assert set(vocabulary) == frequent and len(vocabulary) == len(frequent)
    for result in (one, two):
        found = result["data"]["ids"]["user"]
        assert found["rows"] == 1 + len(frequent) + 10, "the table is as large as its vocabulary"
        rare = sum(count for count in counts.values() if count < 3)
        assert found["out_of_vocabulary_share"] == pytest.approx(rare / len(users), abs=1e-4)
        assert result["data"]["ids"]["history"]["distinct_ids"] == 30
    tables = json.loads((tmp_path / "one" / "memory" / "rank_0.json").read_text())["tables"]
    weights = next(table["measured"] for table in tables if table["name"] == "user")
    assert weights["weight_bytes"] == (1 + len(frequent) + 10) * 8 * 4


@pytest.mark.slow
def test_facts_go_on_with_a_run(logs: Path, tmp_path: Path) -> None:
    config = logs / "logs.yaml"
    train(tmp_path / "parts", "train.max_steps=10", config=config)
    train(tmp_path / "parts", "run.resume=true", config=config)
    train(tmp_path / "whole", config=config)
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")


@pytest.mark.slow
def test_facts_go_on_with_the_weights(logs: Path, tmp_path: Path) -> None:
    config = logs / "logs.yaml"
    first = train(tmp_path / "first", "train.max_steps=10", config=config)
    # The second day has other users, but the weights are those of the first run's.
    other = (f"train.init_from={tmp_path / 'first'}", "data.filter=\"day == '2026-11-02'\"")
    warm = train(tmp_path / "warm", *other, "train.epochs=1", config=config)
    assert warm["data"]["ids"]["user"]["rows"] == first["data"]["ids"]["user"]["rows"]
    assert warm["data"]["epochs"] == [{"expected": ROWS, "seen": ROWS, "bad": 0, "skipped": 0}]


def test_a_filter_by_row_keeps_steps_equal(logs: Path, tmp_path: Path) -> None:
    hours = pq.read_table(logs / "rows", columns=["hour"])["hour"].to_numpy()
    expected = int(((hours < 5) | (hours == 20)).sum())
    result = train(
        tmp_path, "data.filter='hour < 5 or hour == 20'", "train.epochs=1", config=logs / "logs.yaml", nproc=2
    )
    assert result["data"]["epochs"] == [{"expected": expected, "seen": expected, "bad": 0, "skipped": 0}]


@pytest.mark.slow
@pytest.mark.parametrize("filter", [None, "user != 'u1'"])
def test_bad_rows_within_the_quota_are_left_out_on_all_ranks(logs: Path, tmp_path: Path, filter: str | None) -> None:
    """Two row groups, the first one among them, in a column that a vocabulary is made of."""
    table = pq.read_table(logs / "rows" / "day=2026-11-01" / "part-0.parquet", partitioning=None)
    write(table, tmp_path / "part-0.parquet", 250)
    path = tmp_path / "part-0.parquet"
    content = bytearray(path.read_bytes())
    for group in (0, 3):
        column = pq.read_metadata(path).row_group(group).column(0)
        content[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 20] ^= 4
    path.write_bytes(content)
    options = (f"data.train={path}", "features.day.column=hour", f'data.filter="{filter}"' if filter else "seed=1")
    config = logs / "logs.yaml"
    result = train(tmp_path / "run", *options, "data.max_bad_rows=500", config=config, nproc=2)
    readable = pa.concat_tables([table.slice(250, 500), table.slice(1000)])["user"].to_pylist()
    seen = sum(user not in (None, "u1") or not filter for user in readable)
    assert result["data"]["epochs"] == [{"expected": seen + 500, "seen": seen, "bad": 500, "skipped": 0}] * 2
    train(tmp_path / "stopped", *options, "data.max_bad_rows=500", "train.max_steps=3", config=config)
    resumed = train(tmp_path / "stopped", *options, "data.max_bad_rows=500", "run.resume=true", config=config)
    for counted in (found["data"]["ids"]["user"] for found in (result, resumed)):  # read ahead at the stop, in part
        assert counted["ids"] + counted["nulls"] == pytest.approx(2 * seen, abs=1)
    words = ("train", config, f"run.dir={tmp_path}/few", *EACH_STEP, *options, "data.max_bad_rows=499")
    assert "'data.max_bad_rows' allows 499" in run_recsys(*words, nproc=2, status=1)


def test_one_filter_is_for_all_data_sets_of_rows(tmp_path: Path) -> None:
    for i, role in enumerate(("train", "valid", "test")):
        columns = {"u": range(20), "label": [0, 1] * 10, "day": [i] * 5 + [9] * 15}
        write(pa.table(columns), tmp_path / role / "a.parquet")
    write(pa.table({"u": range(20), "label": [0, 1] * 10}), tmp_path / "late" / "a.parquet")
    (tmp_path / "config.yaml").write_text(
        f"data: {{train: {tmp_path}/train, valid: {tmp_path}/valid, test: {tmp_path}/test, label_column: label}}\n"
        "features: {u: {table: u}}\ntables: {u: {num_embeddings: 100, embedding_dim: 4}}\n"
        "model: {name: dlrm, interaction: dot_and_embeddings}\n"
    )

    def counts(*overrides: str) -> list[int]:
        datasets = open_inputs(load_config(tmp_path / "config.yaml", overrides), world).datasets
        return [datasets[role].num_rows for role in ("train", "valid", "test")]

    with open_world(Device.cpu) as world:
        assert counts("data.filter=day == 9") == [15, 15, 15]
        assert counts("data.filter={train: day == 9, test: day == 2}") == [15, 20, 5]
        for overrides in (("data.filter=day == 0",), ("data.filter=day == 9", f"data.valid={tmp_path}/late")):
            with pytest.raises(UserError) as refused:
                counts(*overrides)
            message = str(refused.value)
            assert "config key 'data.filter'" in message and "valid" in message and "data.filter={train: …}" in message
