"""A float feature of several numbers a row: what models learn of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from launch import fork_train, must_train, train_losses

NUMBERS = ["x0", "x1", "x2"]
RANKERS: dict[str, dict[str, Any]] = {
    "dlrm": {"bottom_mlp": [8], "top_mlp": [8]},
    "dcn": {"mlp": [8]},
    "mmoe": {},
    "ple": {},
    "logistic_regression": {},
    "final_mlp": {"mlp_1": [8], "mlp_2": [8]},
    "wukong": {"bottom_mlp": [8]},
}
USUAL = {"standardise": True, "nulls": "mean"}


def write_rows(folder: Path) -> None:
    """Write rows with numbers as columns of their own and as vectors, `v`; both are null at the same places."""
    dice = np.random.default_rng(3)
    users, items, numbers = dice.integers(0, 20, 400), dice.integers(0, 30, 400), dice.normal(3, 2, (400, 3))
    is_null = dice.random((400, 3)) < 0.1
    is_null[dice.random(400) < 0.1] = True
    rows = [[None if bad else x for x, bad in zip(*pair, strict=True)] for pair in zip(numbers, is_null, strict=True)]
    vectors = pa.array([None if bad.all() else row for row, bad in zip(rows, is_null, strict=True)])
    columns = {name: pa.array([row[i] for row in rows], pa.float64()) for i, name in enumerate(NUMBERS)}
    others = {"user": users, "item": items, "price": dice.random(400), "label": (numbers[:, 0] > users % 5).astype(int)}
    pq.write_table(pa.table({**others, **columns, "v": vectors}), folder / "rows.parquet", row_group_size=50)


def write_config(folder: Path, name: str, model: dict[str, Any], floats: dict[str, Any]) -> Path:
    features = {"user": {"table": "user"}, "item": {"table": "item"}, **floats}
    tables = {name: {"num_embeddings": 50, "embedding_dim": 4} for name in ("user", "item")}
    data: dict[str, Any] = {"train": f"{folder}/rows.parquet"}
    if model["name"] != "two_tower":
        data["label_column"] = "label"
    train = {"global_batch_size": 64, "epochs": 2, "log_every_steps": 1}
    config = {"data": data, "features": features, "tables": tables, "model": model, "train": train}
    (folder / f"{name}.yaml").write_text(yaml.dump(config, sort_keys=False))
    return folder / f"{name}.yaml"


def same_losses(folder: Path, model: dict[str, Any], nproc: int = 1) -> list[float]:
    """Return the losses by numbers, which those by vectors are to the last bit."""
    of_item, price = list(model.get("item_features", [])), {"price": {"type": "float"}}
    single = {name: {"type": "float", **USUAL} for name in NUMBERS}
    by_kind = {"numbers": {**price, **single}, "vectors": {"v": {"type": "float", "dim": 3, **USUAL}, **price}}
    found = []
    for kind, floats in by_kind.items():
        sides = {"item_features": [*of_item, *(NUMBERS if kind == "numbers" else ["v"])]} if of_item else {}
        config = write_config(folder, kind, {**model, **sides}, floats)
        found.append(train_losses(config, folder / kind, nproc=nproc))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    ("name", "nproc"),
    [
        pytest.param("dlrm", 2, marks=pytest.mark.slow),
        ("dcn", 1),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in RANKERS if name not in ("dlrm", "dcn")),
    ],
)
def test_a_vector_teaches_what_its_numbers_teach(name: str, nproc: int, tmp_path: Path) -> None:
    write_rows(tmp_path)
    found = same_losses(tmp_path, {"name": name, **RANKERS[name]}, nproc)
    assert found[-1] < found[0]


def test_towers_read_the_vectors_of_their_side(tmp_path: Path) -> None:
    write_rows(tmp_path)
    items = ["item"]
    model = {"name": "two_tower", "user_features": ["price", "user"], "item_features": items, "item_id": "item"}
    same_losses(tmp_path, {**model, "user_mlp": [8], "item_mlp": [8], "output_dim": 4})


def test_a_table_of_vectors_that_stays_teaches_what_they_teach(tmp_path: Path) -> None:
    write_rows(tmp_path)
    dice, rows = np.random.default_rng(4), pq.read_table(tmp_path / "rows.parquet")
    of_items = dice.normal(size=(30, 4)).astype(np.float32)
    pq.write_table(pa.table({"id": np.arange(30), "vector": list(of_items)}), tmp_path / "vectors.parquet")
    rows = rows.append_column("text", pa.array(list(of_items[rows["item"].to_numpy()])))
    pq.write_table(rows, tmp_path / "rows.parquet")
    stays = {"vocabulary": f"{tmp_path}/vectors.parquet", "optimizer": {"name": "sgd", "learning_rate": 0}}
    table = {"num_embeddings": 99, "embedding_dim": 4, "mapping": "vocabulary", **stays}
    found = []
    for name, text in (("rows", {"type": "float", "dim": 4}), ("table", {"column": "item", "table": "text"})):
        config = yaml.safe_load(write_config(tmp_path, name, {"name": "dcn", "mlp": [8]}, {"text": text}).read_text())
        if name == "table":
            config["tables"]["text"] = table
            config["train"]["init"] = {"from_parquet": {"text": f"{tmp_path}/vectors.parquet"}}
        (tmp_path / f"{name}.yaml").write_text(yaml.dump(config, sort_keys=False))
        found.append(train_losses(tmp_path / f"{name}.yaml", tmp_path / name))
    np.testing.assert_allclose(*found, rtol=1e-6)


def test_another_dimension_begins_a_layer_anew(tmp_path: Path) -> None:
    write_rows(tmp_path)
    vectors = {"v": {"type": "float", "dim": 3, **USUAL}}
    config = write_config(tmp_path, "vectors", {"name": "dcn", "mlp": [8]}, vectors)
    train_losses(config, tmp_path / "run")
    rows = pq.read_table(tmp_path / "rows.parquet")
    shorter = pa.array([None if v is None else v[:2] for v in rows["v"].to_pylist()])
    pq.write_table(rows.set_column(rows.column_names.index("v"), "v", shorter), tmp_path / "rows.parquet")
    other = "features.v.dim=2"
    start = [str(config), f"run.dir={tmp_path}/next", f"train.init_from={tmp_path}/run", other]
    done = fork_train(*start)
    assert done.returncode == 1 and "train.init.dense=matching" in done.stderr, done.stderr[-2000:]
    done = must_train(*start, "train.init.dense=matching")
    assert "kept: dense/mlp.0.weight (of shape (8, 11) there)" in done.stdout
    done = fork_train(str(config), f"run.dir={tmp_path}/run", "run.resume=true", "train.epochs=3", other)
    assert done.returncode == 1 and "features.v.dim" in done.stderr, done.stderr[-2000:]


def test_lists_of_another_length_are_told(tmp_path: Path) -> None:
    write_rows(tmp_path)
    for dim, said in ((4, "holds a list of 3 numbers, where features.v.dim=4 needs 4"), (None, "set features.v.dim=3")):
        config = write_config(tmp_path, "c", {"name": "dcn"}, {"v": {"type": "float", "dim": dim, **USUAL}})
        done = fork_train(str(config), f"run.dir={tmp_path}/run")
        assert done.returncode == 1 and said in done.stderr and "rows.parquet" in done.stderr, done.stderr[-2000:]
