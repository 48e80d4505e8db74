"""Random configs learn the same on any number of ranks, and go on from any checkpoint as if they had never stopped."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from launch import fork_train
from random_export import write_random, write_random_towers

from recsys.config import load_config
from recsys.errors import UserError

TABLE_OPTIMIZERS = ["rowwise_adagrad", "adagrad", "sgd", "adam", "ftrl"]  # on CPUs
RANKERS_WITH_DROPOUT = ("dlrm", "deepfm", "dcn", "final_mlp", "mmoe", "ple")


def add_columns(folder: Path, dice: random.Random) -> None:
    """Give the data a weight and a column to filter by, in one file or two, and row groups of any size."""
    generator = np.random.default_rng(dice.randrange(2**32))
    for part in ("train", "test"):
        rows = pq.read_table(folder / f"{part}.parquet")
        (folder / f"{part}.parquet").unlink()
        numbers = generator.random(len(rows))
        rows = rows.append_column("extra", pa.array(numbers, mask=generator.random(len(rows)) < 0.1))
        rows = rows.append_column("row_weight", pa.array(generator.choice([0, 0.5, 1, 3], len(rows))))
        (folder / part).mkdir()
        cut = dice.choice([0, dice.randrange(1, len(rows))])
        for name, some in (("a", rows.slice(0, cut)), ("b", rows.slice(cut))):
            pq.write_table(some, folder / part / f"{name}.parquet", row_group_size=dice.choice([11, 71, 1000]))


def table_optimizer(dice: random.Random) -> dict[str, Any]:
    return {"name": dice.choice(TABLE_OPTIMIZERS), "learning_rate": dice.choice([0.01, 0.1]), "eps": 1e-4}


def draw_tables(tables: dict[str, dict[str, Any]], dice: random.Random) -> None:
    for table in tables.values():
        kinds = ["auto", "auto", "data_parallel", "table_wise", "row_wise", "column_wise"]
        table["sharding_type"] = dice.choice(kinds)
        table |= {"optimizer": table_optimizer(dice)} if dice.random() < 0.4 else {}
        table |= {"l2": 0.01} if dice.random() < 0.3 else {}
        is_held_by_all = table["sharding_type"] in ("auto", "data_parallel")
        table |= {"l2_all_rows": 0.001} if is_held_by_all and dice.random() < 0.15 else {}


def draw_model(model: dict[str, Any], dice: random.Random) -> None:
    if model["name"] == "two_tower":
        model["loss"] = dice.choice(["softmax", "bpr"])
        some = {"sampled_negatives": 10, "sampling_power": 0.5, "logq_correction": False, "dropout": 0.2}
    else:
        some = {"dropout": 0.2} if model["name"] in RANKERS_WITH_DROPOUT else {}
    model |= {key: value for key, value in some.items() if dice.random() < 0.3}


def draw_training(folder: Path, config: dict[str, Any], dice: random.Random) -> None:
    """Set how a config reads its data and trains."""
    data, train, is_ranker = config["data"], config["train"], config["model"]["name"] != "two_tower"
    data |= {
        "train": f"{folder}/train",
        "num_streams": dice.choice([1, 2, 3, 5, 8, 12]),
        "shuffle": dice.random() < 0.7,
    }
    extra = {"filter": {"train": "extra > 0.3"}, "weight_column": "row_weight", "drop_last": True}
    extra |= {"num_threads": dice.choice([0, 1, 3]), "prefetch_batches": dice.choice([0, 1, 5])}
    extra |= {"keep_negatives": 0.5} if is_ranker and "label_column" in data else {}
    data |= {key: value for key, value in extra.items() if dice.random() < 0.3}
    train |= {"global_batch_size": dice.choice([13, 30, 31, 64, 100]), "epochs": dice.choice([1, 2, 3])}
    train |= {"log_every_steps": 1, "checkpoint_every_steps": dice.choice([1, 2, 3]), "keep_checkpoints": 1000}
    extra = {"micro_batch_size": dice.choice([1, 8, 50]), "eval_batch_size": dice.choice([13, 100, 1000])}
    extra |= {"activation_checkpointing": True, "check_every_step": False, "async_checkpoints": True}
    extra |= {"dense_sharding": "optimizer"}
    train |= {key: value for key, value in extra.items() if dice.random() < 0.3}
    if is_ranker:
        data["test"] = f"{folder}/test"
        if dice.random() < 0.5:
            data["valid"], train["eval_every_steps"] = data["test"], dice.choice([2, 3])
    dense = {"name": dice.choice(["adam", "adamw", "adagrad", "sgd"]), "learning_rate": 0.01}
    dense |= {"clip_norm": dice.choice([0.01, 0.5])} if dice.random() < 0.4 else {}
    schedule = {"name": dice.choice(["linear", "cosine", "constant"]), "warmup_steps": dice.choice([0, 3])}
    config["optimizer"] = {"tables": table_optimizer(dice), "dense": dense, "schedule": schedule}
    config["seed"] = dice.randrange(10**6)


def write(folder: Path, seed: int, dice: random.Random) -> Path:
    """Write data and a config that loads; return the config."""
    path = (write_random_towers if dice.random() < 0.3 else write_random)(folder, seed)
    add_columns(folder, dice)
    text = path.read_text()
    for _ in range(100):
        config = yaml.safe_load(text)
        draw_tables(config["tables"], dice)
        draw_model(config["model"], dice)
        draw_training(folder, config, dice)
        path.write_text(yaml.dump(config, allow_unicode=True))
        try:
            load_config(path)
        except UserError:  # what does not go together
            continue
        return path
    raise AssertionError("none of a hundred configs loads")


def train(config: Path, run: Path, nproc: int, *options: str) -> tuple[dict[int, float], dict[str, Any]]:
    """Return the loss of each step, and the metrics of data.test."""
    always = (f"run.dir={run}", "run.num_threads=1", "run.device=cpu")
    done = fork_train(str(config), *always, *options, nproc=nproc, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    return losses, json.loads((run / "result.json").read_text())["metrics"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_any_ranks_and_any_stop(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    config = write(tmp_path, seed, dice)
    alone = train(config, tmp_path / "alone", 1)
    nproc = dice.choice([2, 3, 4])
    several = train(config, tmp_path / "several", nproc)
    assert several[0] == pytest.approx(alone[0], rel=1e-3, abs=1e-3)
    run, ranks, found = dice.choice([("alone", 1, alone), ("several", nproc, several)])
    saved = sorted((tmp_path / run / "checkpoints").iterdir())
    for checkpoint in saved[dice.randrange(1, len(saved)) if len(saved) > 1 else 1 :]:
        shutil.rmtree(checkpoint)
    (tmp_path / run / "result.json").unlink()
    assert train(config, tmp_path / run, ranks, "run.resume=true") == found
