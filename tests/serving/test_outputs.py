"""What commands write to: what cannot be written is refused, and nothing is left in the way of the next attempt."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, environment, run_recsys

from recsys.checkpoint import parquet as tables
from recsys.errors import UserError
from recsys.runtime import parquet as write
from recsys.runtime import watchdog
from recsys.runtime.run_lock import LOCK_FILE, RunLock
from recsys.serving import compress as compress_module
from recsys.serving import embeddings as embeddings_module
from recsys.serving import evaluate as evaluate_module
from recsys.serving import export as export_module
from recsys.serving import finished
from recsys.serving import predict as predict_module
from recsys.serving.parts import Parts
from recsys.training import run as run_module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    options = ("train.max_steps=2", "data.valid=null", "data.test=null")
    run_recsys("train", "configs/dlrm_sample.yaml", f"run.dir={folder}", *options)
    return folder


def recsys(*words: object, status: int = 0, before: Any = None) -> str:
    """Run a command; return what it prints, or with another status its one line of error."""
    said = run_recsys(*words, status=status, before=before)
    assert not status or "\n" not in said, said
    return said


def test_ranks_of_commands_wait_for_each_other_by_what_the_config_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may count rows, or make an index, for hours."""
    waits: list[float] = []

    def open_world(device: object, num_threads: object, timeout_s: float) -> None:
        waits.append(timeout_s)
        raise UserError("no world")

    anything: Any = SimpleNamespace(device=None, num_threads=None, stuck_after_s=7200.0, debug=False)
    anything.run = anything.config = anything
    calls: list[Callable[[], object]] = [
        lambda: run_module.run(anything),
        lambda: evaluate_module.evaluate(anything, []),
        lambda: predict_module.write_results(anything, tmp_path, anything, {}, anything),
        lambda: embeddings_module._write_table(anything, "item", tmp_path, None),
        lambda: compress_module.compress(anything, tmp_path, anything),
    ]
    monkeypatch.setattr(watchdog, "open_world", open_world)
    for call in calls:
        with pytest.raises(UserError, match="no world"):
            call()
    assert waits == [7320.0] * len(calls)


def hold_the_lock_of_python() -> None:
    """Let rank 1 not answer for a while when it builds the model, like a process that is stopped."""
    build_model = finished.build_model

    def held(inputs: Any) -> Any:
        ctypes.PyDLL(None).sleep(5 if os.environ["RANK"] == "1" else 0)
        return build_model(inputs)

    finished.build_model = held


def test_a_rank_of_a_command_that_does_not_answer_is_named(run: Path, tmp_path: Path) -> None:
    """Ranks would wait for it for ten minutes, whatever the key says."""
    words = ("predict", run, "data/sample/test", tmp_path / "out", "run.stuck_after_s=2")
    said = run_recsys(*words, nproc=2, status=1, before=hold_the_lock_of_python)
    assert re.search(r"rank 1 on \S+ is stuck: it has not answered for 2 s .*; rank 0 waits for it\n", said), said


def commands(run: Path, folder: Path) -> dict[str, tuple[object, ...]]:
    """Return commands that write a file, whose path is to follow, and the argument that names it."""
    vectors = folder / "vectors.parquet"
    pq.write_table(pa.table({"item": [1, 2], "vector": list(np.eye(2))}), vectors)
    return {
        "report": ("--out", "report", run, "--out"),
        "compare": ("--out", "compare", run, run, "--out"),
        "tables": ("OUT", "tables", "export", run, "item"),
        "semantic-ids": ("OUT", "semantic-ids", vectors),
    }


@pytest.mark.parametrize("command", ["report", "compare", "tables", "semantic-ids"])
def test_a_file_is_written_where_it_can_be(command: str, run: Path, tmp_path: Path) -> None:
    argument, *words = commands(run, tmp_path)[command]
    said = recsys(*words, tmp_path, status=1)
    assert said == f"error: {argument}: '{tmp_path}' is a folder; name a file"
    (tmp_path / "file").touch()
    said = recsys(*words, tmp_path / "file" / "x", status=1)
    assert said.startswith(f"error: {argument}: '{tmp_path}/file' cannot be made (")
    recsys(*words, tmp_path / "new" / "folder" / "x")
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["x"]


def test_a_sweep_refuses_a_file_as_its_folder(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "file").touch()
    words = ("sweep", "configs/dlrm_sample.yaml", "--space", "train.epochs=1..3", "--out")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper"):
        said = recsys(*words, path, status=1)
        assert said.startswith(f"error: --out: '{path}' cannot be made (") and said.endswith("name another folder")


