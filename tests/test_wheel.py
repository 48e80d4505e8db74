"""The wheel: all of the package and nothing else, which installs without torch and trains outside the repository."""

import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from launch import ROOT
from packaging.requirements import Requirement

sys.path.insert(0, str(ROOT / "scripts"))

from requirements import requirements, tomllib

from recsys.runtime.versions import FIRST_MINOR, LAST_MINOR, PLAIN, TORCH_MINOR_OFFSET


def all_required(names: set[str]) -> set[str]:
    """Return the names of what is required by these packages, as they are installed here, and by what they require."""
    seen: set[str] = set()
    while names:
        seen |= names
        needs = [Requirement(line) for name in names for line in metadata.requires(name) or []]
        names = {need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})} - seen
    return seen


def test_torch_comes_with_an_extra_alone() -> None:
    assert "torch" in all_required({"tensordict"})  # so that the next line is able to fail
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain = {pin.split("==")[0] for pin in project["dependencies"]}
    assert "torch" not in all_required(plain) and plain == set(PLAIN)


def test_the_sets_have_one_fbgemm_each_of_one_version() -> None:
    cpu, cuda = set(requirements("cpu")), set(requirements("cuda"))
    (cpu_only,), (cuda_only,) = cpu - cuda, cuda - cpu
    assert cpu_only.replace("-cpu==", "==") == cuda_only and cuda_only.startswith("fbgemm-gpu==")


@pytest.mark.parametrize(("name", "minor"), [("oldest", FIRST_MINOR), ("newest", LAST_MINOR)])
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_oldest_and_the_newest_set_are_what_is_supported(kind: str, name: str, minor: int) -> None:
    plain, pins = requirements(kind), requirements(kind, name)
    other = sorted(pin for pin in pins if pin not in plain)
    assert len(pins) == len(plain) and len(other) == 3
    names = [
        f"fbgemm-gpu{'-cpu' * (kind == 'cpu')}==1.{minor}",
        f"torch==2.{minor + TORCH_MINOR_OFFSET}",
        f"torchrec==1.{minor}",
    ]
    assert [pin.rpartition(".")[0] for pin in other] == names


@pytest.mark.slow
def test_the_wheel_trains_outside_the_repository(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recsys", tmp_path / "source" / "recsys", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build = ["wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "source")]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    (wheel,) = tmp_path.glob("recsys-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        about = {Path(name).name: archive.read(name).decode() for name in set(archive.namelist()) - names}
        archive.extractall(tmp_path / "site")
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("recsys/**/*.py")}
    assert names == modules | {"recsys/py.typed", "recsys/report/style.css"} and "BSD 3-Clause" in about["LICENSE"]
    assert "recsys = recsys.__main__:main" in about["entry_points.txt"]
    plain = [
        line for line in about["METADATA"].splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    assert plain and not re.search("torch|fbgemm|tensordict|iopath", " ".join(plain))

    config = (ROOT / "configs" / "dlrm_sample.yaml").read_text().replace("data/sample", str(ROOT / "data" / "sample"))
    (tmp_path / "my.yaml").write_text(config)
    run = ["-m", "recsys", "train", "my.yaml", "train.max_steps=5", "run.dir=run", "data.valid=null", "data.test=null"]
    code = f"import runpy, sys, recsys; assert recsys.__file__.startswith({str(tmp_path)!r}); sys.argv = {run[1:]!r}"
    command = [sys.executable, "-c", f"{code}; runpy.run_module('recsys', run_name='__main__')"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": "site"}, capture_output=True, text=True)
    assert done.returncode == 0 and "done at step 5" in done.stdout, done.stderr
