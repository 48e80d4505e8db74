"""The run directory, its records and what a checkpoint brings back."""

import json
from pathlib import Path

import pytest
import torch
from launch import ROOT, run_recsys

from recsys.checkpoint import Checkpoints, Marker, Tensors, TrainState, find_checkpoint, load_tensors
from recsys.config import Config, Device, OptimizerConfig, load_config
from recsys.config.schema import DenseOptimizer, DenseOptimizerConfig
from recsys.data.inputs import open_inputs
from recsys.data.order import Position
from recsys.errors import UserError
from recsys.memory.dry_run import dry_run
from recsys.models.base import checkpoint_mlps
from recsys.report.writers import JsonLines
from recsys.runtime.logs import to_json
from recsys.runtime.run_lock import RunLock
from recsys.runtime.world import open_world
from recsys.step.optim import build_dense_optimizer
from recsys.training.build import build_model
from recsys.training.evaluation import EvaluationStopped, evaluate_dataset
from recsys.training.run_dir import prepare_run_dir

SAMPLE = ROOT / "configs" / "dlrm_sample.yaml"


def prepare(config: Config) -> Path:
    with RunLock() as lock:
        return prepare_run_dir(config, lock)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    (tmp_path / "logs").mkdir()
    for option in ("run.overwrite=true", "run.resume=true", "run.overwrite=false"):
        with pytest.raises(UserError, match="is not empty and holds no run"):
            prepare(load_config(SAMPLE, [f"run.dir={tmp_path}", option]))
    assert (tmp_path / "config.yaml").read_text() == "mine" and (tmp_path / "logs").exists()


def test_a_run_begins_where_a_dry_run_has_written(tmp_path: Path) -> None:
    config = load_config(SAMPLE, [f"run.dir={tmp_path}"])
    assert dry_run(config) == 0
    (tmp_path / "memory" / "mine.md").touch()
    with pytest.raises(UserError, match="is not empty and holds no run"):
        prepare(config)
    (tmp_path / "memory" / "mine.md").unlink()
    assert prepare(config) == tmp_path and (tmp_path / "memory" / "dry_run.json").exists()


def test_a_copy_without_hidden_files_goes_on_and_is_not_replaced(tmp_path: Path) -> None:
    run_dir = prepare(load_config(SAMPLE, [f"run.dir={tmp_path / 'run'}"]))
    checkpoint = run_dir / "checkpoints" / "step-000000001"
    checkpoint.mkdir()
    (run_dir / ".recsys-run").unlink()
    for option in ("run.overwrite=true", "run.resume=true"):  # a folder of that name may be anybody's
        with pytest.raises(UserError, match="is not empty and holds no run"):
            prepare(load_config(SAMPLE, [f"run.dir={run_dir}", option]))
    (checkpoint / "checkpoint.json").touch()
    with pytest.raises(UserError, match="is not empty and holds no run"):
        prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.overwrite=true"]))
    assert prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.resume=true"])) == run_dir
    assert (checkpoint / "checkpoint.json").exists()


def test_an_earlier_run_is_kept_unless_told(tmp_path: Path) -> None:
    run_dir = prepare(load_config(SAMPLE, [f"run.dir={tmp_path / 'run'}"]))
    (run_dir / "checkpoints" / "step-000000001").mkdir()
    with pytest.raises(UserError, match=r"holds an earlier run; add run\.resume=true"):
        prepare(load_config(SAMPLE, [f"run.dir={run_dir}"]))
    prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.resume=true"]))
    assert (run_dir / "checkpoints" / "step-000000001").exists()
    prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.overwrite=true"]))
    assert not any((run_dir / "checkpoints").iterdir())
    assert not load_config(run_dir / "config.yaml").run.overwrite


def test_an_earlier_run_is_kept_where_the_next_one_could_not_start(tmp_path: Path) -> None:
    run_dir = prepare(load_config(SAMPLE, [f"run.dir={tmp_path / 'run'}"]))
    checkpoint = run_dir / "checkpoints" / "step-000000001"
    checkpoint.mkdir()
    for change, said in (
        (f"train.init_from={run_dir}", "'train.init_from': .* lies in run.dir .*; name another run.dir"),
        (f"run.plan={run_dir}/plan.json", "'run.plan': .* lies in run.dir"),
        (f"train.init.from_parquet.user={run_dir}/user.parquet", "'train.init.from_parquet.user': .* lies in run.dir"),
        ("train.init_from=nowhere", "'train.init_from': 'nowhere' does not exist"),
    ):
        with pytest.raises(UserError, match=said):
            prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.overwrite=true", change]))
        assert checkpoint.exists()


