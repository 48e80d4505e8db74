"""`recsys compress --steps distill`: a student beside its teacher's scores, taken where it is as good."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_tables
from exports import assert_scores_alike
from launch import ROOT, evaluate, run_recsys
from retrieval import write_retrieval

from recsys.config import config_text, load_config
from recsys.config.initial import InitConfig
from recsys.errors import UserError
from recsys.models.dlrm import DLRM
from recsys.runtime.run_lock import RunLock
from recsys.serving import distill
from recsys.serving.compressed_run import begin_folder, finish_folder
from recsys.serving.distill import check_student


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime")
    folder = tmp_path_factory.mktemp("teacher") / "run"
    published = f"train.publish={{dir: {folder.parent}/published, every_steps: 24}}"
    options = ("train.max_steps=24", "tables.user.mapping=vocabulary", "optimizer.dense.learning_rate=0.01")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={folder}", published, *options)
    return folder


@pytest.mark.slow
def test_a_smaller_student_is_compressed_further(run: Path, tmp_path: Path) -> None:
    student = ("--student", "tables.item.embedding_dim=4", "train.max_steps=30", "train.distill.temperature=2")
    run_recsys("compress", run, f"{tmp_path}/small", "--steps", "distill,quantize", "--max-loss", "0.2", *student)
    found = json.loads((tmp_path / "small" / "compression.json").read_text())["stages"]
    assert [stage["name"] for stage in found] == ["as trained", "distill", "quantize"]
    assert found[1]["accepted"] == "a student from the beginning"
    assert found[0]["seen_bytes"] > found[1]["seen_bytes"] > 2 * found[2]["seen_bytes"]
    assert evaluate(tmp_path / "small")["valid"] == pytest.approx(found[2]["metrics"], abs=1e-6)
    tables = load_tables(tmp_path / "small")
    assert tables["item"].shape[1] == 4 and tables["user"].shape[1] == 8
    config = (tmp_path / "small" / "config.yaml").read_text()
    assert "temperature: 2" in config and "quantize: INT" in config and "column: score" in config


@pytest.mark.slow
def test_a_student_goes_on_from_codes_or_is_left_out(run: Path, tmp_path: Path) -> None:
    options = ("--steps", "quantize,distill", "--max-loss", "0.1", "--student")
    run_recsys("compress", run, f"{tmp_path}/small", *options, "train.max_steps=8")
    found = json.loads((tmp_path / "small" / "compression.json").read_text())["stages"]
    assert found[2]["accepted"] == "a student from the weights so far"
    assert found[2]["seen_bytes"] == found[1]["seen_bytes"]
    trained = json.loads((tmp_path / "small" / "distill-2" / "student" / "loaded.json").read_text())
    assert trained["source"].startswith(str(tmp_path / "small" / "distill-2" / "start"))
    assert [path.name for path in (run.parent / "published").iterdir()] == ["base-000000001"]  # of the run alone
    # The class of its own that --student names is trusted, as it was when the student was trained.
    run_recsys("compress", run, f"{tmp_path}/same", "--steps", "distill", "--max-loss", "0", "--student",
               "optimizer.dense.learning_rate=3", "optimizer.tables.learning_rate=3",
               "model.name=recsys.models.dlrm.DLRM")  # fmt: skip
    assert "| distill | left out, since" in (tmp_path / "same" / "compression.md").read_text()
    assert evaluate(tmp_path / "same") == evaluate(run)


def test_how_the_run_began_is_not_how_a_student_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of vectors would take the place of the weights so far, and the dense part not be taken."""
    began = ["train.init_from=yesterday", "train.init.dense=none", "train.init.from_parquet.user=vectors.parquet"]
    start = tmp_path / "start"
    start.mkdir()
    (start / "config.yaml").write_text(config_text(load_config(ROOT / "configs/dlrm_sample.yaml", began)))
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(distill, "run_command", lambda *words: commands.append(words))
    _, with_what = distill.train_student(tmp_path / "teacher", start, tmp_path, ["train.epochs=2"])
    ((_, config, *words),) = commands
    student = load_config(config, words)
    assert with_what == "from the weights so far" and student.train.init_from == str(start)
    assert student.train.init == InitConfig() and student.train.epochs == 2


@pytest.mark.slow
def test_two_towers_are_trained_without_a_teacher(tmp_path: Path) -> None:
    config = str(write_retrieval(tmp_path))
    run_recsys("train", config, f"run.dir={tmp_path}/run")
    options = ("--steps", "distill", "--max-loss", "90%", "--student", "tables.user.embedding_dim=4")
    run_recsys("compress", f"{tmp_path}/run", f"{tmp_path}/small", *options, "tables.user.quantize=INT4")
    found = json.loads((tmp_path / "small" / "compression.json").read_text())["stages"]
    assert evaluate(tmp_path / "small")["valid"] == pytest.approx(found[1]["metrics"], abs=1e-6)
    assert not (tmp_path / "small" / "distill-1" / "scores").exists()


