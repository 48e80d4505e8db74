"""What is promised of every run, of random ones: any model, data and settings that a CPU can train.

RANDOM_SEEDS=100-130 pytest -m slow tests/serving/test_random_promises.py    # others than the first few
"""

import json
import math
import os
import random
import re
import shutil
import signal
import sys
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import kills
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from checkpoints import load_tables
from gpu_order import step_as_gpus
from launch import ROOT, evaluate, fork_train, records_of, run_recsys
from random_config import keys
from random_promises import base, drawn_keys, write

import recsys
from recsys.config import Config
from recsys.config.model import MODELS
from recsys.runtime.arguments import as_names

first, _, last = os.environ.get("RANDOM_SEEDS", "0-5").partition("-")
SEEDS = range(int(first), int(last or first) + 1)
# Keys that are not drawn: what the checks set, what GPUs alone have, and what has no effect here.
UNDRAWN = {
    *("debug", "topology.*", "run.device", "run.dir", "run.name", "run.num_threads", "run.overwrite", "run.resume"),
    *("run.stop_file", "run.plan", "run.track.project", "train.init*", "train.max_steps", "train.distill.*"),
    *("tables.NAME.kept_rows", "tables.NAME.vocabulary", "tables.NAME.cache_load_factor", "memory.snapshot"),
    *("tables.NAME.stochastic_rounding", "*.weight_decay", "*.state_dtype", "train.activation_offload"),
    *("train.publish.dir", "train.early_stop.*", "model.attention.NAME"),
    *("model.deciding", "model.free", "model.mlps", "model.shapes"),
}
ALWAYS = ("run.num_threads=1", "run.device=cpu")


