"""Tables and features may be called whatever columns are called, also as attributes of what holds them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from checkpoints import load_tables
from launch import must_train

# Attributes of torch's modules and module dicts, of mappings, of OmegaConf's nodes.
TABLES = ["items", "type", "values", "keys", "pop", "update", "training", "weight", "dense", "_modules", "naïve-x"]
FLOATS = ["float", "forward"]
LIST = "copy"  # a feature of table `items`, a list of ids
WIDTHS = {name: 4 + 4 * (number % 2) for number, name in enumerate(TABLES)}
SETTINGS: dict[str, Any] = {
    "features": {name: {"table": name} for name in TABLES}
    | {LIST: {"table": "items"}}
    | {name: {"type": "float", "standardise": True} for name in FLOATS},
    "tables": {name: {"num_embeddings": 20, "embedding_dim": width} for name, width in WIDTHS.items()},
    "train": {"global_batch_size": 64, "max_steps": 4, "log_every_steps": 1, "activation_checkpointing": True},
}
SETTINGS["tables"]["keys"] |= {"mapping": "vocabulary"}
SETTINGS["tables"]["pop"] |= {"sharding_type": "row_wise"}
SETTINGS["tables"]["type"] |= {"sharding_type": "data_parallel"}
MODELS = {
    "dlrm": {"name": "dlrm", "attention": {LIST: "items", "training": "items"}, "dropout": 0.1},
    "two_tower": {
        "name": "two_tower",
        "user_features": [*TABLES[1:], *FLOATS, LIST],
        "item_features": ["items"],
        "item_id": "items",
        "top_k": [5],
    },
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with a column of each name, and a file of all items."""
    folder, random = tmp_path_factory.mktemp("names"), np.random.default_rng(5)
    columns: dict[str, Any] = {name: pa.array(random.integers(0, 12, 300)) for name in TABLES}
    columns |= {name: pa.array(random.random(300)) for name in FLOATS}
    columns |= {
        name: pa.array([random.integers(0, 12, n % 4).tolist() for n in range(300)], pa.list_(pa.int64()))
        for name in (LIST, "targets", "seen")
    }
    pq.write_table(pa.table(columns | {"clicked": pa.array(random.integers(0, 2, 300))}), folder / "rows.parquet")
    pq.write_table(pa.table({"items": pa.array(range(12))}), folder / "items.parquet")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_whole_run_on_two_ranks(model: str, data: Path, tmp_path: Path) -> None:
    rows = {role: str(data / "rows.parquet") for role in ("train", "valid")}
    own = {"label_column": "clicked"} if model == "dlrm" else {"items": str(data / "items.parquet")}
    content = SETTINGS | {"model": MODELS[model], "data": {**rows, **own, "num_streams": 4}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(content, allow_unicode=True))
    run = tmp_path / "run"
    arguments = (str(tmp_path / "config.yaml"), f"run.dir={run}", "tables.update.pooling=mean", "run.num_threads=1")
    for more in ((), ("run.resume=true", "train.max_steps=6", "train.epochs=2", "train.eval_every_steps=5")):
        must_train(*arguments, *more, nproc=2)

    result = json.loads((run / "result.json").read_text())
    assert result["steps"] == 6 and set(result["data"]["ids"]) == {*TABLES, LIST}
    assert {shard["table"] for shard in json.loads((run / "plan.json").read_text())["shards"]} == set(TABLES)
    checkpoint = run / "checkpoints" / "step-000000006"
    assert {name: value.shape[1] for name, value in load_tables(checkpoint).items()} == {
        name: table["embedding_dim"] for name, table in SETTINGS["tables"].items()
    }
    loaded = json.loads((run / "loaded.json").read_text())
    assert {f"tables/{name}" for name in TABLES} <= set(loaded["loaded"])
    reports = [json.loads((run / "memory" / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert {table["name"] for report in reports for table in report["tables"]} == set(TABLES)
    if model == "dlrm":
        assert any(name.startswith("dense/attention.training.mlp.0") for name in loaded["loaded"])
        assert not [name for name in load_tables(checkpoint, "dense/") if ":" in name]
