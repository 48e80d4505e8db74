"""Ranks whose configs differ end with a sentence, where they would wait for each other or each learn something else."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch import ROOT

from recsys.config import Config, load_config
from recsys.errors import UserError
from recsys.runtime.run_lock import RunLock
from recsys.training import alike
from recsys.training.alike import check_alike, check_shared, unlike_versions

SAMPLE = ROOT / "configs" / "dlrm_sample.yaml"


def check(*configs: Config) -> None:
    """Compare ranks that were given these configs."""
    sent: list[Any] = []
    alone: Any = SimpleNamespace(world_size=2, gather=lambda mine: (sent.append(mine), [mine, mine])[1])
    for config in configs:
        check_alike(config, alone)
    world: Any = SimpleNamespace(world_size=len(configs), gather=lambda mine: sent)
    check_alike(configs[0], world)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["optimizer.dense.learning_rate=0.1"], "optimizer.dense.learning_rate' is 0.001 on rank 0 and 0.1 on rank 2;"),
        (["data.valid=null", "train.epochs=1"], r"data.valid' is \S+/valid on rank 0 and None on rank 2 \(1 more diff"),
        (["features.more={table: user, column: user_id}"], "features.more.type' is not there on rank 0 and id on r"),
    ],
)
def test_what_differs_is_named(own: list[str], said: str) -> None:
    config = load_config(SAMPLE)
    with pytest.raises(UserError, match=f"^config key '{said}"):
        check(config, config, load_config(SAMPLE, own))


def test_what_a_machine_may_have_of_its_own() -> None:
    own = ["run.dir=there", "run.num_threads=2", "data.num_threads=0", "memory.budget=1GiB"]
    check(load_config(SAMPLE), load_config(SAMPLE, own))


def test_what_the_environment_says_may_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    configs = []
    for value in ("first", "second"):
        monkeypatch.setenv("WHERE", value)
        configs.append(load_config(SAMPLE, ["run.track.project=${oc.env:WHERE}"]))
    check(configs[0], configs[0])
    with pytest.raises(UserError, match=r"'run.track.project' is \$\{oc.env:WHERE\} on rank 0 and \$\{oc.env:WHERE\} "):
        check(*configs)


@pytest.mark.parametrize("what", ["config key 'run.dir'", "OUT"])
def test_a_folder_that_a_rank_does_not_see_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else training goes on up to its first checkpoint, a run that goes on calls its checkpoints corrupt, and what a
    rank predicts stays on a disk of its own."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared, own):
        folder.mkdir()
        with RunLock() as lock:  # an earlier run, which left a lock on each of the machines
            lock.take(folder)
            copy = (folder / ".lock").read_text()
        (folder / ".lock").write_text(copy)
    with RunLock() as lock:
        lock.take(shared)
        world: Any = SimpleNamespace(rank=1, agree=lambda action: action(), from_rank_zero=lambda action: action())
        check_shared(shared, lock, world, what)
        monkeypatch.setattr(alike, "_SEEN_WITHIN_S", 0.2)
        said = rf"^{what}: rank 1 on \S+ does not see in '{own}' what rank 0 .* that all machines share"
        with pytest.raises(UserError, match=said):
            check_shared(own, lock, world, what)
        monkeypatch.setattr(alike, "_SEEN_WITHIN_S", 30)
        threading.Timer(0.3, lambda: (own / ".lock").write_bytes((shared / ".lock").read_bytes())).start()
        check_shared(own, lock, world, what)


def test_other_versions_on_a_machine_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    alone: Any = SimpleNamespace(gather=lambda mine: (sent.append(mine), [mine])[1])
    for host, torch, commit in (("a", "2.13", "abc"), ("a", "2.13", "abc"), ("b", "2.12", None), ("b", "2.12", None)):
        monkeypatch.setattr(alike.socket, "gethostname", lambda host=host: host)
        monkeypatch.setattr(alike, "installed_versions", lambda torch=torch: {"torch": torch, "numpy": "2.4"})
        monkeypatch.setattr(alike, "git_commit", lambda commit=commit: commit)
        assert unlike_versions(alone) == []
    (told,) = unlike_versions(SimpleNamespace(gather=lambda mine: sent))  # type: ignore[arg-type]
    assert told.startswith("rank 2 on b has torch 2.12 where rank 0 has 2.13; install the same on all")
    sent[1] = "a", sent[0][1], "abc+"
    told = unlike_versions(SimpleNamespace(gather=lambda mine: sent[:2]))[0]  # type: ignore[arg-type]
    assert told.startswith("rank 1 on a has commit abc+ where rank 0 has abc; ")
