"""`recsys compress`: what is accepted is a run as any other, of fewer bytes, and of the metric that was reported."""

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from exports import assert_scores_alike
from launch import ROOT, environment, evaluate, losses_of, run_recsys, run_train, train_command
from retrieval import write_retrieval

from recsys.__main__ import main
from recsys.config import TableConfig
from recsys.config.choices import RowCode
from recsys.ids import KeptRows
from recsys.report.record import open_record
from recsys.serving.accepted import accepted_moves
from recsys.serving.compress import _quantize
from recsys.serving.trials import Compression, Loss, Pruning, Trials
from recsys.tables.row_codes import row_bytes

# A list with weights of its own to be averaged, a vocabulary, several rows an id, and rows by number.
CONFIG = (
    "configs/dlrm_sample.yaml",
    *("train.max_steps=24", "train.checkpoint_every_steps=24", "train.log_every_steps=1", "data.window_mib=1"),
    *("tables.user={mapping: vocabulary, num_buckets: 3, min_count: 2}", "tables.category.num_hashes=2"),
    *("optimizer.dense.learning_rate=0.01", "tables.device.sharding_type=data_parallel"),
    "tables.item.compute_kernel=fused_uvm",
)


def report(out: Path) -> dict[str, Any]:
    return json.loads((out / "compression.json").read_text())