class RandomRun:
    """A random config, trained by one process and by several; `run` is one of both, of `nproc`."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.dice = folder, random.Random(f"{seed} checks")
        several = self.dice.choice([2, 2, 3, 4])
        self.path = write(folder, seed, several)
        self.config = yaml.safe_load(self.path.read_text())
        self.is_retrieval = "items" in self.config["data"]
        self.alone, self.several = self.train("alone", 1), self.train("several", several)
        name, self.nproc = self.dice.choice([("alone", 1), ("several", several)])
        self.run, self.other = folder / name, several + 1 - self.nproc
        self.trained = self.alone if name == "alone" else self.several

    def train(
        self, name: str, nproc: int, *options: str, before: Any = None, code: int = 0
    ) -> tuple[dict[int, float], dict[str, Any]]:
        """Return the loss of each step, and what the run tells that no time changes."""
        run = self.folder / name
        if "publish" in self.config["train"]:
            options = (f"train.publish.dir={self.folder}/published-{name}", *options)
        words = ("train", self.path, f"run.dir={run}", *ALWAYS, *options)
        run_recsys(*words, nproc=nproc, before=before, status=code, timeout=900)
        losses = {record["step"]: record["loss"] for record in records_of(run)}
        if code:
            return losses, {}
        result = json.loads((run / "result.json").read_text())
        data = {key: value for key, value in result["data"].items() if key in ("rows", "epochs")}
        told = {key: result[key] for key in ("metrics", "steps", "best_step", "bad_steps", "rows_seen")}
        assert result["status"] == "done" and (run / "report.html").exists() and (run / "memory/report.md").exists()
        assert len([*(run / "memory").glob("rank_*.json")]) == nproc
        return losses, told | {"data": data}

    def tolerance(self, exact: float) -> float:
        """Return by how much figures of two numbers of ranks may differ."""
        precision = self.config.get("precision", {})
        rough = {"autocast", "output_dtype", "forward_wire", "backward_wire"} & precision.keys()
        return 0.1 if rough else exact

    @property
    def near(self) -> float:
        """By how much an export may differ: it computes in FP32, and rounds to bytes by other last digits."""
        precision = self.config.get("precision", {})
        return 0.1 if {"autocast", "output_dtype"} & precision.keys() else 0.02 if "dense_int8" in precision else 2e-5

    def new(self, name: str) -> Path:
        return self.folder / f"{name}-{len([*self.folder.iterdir()])}"


def tensors(run: Path) -> dict[str, bytes]:
    checkpoint = max((run / "checkpoints").glob("step-*"))
    found = load_tables(checkpoint, "")
    # Counts of ids are taken off in proportion where a run was stopped, and no seed is of Python's own generator.
    return {
        name: tensor.numpy().tobytes() for name, tensor in found.items() if not re.match(r"ids/|rng/\d+/[np]", name)
    }


def scores(path: Path) -> dict[str, np.ndarray]:
    return scores_of(pq.read_table(path))


def scores_of(table: pa.Table) -> dict[str, np.ndarray]:
    return {name: table[name].to_numpy() for name in table.column_names if name.startswith("score")}


def assert_close(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        largest = float(np.abs(values).max(initial=0))
        np.testing.assert_allclose(ours[name], values, rtol=tolerance, atol=tolerance + 1e-6 * largest, err_msg=name)


def assert_alike(it: RandomRun, ours: dict[int, float], theirs: dict[int, float], close: float) -> None:
    """Compare the losses of each step that two ways to train one run have."""
    assert "early_stop" in it.config["train"] or ours.keys() == theirs.keys()  # it may see another last digit
    for step in sorted(ours.keys() & theirs.keys()):
        if None in (ours[step], theirs[step]):  # which steps overflow in FP16 may depend on roundings
            return
        assert ours[step] == pytest.approx(theirs[step], rel=close, abs=close), step


def assert_told_alike(ours: dict[str, Any], theirs: dict[str, Any], close: float) -> None:
    """Compare what two runs tell, metrics up to a tolerance."""
    assert {**ours, "metrics": None} == {**theirs, "metrics": None}
    for part, metrics in theirs["metrics"].items():
        assert_metrics(ours["metrics"][part], metrics, close)


def assert_metrics(ours: dict[str, Any], theirs: dict[str, Any], close: float) -> None:
    """Compare metrics, of which those without a value, such as the AUC of rows with one label, are null in both."""
    numbers = [{name: math.nan if value is None else value for name, value in of.items()} for of in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], rel=close, abs=close, nan_ok=True)


def check_ranks(it: RandomRun) -> None:
    assert_alike(it, it.several[0], it.alone[0], it.tolerance(1e-3))
    if it.alone[0].keys() == it.several[0].keys():
        assert it.alone[1]["data"] == it.several[1]["data"]


def check_order_of_gpus(it: RandomRun) -> None:
    """GPUs have steps in another order, other pipelines and other exchanges than CPUs, and round as often."""
    nproc = it.dice.choice([1, it.nproc, it.other])
    theirs, close = it.alone if nproc == 1 else it.several, 2e-5
    losses, told = it.train("as-gpus", nproc, before=step_as_gpus)
    assert_alike(it, losses, theirs[0], close)
    if losses.keys() == theirs[0].keys() and None not in (*losses.values(), *theirs[0].values()):
        # No loss but these figures tells what the last step did.
        assert_told_alike(told, theirs[1], close)


def check_resume(it: RandomRun) -> None:
    """A run that was killed, stopped by SIGTERM or by train.max_steps goes on as if it never had been."""
    steps, constant = len(it.trained[0]), "schedule" not in it.config["optimizer"]
    how = it.dice.choice(["kill", "signal", "max_steps"])
    at = it.dice.randrange(3, steps) if steps > 3 else 0
    if how == "signal" and at:
        it.train("stopped", it.nproc, before=partial(kills.terminate_twice, at), code=128 + signal.SIGTERM)
    elif how == "max_steps" and at and constant and "early_stop" not in it.config["train"]:
        it.train("stopped", it.nproc, f"train.max_steps={at}")
    else:
        shutil.copytree(it.run, it.folder / "stopped")
        saved = sorted((it.folder / "stopped/checkpoints").glob("step-*"))
        for checkpoint in saved[it.dice.randrange(1, len(saved)) if len(saved) > 1 else 1 :]:
            shutil.rmtree(checkpoint)
        (it.folder / "stopped/result.json").unlink()
    # These change nothing that is learned.
    free = ["data.num_threads=2", "data.prefetch_batches=2", "train.async_checkpoints=true", "train.eval_batch_size=50"]
    options = ["run.resume=true", *(key for key in free[: it.dice.randrange(8)] if it.dice.random() < 0.4)]
    is_elsewhere = it.dice.random() < 0.2 and "early_stop" not in it.config["train"]
    if is_elsewhere and None not in it.trained[0].values():
        losses, _ = it.train("stopped", it.other, *options)
        close = it.tolerance(1e-3)
        assert losses == pytest.approx(it.trained[0], rel=close, abs=close)
        return
    losses, told = it.train("stopped", it.nproc, *options)
    assert losses == it.trained[0]
    assert_told_alike(told, it.trained[1], 1e-5)  # not to the last digit where batches are of another size
    ours, whole = tensors(it.folder / "stopped"), tensors(it.run)
    assert ours.keys() == whole.keys()
    assert not [name for name in ours if ours[name] != whole[name]]


def check_evaluation(it: RandomRun) -> None:
    for nproc, close in ((it.nproc, 1e-5), (it.other, max(it.tolerance(1e-3), it.near))):
        choices: list[tuple[str, ...]] = [(), ("--bootstrap", "5"), ("--importance", "1"), ("--by", "part")]
        metrics = evaluate(it.run, *it.dice.choice(choices), *ALWAYS, nproc=nproc)
        assert metrics.keys() == it.trained[1]["metrics"].keys()
        for part, told in it.trained[1]["metrics"].items():
            assert_metrics(metrics[part], told, close)


def check_predictions(it: RandomRun) -> None:
    close = max(it.tolerance(1e-5), it.near)
    outs = it.new("predicted"), it.new("predicted")
    for nproc, out in zip((it.nproc, it.other), outs, strict=True):
        run_recsys("predict", it.run, it.folder / "test", out, "--keep", "extra", *ALWAYS, nproc=nproc)
    rows = pq.read_table(it.folder / "test")
    assert all(pq.read_table(out)["extra"].equals(rows["extra"]) for out in outs)
    assert_close(scores(outs[0]), scores(outs[1]), close)
    if it.dice.random() < 0.4:
        given = recsys.open_run(it.run, "train.eval_batch_size=29").predict(rows)
        assert_close(scores_of(given), scores(outs[0]), close)


def check_export(it: RandomRun, run: Path | None = None) -> None:
    from recsys.serving.score import Scorer

    run, out, predicted = run or it.run, it.new("export"), it.new("predicted")
    run_recsys("export", run, out)
    run_recsys("predict", run, it.folder / "test", predicted, "--keep", "extra", *ALWAYS)
    rows = pq.read_table(it.folder / "test")
    assert_close(scores_of(Scorer(out).score(rows)), scores(predicted), it.near)
    if it.is_retrieval:
        best, nproc = it.new("best"), 1 if it.tolerance(0) else it.other  # between ranks vectors may be rounded
        run_recsys("recommend", run, it.folder / "test", best, "--k", 7, "--keep", "extra", *ALWAYS, nproc=nproc)
        theirs, mine = pq.read_table(best)["scores"].to_pylist(), Scorer(out).recommend(rows, k=7)["scores"].to_pylist()
        close = 5 * it.near
        for one, other in zip(theirs, mine, strict=True):
            assert one == pytest.approx(other, rel=close, abs=close * max(map(abs, one), default=1))


def check_publication(it: RandomRun) -> None:
    for run in (it.folder / "alone", it.folder / "several") if "publish" in it.config["train"] else ():
        check_publication_of(it, run)


def check_publication_of(it: RandomRun, run: Path) -> None:
    """A base and its deltas are the export of the last step, bit for bit."""
    sys.path.insert(0, str(ROOT / "recsys" / "serving"))
    from follow import Follower
    from score import Scorer

    code, out, rows = it.config["train"]["publish"].get("tables", "fp32"), it.new("export"), it.folder / "test"
    run_recsys("export", max((run / "checkpoints").glob("step-*")), out, "--tables", code)
    whole, follower = Scorer(out), Follower(it.folder / f"published-{run.name}")
    ours, step = follower.scorer, whole.manifest["made"]["step"]
    assert (follower.problem, follower.step) == (None, step)
    for name, vectors in whole._vectors.items():
        numbers = np.arange(whole.manifest["tables"][name]["vectors"]["rows"])
        assert np.array_equal(ours._vectors[name].bytes_of(numbers), vectors.bytes_of(numbers)), name
    assert ours.score(pq.read_table(rows)).equals(whole.score(pq.read_table(rows)))
    if it.is_retrieval:
        assert ours.recommend(pq.read_table(rows), 5).equals(whole.recommend(pq.read_table(rows), 5))


def check_compression(it: RandomRun) -> None:
    steps = it.dice.choice(["quantize", "prune", "quantize,prune,neurons", "quantize,prune"])
    by, out = it.dice.choice(["norm", "count", "gradient"]), it.new("compressed")
    options = ("--steps", steps, "--max-loss", "20%", "--prune-by", by)
    run_recsys("compress", it.run, out, *options, *ALWAYS, nproc=it.dice.choice([1, 2]))
    told = json.loads((out / "compression.json").read_text())
    metrics, accepted = evaluate(out, *ALWAYS)[told["data"]], told["stages"][-1]["metrics"]
    close = 0.05 if it.is_retrieval else it.tolerance(1e-4)  # pruned items are alike, in an order of last digits
    assert_metrics({key: metrics[key] for key in accepted}, accepted, close)
    check_export(it, out)
    if it.dice.random() < 0.5:
        how = ("run.resume=true", f"run.dir={out}", "train.epochs=3")
    else:
        how = (f"train.init_from={out}", f"run.dir={it.folder}/small", "train.epochs=1")
    run_recsys("train", out / "config.yaml", *how, "train.publish.dir=null", *ALWAYS, nproc=it.nproc)


def still(it: RandomRun) -> list[str]:
    """Return the settings by which no rate moves a weight."""
    tables = [f"tables.{name}.optimizer" for name, table in it.config["tables"].items() if "optimizer" in table]
    return [f"{optimizer}.learning_rate=0" for optimizer in ("optimizer.tables", "optimizer.dense", *tables)]


def check_start(it: RandomRun) -> None:
    """A run that starts from another has its weights: where no rate moves them, its metrics."""
    more = it.dice.choice(["train.init.optimizers=none", "train.init.grow_vocabularies=true", "train.max_steps=2"])
    _, told = it.train("started", it.other, f"train.init_from={it.run}", "train.epochs=1", *still(it), more)
    names = yaml.safe_dump(it.config["optimizer"]), yaml.safe_dump(it.config["tables"])
    if not any("ftrl" in text for text in names):  # which computes weights from its state
        close = it.tolerance(1e-3)
        for part, metrics in it.trained[1]["metrics"].items():
            assert_metrics(told["metrics"][part], metrics, close)


def check_teacher(it: RandomRun) -> None:
    """A run with a teacher is one on the teacher's predictions of the same rows, to the last bit."""
    if it.is_retrieval or "distill" in it.config["train"] or it.config["model"]["name"] == "esmm":
        return
    data = it.config["data"]
    # Scores are in other files, and rows are drawn by a file's footer, and hidden by their row group.
    hides = any("hidden" in feature for feature in it.config["features"].values())
    if hides or "keep_negatives" in data or "sampled" in str(data.get("filter")):
        return
    scored, epoch = it.new("scored"), "train.epochs=1"
    columns = as_names([*pq.read_schema(next((it.folder / "test/part=1").iterdir())).names, "part"])
    run_recsys("predict", it.run, it.folder / "train", scored, "--keep", columns, *ALWAYS)
    losses, told = it.train("taught", it.nproc, f"train.distill.teacher={it.run}", epoch)
    by_hand, told_by_hand = it.train("by-hand", it.nproc, f"data.train={scored}", "train.distill={}", epoch)
    assert losses == by_hand
    assert_told_alike(told, told_by_hand, 0)


