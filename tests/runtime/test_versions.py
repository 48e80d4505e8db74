import ast
import logging
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torchrec
from launch import ROOT

import recsys
from recsys import errors
from recsys.errors import UserError
from recsys.runtime import versions
from recsys.runtime.environment import prepare_environment
from recsys.runtime.logs import quiet_libraries

CPU = {
    "torch": "2.13.0+cpu",
    "torchrec": "1.8.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "pyarrow": "26.0.1",
    "omegaconf": "2.4.0",
    "numpy": "2.4.6",
}
UNREPORTED = {"psutil": "7.2.2", "xxhash": "4.1.0"}
CUDA = {**CPU, "torch": "2.13.0", "fbgemm-gpu": "1.8.0"}
del CUDA["fbgemm-gpu-cpu"]


def without(installed: dict[str, str], *names: str) -> dict[str, str]:
    return {name: version for name, version in installed.items() if name not in names}


@pytest.fixture
def pretend(monkeypatch):
    """A function that makes the given distributions the only ones installed, and those that no report names."""

    def replace(installed: dict[str, str]) -> None:
        installed = {**UNREPORTED, **installed}

        def version(name: str) -> str:
            if not installed.get(name):
                raise metadata.PackageNotFoundError(name)
            return installed[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(versions, "_version", versions._version.__wrapped__)  # without those of before

    return replace


GOOD = {
    "cpu": CPU,
    "cuda": CUDA,
    "PyPI's torch with CPU tables": {**CPU, "torch": "2.13.0"},
    "oldest": {**CUDA, "torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0+cu130"},
    "newest": {**CUDA, "torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "1.9.0"},
    "vendor's build": {**CUDA, "torch": "2.13.0a0+ecf3bae40a.nv26.08"},
    "oldest of what is not torch's": {**CPU, "numpy": "2.0.0", "pyarrow": "21.0.0", "omegaconf": "2.4.0.dev1"},
    "development": {
        **CUDA,
        "torch": "2.14.0.dev20261001+cu130",
        "torchrec": "1.9.0.dev1",
        "fbgemm-gpu": "1.9.0",
    },
    "CPU build under the CUDA name": {**CUDA, "torch": "2.13.0+cpu", "fbgemm-gpu": "1.8.0+cpu"},
}


@pytest.mark.parametrize("installed", GOOD.values(), ids=GOOD)
def test_accepts(pretend, installed):
    pretend(installed)
    versions.check_versions()


BAD = {
    "no torch": (without(CPU, "torch"), ["torch is not installed"]),
    "no torchrec": (without(CUDA, "torchrec"), ["torchrec is not installed"]),
    "no torchrec, as the extra cpu": (without(CPU, "torchrec"), ["pip install --no-deps 'torchrec==1.8.*'"]),
    "no pyarrow, no omegaconf": (
        without(CPU, "pyarrow", "omegaconf"),
        ["pyarrow and omegaconf are not installed"],
    ),
    "a set of torch alone": (
        {**without(CPU, "omegaconf"), "psutil": "", "xxhash": ""},
        ["omegaconf and psutil and xxhash are not installed"],
    ),
    "omegaconf of long ago": (
        {**CPU, "omegaconf": "2.3.0"},
        ["omegaconf 2.3.0 is too old for this program, which needs omegaconf 2.4 or later;"],
    ),
    "old numpy and pyarrow": (
        {**CPU, "numpy": "1.26.4", "pyarrow": "20.0.0"},
        [
            "numpy 1.26.4 and pyarrow 20.0.0 are too old for this program, which needs numpy 2.0 and pyarrow 21.0 or",
        ],
    ),
    "no fbgemm": (
        without(CPU, "fbgemm-gpu-cpu"),
        ["fbgemm-gpu (without a GPU fbgemm-gpu-cpu) is not installed"],
    ),
    "both fbgemm": (
        {**CPU, "fbgemm-gpu": "1.9.0"},
        ["fbgemm-gpu 1.9.0 and fbgemm-gpu-cpu 1.8.0 are both installed", "uninstall both"],
    ),
    "torch behind": (
        {**CPU, "torch": "2.12.1+cpu"},
        ["torch 2.12.1+cpu does not go with torchrec 1.8.0 and fbgemm-gpu-cpu 1.8.0: install torch 2.13;"],
    ),
    "torchrec ahead": (
        {**CPU, "torchrec": "1.9.2"},
        ["torchrec 1.9.2 does not go with torch 2.13.0+cpu and fbgemm-gpu-cpu 1.8.0: install torchrec 1.8;"],
    ),
    "fbgemm behind": (
        {**CUDA, "fbgemm-gpu": "1.7.0"},
        ["fbgemm-gpu 1.7.0 does not go with torch 2.13.0 and torchrec 1.8.0: install fbgemm-gpu 1.8;"],
    ),
    "fbgemm of another age": (
        {**CUDA, "fbgemm-gpu": "0.8.0"},
        ["fbgemm-gpu 0.8.0 does not go with", "install fbgemm-gpu 1.8;"],
    ),
    "all differ": (
        {**CUDA, "torchrec": "1.7.0", "fbgemm-gpu": "1.6.0"},
        [
            "torchrec 1.7.0 and fbgemm-gpu 1.6.0 do not go with torch 2.13.0",
            "install torchrec 1.8 and fbgemm-gpu 1.8;",
        ],
    ),
    "too new beside torch": (
        {**CUDA, "torchrec": "1.10.0", "fbgemm-gpu": "1.10.0"},
        ["torchrec 1.10.0 and fbgemm-gpu 1.10.0 do not go with torch 2.13.0: install torchrec 1.8"],
    ),
    "torch of no version": (
        {**CPU, "torch": "unknown"},
        ["torch unknown does not go with torchrec 1.8.0", "install torch 2.13;"],
    ),
    "too old together": (
        {**CUDA, "torch": "2.10.0", "torchrec": "1.5.1", "fbgemm-gpu": "1.5.0"},
        [
            "torch 2.10.0, torchrec 1.5.1 and fbgemm-gpu 1.5.0 are not supported",
            "torch 2.11 to 2.14",
            "1.6 to 1.9",
        ],
    ),
    "too new together": (
        {**CUDA, "torch": "2.15.0", "torchrec": "1.10.0", "fbgemm-gpu": "1.10.0"},
        ["torch 2.15.0, torchrec 1.10.0 and fbgemm-gpu 1.10.0 are not supported"],
    ),
    "CUDA tables, CPU torch": (
        {**CUDA, "torch": "2.13.0+cpu"},
        [
            "torch 2.13.0+cpu is a CPU build and fbgemm-gpu 1.8.0 needs a CUDA build",
            "fbgemm-gpu-cpu instead",
        ],
    ),
}


@pytest.mark.parametrize(("installed", "said"), BAD.values(), ids=BAD)
def test_refuses_in_one_sentence(pretend, installed, said):
    pretend(installed)
    with pytest.raises(UserError) as caught:
        versions.check_versions()
    message = str(caught.value)
    for part in [*said, "`bash scripts/setup.sh`"]:
        assert part in message
    assert "\n" not in message and ". " not in message


def test_the_python_api_checks_before_it_imports(pretend):
    pretend(without(CPU, "torchrec"))
    with pytest.raises(UserError, match="torchrec is not installed"):
        recsys.open_run  # noqa: B018


def test_what_fbgemm_says_of_its_own_version_is_not_shown(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "filters", [])  # a program that was run in this process leaves its own
    caplog.set_level(logging.WARNING)  # another test may have raised it
    prepare_environment()
    logging.warning("\033[33m\n_fbgemm_torch_compat_table has no entry for 1.6.0 of FBGEMM")
    logging.warning("FBGEMM_GPU version is 1.6.0, which is not guaranteed to be compatible")
    assert [record.msg[:10] for record in caplog.records] == ["FBGEMM_GPU"]


def test_notices_of_libraries_are_silenced_and_messages_of_other_code_are_not(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "filters", [])
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        quiet_libraries()
    for level in ("warning", "error"):
        call = compile(f"logging.{level}('{level} of torchrec')", torchrec.__file__, "exec")
        exec(call, {"logging": logging})  # at the root logger, as torchrec's planner does
    logging.warning("mine")
    assert [record.msg for record in caplog.records] == ["error of torchrec", "mine"]
    assert len(logging.getLogger().filters) == 1


def test_installed_versions(pretend):
    pretend(CPU)
    assert versions.installed_versions() == {"python": platform.python_version(), **CPU}


def test_what_is_installed_here_goes_together():
    versions.check_versions()


@pytest.mark.parametrize("module", [versions, errors], ids=["versions", "errors"])
def test_imports_only_the_standard_library(module):
    """The check runs before the packages that it is about are imported."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in sys.stdlib_module_names or name == "recsys.errors"


@pytest.mark.parametrize(
    "script",
    [
        "scripts/prepare_data.py movielens-100k",
        "scripts/tables.py export a b c",
        "scripts/gpu_check.py",
        "benchmarks/benchmark.py seeds c.yaml",
        "benchmarks/compare_strategies.py c.yaml",
        "benchmarks/plain_torch.py c.yaml",
    ],
)
def test_a_script_outside_of_its_environment(script: str, tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").touch()  # a run that is not there is told before
    # -S: without the packages of the environment
    command = [sys.executable, "-S", *script.replace(" a ", f" {tmp_path} ").split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "not installed for" in done.stderr and "scripts/setup.sh" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "command"),
    [("xxhash", "prepare csv"), ("omegaconf", "calibrate c.json"), ("omegaconf", "export a b")],
)
def test_a_command_without_a_package_that_it_imports(package: str, command: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from recsys.__main__ import main; main({command.split()})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = f"error: the Python package '{package}' is not installed; `bash scripts/setup.sh` installs all (without a"
    assert done.returncode == 1 and done.stderr.startswith(said) and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "version", "command"), [("omegaconf", "2.3.0", "report runs/a"), ("pyarrow", "20.0.0", "prepare csv")]
)
def test_a_command_with_a_package_that_is_too_old(package: str, version: str, command: str, tmp_path: Path) -> None:
    metadata_folder = tmp_path / f"{package}-{version}.dist-info"
    metadata_folder.mkdir()
    (metadata_folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    run = [sys.executable, "-m", "recsys", *command.split()]
    done = subprocess.run(
        run, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {package} {version} is too old for this program, which needs {package} ")


def test_a_folder_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B makes a folder `wandb` where it is used, which Python imports as a package without code."""
    (tmp_path / "some_folder").mkdir()
    (tmp_path / "some_module.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    names = ("some_folder", "some_module", "torch", "nowhere")
    assert [versions.is_installed(name) for name in names] == [False, True, True, False]