def test_links_on_the_way_to_a_run(tmp_path: Path) -> None:
    """To a disk that is not mounted, they are told; what they lead to is not removed, and nothing else before that."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    run_dir = prepare(load_config(SAMPLE, [f"run.dir={tmp_path / 'link' / 'run'}"]))
    (run_dir / "checkpoints").rename(tmp_path / "elsewhere")
    (run_dir / "checkpoints").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "step-000000001").mkdir()
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(UserError, match=r"'.*/run/checkpoints' of the earlier run is a link to '.*/elsewhere'"):
        prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.overwrite=true"]))
    assert sorted(run_dir.rglob("*")) == before and (tmp_path / "elsewhere" / "step-000000001").exists()
    for link, away in (("link/run/checkpoints", "elsewhere"), ("link", "disk")):
        (tmp_path / away).rename(tmp_path / "away")
        with pytest.raises(UserError, match=rf"'.*/{link}' is a link to '.*/{away}', which is not there"):
            prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.resume=true"]))
        (tmp_path / "away").rename(tmp_path / away)
    assert prepare(load_config(SAMPLE, [f"run.dir={run_dir}", "run.resume=true"])) == run_dir


def test_going_on_needs_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"'run\.resume' continues the run in run\.dir, which is not set"):
        prepare(load_config(SAMPLE, ["run.resume=true"]))
    assert not any(tmp_path.iterdir())
    for value, said in (("''", "is an empty text"), ("~/runs/a", r"is .*write \$\{oc\.env:HOME\}/runs/a")):
        with pytest.raises(UserError, match=f"'run.dir' {said}"):
            load_config(SAMPLE, [f"run.dir={value}"])


def test_runs_of_the_same_second_have_their_own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(SAMPLE)
    assert len({prepare(config) for _ in range(3)}) == 3


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 10}\n{"kind": "train", "step": 20}\n{"kind": "tr')
    writer = JsonLines(path, 10)
    writer.log("train", {"step": 20, "loss": float("nan")})
    writer.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in records] == [10, 20] and records[1]["loss"] is None
    assert to_json({"a": [float("inf"), 1.5]}) == '{"a": [null, 1.5]}'


@pytest.mark.parametrize("optimizer", list(DenseOptimizer))
def test_the_dense_optimizer_goes_on_with_the_settings_of_the_config(optimizer: DenseOptimizer, tmp_path: Path) -> None:
    """Three steps, saved, loaded into a new model under activation checkpointing, and three more."""

    def build(weight_decay: float) -> Tensors:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
        settings = DenseOptimizerConfig(name=optimizer, weight_decay=weight_decay, momentum=0.9)
        return Tensors(dict, dict, model, build_dense_optimizer(model.parameters(), OptimizerConfig(dense=settings)))

    def train(tensors: Tensors) -> None:
        for number in range(3):
            tensors.dense(torch.ones(1, 3) * number).square().sum().backward()
            tensors.dense_optimizer.step()
            tensors.dense_optimizer.zero_grad()

    old, new = build(0.5), build(0.5)
    checkpoint_mlps(new.dense[1])
    (tmp_path / "checkpoints").mkdir()
    with open_world(Device.cpu) as world:
        checkpoints = Checkpoints(tmp_path / "checkpoints", world, 2)
        train(old)
        checkpoints.save(old, TrainState(Position(), step=3))
        found = checkpoints.newest_valid()
        assert found is not None
        load_tensors(*found, new, world)
        other = build(0.25)
        load_tensors(*found, other, world)
    train(old)
    train(new)
    for mine, theirs in zip(old.dense.parameters(), new.dense.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.dense_optimizer.param_groups[0]["weight_decay"] == 0.25


def test_a_warm_start_takes_the_best_checkpoint(tmp_path: Path) -> None:
    for step, best in ((10, 10), (20, 20), (30, 20)):
        folder = tmp_path / "checkpoints" / f"step-{step:09d}"
        folder.mkdir(parents=True)
        Marker(TrainState(Position(), step=step, best_step=best), {}, {}, "Adam", {}, {}, 1).write(folder)
    (tmp_path / "checkpoints" / "step-000000040.tmp").mkdir()
    assert find_checkpoint(tmp_path).name == "step-000000020"
    assert find_checkpoint(tmp_path / "checkpoints" / "step-000000030").name == "step-000000030"


def test_other_streams_on_resume_are_refused(tmp_path: Path) -> None:
    words = ("train", SAMPLE, f"run.dir={tmp_path}", "train.max_steps=3")
    run_recsys(*words)
    told = run_recsys(*words, "run.resume=true", "data.num_streams=6", status=1)
    assert "'data.num_streams' is 6, and was 8" in told


@pytest.mark.slow
def test_batches_of_another_size_on_resume(tmp_path: Path) -> None:
    """They take as many rows of each stream, so that what is left of the epoch comes in other batches."""
    words = ("train", SAMPLE, f"run.dir={tmp_path}", "train.epochs=1")
    run_recsys(*words, "train.max_steps=3")
    run_recsys(*words, "run.resume=true", "train.global_batch_size=128", nproc=3)
    epochs = json.loads((tmp_path / "result.json").read_text())["data"]["epochs"]
    assert epochs == [{"expected": 3000, "seen": 3000, "bad": 0, "skipped": 0}]


def test_a_signal_ends_an_evaluation() -> None:
    config = load_config(SAMPLE, ["train.eval_batch_size=64", "data.num_threads=0"])
    answers = iter([False, False, True])
    with open_world(Device.cpu) as world:
        inputs = open_inputs(config, world)
        model = build_model(inputs).model
        with pytest.raises(EvaluationStopped):
            evaluate_dataset(inputs, model, "valid", lambda: next(answers))
        assert model.training