def check_tables(it: RandomRun) -> None:
    """Tables go out and in as Parquet, and a vocabulary's ids with it; where no rate moves them, they go out again."""
    options = []
    for name, table in it.config["tables"].items():
        run_recsys("tables", "export", it.run, name, it.folder / f"{name}.parquet")
        options.append(f"train.init.from_parquet.{name}={it.folder}/{name}.parquet")
        if table.get("mapping") == "vocabulary":
            options.append(f"tables.{name}.vocabulary={it.run}/vocabulary/{name}.parquet")
    # By another seed, rows that no file sets begin with other weights.
    options += [*still(it), f"seed={it.config['seed'] + 1}", "train.max_steps=1"]
    it.train("from_parquet", it.other, *options)
    for name, table in it.config["tables"].items():
        run_recsys("tables", "export", it.folder / "from_parquet", name, it.folder / f"{name}-again.parquet")
        ours, theirs = (pq.read_table(it.folder / f"{name}{text}.parquet") for text in ("-again", ""))
        optimizer = table.get("optimizer", it.config["optimizer"].get("tables", {})).get("name", "rowwise_adagrad")
        assert ours.column_names == theirs.column_names, name
        for column in theirs.column_names if optimizer != "ftrl" else ():  # which computes weights from its state
            if column in ("row", "id", "bucket", "vector"):
                assert ours[column].equals(theirs[column]), (name, column)
            elif "adagrad" in optimizer:  # sums of squares
                state = [np.concatenate([*map(np.atleast_1d, of[column].to_numpy())]) for of in (ours, theirs)]
                assert (state[0] >= state[1] * (1 - 1e-6)).all(), (name, column)


