"""Followers of what training publishes: they answer from one publication, whatever becomes of the folder meanwhile."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, run_recsys
from retrieval import write_retrieval

pytest.importorskip("onnxruntime")

sys.path.insert(0, str(ROOT / "recsys" / "serving"))  # as it stands in an export

from follow import Follower
from score import ExportError, checksum

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and its deltas."""
    folder = tmp_path_factory.mktemp("published")
    publish = f"train.publish={{dir: {folder}/published, every_steps: 20}}"
    run_recsys("train", write_retrieval(folder), f"run.dir={folder}/run", publish)
    return folder / "published"


def test_answers_under_load_are_of_one_publication(published: Path, tmp_path: Path) -> None:
    """Every answer given while deltas arrive is that of one of the publications."""
    users = pq.read_table(published.parent / "valid.parquet")
    names = sorted(path.name for path in published.iterdir())
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copytree(published / names[0], copy / names[0])
    expected, follower = [], Follower(copy)
    answers: list[pa.Table] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            answers.append(follower.scorer.recommend(users, 5))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    expected.append(follower.scorer.recommend(users, 5))
    for thread in threads:
        thread.start()
    for name in names[1:]:
        shutil.copytree(published / name, copy / (name + ".tmp"))
        (copy / (name + ".tmp")).rename(copy / name)
        follower.refresh()
        expected.append(follower.scorer.recommend(users, 5))
    done.set()
    for thread in threads:
        thread.join()
    assert not expected[0].equals(expected[-1])
    assert len(answers) > len(names)
    for answer in answers:
        assert any(answer.equals(one) for one in expected)


def test_a_follower_outlives_a_folder_that_begins_again_and_a_torn_base(published: Path, tmp_path: Path) -> None:
    folder, number = tmp_path / "copy", Follower(published).number
    shutil.copytree(published, folder)
    follower = Follower(folder)
    shutil.rmtree(folder)
    assert follower.refresh() == number  # while there is nothing, answers stay those of before
    shutil.copytree(published / "base-000000001", folder / "base-000000001")
    assert follower.refresh() == 1
    shutil.copytree(published / "base-000000001", folder / "base-000000099")
    (folder / "base-000000099/dense.bin").write_bytes(b"")
    late = Follower(folder)
    assert late.number == 1 and "base-000000099" in (late.problem or "")


def publish_anew(published: Path, folder: Path, number: int) -> None:
    """Write to a folder, in place of what it holds, publications as another run of the same weights would."""
    shutil.rmtree(folder)
    names = sorted((path.name for path in published.iterdir()), key=lambda name: int(name.partition("-")[2]))
    last = ""
    for name in names[:number]:
        shutil.copytree(published / name, folder / name)
        manifest = json.loads((folder / name / "manifest.json").read_text())
        manifest |= {"follows": last} if last else {"made": {**manifest["made"], "run": "another"}}
        last = manifest["sha256"] = checksum(manifest)
        (folder / name / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_follower_begins_anew_however_far_another_run_has_come(published: Path, tmp_path: Path, number: int) -> None:
    """Also where the other run has published as much when the follower looks, or more."""
    folder = tmp_path / "copy"
    for before in (1, 2, 3, 4):
        publish_anew(published, folder, before) if folder.exists() else folder.mkdir()
        for name in sorted(path.name for path in published.iterdir())[:before]:
            shutil.copytree(published / name, folder / name, dirs_exist_ok=True)
        follower = Follower(folder)
        assert (follower.number, follower.problem) == (before, None)
        publish_anew(published, folder, number)
        follower.refresh_or_tell()
        assert (follower.number, follower.problem) == (number, None), before
        assert follower.scorer.manifest["made"]["run"] == "another"


def test_a_base_that_comes_while_a_follower_looks_is_no_gap(published: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """A base and its delta appear after the follower has looked for bases."""
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    follower, last = Follower(folder), Follower(published).number
    numbers = follower._numbers

    def appear_after_bases(kind: str) -> list[int]:
        seen = numbers(kind)
        if kind == "base":
            (folder / f"delta-{last + 2:09d}").mkdir(exist_ok=True)
        return seen

    monkeypatch.setattr(follower, "_numbers", appear_after_bases)
    assert follower.refresh() == last


def test_a_follower_goes_on_after_any_error(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = Follower(published)
    monkeypatch.setattr(follower, "refresh", lambda: 1 // 0)
    follower.refresh_or_tell()
    assert "ZeroDivisionError" in (follower.problem or "")
    monkeypatch.undo()
    follower.refresh_or_tell()
    assert follower.problem is None


def test_seconds_are_a_number_of_any_type(published: Path, tmp_path: Path) -> None:
    base, delta, *_ = sorted(path.name for path in published.iterdir())
    shutil.copytree(published / base, tmp_path / base)
    follower, until = Follower(tmp_path, np.float32(0.05)), time.monotonic() + 60
    shutil.copytree(published / delta, tmp_path / delta)
    while follower.number == 1 and time.monotonic() < until:
        time.sleep(0.05)
    assert follower.number == 2


def test_what_no_follower_can_follow() -> None:
    for folder in (None, 3, ["published"], "nowhere"):
        with pytest.raises(
            ExportError, match=r"the folder is of type \w+, but must be the path|'nowhere' holds no base"
        ):
            Follower(folder)  # type: ignore[arg-type]
    for every_s in ("5", [1], 0, float("nan"), float("inf")):
        with pytest.raises(ExportError, match=r"every_s is .*, but must be seconds above 0, or None"):
            Follower("nowhere", every_s)  # type: ignore[arg-type]
