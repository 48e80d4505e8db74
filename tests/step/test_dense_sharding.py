"""A dense part of which each rank trains a slice learns, saves and restores the same, to the last bit."""

import json
import math
import random
import shutil
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kills
import pytest
import torch
from checkpoints import load_tables
from launch import fork_train, losses_of, run_train

from recsys.checkpoint import Marker
from recsys.config import OptimizerConfig, load_config
from recsys.config.choices import ELEMENTWISE, DenseOptimizer
from recsys.config.device import check_device
from recsys.errors import UserError
from recsys.step.dense_shards import DenseShards, Layout
from recsys.step.optim import build_dense_optimizer

CONFIG = "configs/dlrm_sample.yaml"
SHARED = "train.dense_sharding=optimizer"
FORMS = ("none", "optimizer")
OPTIONS = (
    "data.window_mib=1", "data.valid=null", "data.test=null", "train.log_every_steps=1", "model.dropout=0.1",
    "model.top_mlp=[48,40]", "run.num_threads=1",
)  # fmt: skip
ALL_AT_ONCE = (
    "train.micro_batch_size=40", "optimizer.dense.clip_norm=0.05", "optimizer.schedule.name=cosine",
    "optimizer.schedule.warmup_steps=3", "precision.autocast=fp16", "precision.loss_scale=16777216",
    "optimizer.dense.weight_decay=0.01",
)  # fmt: skip
SETTINGS = {each.name: f"optimizer.dense.name={each.name}" for each in ELEMENTWISE}
SETTINGS["momentum"] = "optimizer.dense={name: sgd, momentum: 0.9}"


def train(run_dir: Path, *options: str, nproc: int, before: Any = None) -> Any:
    done = fork_train(CONFIG, f"run.dir={run_dir}", *OPTIONS, *options, nproc=nproc, before=before)
    assert done.returncode == 0 or before, done.stderr[-3000:]
    return done


def tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    found = load_tables(run_dir, "")
    return {name: value for name, value in found.items() if not name.startswith(("rng/", "ids/"))}


def assert_same(run_dir: Path, other: Path) -> None:
    found, expected = tensors(run_dir), tensors(other)
    assert found.keys() == expected.keys() and any(name.startswith("dense/") for name in found)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    assert losses_of(run_dir) == losses_of(other) and len(set(losses_of(other))) > 3


def test_cuts_lie_between_rows_and_take_whole_registers() -> None:
    shapes = [torch.Size(each) for each in ((64, 16), (64,), (10, 3), ())]
    layout = Layout.of(shapes, 2)
    assert layout.starts == (0, 1024, 1152, 1280, 1408)  # multiples of 128
    assert layout.cuts == ((0, 0), (0, 44), (4, 0))  # row 44 begins at 704, the middle
    assert layout.slices(0) == [(0, 0, 44)]
    assert layout.slices(1) == [(0, 44, 64), (1, 0, 64), (2, 0, 10), (3, 0, 1)]
    assert layout.sizes() == [704, 704]
    # 16 rows of 3 are as many whole registers, and there are but 10: they are not cut.
    assert Layout.of(shapes[2:3], 2).slices(0) in ([], [(0, 0, 10)])


def test_any_layout_has_every_row_once() -> None:
    draw = random.Random(0)
    for _ in range(300):
        shapes = [
            torch.Size(draw.choices((1, 2, 3, 16, 33, 64, 479), k=draw.randrange(4)))
            for _ in range(draw.randrange(1, 9))
        ]
        num_ranks = draw.randrange(1, 9)
        layout = Layout.of(shapes, num_ranks)
        rows: dict[int, list[int]] = {number: [] for number in range(len(shapes))}
        for rank in range(num_ranks):
            for number, first, stop in layout.slices(rank):
                rows[number] += range(first, stop)
                width = shapes[number][1:].numel()
                assert first * width % 16 == 0
        assert rows == {number: list(range(shape[0] if shape else 1)) for number, shape in enumerate(shapes)}
        assert sum(layout.sizes()) == layout.starts[-1] and min(layout.sizes()) >= 0


def test_parameters_keep_their_numbers_and_must_be_fp32() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 40), torch.nn.Linear(40, 5))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    shards = DenseShards(model, 1, 3)
    assert all(map(torch.equal, before, model.parameters()))
    assert len({parameter.untyped_storage().data_ptr() for parameter in (*model.parameters(), *shards.slices)}) == 1
    for own, (whole, first) in shards.slices.items():
        assert torch.equal(own, whole[first : first + len(own)])
    with pytest.raises(UserError, match=r"must be torch.float32, found torch.float64; set it to none"):
        DenseShards(model.double(), 0, 2)


def test_a_model_may_have_no_parameters() -> None:
    for rank in range(2):
        shards = DenseShards(torch.nn.ReLU(), rank, 2)
        shards.step(build_dense_optimizer(shards.slices, OptimizerConfig()))
        assert not shards.slices


def test_what_takes_norms_of_parameters_is_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"'train.dense_sharding' must be one of none, optimizer, found 'full'"):
        load_config(CONFIG, ["train.dense_sharding=full"])
    for optimizer in DenseOptimizer:
        config = load_config(CONFIG, [SHARED, f"optimizer.dense.name={optimizer.name}"])
        if optimizer in ELEMENTWISE:
            assert not check_device(config, on_gpu=False, world_size=2)
            assert check_device(config, on_gpu=True, world_size=1) == [f"{SHARED} changes nothing on one rank"]
            continue
        with pytest.raises(
            UserError, match=rf"'train.dense_sharding': {optimizer.name} needs the norms .*=adam or adamw"
        ):
            check_device(config, on_gpu=False, world_size=2)


