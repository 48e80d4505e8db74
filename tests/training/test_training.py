"""The main job with real processes: one config, the same numbers however it is run, and nothing lost on the way."""

import json
import shutil
import signal
import subprocess
from functools import partial
from logging import getLogger
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from launch import ROOT, environment, fork_train, losses_of, records_of, run_train, train_command

from recsys.step.pipeline import PlainPipeline

CONFIG = "configs/dlrm_sample.yaml"
EACH_STEP = ("train.log_every_steps=1", "data.window_mib=1")


def train(
    run_dir: Path, *overrides: str, config: str = CONFIG, nproc: int = 1, launch: Any = fork_train
) -> dict[str, Any]:
    """Train to the end and return result.json."""
    done = launch(config, f"run.dir={run_dir}", *EACH_STEP, *overrides, nproc=nproc)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((run_dir / "result.json").read_text())


def sharded(kind: str) -> list[str]:
    return [f"tables.{name}.sharding_type={kind}" for name in ("user", "item", "category", "device", "hour")]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of 60 steps in one process, dropout on, a checkpoint every 20."""
    run_dir = tmp_path_factory.mktemp("reference")
    result = train(run_dir, "train.checkpoint_every_steps=20", "train.keep_checkpoints=9", "model.dropout=0.1")
    return run_dir, result


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The same run on two ranks with every table split by rows."""
    run_dir = tmp_path_factory.mktemp("pair")
    options = ("train.checkpoint_every_steps=20", "train.keep_checkpoints=9", "model.dropout=0.1")
    return run_dir, train(run_dir, *options, *sharded("row_wise"), nproc=2)


def assert_same_run(run_dir: Path, result: dict[str, Any], other_dir: Path, other: dict[str, Any]) -> None:
    assert len(losses_of(run_dir)) == 60
    torch.testing.assert_close(losses_of(run_dir), losses_of(other_dir), rtol=0, atol=1e-4)
    for role in ("valid", "test"):
        torch.testing.assert_close(result["metrics"][role], other["metrics"][role], rtol=0, atol=1e-4)
    assert result["rows_seen"] == other["rows_seen"] == 5 * 3000


