"""A mistake is told once, however many ranks find it, and as text that does nothing to a terminal."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, fork_train, run_train

from recsys.errors import LAUNCHER_FILE, EchoError, UserError
from recsys.runtime.arguments import told_by_first_rank
from recsys.runtime.command import run_command

KILLED = "it was ended by SIGKILL, as the system ends what takes more memory than there is"
SAMPLE = str(ROOT / "configs" / "dlrm_sample.yaml")


@pytest.mark.slow
def test_torchrun_shows_a_mistake_in_the_config_of_one_rank_alone() -> None:
    done = run_train(SAMPLE, "train.epochs=many", nproc=3)
    sentence = "error: config key 'train.epochs' must be a whole number, found 'many'"
    assert done.returncode == 1
    assert done.stderr.count(sentence) == 2  # by rank 0, and below, in the summary
    assert done.stderr.count("exitcode  : 1 ") == 1  # a rank that torchrun ended while Python started has another
    assert 'train.py", line' not in done.stderr and "recsys/" not in done.stderr


@pytest.mark.parametrize(
    ("mistake", "tellers"), [("train.epochs=many", 2), ("data.train=nowhere", 1), ("train.init_from=nowhere", 1)]
)
def test_ranks_without_torchrun_tell_once_what_they_have_agreed_on(mistake: str, tellers: int, tmp_path) -> None:
    done = fork_train(SAMPLE, mistake, f"run.dir={tmp_path / 'run'}", nproc=2)
    assert done.returncode == 1 and done.stderr.count("error: ") == tellers, done.stderr


@pytest.mark.parametrize(
    ("variables", "tells"),
    [
        ({"RANK": "2", "LOCAL_RANK": "0"}, True),
        ({"RANK": "2"}, True),
        ({"RANK": "3", "LOCAL_RANK": "1"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0", LAUNCHER_FILE: "error.json"}, False),
    ],
)
def test_a_mistake_of_one_rank_alone_is_told_there(
    variables: dict[str, str], tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", LAUNCHER_FILE):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as raised, told_by_first_rank():
        raise UserError("a mistake")
    assert isinstance(raised.value, EchoError) != tells


def test_texts_are_cut_and_keep_to_their_lines() -> None:
    error = UserError(f"found '{'x' * 5000}' and '\n\x1b[2J\ud800\0'", "a second line")
    first, second = str(error).split("\n")
    assert first == f"found '{'x' * 99}… and '\\n\\x1b[2J\\ud800\\x00'" and second == "  a second line"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        ("end_run(UserError('no room', 'table a: 3 GiB', '  in all'))", ("no room", "table a: 3 GiB", "  in all")),
        ("end_run(UserError('no such key'))", ("no such key",)),
        ("print('a warning', file=sys.stderr); end_run(UserError('a', 'b'))", ("a", "b")),
        ("print('error: a\\n  b\\nall done', file=sys.stderr); sys.exit(1)", ("a", "b")),
        ("1 / 0", ("ZeroDivisionError: division by zero",)),
        ("end_run(MemoryError())", ("memory has run out: MemoryError; free some, or make the run smaller",)),
        ("sys.exit(3)", ("it ended with status 3",)),
        ("print('step 3', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)", (KILLED, "it told last: step 3")),
        ("os.kill(os.getpid(), 6)", ("it was ended by SIGABRT",)),
        ("os.kill(os.getpid(), 40)", ("it was ended by signal 40",)),
        ("print('error: once', file=sys.stderr)", None),
    ],
)
def test_all_lines_of_what_a_command_told_are_handed_on(
    program: str, lines: tuple[str, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "program.py").write_text(
        f"import os\nimport sys\nfrom recsys.errors import UserError, end_run\n{program}\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    problem = run_command(module="program")
    assert (problem and problem.args) == lines
    if problem and lines:
        assert str(problem.within("it failed")) == "\n  ".join(["it failed: " + lines[0], *lines[1:]])


@pytest.mark.parametrize(
    "error",
    [
        'RuntimeError("can\'t start new thread")',
        "RuntimeError('Resource temporarily unavailable')",
        "BlockingIOError(11, 'Resource temporarily unavailable')",
    ],
)
def test_a_thread_that_the_system_does_not_start(error: str) -> None:
    command = [sys.executable, "-c", f"{_TOLD}raise {error}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("error: the system starts no further thread or process (")
    assert "ulimit -u" in done.stderr and "Traceback" not in done.stderr


_TOLD = "from recsys.runtime.arguments import mistakes_told\nwith mistakes_told(): "
_LOGGED = "from recsys.runtime.logs import *\nstart_logging(Path('.'), 0)\nfor _ in range(3): logger.info('a line')"


@pytest.mark.parametrize(
    ("program", "status"),
    [
        (f"{_TOLD}print('a page')", 0),
        (f"{_TOLD}print('a page', flush=True)", 141),
        (_LOGGED, 0),
        ("from recsys.__main__ import main; main(['prepare', '--help'])", 0),
    ],
    ids=["at the end", "at once", "a log", "help"],
)
def test_output_that_nobody_reads_any_more_is_no_error(program: str, status: int, tmp_path: Path) -> None:
    read, written = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", program]
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=settings)
    os.close(written)
    assert (done.returncode, done.stderr) == (status, "")


def test_a_pipe_of_another_kind_that_breaks_is_told() -> None:
    command = [sys.executable, "-c", f"{_TOLD}raise BrokenPipeError(32, 'of a process')"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.endswith("BrokenPipeError: [Errno 32] of a process\n")
