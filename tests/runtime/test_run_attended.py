"""Commands that run in a process of their own: how they end with this one, and by Ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

CHILD = """
import signal, sys, time
asked = []
def ask(number, frame):
    asked.append(number)
    print("asked", flush=True)
signal.signal(signal.SIGINT, ask)
print("begun", flush=True)
while len(asked) < int(sys.argv[1]): time.sleep(0.01)
time.sleep(1)  # what it saves takes longer than subprocess.run would wait
open(sys.argv[2], "w").write(str(len(asked)))
"""
PARENT = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
from recsys.runtime.command import run_attended
try:
    run_attended([sys.executable, "-c", {CHILD!r}, *sys.argv[1:]], os.environ)
except KeyboardInterrupt:
    print("interrupted", os.path.exists(sys.argv[2]), flush=True)
"""


@pytest.mark.parametrize(("times", "is_terminal"), [(1, True), (2, True), (1, False)])
def test_ctrl_c_comes_once_to_a_command_which_ends_in_its_own_time(
    times: int, is_terminal: bool, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", PARENT, str(times), str(tmp_path / "asked")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline()]
        for _ in range(times):
            (os.killpg if is_terminal else os.kill)(process.pid, signal.SIGINT)
            said.append(process.stdout.readline())  # before the next one, which may else be one with it
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
        said.append(process.communicate(timeout=30)[0])
    assert said == ["begun\n", *["asked\n"] * times, "interrupted True\n"] and process.returncode == 0
    assert (tmp_path / "asked").read_text() == str(times)


def test_a_command_tells_its_status_and_ends_by_what_a_handler_raises() -> None:
    code = """
import os, signal, sys, time
from recsys.runtime.command import run_attended
assert run_attended([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3
def late(number, frame): raise TimeoutError
signal.signal(signal.SIGALRM, late)
signal.alarm(2)
begun = time.monotonic()
try:
    run_attended([sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
except TimeoutError:
    print("late", time.monotonic() - begun < 30)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.stdout == "late True\n", done.stderr
