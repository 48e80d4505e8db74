"""Training on quantised vectors: the model reads codes, of lists before they are summed; the weights stay unrounded."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from launch import evaluate, fork_train, train_losses

from recsys.config.choices import RowCode
from recsys.tables.row_codes import quantize_rows

CODES = {"item": RowCode.INT2, "user": RowCode.INT4, "category": RowCode.INT8}  # item: of a list, averaged
SETTINGS = (
    "tables.category.embedding_dim=4",  # other than the rest
    "optimizer.tables={name: sgd, learning_rate: 10}",
    "tables.item.data_type=FP32",
    *("train.log_every_steps=1", "data.window_mib=1", "data.valid=null"),
)
QUANTIZED = tuple(f"tables.{table}.quantize={code.name}" for table, code in CODES.items())


def train(run_dir: Path, *overrides: str, nproc: int = 1) -> list[float]:
    """Train and return the loss of each step."""
    return train_losses("configs/dlrm_sample.yaml", run_dir, *SETTINGS, *overrides, nproc=nproc)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    folder = tmp_path_factory.mktemp("quantized")
    return folder, train(folder, "train.max_steps=20", *QUANTIZED)


@pytest.mark.slow
def test_the_model_reads_codes_and_gradients_pass_through(tmp_path: Path) -> None:
    # The same step from weights that were quantised before: what is read is the same, and so is what is learned.
    frozen = ("train.max_steps=1", "optimizer.tables.learning_rate=0")
    train(tmp_path / "initial", *frozen)
    initial = load_tables(tmp_path / "initial")
    given = []
    for table, code in CODES.items():
        rounded = quantize_rows(initial[table], code)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(rounded.reshape(-1).numpy()), rounded.shape[1])
        pq.write_table(pa.table({"row": range(len(rounded)), "vector": vectors}), tmp_path / f"{table}.parquet")
        given.append(f"train.init.from_parquet.{table}={tmp_path}/{table}.parquet")
    plain = train(tmp_path / "plain", "train.max_steps=1", *given)
    losses = train(tmp_path / "coded", "train.max_steps=1", *QUANTIZED)
    torch.testing.assert_close(losses, plain, rtol=0, atol=1e-6)
    assert abs(losses[0] - train(tmp_path / "other", *frozen)[0]) > 1e-5, "the codes make a difference"
    after, of_rounded = load_tables(tmp_path / "coded"), load_tables(tmp_path / "plain")
    for table, code in CODES.items():
        step = of_rounded[table] - quantize_rows(initial[table], code)
        assert step.abs().max() > 1e-4
        torch.testing.assert_close(after[table] - initial[table], step, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
def test_the_plan_does_not_matter(kind: str, run: tuple[Path, list[float]], tmp_path: Path) -> None:
    split = [f"tables.{table}.sharding_type={kind}" for table in CODES]
    losses = train(tmp_path, "train.max_steps=20", *QUANTIZED, *split, nproc=2)
    torch.testing.assert_close(losses, run[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(evaluate(tmp_path), evaluate(run[0]), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_resumed_equals_uninterrupted(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    train(tmp_path, "train.max_steps=12", *QUANTIZED, "train.micro_batch_size=50")
    assert train(tmp_path, "train.max_steps=20", *QUANTIZED, "run.resume=true") == pytest.approx(run[1], abs=1e-5)
    done: Any = fork_train("configs/dlrm_sample.yaml", f"run.dir={tmp_path}", *SETTINGS, "run.resume=true")
    assert done.returncode == 1 and "'tables.category.quantize' is null, and was INT8" in done.stderr


@pytest.mark.slow
def test_a_run_of_whole_weights_begins_one_on_codes(run: tuple[Path, list[float]], tmp_path: Path) -> None:
    train(tmp_path / "whole", "train.max_steps=5")
    coded = train(tmp_path / "coded", "train.max_steps=5", *QUANTIZED, f"train.init_from={tmp_path}/whole")
    assert len(coded) == 5 and coded[0] < run[1][0]
