"""A disk that others fill, or a run directory that goes, ends a run with one sentence; what was whole stays whole."""

import errno
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from launch import fork_train, records_of
from small_checkpoints import checkpoints, names, state, tensors

from recsys.checkpoint import Tensors, verify_checkpoint
from recsys.config import config_text, load_config
from recsys.data.facts import Facts
from recsys.data.figures import FloatFacts
from recsys.errors import UserError, disk_problem
from recsys.ids import write_vocabulary
from recsys.memory.report import write_rank
from recsys.report.writers import JsonLines
from recsys.runtime.files import replace_file
from recsys.runtime.logs import start_logging
from recsys.runtime.profiling import traced_steps
from recsys.runtime.world import World
from recsys.serving.export_dense import write_program
from recsys.tables.shard import save_plan
from recsys.training.trainer import Trainer

CONFIG = "configs/dlrm_sample.yaml"


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 4 MiB, or of another size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={getattr(request, 'param', '4m')}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("root alone mounts a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    """Leave no byte."""
    with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    with suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"0")


def large() -> Tensors:
    """Tensors of 1.6 MB; a checkpoint asks for 1 MiB more."""
    made, table = tensors(1), torch.ones(100_000, 4)
    made.tables = lambda: {"t": table}
    made.table_optimizer = dict
    return made


@pytest.mark.parametrize("disk", ["3m"], indirect=True)
def test_a_checkpoint_that_does_not_fit(disk: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = checkpoints(disk, world)
    saved.save(large(), state(1))
    with pytest.raises(UserError, match=r"a checkpoint needs [\d,]+ bytes, and '.*' has [\d,]+ free; make room there"):
        saved.save(large(), state(2))
    monkeypatch.setattr(saved, "_check_space", lambda *rest: None)  # as where others fill it meanwhile
    with pytest.raises(UserError, match="No space left on device"):
        saved.save(large(), state(2))
    assert names(disk) == ["latest", "step-000000001"]
    assert verify_checkpoint(disk / "step-000000001", world).state.step == 1


@pytest.mark.parametrize("disk", ["5m"], indirect=True)
def test_room_is_made_before_a_save_and_never_of_the_last_or_the_best(disk: Path, world: World) -> None:
    saved = checkpoints(disk, world, keep=2)
    for step in (1, 2, 3):
        saved.save(large(), state(step))
    assert names(disk) == ["latest", "step-000000002", "step-000000003"]
    with pytest.raises(UserError, match="a checkpoint needs"):
        saved.save(large(), state(4, best_step=2))
    assert names(disk) == ["latest", "step-000000002", "step-000000003"]
    (disk / "others").write_bytes(bytes(1 << 20))
    with pytest.raises(UserError, match="a checkpoint needs"):
        checkpoints(disk, world, keep=1).save(large(), state(4))
    assert names(disk) == ["latest", "others", "step-000000003"]
    assert verify_checkpoint(disk / "step-000000003", world).state.step == 3


@pytest.mark.parametrize("disk", ["3m"], indirect=True)
@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_for_a_publication_that_does_not_fit_ends_no_run(
    disk: Path, world: World, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is due at that step is tried again, and does."""
    trainer = Trainer.__new__(Trainer)
    trainer.state, trainer._saved_at, trainer._enter_phase = state(2), 1, lambda *phase: None
    trainer._checkpoints = saved = checkpoints(disk, world, background=background)
    monkeypatch.setattr(saved, "_check_space", lambda *rest: None)  # as where others fill it meanwhile
    monkeypatch.setattr(trainer, "_write_checkpoint", lambda: saved.save(large(), trainer.state), raising=False)
    fill(disk)
    told = trainer._saved()
    assert isinstance(told, UserError) and "No space left on device" in str(told)
    assert trainer._saved_at is None and names(disk) == ["filler"]
    (disk / "filler").unlink()
    assert trainer._saved() == disk / "step-000000002"
    verify_checkpoint(disk / "step-000000002", world)


def _write_metrics(folder: Path) -> None:
    writer = JsonLines(folder / "metrics.jsonl", 0)
    for step in range(10_000):
        writer.log("train", {"step": step})


def _write_program(path: Path) -> None:
    write_program(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "any": lambda folder: replace_file(folder / "any", "x" * 10_000),
    "vocabulary": lambda folder: write_vocabulary(folder / "vocabulary", pa.array(range(10_000))),
    "floats.json": lambda folder: Facts(floats={"x": FloatFacts()}).save(folder),
    "plan.json": lambda folder: save_plan([], 1, folder / "plan.json"),
    "rank_0.json": lambda folder: write_rank(folder, {"identity": {"rank": 0}}),
    "config.yaml": lambda folder: replace_file(folder / "config.yaml", config_text(load_config(CONFIG))),
    "metrics.jsonl": _write_metrics,
    "dense.pt2": lambda folder: _write_program(folder / "dense.pt2"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written_is_named_and_leaves_nothing(name: str, disk: Path) -> None:
    fill(disk)
    with pytest.raises(OSError, match="No space left") as caught:
        WRITERS[name](disk)
    sentence = str(disk_problem(caught.value))
    assert sentence.startswith(f"'{disk}/{name}' cannot be written (No space left on device); make room there")
    assert names(disk) in (["filler"], ["filler", "metrics.jsonl"])


def test_of_a_copy_that_does_not_fit_the_file_that_is_written_is_named(disk: Path) -> None:
    """And nothing is said of resuming, which only one of all commands could."""
    fill(disk)
    with pytest.raises(OSError, match="No space left") as caught:
        shutil.copyfile(__file__, disk / "copy")
    said = f"'{disk}/copy' cannot be written (No space left on device); make room there, and start again"
    assert str(disk_problem(caught.value)) == said


def test_errors_of_files_are_sentences_and_others_stay() -> None:
    gone = disk_problem(FileNotFoundError(errno.ENOENT, "No such file or directory", "run/x"))
    assert isinstance(gone, UserError) and "'run/x' is gone" in str(gone)
    for error in (ValueError("x"), OSError("libcuda.so.1: cannot open"), ConnectionResetError(errno.ECONNRESET, "x")):
        assert disk_problem(error) is error


def test_lines_of_the_log_that_are_lost_are_told_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank_0.log").symlink_to("/dev/full")
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        start_logging(tmp_path, 0)
        for number in range(20):
            logging.getLogger("recsys").info("line %d", number)
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
        logging.captureWarnings(False)
    told = capfd.readouterr()
    assert re.fullmatch(r"warning: '.*rank_0.log' loses lines of the log \(No space left on device\)\n", told.err)
    assert [line for line in told.out.splitlines() if line.startswith("line")] == [f"line {n}" for n in range(20)]


def test_a_trace_that_is_lost_is_told(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with traced_steps(1, disk / "profile/rank_0.json", torch.device("cpu")) as step_done:
        fill(disk)
        for _ in range(14):
            torch.ones(3).sum()
            step_done()
    assert re.search(r"'.*/profile/rank_0.json' cannot be written \(.+\); training continues without it", caplog.text)
    assert names(disk / "profile") == []


def at_step(step: int, action: Callable[[], None]) -> None:
    """Let something happen on rank 0 after a step."""
    whole = Trainer._advance

    def advance(self: Trainer, *arguments: Any) -> None:
        whole(self, *arguments)
        if self.state.step == step and self._world.rank == 0:
            action()

    Trainer._advance = advance  # type: ignore[method-assign]


def fill_at(folder: Path, step: int) -> None:
    at_step(step, partial(fill, folder))


def remove_at(folder: Path, step: int) -> None:
    at_step(step, partial(shutil.rmtree, folder))


@pytest.mark.slow
@pytest.mark.parametrize("disk", ["64m"], indirect=True)
def test_a_disk_that_others_fill_ends_all_ranks_with_a_sentence(disk: Path) -> None:
    options = (f"run.dir={disk}/run", "data.valid=null", "data.test=null", "train.epochs=9", "train.log_every_steps=1")
    options += ("train.checkpoint_every_steps=40",)
    done = fork_train(CONFIG, *options, nproc=2, before=partial(fill_at, disk, 41))
    errors = re.findall("^error: .*", done.stderr, re.MULTILINE)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert any(f"'{disk}/run/metrics.jsonl' cannot be written (No space left" in line for line in errors), done.stderr
    assert all("No space left" in line or "another rank ended" in line for line in errors), done.stderr
    lost = re.findall(r"^warning: '.*(rank_\d\.log)' loses lines", done.stderr, re.MULTILINE)
    assert "Logging error" not in done.stderr and sorted(set(lost)) == sorted(lost), done.stderr  # once for each
    pages = re.findall(r"^warning: .*/report\.html was not written .*No space left", done.stderr, re.MULTILINE)
    assert done.stderr.count("warning: ") == len(lost) + len(pages) and len(pages) < 2, done.stderr
    assert "frame #" not in done.stderr, done.stderr
    (disk / "filler").unlink()
    done = fork_train(CONFIG, *options, "run.resume=true", "train.max_steps=45", nproc=2)
    assert done.returncode == 0 and "resumed at step 40" in done.stdout, done.stderr[-3000:]
    assert [line["step"] for line in records_of(disk / "run")] == list(range(1, 46))


def test_a_run_directory_that_is_removed_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = fork_train(CONFIG, f"run.dir={run_dir}", "train.max_steps=8", before=partial(remove_at, run_dir, 5))
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert re.search(r"error: '.*/run.*' (is gone|or its lock was removed)", done.stderr), done.stderr
    assert not run_dir.exists()


def test_a_machine_without_a_folder_for_temporary_files_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python's tempfile tells it, which has no name of a file."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/nowhere", "/proc"])
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.mkdtemp()
    told = str(disk_problem(caught.value))
    assert "['/proc/nowhere', '/proc']" in told and told.endswith("environment variable TMPDIR") and "gone" not in told
