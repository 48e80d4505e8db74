"""A step whose loss or gradient is not finite changes nothing anywhere, is counted, and its rows are kept."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from launch import ROOT, fork_train, must_train, records_of

from recsys.config import load_config
from recsys.errors import UserError
from recsys.step.exchange import Agreement
from recsys.step.pipeline import GatedOptimizer
from recsys.step.step import DenseHalf

CONFIG = "configs/dlrm_sample.yaml"
CHECKS = [True, False]  # train.check_every_step


def poison(folder: Path, **columns: dict[int, float]) -> Path:
    """Write the sample's training rows to one file, some values of columns replaced, by row."""
    table = pq.read_table(ROOT / "data/sample/train")
    for column, rows in columns.items():
        values = table.column(column).to_pylist()
        for row, value in rows.items():
            values[row] = value
        place = table.schema.get_field_index(column)
        table = table.set_column(place, column, pa.array(values, pa.float32()))
    folder.mkdir()
    pq.write_table(table, folder / "rows.parquet")
    return folder


def train(run_dir: Path, data: Path, *overrides: str, nproc: int = 1) -> Any:
    return fork_train(
        CONFIG, f"run.dir={run_dir}", f"data.train={data}", "data.shuffle=false", "data.num_streams=2",
        "train.log_every_steps=1", "train.epochs=1", *overrides, nproc=nproc,
    )  # fmt: skip


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_poisoned_batches_are_skipped(check: bool, tmp_path: Path) -> None:
    # Of each of two streams of 1500 rows, in order, a step has 128, and each rank has one stream.
    data = poison(tmp_path / "data", price={10: math.nan, 1500 + 300: -math.inf}, label={700: math.nan})
    # Lines of single steps have them read at once: so the unchecked run has few.
    lines_of = f"train.log_every_steps={1 if check else 12}"
    options = ("train.max_bad_steps=3", f"train.check_every_step={check}", "optimizer.dense.clip_norm=1")
    done = train(tmp_path / "run", data, *options, lines_of, nproc=2)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["steps"], result["bad_steps"], result["rows_seen"]) == (12, 3, 3000 - 3 * 256)
    assert result["data"]["epochs"] == [{"expected": 3000, "seen": 3000 - 3 * 256, "bad": 0, "skipped": 3 * 256}]
    losses = {line["step"]: line["loss"] for line in records_of(tmp_path / "run")}
    norms = {line["step"]: line["gradient_norm"] for line in records_of(tmp_path / "run")}
    assert [step for step, norm in norms.items() if norm is None] == [step for step in (1, 3, 6) if check]
    if check:
        assert [step for step, loss in losses.items() if loss is None] == [1, 3, 6]
    assert len(losses) == (12 if check else 1) and all(0 < loss < 2 for loss in losses.values() if loss is not None)
    expected = {"step-000000001-rank-0.pt": "floats", "step-000000003-rank-1.pt": "floats"}
    expected["step-000000006-rank-0.pt"] = "labels"
    kept = {path.name: path for path in (tmp_path / "run/bad_steps").iterdir()}
    assert kept.keys() == expected.keys()
    for name, values in expected.items():
        rank = kept[name].stem[-1]
        assert str(kept[name]) in (tmp_path / f"run/logs/rank_{rank}.log").read_text()
        batch = torch.load(kept[name], weights_only=True)
        assert (~batch[values].isfinite()).sum() == 1 and len(batch["ids"]["user_id"]["lengths"]) == 128


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_it_changes_no_byte(check: bool, tmp_path: Path) -> None:
    """A run that only meets bad steps saves the tables, weights and optimizers that it began with."""
    data = poison(tmp_path / "data", price=dict.fromkeys(range(3000), math.nan))
    for name, steps in (("one", 1), ("twelve", 12)):
        options = (f"train.max_steps={steps}", "train.max_bad_steps=12", "optimizer.dense.weight_decay=0.1",
                   f"train.check_every_step={check}")  # fmt: skip
        done = train(tmp_path / name, data, *options, nproc=2)
        assert done.returncode == 0, done.stderr[-3000:]
    saved = [load_tables(tmp_path / f"{name}/checkpoints/step-{n:09d}", "") for name, n in (("one", 1), ("twelve", 12))]
    assert any(key.startswith("table_optimizer/") for key in saved[0])
    assert saved[0].keys() == saved[1].keys() and len(saved[0]) > 10
    for key, value in saved[0].items():
        if key.startswith("rng/"):
            continue
        assert torch.equal(value, saved[1][key]), key
        if "optimizer" in key and value.numel():
            assert not value.any(), key


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    ("tables", "dense"),
    [
        ("rowwise_adagrad", "adam"),
        ("adagrad", "adamw"),
        ("sgd", "sgd"),
        ("rowwise_adagrad", "sgd, momentum: 0.9"),
        ("adagrad", "adagrad"),
    ],
)
def test_training_goes_on_as_if_the_step_had_not_been(tables: str, dense: str, check: bool, tmp_path: Path) -> None:
    """What follows a bad first step is what the rows after it learn alone."""
    data = poison(tmp_path / "data", price={10: math.nan})
    options = ("data.num_streams=1", f"optimizer.tables.name={tables}", "tables.hour.sharding_type=data_parallel",
               f"optimizer.dense={{clip_norm: 1, name: {dense}}}")  # fmt: skip
    unchecked = ("train.log_every_steps=100", f"train.check_every_step={check}")
    done = train(tmp_path / "run", data, "train.max_bad_steps=1", *options, *unchecked)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = pq.read_table(data)
    (tmp_path / "rest").mkdir()
    pq.write_table(rows.slice(256), tmp_path / "rest/rows.parquet")
    done = train(tmp_path / "alone", tmp_path / "rest", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    one = load_tables(tmp_path / "run/checkpoints/step-000000012")
    other = load_tables(tmp_path / "alone/checkpoints/step-000000011")
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_quota_ends_the_run(check: bool, tmp_path: Path) -> None:
    data = poison(tmp_path / "data", price={10: math.nan, 2000: math.nan, 2900: math.inf})
    options = (f"train.check_every_step={check}", f"train.log_every_steps={1 if check else 100}")
    done = train(tmp_path / "run", data, "train.max_bad_steps=2", "data.num_streams=1", *options, nproc=2)
    assert done.returncode == 1
    assert "config key 'train.max_bad_steps' allows 2 such steps" in done.stderr and "Traceback" not in done.stderr
    done = train(tmp_path / "strict", data)
    assert done.returncode == 1 and "column 'price'" in done.stderr and "holds nan" in done.stderr


@pytest.mark.parametrize("skipped", [True, False])
def test_whoever_calls_the_optimizer_is_stopped(skipped: bool) -> None:
    """As torchrec 1.6 does, whose pipeline asks nobody."""
    weight = torch.nn.Parameter(torch.ones(1))
    half = SimpleNamespace(skipped=skipped, shards=None, is_bad=None)
    optimizer = GatedOptimizer(torch.optim.SGD([weight], lr=1.0), half)
    weight.grad = torch.full((1,), math.nan)
    optimizer.step()
    assert weight.isnan().item() != skipped


@pytest.mark.parametrize(("skipped", "is_bad"), [(True, None), (False, True), (False, False), (False, None)])
def test_a_step_that_is_left_out_has_no_norm(skipped: bool, is_bad: bool | None) -> None:
    """Its gradient may be finite, and that of the step before is not its own."""
    bad = None if is_bad is None else torch.tensor(is_bad)
    half = SimpleNamespace(skipped=skipped, is_bad=bad, _norm=torch.tensor(2.5))
    norm = DenseHalf.gradient_norm(half)
    assert math.isnan(norm) if skipped or is_bad else norm == 2.5


@pytest.mark.slow
def test_steps_read_later_train_the_same(tmp_path: Path) -> None:
    """Bit by bit, with evaluations, saves and lines of the log in between."""
    options = ("train.log_every_steps=7", "train.eval_every_steps=5", "train.checkpoint_every_steps=4",
               "optimizer.dense.clip_norm=0.1", "train.micro_batch_size=32", "train.dense_sharding=optimizer",
               "tables.hour.sharding_type=data_parallel", "tables.user.l2=0.1", "train.max_steps=23")  # fmt: skip
    found = []
    for check in CHECKS:
        run_dir = tmp_path / str(check)
        must_train(CONFIG, f"run.dir={run_dir}", f"train.check_every_step={check}", *options, nproc=2)
        lines = records_of(run_dir, kind=None)
        found.append([[line.get(name) for name in ("step", "loss", "auc", "gradient_norm")] for line in lines])
    assert found[0] == found[1] and len(found[0]) > 8
    one, other = (load_tables(tmp_path / f"{check}/checkpoints/step-000000023") for check in CHECKS)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("precision.autocast=fp16", "precision.autocast=fp16"),
        ("optimizer.dense.name=adafactor", "optimizer.dense.name=adafactor"),
        ("optimizer.tables.name=adam", "optimizer.tables.name=adam"),
        ("tables.user={sparsity: {l1: 0.1}, optimizer: {name: sgd}}", "tables.user.sparsity"),
        ("train.publish={dir: x, every_steps: 5}", "train.publish.dir"),
    ],
)
def test_what_would_change_with_a_bad_step_is_refused(option: str, named: str) -> None:
    with pytest.raises(UserError, match=f"'train.check_every_step' must be true with {named}"):
        load_config(CONFIG, ["train.check_every_step=false", option])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3.4e38])
def test_gradients_of_the_dense_part_are_looked_at_and_left_as_they_are(value: float) -> None:
    """Of all ranks, after their exchange, in which sums may overflow though each is finite."""
    torch.manual_seed(0)
    gradients = [torch.randn(3, 5), torch.randn(7), torch.randn(2)]
    gradients[1][4] = value
    before = [each.clone() for each in gradients]
    totals = torch.tensor([2.5, 4.0, 0.0, 0.0, 0.0, 4.0, 0.0, 0.0])
    agreement = Agreement(totals, gradients)
    is_bad = not math.isfinite(value)
    assert agreement.wait().num_bad == is_bad and bool(agreement.is_bad()) == is_bad
    assert all(torch.equal(*each) or is_bad for each in zip(gradients, before, strict=True))
    assert agreement.wait().weight == 4 and agreement.wait().num_rows == 4
    nothing = Agreement(totals, [])
    assert nothing.wait().num_bad == 0 and not nothing.is_bad()