@pytest.mark.slow
def test_a_student_is_trained_on_one_rank(run: Path, tmp_path: Path) -> None:
    words = ("compress", run, tmp_path / "two", "--steps", "distill", "--max-loss", "1")
    told = run_recsys(*words, nproc=2, status=1)
    assert "distill trains in a separate process; start recsys compress on one rank" in told


@pytest.mark.slow
def test_a_student_begins_with_low_rank_factors(run: Path, tmp_path: Path) -> None:
    narrow = ("tables.item.embedding_dim=4", "tables.item.projected_dim=8")
    still = ("optimizer.dense.learning_rate=0", "optimizer.tables.learning_rate=0", "train.max_steps=2")
    run_recsys("compress", run, f"{tmp_path}/small", "--steps", "distill", "--max-loss", "1",
               "--student", *narrow, *still)  # fmt: skip
    found = json.loads((tmp_path / "small" / "compression.json").read_text())["stages"]
    assert found[1]["accepted"] == "a student from low-rank factors"
    assert found[1]["all_bytes"] < found[0]["all_bytes"]
    whole = load_tables(run)["item"].float()
    matrix = load_tables(tmp_path / "small", "dense/")["table_projections.item.weight"]
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    product = load_tables(tmp_path / "small")["item"].float() @ matrix.T
    torch.testing.assert_close(product, (u[:, :4] * s[:4]) @ v[:4], rtol=0, atol=5e-4)  # of FP16 rows
    assert_scores_alike(tmp_path / "small", tmp_path)


@pytest.mark.parametrize(
    ("steps", "changes", "said"),
    [
        ("distill", ["tables.user.embedding_dim=4"], None),
        ("distill,quantize,prune", ["tables.user.embedding_dim=4", "tables.user.num_embeddings=200"], None),
        (
            "quantize,distill",
            ["tables.user.embedding_dim=4"],
            "where quantize accepts INT2 before: .*multiple of 8, fou",
        ),
        ("distill,quantize,distill", ["tables.user.embedding_dim=4"], "where quantize accepts INT2 before"),
        ("quantize,distill", ["tables.user.embedding_dim=4", "tables.user.quantize=INT4"], None),
        (
            "quantize,distill",
            ["tables.user.sharding_type=data_parallel"],
            "quantize accepts FP16 before: .*works with",
        ),
        (
            "prune,distill",
            ["tables.user.num_embeddings=200"],
            r"prune takes rows before: .* is 200, .* of 1000; l",
        ),
        ("prune,distill", ["tables.user.num_embeddings=200", "tables.user.kept_rows=null"], None),
        (
            "prune,distill",
            ["tables.user.mapping=vocabulary"],
            "prune takes rows before: .*kept_rows' is for mappings",
        ),
        ("neurons,distill", ["train.epochs=two"], "^--student: config key 'train.epochs' must be a whole number"),
    ],
)
def test_a_student_fits_whatever_the_steps_before_it_accept(
    steps: str, changes: list[str], said: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(config_text(load_config(ROOT / "configs" / "dlrm_sample.yaml")))
    if said is None:
        check_student(tmp_path, changes, steps.split(","))
    else:
        with pytest.raises(UserError, match=said):
            check_student(tmp_path, changes, steps.split(","))


def test_a_student_whose_losses_read_no_teacher_is_refused_first(tmp_path: Path) -> None:
    """The steps before it may take hours."""
    (tmp_path / "config.yaml").write_text(config_text(load_config(ROOT / "configs" / "dlrm_sample.yaml")))
    with pytest.raises(UserError, match=r"^--student: config key 'train\.distill': OwnLosses has its own losses"):
        check_student(tmp_path, [f"model.name={__name__}.OwnLosses"], ["quantize", "distill"])


class OwnLosses(DLRM):
    def losses(self, outputs: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {}


def test_an_interrupted_compression_begins_anew_and_touches_nothing_else(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        with RunLock() as lock:
            begin_folder(out, lock)
            assert {path.name for path in out.iterdir()} == {".lock", ".unfinished"}
            with RunLock() as other, pytest.raises(UserError, match="wait for its end"):
                begin_folder(out, other)
            for folder in ("logs", "distill-2/start", "checkpoints/step-000000001.tmp"):
                (out / folder).mkdir(parents=True)
            for file in ("config.yaml", "config.yaml.7.tmp", ".recsys-run", "compression.json", "logs/rank_0.log"):
                (out / file).touch()
    with RunLock() as lock:
        begin_folder(out, lock)
        (out / "mine").touch()
    refused = pytest.raises(UserError, match=r"OUT: '.*out' is not empty; name another folder")
    with RunLock() as lock, refused:
        begin_folder(out, lock)
    (out / "mine").unlink()
    with RunLock() as lock:
        begin_folder(out, lock)
        (out / "config.yaml").touch()
        finish_folder(out)
    with RunLock() as lock, refused:
        begin_folder(out, lock)
    assert [path.name for path in out.iterdir()] == ["config.yaml"]
