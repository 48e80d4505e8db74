"""The limit of time that conftest.py gives each test."""

import subprocess
import sys
from pathlib import Path

from launch import ROOT

TESTS = """
import time
import pytest

@pytest.fixture
def hanging():
    time.sleep(60)

def test_after_a_fixture(hanging):
    pass

def test_in_itself():
    try:
        time.sleep(60)
    except Exception:
        pass

@pytest.mark.slow
def test_slow():
    time.sleep(1.5)
"""


def test_a_test_that_hangs_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text().replace("else 600", "else 1"))
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "."], cwd=tmp_path, capture_output=True, text=True)
    assert "1 failed, 1 passed" in done.stdout and "1 error" in done.stdout, done.stdout
    assert done.stdout.count("Failed: it takes more than 1 s") >= 2