def test_two_ranks_row_wise_train_what_one_trains(
    pair: tuple[Path, dict[str, Any]], reference: tuple[Path, dict[str, Any]]
) -> None:
    assert_same_run(*pair, *reference)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        sharded("table_wise"),
        # One rank has no table to look up in, of those that are not split.
        [*sharded("row_wise"), "tables.user.sharding_type=table_wise"],
    ],
    ids=["all", "one"],
)
def test_two_ranks_table_wise_train_what_one_trains(
    plan: list[str], reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    both = train(tmp_path, "model.dropout=0.1", *plan, nproc=2)
    assert_same_run(tmp_path, both, *reference)


def test_the_loss_falls(reference: tuple[Path, dict[str, Any]]) -> None:
    values = losses_of(reference[0])
    assert sum(values[-12:]) < sum(values[:12])


def test_resumed_equals_uninterrupted(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir, whole = reference
    options = ("model.dropout=0.1", "optimizer.schedule.name=constant")
    train(tmp_path, *options, "train.max_steps=20")
    resumed = train(tmp_path, *options, "run.resume=true")
    assert losses_of(tmp_path) == losses_of(run_dir)
    assert resumed["metrics"] == whole["metrics"]
    assert [record["rows"] for record in records_of(tmp_path)] == [record["rows"] for record in records_of(run_dir)]


def test_trained_on_two_is_evaluated_alike_on_one(pair: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    run_dir, before = pair
    shutil.copytree(run_dir, tmp_path / "run")
    after = train(tmp_path / "run", "model.dropout=0.1", "run.resume=true")
    assert after["steps"] == 60
    torch.testing.assert_close(after["metrics"], before["metrics"], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_another_plan_goes_on_from_a_checkpoint(
    pair: tuple[Path, dict[str, Any]], reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    shutil.copytree(pair[0], tmp_path / "run")
    for step in (40, 60):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{step:09d}")
    result = train(tmp_path / "run", "model.dropout=0.1", "run.resume=true", *sharded("table_wise"), nproc=2)
    assert_same_run(tmp_path / "run", result, *reference)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_other_table_optimizers_resume(optimizer: str, tmp_path: Path) -> None:
    options = (f"optimizer.tables.name={optimizer}", "train.max_steps=12")
    train(tmp_path / "whole", *options)
    train(tmp_path / "parts", *options, "train.max_steps=6", nproc=2)
    train(tmp_path / "parts", *options, "run.resume=true")
    torch.testing.assert_close(losses_of(tmp_path / "parts"), losses_of(tmp_path / "whole"), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_sigterm_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    schedule = ("optimizer.schedule.name=linear", "optimizer.schedule.warmup_steps=5", "train.epochs=10")
    arguments = (CONFIG, f"run.dir={tmp_path / 'stopped'}", *EACH_STEP, *schedule)
    process = subprocess.Popen(
        train_command(*arguments, nproc=2), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and int(line.split()[1].split("/")[0]) >= 7:
            break
    process.send_signal(signal.SIGTERM)
    ending = process.stdout.read().splitlines()
    assert process.wait(timeout=60) != 0
    result = json.loads((tmp_path / "stopped" / "result.json").read_text())
    assert result["status"] == "stopped" and 7 <= result["steps"] < 120
    go_on = next(line for line in ending if line.startswith("go on with: ")).removeprefix("go on with: ")
    subprocess.run(go_on, shell=True, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=120)
    train(tmp_path / "whole", *schedule, nproc=2)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "whole")


def test_warm_start_keeps_weights_and_begins_the_data_anew(
    reference: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    run_dir, yesterday = reference
    still = ("optimizer.dense.learning_rate=0", "optimizer.tables.learning_rate=0", "train.global_batch_size=504")
    warm = train(tmp_path, "data.train=data/sample/valid", "train.epochs=1", f"train.init_from={run_dir}", *still)
    assert warm["steps"] == 1 and warm["rows_seen"] == 500
    assert losses_of(tmp_path) == pytest.approx([yesterday["metrics"]["valid"]["log_loss"]], abs=1e-5)


def test_run_directory_holds_what_the_readme_says(reference: tuple[Path, dict[str, Any]]) -> None:
    run_dir, result = reference
    for name in ("config.yaml", "metrics.jsonl", "memory/rank_0.json", "logs/rank_0.log"):
        assert (run_dir / name).stat().st_size > 0
    assert (run_dir / "checkpoints" / "latest").read_text().strip() == "step-000000060"
    assert result["status"] == "done" and result["steps"] == 60 and result["samples_per_s"] > 0
    assert 0 <= result["wait_share"] <= 1 and result["versions"]["torchrec"]


def test_debug_mode_is_one_short_plain_process(reference: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    result = train(tmp_path, "--debug", "train.max_steps=12", "model.dropout=0.1")
    assert result["steps"] == 12
    assert losses_of(tmp_path) == losses_of(reference[0])[:12]


def tell_of_caches_and_pipelines() -> None:
    make = PlainPipeline.__init__

    def init(self: PlainPipeline, *arguments: Any) -> None:
        getLogger("recsys").info("a pipeline is made")
        make(self, *arguments)

    PlainPipeline.__init__ = init  # type: ignore[method-assign]

    def reset_cache_states(self: SplitTableBatchedEmbeddingBagsCodegen) -> None:
        getLogger("recsys").info("the cache is dropped")

    SplitTableBatchedEmbeddingBagsCodegen.reset_cache_states = reset_cache_states


@pytest.mark.slow
def test_early_stop_tests_the_best(tmp_path: Path) -> None:
    stop = ("train.early_stop.metric=auc", "train.early_stop.patience=2", "train.eval_every_epochs=1")
    launch = partial(fork_train, before=tell_of_caches_and_pipelines)
    result = train(tmp_path, *stop, "train.epochs=40", "optimizer.dense.learning_rate=0.03", launch=launch)
    evaluations = records_of(tmp_path, "valid")
    best = max(evaluations, key=lambda record: record["auc"])
    assert result["best_step"] == best["step"]
    assert best["step"] % 12 == 0 and result["steps"] == best["step"] + 2 * 12 < 480
    assert result["metrics"]["valid"]["auc"] == best["auc"]
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    # `fused_uvm_caching` would go on with rows of the last step, which a GPU holds.
    assert log.count("a pipeline is made") == 1
    assert log.count("the cache is dropped") >= 1 and "early stopping: back" in log.rpartition("is dropped")[2]


@pytest.mark.slow
def test_evaluations_fall_on_the_ends_of_epochs(tmp_path: Path) -> None:
    """Also of a run that goes on in the middle of an epoch, with as many ranks as cut its rows into other streams."""
    options = ("train.eval_every_epochs=2", "train.epochs=5", "data.test=null")
    train(tmp_path, *options, "train.max_steps=30")
    train(tmp_path, *options, "run.resume=true", nproc=3)
    rows = {record["step"]: record["rows"] for record in records_of(tmp_path, "train")}
    evaluated = [rows[record["step"]] for record in records_of(tmp_path, "valid")]
    assert evaluated == [6000, rows[30], 12_000, 15_000] and rows[30] < 9000
    assert "an epoch has 12 steps of 256 rows, the run 30" in (tmp_path / "logs" / "rank_0.log").read_text()


@pytest.mark.slow
def test_many_short_runs_end_in_order(tmp_path: Path) -> None:
    """As torchrun starts them; hundreds of others end in the rest of the tests."""
    for number in range(20):
        train(tmp_path / str(number), "train.max_steps=2", nproc=2, launch=run_train)
