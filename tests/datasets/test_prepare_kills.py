"""Converters that are killed or out of space: what was there is whole, and the next attempt meets nothing of it."""

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kills import kill
from launch import fork_train

from recsys.datasets import writer

WORDS = ("prepare", "synthetic", "--rows", "2000", "--valid-rows", "100", "--test-rows", "100", "--users", "50")


def kill_while_writing() -> None:
    writer.PartWriter._close_file = kill  # type: ignore[method-assign]


def kill_while_removing() -> None:
    def remove_one(folder: Path, *_: Any, **__: Any) -> None:
        paths = [path for path in Path(folder).rglob("*.parquet") if path.is_file()]
        if paths:
            paths[0].unlink()
            kill()

    shutil.rmtree = remove_one  # type: ignore[assignment]


def kill_while_renaming() -> None:
    Path.rename = kill  # type: ignore[assignment]


def terminate_while_writing() -> None:
    writer.PartWriter._close_file = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[method-assign]


def interrupt_while_writing() -> None:
    writer.PartWriter._close_file = lambda *_: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]


def fill_the_disk() -> None:
    def fail(self: Any, *_: Any) -> None:
        self.is_failed = True
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    def refuse(self: Any) -> None:
        if getattr(self, "is_failed", False):
            raise pa.ArrowInvalid("Operation on closed file")

    pq.ParquetWriter.write_table, pq.ParquetWriter.close = fail, refuse


def run(out: Path, seed: int, before: Any = None, *more: str) -> Any:
    words = (*WORDS, "--items", "50", "--out", str(out), "--seed", str(seed), *more)
    return fork_train(*words, program="recsys", before=before)


@pytest.mark.parametrize(
    "before",
    [
        *(pytest.param(kill, marks=pytest.mark.slow) for kill in (kill_while_writing, kill_while_removing)),
        kill_while_renaming,
    ],
)
def test_what_a_kill_leaves_is_whole_and_in_nobodys_way(before: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, 1).returncode == 0
    of_seeds = [pq.read_table(out / "train")]
    assert run(tmp_path / "two", 2).returncode == 0
    of_seeds.append(pq.read_table(tmp_path / "two" / "train"))
    assert not of_seeds[0].equals(of_seeds[1])
    assert run(out, 2, before, "--overwrite").returncode == -signal.SIGKILL
    found = pq.read_table(out / "train")
    assert any(found.equals(each) for each in of_seeds)
    done = run(out, 3, None, "--overwrite")
    assert done.returncode == 0 and pq.read_table(out / "train").num_rows == 2000, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "two"]


@pytest.mark.parametrize(
    ("before", "status", "said"),
    [
        (terminate_while_writing, 143, "ended by SIGTERM; nothing is left of it"),
        (interrupt_while_writing, 130, "interrupted; nothing is left of it"),
        (
            fill_the_disk,
            1,
            "error: '{}' cannot be written (No space left on device); make room there, and start again",
        ),
    ],
)
def test_what_ends_it_is_a_line_and_leaves_nothing(before: Any, status: int, said: str, tmp_path: Path) -> None:
    done = run(tmp_path / "out", 1, before)
    assert done.returncode == status
    assert done.stderr == said.format(tmp_path / ".out.tmp" / "train" / "part-00000.parquet") + "\n"
    assert not list(tmp_path.iterdir())
