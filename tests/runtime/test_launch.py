"""What a launcher says of ranks is checked before torch waits for peers that are not there; children end with us."""

import subprocess
import sys

import pytest
from launch import ROOT

from recsys.errors import UserError
from recsys.runtime.launch import local_ranks

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def given(monkeypatch: pytest.MonkeyPatch, **variables: str | None) -> None:
    for name, value in {**dict.fromkeys(LAUNCHED), **variables}.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)


def test_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    assert local_ranks() == (0, 1)
    given(monkeypatch, **LAUNCHED)
    assert local_ranks() == (1, 2)
    given(monkeypatch, **{**LAUNCHED, "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": None})  # as scripts under srun do
    assert local_ranks() == (3, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": None, "MASTER_PORT": ""}, "not set: WORLD_SIZE, MASTER_PORT;"),
        ({"MASTER_ADDR": None}, "not set: MASTER_ADDR;"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT must be a whole number up to 65535, found 'http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be a whole number up to 65535, found '70000'"),
        ({"RANK": "8"}, "RANK and WORLD_SIZE must be whole numbers.*found '8' and '8'"),
        ({"WORLD_SIZE": "-1"}, "found '3' and '-1'"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK and LOCAL_WORLD_SIZE must be.*found 'one' and '2'"),
    ],
)
def test_what_a_launcher_would_not_say_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], said: str
) -> None:
    given(monkeypatch, **{**LAUNCHED, **changes})
    with pytest.raises(UserError, match=said):
        local_ranks()


@pytest.mark.parametrize("way", ["child", "late child", "rank of torchrun"])
def test_a_child_ends_with_the_process_that_started_it(way: str) -> None:
    is_late = way == "late child"
    child = f"""import time; time.sleep({int(is_late)})
from recsys.runtime.environment import prepare_environment
print('prepares', flush=True); prepare_environment(); print('is prepared', flush=True); time.sleep(60)"""
    given = "{**os.environ, 'TORCHELASTIC_RUN_ID': 'none'}" if way == "rank of torchrun" else "environment_of_child()"
    parent = f"""import os, subprocess, sys, time; from recsys.runtime.launch import environment_of_child
subprocess.Popen([sys.executable, '-c', {child!r}], env={given}); print('begun', flush=True); time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(1 if is_late else 3)]
        process.kill()
        said, _ = process.communicate(timeout=30)  # to the end of what the child writes to
    expected = ["begun", "prepares", *([] if is_late else ["is", "prepared"])]
    assert sorted("".join([*lines, said]).split()) == sorted(expected)
