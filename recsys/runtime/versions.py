"""Versions of this program and its packages; they are checked before heavy imports, in which some sets crash."""

import platform
import re
import subprocess
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from recsys.errors import UserError

FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")
# `dependencies` of pyproject.toml, which a Python with its own set of torch may lack
PLAIN = ("numpy", "pyarrow", "omegaconf", "psutil", "xxhash")
REPORTED = ("torch", "torchrec", *FBGEMM, "pyarrow", "omegaconf", "numpy")

# torchrec 1.X fits fbgemm 1.X and torch 2.(X+5), which their wheels do not say. These X are supported:
FIRST_MINOR, LAST_MINOR = 6, 9
TORCH_MINOR_OFFSET = 5

# The first versions that work. With older ones a run ended in a traceback: numpy 1.26 has no `bitwise_count`, pyarrow
# 20 no `arrow_extensions_enabled` of a ParquetFile, omegaconf 2.3 no `max_yaml_expanded_nodes`.
OLDEST = {"numpy": (2, 0), "pyarrow": (21, 0), "omegaconf": (2, 4)}

SETUP = "`bash scripts/setup.sh` installs matching versions (without a clone: the wheel's extra cpu or cuda)"


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide what a run does, for reports."""
    installed = {name: version for name in REPORTED if (version := _version(name))}
    return {"python": platform.python_version(), **installed}


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a folder without code, such as W&B's ./wandb, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def own_version() -> str:
    """Return the version of this program: that of the clone that it runs from, else that installed."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    version = re.search(r'^version = "(.+)"$', project.read_text(), re.MULTILINE) if project.exists() else None
    return version[1] if version else _version("recsys") or "of unknown version"


@cache
def git_commit() -> str | None:
    """Return the commit of the source tree, with `+` if it has changes, or None outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        run = ["git", "-C", str(here), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def check_versions() -> None:
    """Raise a UserError, which says what to install, if packages are missing or do not fit each other."""
    versions = installed_versions()
    fbgemm = [name for name in FBGEMM if name in versions]
    _check_installed("torch", "torchrec", *(fbgemm or FBGEMM[:1]), *PLAIN)
    _check_not_too_old(*PLAIN)
    if len(fbgemm) == 2:
        raise UserError(
            f"fbgemm-gpu {versions['fbgemm-gpu']} and fbgemm-gpu-cpu {versions['fbgemm-gpu-cpu']} are both "
            f"installed and overwrite each other's files: uninstall both, then install one; {SETUP}"
        )
    _check_minors(versions, fbgemm[0])
    _check_build(versions, fbgemm[0])


def exit_unless_installed(*names: str) -> None:
    """End a script with a sentence if packages are missing or too old, before it imports them.

    Args:
        names: packages that the script needs; none: all that a run needs, in versions that fit each other.
    """
    try:
        if not names:
            check_versions()
        _check_installed(*names)
        _check_not_too_old(*names)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def _check_installed(*names: str) -> None:
    missing = [name for name in names if _version(name) is None]
    if missing:
        shown = " and ".join("fbgemm-gpu (without a GPU fbgemm-gpu-cpu)" if n in FBGEMM else n for n in missing)
        verb = "is" if len(missing) == 1 else "are"
        alone = "" if missing != ["torchrec"] else _torchrec_alone(_version("fbgemm-gpu-cpu"))
        raise UserError(f"{shown} {verb} not installed for {sys.executable}; {SETUP}{alone}")


def _check_not_too_old(*names: str) -> None:
    have = {name: _version(name) for name in names if name in OLDEST}
    if old := [name for name, version in have.items() if version and _is_older(version, OLDEST[name])]:
        oldest = _join([f"{name} {'.'.join(map(str, OLDEST[name]))}" for name in old])
        raise UserError(
            f"{_join([f'{name} {have[name]}' for name in old])} {'is' if len(old) == 1 else 'are'} too old for this "
            f"program, which needs {oldest} or later; {SETUP}"
        )


def _is_older(version: str, oldest: tuple[int, int]) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version)
    return match is not None and (int(match[1]), int(match[2])) < oldest


def _torchrec_alone(fbgemm_cpu: str | None) -> str:
    # torchrec requires fbgemm-gpu, which must not be installed together with fbgemm-gpu-cpu; so the extra cpu lacks it.
    minor = fbgemm_cpu and _minor(fbgemm_cpu, 1)
    return f"; with fbgemm-gpu-cpu use `pip install --no-deps 'torchrec==1.{minor}.*'`" if minor else ""


def _check_minors(versions: dict[str, str], fbgemm: str) -> None:
    names = ("torch", "torchrec", fbgemm)
    have = [f"{name} {versions[name]}" for name in names]
    # Each version is turned into the X of the rule above.
    minors = [_minor(versions["torch"], 2, TORCH_MINOR_OFFSET), *(_minor(versions[n], 1) for n in names[1:])]
    supported = [m if m is not None and FIRST_MINOR <= m <= LAST_MINOR else None for m in minors]
    if supported[0] is not None and len(set(supported)) == 1:
        return
    # Propose the X that two of the three agree on, else that of torch, which takes longest to replace.
    agreed = next((m for m in supported if m is not None and supported.count(m) == 2), supported[0])
    if agreed is None:
        raise UserError(
            f"{_join(have)} are not supported: torch 2.{FIRST_MINOR + TORCH_MINOR_OFFSET} to "
            f"2.{LAST_MINOR + TORCH_MINOR_OFFSET} are, with torchrec and {fbgemm} 1.{FIRST_MINOR} to "
            f"1.{LAST_MINOR} in step; {SETUP}"
        )
    matching = (f"torch 2.{agreed + TORCH_MINOR_OFFSET}", f"torchrec 1.{agreed}", f"{fbgemm} 1.{agreed}")
    odd = [i for i, minor in enumerate(supported) if minor != agreed]
    rest = [have[i] for i in range(3) if i not in odd]
    raise UserError(
        f"{_join([have[i] for i in odd])} {'does' if len(odd) == 1 else 'do'} not go with {_join(rest)}: "
        f"install {_join([matching[i] for i in odd])}; {SETUP}"
    )


def _check_build(versions: dict[str, str], fbgemm: str) -> None:
    torch_build, fbgemm_build = (versions[name].partition("+")[2] for name in ("torch", fbgemm))
    if torch_build == "cpu" and fbgemm == "fbgemm-gpu" and fbgemm_build != "cpu":
        raise UserError(
            f"torch {versions['torch']} is a CPU build and fbgemm-gpu {versions['fbgemm-gpu']} needs a CUDA "
            f"build: install fbgemm-gpu-cpu instead, or a CUDA build of torch; {SETUP}"
        )


@cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str, major: int, offset: int = 0) -> int | None:
    """Return the minor version less the offset (for major 2, 12 for 2.12.1+cu130), or None for another major."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return int(match[2]) - offset if match and int(match[1]) == major else None


def _join(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 2 else words)


def main() -> None:
    """Print the installed versions, or exit with a sentence on what is wrong with them."""
    try:
        check_versions()
    except UserError as error:
        raise SystemExit(f"versions: {error}") from None
    print(*(f"{name} {version}" for name, version in installed_versions().items()), sep="\n")


if __name__ == "__main__":
    main()