def check_others(it: RandomRun) -> None:
    run_recsys("report", it.run)
    run_recsys("compare", it.folder / "alone", it.folder / "several", "--out", it.folder / "compare.html")
    for name in ("item", "user") if it.is_retrieval else ():
        of = ("--data", it.folder / "test") if name == "user" else ()
        run_recsys("embeddings", it.run, name, it.new("vectors"), *of, *ALWAYS)
    run_recsys("dry-run", it.path, f"topology.world_size={it.other}")
    small = ("memory.fit=true", "memory.budget=415MiB", "memory.allow=[row_order,bf16_autocast,fp16_tables]")
    done = fork_train(str(it.path), f"run.dir={it.folder}/fitted", *small, *ALWAYS, nproc=it.nproc)
    assert "Traceback" not in done.stderr and (not done.returncode or "error: " in done.stderr), done.stderr[-3000:]


OPTIONAL = (
    *(check_order_of_gpus, check_publication, check_export, check_compression, check_start, check_teacher),
    *(check_tables, check_others),
)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_promises(seed: int, tmp_path: Path) -> None:
    it = RandomRun(tmp_path, seed)
    checks = [check_ranks, check_resume, check_evaluation, check_predictions]
    checks += [check for check in OPTIONAL if check is check_publication or it.dice.random() < 0.4]
    failed = []
    for check in checks:
        try:
            check(it)
        except AssertionError as error:
            failed.append(f"{check.__name__}: {error}")
    assert not failed, f"seed {seed}:\n\n" + "\n\n".join(failed)


@pytest.mark.slow
def test_no_key_goes_undrawn(tmp_path: Path) -> None:
    drawn = drawn_keys({})
    for seed in range(40):
        (folder := tmp_path / f"{seed}").mkdir()
        drawn |= drawn_keys(base(folder, seed, random.Random(seed)))
    every = {
        ".".join("NAME" if word == "new" else word for word in path)
        for model in MODELS
        for path, _ in keys(Config, {"model": {"name": model}})
    }
    missing = {key for key in every - drawn if "." in key and not any(fnmatch(key, pattern) for pattern in UNDRAWN)}
    assert not missing
