"""Weights of rows: what is learned depends on their proportions alone, and is the same on one process and on two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from launch import ROOT, fork_train, losses_of

TABLES = [
    f"tables.{name}.{key}"
    for name in ("user", "item", "category", "device", "hour")
    for key in ("data_type=FP32", "sharding_type=table_wise")
]
OPTIONS = (
    "data.label_column=null",
    "data.valid=null",
    "data.test=null",
    "train.max_steps=6",
    "train.log_every_steps=1",
)


def write(path: Path, scale: float, label_scale: float = 1.0) -> Path:
    """Write the sample's training rows with weights from 1/4 to 2 times `scale`, and the labels times a number."""
    rows = pq.read_table(ROOT / "data/sample/train")
    weights = np.random.default_rng(0).uniform(0.25, 2, rows.num_rows).astype(np.float32) * np.float32(scale)
    rows = rows.append_column("row_weight", pa.array(weights))
    labels = rows.column("label").to_numpy().astype(np.float32) * label_scale
    path.mkdir()
    pq.write_table(rows.append_column("value", pa.array(labels)), path / "rows.parquet")
    return path


def train(run_dir: Path, data: Path, *overrides: str, loss: str = "binary", nproc: int = 1) -> Any:
    return fork_train(
        "configs/dlrm_sample.yaml", f"run.dir={run_dir}", f"data.train={data}", "data.weight_column=row_weight",
        *OPTIONS, f"data.labels={{value: {{loss: {loss}}}}}", *TABLES, "run.num_threads=1", *overrides, nproc=nproc,
    )  # fmt: skip


def learned(run_dir: Path, *arguments: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the steps, and what the last checkpoint holds of tables and dense part."""
    done = train(run_dir, *arguments, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {name: value for name, value in load_tables(run_dir, "").items() if name.startswith(("tables/", "dense/"))}
    return losses_of(run_dir), found


@pytest.mark.parametrize(
    ("nproc", "narrow"),
    [pytest.param(1, "precision.output_dtype=FP16", marks=pytest.mark.slow), (2, "precision.backward_wire=FP16")],
    ids=str,
)
def test_small_weights_teach_what_large_ones_do(nproc: int, narrow: str, tmp_path: Path) -> None:
    """Gradients that travel in FP16 have the weights in them, and those of 2**-20 would be 0 there."""
    runs = [
        learned(tmp_path / f"run-{power}", write(tmp_path / f"data-{power}", 2.0**power), narrow, nproc=nproc)
        for power in (0, -20)
    ]
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a run starts from, on any number of ranks: the one step that it takes changes nothing."""
    folder = tmp_path_factory.mktemp("untrained")
    still = ("optimizer.tables={name: sgd, learning_rate: 0}", "optimizer.dense={name: sgd, learning_rate: 0}")
    return learned(folder / "run", write(folder / "data", 1.0), *still, "train.max_steps=1")[1]


@pytest.mark.parametrize("narrow", ["output_dtype=FP16", pytest.param("backward_wire=FP16", marks=pytest.mark.slow)])
def test_each_row_many_times_teaches_what_it_teaches_once(
    narrow: str, untrained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Gradients of a mean over 32,768 rows are about 1e-7, and in FP16 many of them would be 0."""
    rows = pq.read_table(write(tmp_path / "all", 1.0)).slice(0, 64)
    runs = []
    for times in (1, 512):
        data = tmp_path / f"{times}.parquet"
        pq.write_table(pa.concat_tables([rows] * times), data)
        options = ("optimizer.tables={name: sgd, learning_rate: 20}", f"train.global_batch_size={64 * times}")
        runs.append(
            learned(tmp_path / f"run-{times}", data, *options, "train.epochs=2", f"precision.{narrow}", nproc=2)[1]
        )
    once, often = runs
    tables = [name for name in once if "tables/" in name]
    assert tables
    for name in tables:
        assert (often[name] - once[name]).norm() < 0.003 * (once[name] - untrained[name]).norm(), name


@pytest.mark.slow
def test_weights_teach_one_process_what_they_teach_two(tmp_path: Path) -> None:
    data = write(tmp_path / "data", 1.0)
    one, two = (learned(tmp_path / f"run-{nproc}", data, nproc=nproc)[1] for nproc in (1, 2))
    assert [name for name, value in one.items() if not torch.equal(value, two[name])] == []


@pytest.mark.parametrize(("nproc", "narrow"), [(1, "output_dtype=FP16"), (2, "backward_wire=FP16")], ids=str)
def test_a_gradient_beyond_fp16_changes_nothing(
    nproc: int, narrow: str, untrained: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    data = write(tmp_path / "data", 1.0, label_scale=1e9)
    options = ("train.max_bad_steps=6", f"precision.{narrow}")
    after = learned(tmp_path / "six", data, *options, loss="squared", nproc=nproc)[1]
    result = json.loads((tmp_path / "six/result.json").read_text())
    assert result["bad_steps"] == 6
    assert untrained.keys() <= after.keys()
    assert [name for name, value in untrained.items() if not torch.equal(value, after[name])] == []


def test_bf16_is_sent_as_such(tmp_path: Path) -> None:
    """Over gloo too: it holds gradients that FP16 has no number for."""
    data = write(tmp_path / "data", 1.0, label_scale=1e9)
    learned(
        tmp_path / "run", data, "precision.forward_wire=BF16", "precision.backward_wire=BF16", loss="squared", nproc=2
    )
    assert json.loads((tmp_path / "run/result.json").read_text())["bad_steps"] == 0


@pytest.mark.parametrize(
    "option",
    [
        "train.check_every_step=true",
        pytest.param("train.check_every_step=false", marks=pytest.mark.slow),
        "precision.autocast=fp16",
    ],
)
def test_weights_too_small_to_divide_by_are_named(option: str, tmp_path: Path) -> None:
    """At once in FP16 too: no loss scale mends them."""
    data = write(tmp_path / "data", 2.0**-130)
    done = train(tmp_path / "run", data, option)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "step 1: the weights of its rows, of data.weight_column, add up to " in done.stderr
    assert "multiply all weights by a number" in done.stderr and not list((tmp_path / "run/checkpoints").glob("step-*"))
