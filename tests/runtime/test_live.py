"""The live line on a terminal, plain lines elsewhere, and signs of life of what takes long."""

import io
import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ROOT, environment

from recsys.runtime import live
from recsys.runtime.environment import colours_on
from recsys.runtime.live import LiveLine, Task, bar


class Terminal(io.StringIO):
    """Takes what is written, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(live, "live_line", LiveLine(stream))
    return stream


def in_terminal(*command: str, **variables: str) -> str:
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, cwd=ROOT, env={**environment(), "TERM": "xterm", **variables}
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    assert process.wait(60) == 0, said.decode()[-3000:]
    return said.decode()


@pytest.mark.slow
def test_training_has_a_live_line_on_a_terminal_alone(tmp_path: Path) -> None:
    command = [sys.executable, "train.py", "configs/dlrm_sample.yaml", "run.track.to=[]", "train.log_every_steps=1"]
    said = in_terminal(*command, f"run.dir={tmp_path}/a")
    drawn = [text.split("\r")[0] for text in said.split("\x1b[K") if "%  step " in text[:60]]
    assert drawn and any("loss 0." in text and "left 0:00:" in text for text in drawn)
    lines = [line for line in said.replace("\r\n", "\n").split("\n") if "\x1b" not in line]
    assert not any(line.startswith("step ") for line in lines) and any(
        line.startswith("done at step") for line in lines
    )
    assert "step  1/" in (tmp_path / "a" / "logs" / "rank_0.log").read_text()
    done = subprocess.run(
        [*command, f"run.dir={tmp_path}/b"], cwd=ROOT, env=environment(), capture_output=True, text=True, check=True
    )
    assert "\x1b" not in done.stdout and "\r" not in done.stdout and "\nstep  1/" in done.stdout


def test_a_long_task_draws_a_bar(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "_DRAWN_EVERY_S", 0.01)
    monkeypatch.setattr(live, "_AFTER_S", 0.01)
    with Task("counting", 200, "rows") as task:
        task.done = 50
        time.sleep(0.3)
    said = terminal.getvalue()
    assert f"{bar(0.25)}  counting: 50 of 200 rows (25%" in said and said.endswith("\r\x1b[K")


def test_elsewhere_it_logs_ever_rarer_lines(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "live_line", LiveLine(io.StringIO()))
    logger = logging.getLogger("recsys")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(live, "_AFTER_S", 0.05)
    with caplog.at_level(logging.INFO, "recsys"), Task("planning"):
        time.sleep(0.6)
    told = [record.getMessage() for record in caplog.records]
    assert 2 <= len(told) <= 5 and told[0] == "planning, 0 s so far"  # at 0.05, 0.1, 0.2 and 0.4 s
    caplog.clear()
    monkeypatch.setattr(live, "_AFTER_S", 5)
    with caplog.at_level(logging.INFO, "recsys"), Task("quick"):
        pass
    assert not caplog.records


def test_lines_go_above_the_live_one(terminal: Terminal) -> None:
    line = live.live_line
    line.draw("50 %")
    with line:
        terminal.write("a line\n")
    line.close()
    assert terminal.getvalue() == "\r\x1b[K50 %\r\x1b[Ka line\n\r\x1b[K50 %\r\x1b[K"


def test_colours_are_for_terminals_whose_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours_on(Terminal()) and not colours_on(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not colours_on(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not LiveLine(Terminal()).is_on
