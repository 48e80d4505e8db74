"""`scripts/setup.sh` on what may stand in the place of .venv, up to where pip would ask the network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What set-up reads, in a folder with a space in its name."""
    folder = tmp_path / "a clone"
    for name in ("pyproject.toml", "scripts", "recsys/__init__.py", "recsys/errors.py", "recsys/runtime"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    return folder


def said_by_setup(clone: Path) -> str:
    """Run the set-up, which ends where pip finds nothing, from another folder; return what it says."""
    nothing = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "TORCH_CPU_INDEX": "http://127.0.0.1:9"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") and name != "SET"}
    done = subprocess.run(
        ["bash", f"{clone}/scripts/setup.sh", "cpu"],
        cwd=clone.parent,
        env={**kept, **nothing, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1 and done.stderr.endswith("mend that and run this again.\n"), done.stderr
    return done.stdout + done.stderr


def test_a_venv_without_pip_gets_it(clone: Path) -> None:
    """As of one whose making was interrupted."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    (clone / ".venv" / "kept").touch()
    said = said_by_setup(clone)
    assert "No module named pip" not in said and "No matching distribution found" in said
    assert "(from versions: none)" in said and "reaches no package index: see the network" in said
    assert (clone / ".venv" / "kept").exists()


def test_a_venv_whose_removal_was_interrupted_is_made_anew(clone: Path) -> None:
    """Without pyvenv.cfg its python is that of the system, which packages would go into."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", clone / ".venv"], check=True)
    (clone / ".venv" / "pyvenv.cfg").unlink()
    assert "setup: making .venv with " in said_by_setup(clone)
    assert (clone / ".venv" / "pyvenv.cfg").exists()


def test_the_venv_of_another_clone_is_left_as_it_is(clone: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "theirs"], check=True)
    (tmp_path / "theirs" / "recsys-set.txt").write_text("# cpu set for Python 3.11.7 in /elsewhere\n")
    before = sorted((tmp_path / "theirs").rglob("*"))
    (clone / ".venv").symlink_to(tmp_path / "theirs")
    assert "setup: making .venv with " in said_by_setup(clone)
    assert sorted((tmp_path / "theirs").rglob("*")) == before
    assert (clone / ".venv" / "bin" / "python").exists() and not (clone / ".venv").is_symlink()


def test_a_set_that_there_is_not_is_refused_before_anything_is_made(clone: Path) -> None:
    command, environment = ["bash", f"{clone}/scripts/setup.sh", "cpu"], {**os.environ, "SET": "odd"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "setup: SET is 'odd', but must be oldest or newest, or not set.\n"
    assert not list(clone.glob(".venv*"))
