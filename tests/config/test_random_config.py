"""Any value of any key gives a config, or one sentence that names the key; what loads runs, or ends in a sentence too.

Nothing is written outside of the run directory.
"""

import random
import resource
from pathlib import Path

import psutil
import pytest
from launch import fork_train
from random_config import write, write_data

from recsys.config import config_text, load_config
from recsys.errors import UserError


def attempt(folder: Path, dice: random.Random) -> tuple[list[str], set[str]] | None:
    """Load a random config, and return its overrides and the keys that were changed; None where it is refused.

    Then a sentence names one of these.
    """
    overrides, paths = write(folder, dice)
    try:
        config = load_config(folder / "c.yaml", overrides)
    except UserError as error:
        said = str(error)
        assert said.isprintable() and len(said) < 1000, said
        # Of a table, a feature or a label that is new, or of settings that a table has not, another key may be missing.
        of_new = [path for path in paths if {"new", "experts", "sparsity"} & {*path}]
        prefixes = [".".join(path[:length]) for path in of_new for length in range(2, len(path))]
        named = [key for key in (*(path[-1] for path in paths), *prefixes) if key in said]
        named += [path[0] for path in paths if len(path) == 2 and f"config key '{path[0]}" in said]
        assert named or "is not readable YAML" in said or "never" in said, said
        return None
    (folder / "saved.yaml").write_text(config_text(config))
    assert load_config(folder / "saved.yaml") == config
    return overrides, {".".join(path) for path in paths}


def attempts(folder: Path, seed: int, count: int) -> None:
    bad = []
    for number in range(count):
        try:
            attempt(folder, random.Random(f"{seed} {number}"))
        except Exception as error:
            bad.append(f"{seed} {number}: {type(error).__name__}: {error}")
    assert not bad, "\n".join(bad)
    assert {path.name for path in folder.iterdir()} <= {"c.yaml", "saved.yaml"}


@pytest.mark.slow
def test_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attempts(tmp_path, 1, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 32))
def test_thousands(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    attempts(tmp_path, seed, 150)


def limit_memory() -> None:
    """Let a process have so much more memory than it has, so that large sizes end there and not with the machine."""
    most = psutil.Process().memory_info().vms + (4 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


LONG = {"train.max_steps", "train.epochs"}  # a run takes as long as these say
FORCED = {"train.max_steps": "2", "train.epochs": "1", "memory.budget": "2GiB"}


def run_or_refuse(folder: Path, number: str, mode: str) -> str:
    """Start a run of a random config that loads, on random data; return what is wrong with how it ends, or nothing."""
    cwd = folder / "in" / "here"  # so that ../.. is seen
    cwd.mkdir(parents=True)
    dice = random.Random(number)
    while (found := attempt(folder, dice)) is None or LONG & found[1]:
        pass
    overrides, changed = found
    if dice.random() < 0.4 and not any(key.startswith(("data.", "features.")) for key in changed):
        overrides += write_data(folder, dice)
    forced = [f"{key}={value}" for key, value in FORCED.items() if key not in changed]
    before = {*folder.rglob("*")}
    options = (*overrides, *forced, f"run.dir={folder / 'run'}", *([mode] if mode else []))
    done = fork_train(str(folder / "c.yaml"), *options, before=limit_memory, cwd=cwd, timeout=900)
    new = {path for path in {*folder.rglob("*")} - before if folder / "run" not in (path, *path.parents)}
    problem = f"wrote {new}" if new else ""
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("  ")]  # further ones go below
    told = lines[-1] if lines else ""
    if "Traceback" in done.stderr + done.stdout:
        problem = f"traceback: {told}"
    elif done.returncode and not (told.startswith("error: ") or (mode and done.returncode == 1)):
        problem = f"status {done.returncode} after {told!r}"
    return problem and f"{number} ({overrides} of {sorted(changed)}): {problem}"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["", "--dry-run"])
@pytest.mark.parametrize("seed", range(4))
def test_what_loads_runs(mode: str, seed: int, tmp_path: Path) -> None:
    found = [run_or_refuse(tmp_path / f"{number}", f"{seed} {number} run", mode) for number in range(25)]
    assert not any(found), "\n".join(filter(None, found))