def interrupted(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(9)


def interrupted_scores() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    predict_module.scored = interrupted


def terminated_scores() -> None:
    def terminated(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)

    predict_module.scored = terminated


def interrupted_export() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    export_module._Export.write = interrupted  # type: ignore[method-assign]


def terminated_export() -> None:
    def end(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)

    export_module._Export.write = end  # type: ignore[method-assign]


def test_an_interrupted_prediction_ends_in_a_line_and_goes_on(run: Path, tmp_path: Path) -> None:
    words = ("predict", run, ROOT / "data/sample/test", tmp_path / "out")
    for before, status, how in ((interrupted_scores, 130, "interrupted"), (terminated_scores, 143, "ended by SIGTERM")):
        assert recsys(*words, status=status, before=before) == f"{how}; the same command goes on with OUT"
        assert not list((tmp_path / "out").glob(f"{LOCK_FILE}*"))
    recsys(*words)
    assert pq.read_table(tmp_path / "out").num_rows == 500 and not list((tmp_path / "out").glob(f"{LOCK_FILE}*"))


def test_an_export_on_several_processes_is_refused(run: Path, tmp_path: Path) -> None:
    """They would hinder each other, and tell of another process that writes to OUT."""
    told = run_recsys("export", run, tmp_path / "out", nproc=2, status=1)
    assert "error: recsys export runs one process; start it without torchrun" in told


def test_an_export_that_a_signal_ends_leaves_nothing(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for before, status, line in (
        (interrupted_export, 130, "interrupted"),
        (terminated_export, 143, "ended by SIGTERM"),
    ):
        assert recsys("export", run, tmp_path / "out", status=status, before=before) == line
        assert not list(tmp_path.iterdir())


def terminated_table() -> None:
    batches, write.ROW_GROUP_ROWS = tables._batches, 10

    def end(*arguments: Any) -> Any:
        yield from batches(*arguments)  # by then, a file lies aside
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)

    tables._batches = end


def test_a_table_that_sigterm_ends_leaves_nothing(run: Path, tmp_path: Path) -> None:
    words = ("tables", "export", run, "item", tmp_path / "item.parquet")
    assert recsys(*words, status=143, before=terminated_table) == "ended by SIGTERM"
    assert not list(tmp_path.iterdir())


STATES = [("done", None), ("done", "1"), ("done", 2), ("done", -1), ("task", []), ("task", None), ("rows", "x")]


def test_a_folder_whose_state_was_edited_is_refused(tmp_path: Path) -> None:
    with (lock := RunLock()):
        Parts.begin(tmp_path / "out", {"data": "a"}, [3], lock)
    path = tmp_path / "out" / "_state.json"
    whole = json.loads(path.read_text())
    for key, value in STATES:
        path.write_text(json.dumps({**whole, key: value}))
        with RunLock() as lock, pytest.raises(UserError, match=r"holds nothing to resume; name another folder$"):
            Parts.begin(tmp_path / "out", {"data": "a"}, [3], lock)
    path.write_text(json.dumps(whole))
    with RunLock() as lock:
        assert Parts.begin(tmp_path / "out", {"data": "a"}, [3], lock).done == 0


@pytest.mark.slow
def test_one_prediction_at_a_time_writes_to_a_folder(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("predict", str(run), f"{ROOT}/data/sample/test", str(out))
    code = (
        "import time; import recsys.serving.predict as p; p.scored = lambda *_: time.sleep(600); "
        f"from recsys.__main__ import main; main({list(words)!r})"
    )
    first = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment(), stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 100
        while not (out / "_state.json").exists():
            assert first.poll() is None and time.monotonic() < deadline, first.communicate()
            time.sleep(0.1)
        (out / "part-00000-00000.parquet.1.tmp").touch()
        said = recsys(*words, status=1)
        assert said.startswith(f"error: OUT: another process writes to '{out}' (process {first.pid} of ")
        assert said.endswith("; wait for its end, stop it, or name another folder") and " on " in said
        assert (out / "part-00000-00000.parquet.1.tmp").exists()
    finally:
        first.kill()
        first.communicate()
    (out / "_state.json").unlink()
    (out / "part-00000-00000.parquet.1.tmp").unlink()
    (out / "_logs" / "rank_0.log").unlink()
    (out / "_logs").rmdir()
    assert [path.name for path in out.iterdir()] == [LOCK_FILE]  # as of one that was killed at once
    recsys(*words)
    assert json.loads((out / "_state.json").read_text())["done"] == 1 and not (out / LOCK_FILE).exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("foo=1", "error: --student: config key 'foo'"),
        ("tables.itm.embedding_dim=4", "did you mean 'tables.item'?"),
        ("data.train=[a, b]", "data.train must be one path to be scored, found a list"),
    ],
)
def test_a_student_that_cannot_be_is_refused_before_anything_is_made(
    change: str, said: str, run: Path, tmp_path: Path
) -> None:
    words = ("compress", run, tmp_path / "small", "--steps", "distill", "--max-loss", "1", "--student", change)
    assert said in recsys(*words, status=1)
    assert not list(tmp_path.iterdir())