def tables(run: Path, prefix: str = "tables/") -> dict[str, torch.Tensor]:
    return load_tables(run, prefix)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run, and what it is compressed to."""
    folder = tmp_path_factory.mktemp("compressed")
    run_recsys("train", *CONFIG, f"run.dir={folder}/run")
    printed = run_recsys("compress", f"{folder}/run", f"{folder}/small", "--max-loss", "0.03")
    assert "prune: " in printed and (folder / "small" / "compression.svg").read_text().startswith("<svg")
    return folder / "run", folder / "small"


@pytest.mark.slow
def test_a_compressed_run_is_what_was_reported(runs: tuple[Path, Path], tmp_path: Path) -> None:
    run, small = runs
    found = report(small)
    first, coded, pruned = found["stages"]
    assert first["metrics"] == pytest.approx(evaluate(run)["valid"], abs=1e-6)
    for nproc in (1, 2):
        metrics = evaluate(small, f"run.dir={tmp_path}", nproc=nproc)
        assert metrics["valid"] == pytest.approx(pruned["metrics"], abs=1e-6)
        assert metrics["test"] == pytest.approx(pruned["test"], abs=1e-6)
    for stage, share in ((coded, 1), (pruned, 2)):
        lost = first["metrics"]["auc"] - stage["metrics"]["auc"]
        assert stage["loss"]["value"] == lost < stage["loss"]["at_most"] <= share / 2 * found["allowed_loss"]
        assert found["allowed_loss"] == 0.03
    assert first["seen_bytes"] > 2 * coded["seen_bytes"] > 2 * pruned["seen_bytes"]
    rows = (small / "compression.md").read_text().splitlines()
    assert len(rows) == 5 and f"| {pruned['seen_bytes']:,} |" in rows[-1] and "auc, test" in rows[0]
    assert f"× | {pruned['all_bytes']:,} | {pruned['dense_bytes']:,} |" in rows[-1]


def test_rows_are_gone_and_those_kept_are_as_they_were(runs: tuple[Path, Path]) -> None:
    before, after = map(tables, runs)
    num_pruned = 0
    for name, weights in after.items():
        marks = runs[1] / "vocabulary" / f"{name}.kept.parquet"
        shared = 3 if name == "user" else 1
        if marks.exists():
            kept = KeptRows.read(marks).kept.to_numpy(zero_copy_only=False)
        elif not (runs[0] / "vocabulary" / f"{name}.parquet").exists():  # a hashed table of which nothing was pruned
            assert weights.equal(before[name])
            continue
        else:
            ids, left = (pq.read_table(run / "vocabulary" / f"{name}.parquet")["id"] for run in runs)
            kept = np.concatenate([[True], np.isin(ids.to_numpy(), left.to_numpy()), [False] * shared])
        assert weights[:-shared].equal(before[name][torch.from_numpy(kept)])
        assert len(weights) == kept.sum() + shared and (weights[-shared:] == weights[-1]).all()
        assert weights[-1].norm() < before[name][torch.from_numpy(~kept)].norm(dim=1).max()
        num_pruned += (~kept).sum() - shared
    assert num_pruned > 500
    sizes = [sum(path.stat().st_size for path in run.glob("checkpoints/*/*.bin")) for run in runs]
    states = [sum(v.numel() * v.element_size() for v in tables(run, "table").values()) for run in runs]
    assert sizes[0] - sizes[1] == states[0] - states[1] > 500 * 4 * 8


def test_its_page_tells_what_was_accepted(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    record, last = open_record(runs[1]), report(runs[1])["stages"][-1]
    assert (record.status, record.step) == ("compressed", 24)
    assert record.metrics == {"valid": last["metrics"], "test": last["test"]}
    assert main(["compare", *map(str, runs), "--out", str(runs[1].parent / "compare.html")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^status +done +compressed$", said, re.M) and re.search(r"^steps +24 +24$", said, re.M)
    assert re.search(rf"^valid auc +[\d.]+ +{last['metrics']['auc']:.4f}$", said, re.M)
    assert main(["report", str(runs[1])]) == 0
    assert "status good'>compressed</span> at step 24" in (runs[1] / "report.html").read_text()


def test_it_predicts_and_exports(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for nproc in (1, 2):
        run_recsys("predict", runs[1], "data/sample/test", f"{tmp_path}/{nproc}", nproc=nproc)
    one, two = (pq.read_table(tmp_path / str(n))["score"].to_numpy() for n in (1, 2))
    np.testing.assert_allclose(one, two, atol=1e-6)
    run_recsys("tables", "export", runs[1], "item", f"{tmp_path}/item.parquet")
    assert pq.read_metadata(tmp_path / "item.parquet").num_rows == len(tables(runs[1])["item"])


@pytest.mark.slow
def test_importance_by_gradient_is_the_same_on_two_ranks(runs: tuple[Path, Path], tmp_path: Path) -> None:
    found = []
    for nproc in (1, 2):
        options = ("--steps", "prune", "--max-loss", "0.05", "--prune-by", "gradient")
        run_recsys("compress", runs[0], f"{tmp_path}/{nproc}", *options, nproc=nproc)
        found.append(report(tmp_path / str(nproc))["stages"][-1])
        assert evaluate(tmp_path / str(nproc))["valid"] == pytest.approx(found[-1]["metrics"], abs=1e-6)
    assert found[0]["accepted"] == found[1]["accepted"] and found[0]["all_bytes"] == found[1]["all_bytes"]
    one, two = (tables(tmp_path / str(n)) for n in (1, 2))
    torch.testing.assert_close(one["item"][:-1], two["item"][:-1], rtol=0, atol=0)


@pytest.mark.slow
def test_what_was_accepted_is_what_is_exported(runs: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    assert "the dense part in INT8" in report(runs[1])["stages"][1]["accepted"]
    assert_scores_alike(runs[1], tmp_path, atol=1e-3)  # numbers between two steps may be rounded to either
    assert not {"dense.bin", "dense.pt2"} & {path.name for path in (tmp_path / "export").iterdir()}


@pytest.mark.slow
def test_it_goes_on_training(runs: tuple[Path, Path], tmp_path: Path) -> None:
    for name, nproc, parts in (("whole", 1, (40,)), ("parts", 1, (31, 40)), ("two", 2, (40,))):
        shutil.copytree(runs[1], tmp_path / name)
        for steps in parts:
            options = (f"run.dir={tmp_path}/{name}", "run.resume=true", f"train.max_steps={steps}")
            run_recsys("train", f"{runs[1]}/config.yaml", *options, nproc=nproc)
    whole = losses_of(tmp_path / "whole")
    assert len(whole) == 16 and losses_of(tmp_path / "parts") == whole
    torch.testing.assert_close(losses_of(tmp_path / "two"), whole, rtol=0, atol=1e-4)
    trained, before = tables(tmp_path / "whole"), tables(runs[1])
    assert {name: weights.shape for name, weights in trained.items()} == {n: w.shape for n, w in before.items()}
    assert not trained["item"].equal(before["item"])


@pytest.mark.slow
def test_it_begins_another_run_and_is_compressed_again(runs: tuple[Path, Path], tmp_path: Path) -> None:
    start = (f"train.init_from={runs[1]}", f"run.dir={tmp_path}/next", "run.plan=null", "train.max_steps=3")
    run_recsys("train", f"{runs[1]}/config.yaml", *start)
    metrics = evaluate(tmp_path / "next")["valid"]
    assert metrics["auc"] == pytest.approx(report(runs[1])["stages"][-1]["metrics"]["auc"], abs=0.05)
    run_recsys("compress", f"{tmp_path}/next", f"{tmp_path}/less", "--max-loss", "100%", "--prune-by", "norm")
    found = report(tmp_path / "less")["stages"]
    assert found[0]["metrics"] == pytest.approx(metrics, abs=1e-6)
    assert evaluate(tmp_path / "less")["valid"] == pytest.approx(found[-1]["metrics"], abs=1e-6)
    assert all(len(weights) <= 4 for weights in tables(tmp_path / "less").values()), "all rows are pruned"


@pytest.mark.slow
def test_too_strict_a_loss_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    # Every row is of an id that was seen; on the rows that it was trained on, ids lose by sharing a vector.
    mappings = [f"tables.{table}.mapping=vocabulary" for table in ("user", "item", "category", "device", "hour")]
    run_recsys("train", CONFIG[0], f"run.dir={tmp_path}/run", "train.epochs=4", *mappings)
    options = ("--steps", "prune", "--max-loss", "0", "--metric", "log_loss", "data.valid=data/sample/train")
    run_recsys("compress", f"{tmp_path}/run", f"{tmp_path}/same", *options)
    assert "| prune | left out, since" in (tmp_path / "same" / "compression.md").read_text()
    before, after = (tables(tmp_path / name, "") for name in ("run", "same"))
    assert before.keys() == after.keys() and all(after[name].equal(value) for name, value in before.items())
    assert evaluate(tmp_path / "same") == evaluate(tmp_path / "run")


@pytest.mark.slow
def test_two_towers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else MKL rounds by where matrices lie in memory, and items that share a row are near enough to change places. It
    # reads this as it is loaded, so in processes of their own.
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    config = str(write_retrieval(tmp_path))
    run_recsys("train", config, f"run.dir={tmp_path}/run", "tables.user.mapping=vocabulary")
    options = ("--steps", "prune,quantize", "--max-loss", "10%", "--metric", "recall@10")
    command = [*train_command(nproc=2)[:-1], "-m", "recsys", "compress", f"{tmp_path}/run", f"{tmp_path}/small"]
    subprocess.run([*command, *options], cwd=ROOT, env=environment(), check=True, timeout=120)
    found = report(tmp_path / "small")
    assert found["allowed_loss"] == pytest.approx(0.1 * found["stages"][0]["metrics"]["recall@10"])
    # On as many ranks: items that share a vector have equal scores, and which of equals comes first may depend on that.
    done = run_train(f"{tmp_path}/small", "--evaluate", f"run.dir={tmp_path}", nproc=2)
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert metrics["valid"] == pytest.approx(found["stages"][-1]["metrics"], abs=1e-6)
    printed = pq.read_table(tmp_path / "valid.parquet")
    run_recsys("recommend", f"{tmp_path}/small", f"{tmp_path}/valid.parquet", f"{tmp_path}/best", "--k", "5")
    assert pq.read_table(tmp_path / "best").num_rows == printed.num_rows


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-loss", "1%", "--steps", "quantise"), "--steps: there is no 'quantise'; did you mean 'quantize'?"),
        (("--max-loss", "-1"), "--max-loss must be a number of at least 0"),
        (("--max-loss", "0.1", "--metric", "acu"), "did you mean 'auc'?"),
        (("--max-loss", "0.1", "data.valid=null", "data.test=null"), "nothing to compare compressions on"),
        (("--max-loss", "0.1", "tables.user.num_buckets=1"), "is fixed by what the run has trained"),
    ],
)
def test_mistakes(options: tuple[str, ...], said: str, runs: tuple[Path, Path], tmp_path: Path) -> None:
    assert said in run_recsys("compress", runs[0], tmp_path / "out", *options, status=1)
    (tmp_path / "out").mkdir(exist_ok=True)
    (tmp_path / "out" / "a").touch()
    told = run_recsys("compress", runs[0], tmp_path / "out", "--max-loss", "0.1", status=1)
    assert f"OUT: '{tmp_path}/out' is not empty" in told


class FakeTrials:
    """Tables whose losses by code add up."""

    def __init__(self, losses: dict[str, dict[str, tuple[float, float]]]) -> None:
        self._losses = losses
        tables = {name: TableConfig(num_embeddings=100, embedding_dim=64) for name in losses}
        publish = SimpleNamespace(publish=SimpleNamespace(dir=None))
        self.config = SimpleNamespace(tables=tables, train=publish)

    def num_bytes(self, compression: Compression) -> int:
        return sum(row_bytes(table, compression.codes.get(name)) for name, table in self.config.tables.items())

    def dense_bytes(self, compression: Compression) -> int:
        return 0

    def loss(self, compression: Compression, remark: str) -> Loss:
        parts = [self._losses[table].get(code.name, (0.0, 0.0)) for table, code in compression.codes.items()]
        return Loss(sum(value for value, _ in parts), sum(at_most for _, at_most in parts))


def test_codes_that_are_lucky_and_noisy_keep_no_other_out() -> None:
    noisy = {"INT8": (0.0, 0.0001), "INT4": (0.0001, 0.001), "INT2": (-0.0007, 0.0032)}
    plain = {"INT8": (0.0, 0.0001), "INT4": (0.0, 0.0005), "INT2": (0.003, 0.004)}
    trials: Any = FakeTrials({"user": noisy, "item": plain, "category": plain})
    accepted, shown = _quantize(trials, Compression(), 0.0025)
    assert set(accepted.codes.values()) == {RowCode.INT4} and shown == "INT4: user, item, category"
    # Together all of INT4 is more than is allowed: the one that loses most keeps the code that it has.
    trials = FakeTrials({"user": noisy, "item": plain, "category": plain})
    accepted, _ = _quantize(trials, Compression(), 0.0015)
    assert accepted.codes == {"user": RowCode.INT8, "item": RowCode.INT4, "category": RowCode.INT4}


@pytest.mark.parametrize("bad", [(), (0,), (99,), (0, 40, 99), range(100)], ids=str)
def test_changes_after_one_that_is_refused_are_tried(bad: Sequence[int]) -> None:
    asked = []

    def is_accepted(moves: Sequence[tuple[str, RowCode]]) -> bool:
        asked.append(moves)
        return not {f"t{i}" for i in bad} & {table for table, _ in moves}

    moves = [(f"t{i}", RowCode.INT8) for i in range(100)]
    assert accepted_moves(moves, is_accepted) == [move for i, move in enumerate(moves) if i not in bad]
    assert len(asked) <= 7 + len(bad) * 12 if len(bad) < 100 else len(asked) == 7 + 99


def test_rows_are_computed_with_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables may be as large as memory, and in FP32 those of half precision would be twice that."""
    monkeypatch.setattr("recsys.serving.trials._ROWS_AT_ONCE", 7)
    trials: Any = object.__new__(Trials)
    trials._weights = {"item": torch.randn(40, 4).half()}
    trials._trained = {"item": [trials._weights["item"].clone()]}
    rows = trials._weights["item"].float()
    np.testing.assert_allclose(trials.norms["item"], rows.norm(dim=1), rtol=1e-6)
    pruning = Pruning(torch.zeros(40, dtype=torch.bool), torch.rand(40), 1)
    torch.testing.assert_close(trials.shared_vector("item", pruning), pruning.weights @ rows)