@pytest.mark.parametrize(
    "name, nproc",
    [
        pytest.param(*case, marks=[] if case == ("adam", 2) else [pytest.mark.slow])
        for case in product(SETTINGS, (2, 3, 4))
    ],
)
def test_the_same_is_learned_to_the_last_bit(name: str, nproc: int, tmp_path: Path) -> None:
    """With micro-batches, clipping, a schedule, and steps that overflow FP16 and are skipped."""
    for form in FORMS:
        train(
            tmp_path / form,
            SETTINGS[name],
            *ALL_AT_ONCE,
            "train.max_steps=16",
            f"train.dense_sharding={form}",
            nproc=nproc,
        )
    assert_same(tmp_path / "optimizer", tmp_path / "none")
    skipped = json.loads((tmp_path / "optimizer/result.json").read_text())["state"]["overflows"]
    assert skipped > 0
    # Written once: as many bytes as by ranks that hold all of it.
    sizes = [sum(file.stat().st_size for file in (tmp_path / form).glob("checkpoints/step-*/*.bin")) for form in FORMS]
    assert sizes[0] == sizes[1]
    report = json.loads((tmp_path / f"optimizer/memory/rank_{nproc - 1}.json").read_text())
    assert {line["error"] for line in report["lines"] if line["measured_bytes"]} == {0.0}


@pytest.mark.slow
def test_from_torchrun_and_a_wide_model(tmp_path: Path) -> None:
    """As a user starts it; matrices of which every rank has a part."""
    wide = ("model.top_mlp=[500,300]", "train.max_steps=8")
    for form in FORMS:
        settings = (*OPTIONS, *wide, f"run.dir={tmp_path / form}", f"train.dense_sharding={form}")
        done = run_train(CONFIG, *settings, nproc=3)
        assert done.returncode == 0, done.stderr[-3000:]
    assert_same(tmp_path / "optimizer", tmp_path / "none")
    state = [
        json.loads((tmp_path / f"optimizer/memory/rank_{rank}.json").read_text())["dense"]["measured"][
            "optimizer_bytes"
        ]
        for rank in range(3)
    ]
    assert max(state) < 1.05 * min(state)


@cache
def scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def saved(form: str, nproc: int) -> Path:
    """A run of four steps."""
    run_dir = Path(scratch().name) / f"{form}-{nproc}"
    train(run_dir, "train.max_steps=4", f"train.dense_sharding={form}", nproc=nproc)
    return run_dir


@cache
def gone_on(saved_by: tuple[str, int], form: str, nproc: int) -> Path:
    """The same, gone on with for four more."""
    run_dir = Path(scratch().name) / f"{saved_by}-{form}-{nproc}"
    shutil.copytree(saved(*saved_by), run_dir)
    options = ("run.resume=true", "train.max_steps=8", "train.keep_checkpoints=1", f"train.dense_sharding={form}")
    train(run_dir, *options, nproc=nproc)
    return run_dir


# One rank shares nothing, and the plain form's own is what the others are compared with.
RANKS = [("none", 1), *product(FORMS, (2, 3))]
PAIRS = [(*saved, *loaded) for saved, loaded in product(RANKS, RANKS) if "optimizer" in (saved[0], loaded[0])]


@pytest.mark.slow
@pytest.mark.parametrize("form, nproc, other, other_nproc", PAIRS)
def test_saved_in_one_form_loaded_in_another(form: str, nproc: int, other: str, other_nproc: int) -> None:
    """What goes on is what the plain form goes on with, from the plain form's checkpoint."""
    assert_same(saved(form, nproc), saved("none", nproc))
    assert_same(gone_on((form, nproc), other, other_nproc), gone_on(("none", nproc), "none", other_nproc))


def test_each_rank_writes_and_reads_its_rows() -> None:
    run_dir = saved("optimizer", 3)
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    entries = Marker.read(checkpoint).tensors
    files = {place.file for name, entry in entries.items() if "/exp_avg" in name for place in entry.places}
    assert files == {f"rank_{rank}.bin" for rank in range(3)}
    cut = [name for name, entry in entries.items() if name.startswith("dense_optimizer/") and len(entry.places) > 1]
    assert cut and all("exp_avg" in name for name in cut)


@pytest.mark.slow
def test_ten_kills(tmp_path: Path) -> None:
    """A shared run that is killed ten times is the plain run that never was."""
    options = ("train.checkpoint_every_steps=2", "train.keep_checkpoints=1", "train.epochs=4", "run.resume=true")
    train(tmp_path / "plain", *options, nproc=2)
    points = [*kills.POINTS, *kills.POINTS[:3]]
    for number, point in enumerate(points):
        rank = 0 if point in kills.ON_RANK_ZERO else number % 2
        calls = {"step": 5, "shard": 60, "pruning": 2}.get(point, 2)
        kill = partial(kills.kill_at, point, (rank,), calls)
        done = train(tmp_path / "run", *options, SHARED, nproc=2, before=kill)
        assert done.returncode != 0 and not (tmp_path / "run/result.json").exists(), (number, point)
    train(tmp_path / "run", *options, SHARED, nproc=2)
    assert_same(tmp_path / "run", tmp_path / "plain")
    assert math.isfinite(losses_of(tmp_path / "run")[-1])
