"""Publishing: a base and its deltas are the export of that step, and who follows never answers from half of one."""

import json
import shutil
import signal
import sys
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from kills import kill
from launch import ROOT, records_of, run_recsys
from retrieval import write_retrieval

pytest.importorskip("onnxruntime")

sys.path.insert(0, str(ROOT / "recsys" / "serving"))  # as it stands in an export

from follow import Follower
from score import ExportError, Scorer

from recsys.errors import UserError
from recsys.runtime.run_lock import RunLock
from recsys.serving import score
from recsys.serving.export_tables import Files
from recsys.serving.publish import Publisher, next_number
from recsys.serving.rebase import number_of, rebase

pytestmark = pytest.mark.slow
_PLAN = ["tables.user.sharding_type=row_wise", "tables.item.sharding_type=column_wise", "tables.item.embedding_dim=16",
         "optimizer.tables.name=adagrad"]  # fmt: skip
_EXPERTS = ["tables.user={experts: {others: [user_2, user_3], by: hash, active: 2, gate: features}}",
            "tables.user_{2..3}={num_embeddings: 100, embedding_dim: 4, projected_dim: 8}",
            "train.dense_sharding=optimizer"]  # fmt: skip


def train(folder: Path, *arguments: Any, nproc: int = 1, before: Any = None, code: int = 0) -> Path:
    """Train with a publication every 20 steps; return the run directory."""
    run_recsys("train", *arguments_of(folder, *arguments), nproc=nproc, before=before, status=code)
    return folder / "run"


def arguments_of(folder: Path, *arguments: Any) -> list[str]:
    publish = f"train.publish={{dir: {folder}/published, every_steps: 20, tables: {{TABLES}}}}"
    tables = next((text for text in arguments if text.startswith("tables=")), "tables=fp32").partition("=")[2]
    rest = [text for text in arguments if not text.startswith("tables=")]
    return [str(folder / "config.yaml"), f"run.dir={folder}/run", publish.replace("{TABLES}", tables), *rest]


def exported(run: Path, out: Path, *options: str) -> Path:
    run_recsys("export", run, out, *options)
    return out


def assert_same(followed: Scorer, export: Path) -> None:
    """Compare bit for bit the tables, the dense part by what it gives, and the vectors of items."""
    whole = Scorer(export)
    for name, rows in whole._vectors.items():
        everything = np.arange(whole.manifest["tables"][name]["vectors"]["rows"])
        assert np.array_equal(followed._vectors[name].bytes_of(everything), rows.bytes_of(everything)), name
    assert np.array_equal(followed._item_vectors, whole._item_vectors)


@pytest.mark.parametrize(
    ("nproc", "options"),
    [
        (1, []),
        (2, _PLAN),
        (4, _PLAN),
        (2, ["tables=int8", "tables.item.sharding_type=data_parallel"]),
        (2, _EXPERTS),
        (2, ["tables.user={l2_all_rows: 0.1, num_embeddings: 400}", "tables.item.num_embeddings=9000"]),
    ],
)
def test_base_and_deltas_are_the_export(tmp_path: Path, nproc: int, options: list[str]) -> None:
    write_retrieval(tmp_path)
    run = train(tmp_path, *options, nproc=nproc)
    published = tmp_path / "published"
    names = sorted(path.name for path in published.iterdir())
    assert names[0] == "base-000000001"
    assert names[1:] == [f"delta-{n:09d}" for n in range(2, len(names) + 1)]
    assert len(names) > 3
    follower = Follower(published)
    tables = next((text.partition("=")[2] for text in options if text.startswith("tables=")), "fp32")
    export = exported(run, tmp_path / "export", "--tables", tables)
    assert follower.step == Scorer(export).manifest["made"]["step"]
    assert_same(follower.scorer, export)
    dense = json.loads((export / "manifest.json").read_text())["files"]["dense.bin"]["sha256"]
    assert json.loads((published / names[-1] / "manifest.json").read_text())["files"]["dense.bin"]["sha256"] == dense
    users = pq.read_table(tmp_path / "valid.parquet")
    assert follower.scorer.recommend(users, 5).equals(Scorer(export).recommend(users, 5))


@pytest.mark.parametrize(("nproc", "options"), [(1, []), (2, [*_PLAN, "tables=int8"])])
def test_deltas_that_outgrow_the_base_become_one(tmp_path: Path, nproc: int, options: list[str]) -> None:
    write_retrieval(tmp_path)
    run = train(tmp_path, *options, "train.publish.every_steps=3", nproc=nproc)
    published = tmp_path / "published"
    names = sorted(path.name for path in published.iterdir())
    *_, before, last = sorted(published.glob("base-*"))
    between = [f"delta-{n:09d}" for n in range(number_of(before) + 1, number_of(last))]
    assert len(between) > 1 and set(between) <= set(names) and number_of(before) > 1
    (tmp_path / "copy").mkdir()
    for name in (before.name, *between):
        shutil.copytree(published / name, tmp_path / "copy" / name)
    follower, whole = Follower(tmp_path / "copy"), Scorer(last, verify=True)
    assert follower.step == whole.manifest["made"]["step"] and (last / "score.py").stat().st_nlink > 1
    assert_same(follower.scorer, last)
    users = pq.read_table(tmp_path / "valid.parquet")
    assert follower.scorer.recommend(users, 5).equals(whole.recommend(users, 5))
    tables = next((text.partition("=")[2] for text in options if text.startswith("tables=")), "fp32")
    export = exported(run, tmp_path / "export", "--tables", tables)
    assert_same(Follower(published).scorer, export)
    described = [json.loads((folder / "manifest.json").read_text()) for folder in (last, export)]
    for manifest in described:
        manifest["files"] = sorted(manifest["files"])
        manifest["beside"].pop("dense.pt2", None)
        del manifest["sha256"], manifest["made"]
    assert described[0] == described[1]


def leave_room_for_two_bases() -> None:
    from recsys.serving import publish

    run = publish.run_command

    def run_where_there_is_room(*words: str, **options: Any) -> UserError | None:
        folder = next(Path(word).parent for word in words if "/base-" in word)
        is_full = len([*folder.glob("base-*")]) > 1
        return UserError("No space left on device") if is_full else run(*words, **options)

    publish.run_command = run_where_there_is_room  # type: ignore[assignment]


def test_a_full_disk_is_published_to_again(tmp_path: Path) -> None:
    """What no follower goes by any more makes room; what followers go by stays."""
    write_retrieval(tmp_path)
    run = train(tmp_path, "train.publish.every_steps=3", before=leave_room_for_two_bases)
    lines = (run / "logs" / "rank_0.log").read_text().splitlines()
    problems = ["is not published" in line for line in lines if "published" in line]
    assert sum(problems) > 0 and not any(map(all, pairwise(problems))), lines
    follower = Follower(tmp_path / "published")
    assert follower.step == json.loads((run / "result.json").read_text())["steps"] and follower.problem is None
    assert_same(follower.scorer, exported(run, tmp_path / "export"))


PLACES = {"rows": (Files, "write", True), "manifest": (Publisher, "_complete", False)}
PLACES["renamed"] = (Publisher, "_complete", True)


def kill_at_the_second(owner: Any, name: str, after: bool) -> None:
    whole, calls = getattr(owner, name), count(1)

    def part(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == 2
        if last and not after:
            kill()
        result = whole(*arguments, **named)
        if last:
            kill()
        return result

    setattr(owner, name, part)


@pytest.mark.parametrize("place", PLACES)
def test_killed_while_publishing(tmp_path: Path, place: str) -> None:
    write_retrieval(tmp_path)
    before = partial(kill_at_the_second, *PLACES[place])
    train(tmp_path, "train.checkpoint_every_steps=10", before=before, code=-signal.SIGKILL)
    Follower(tmp_path / "published")  # what is there can be followed
    run = train(tmp_path, "run.resume=true")
    published = tmp_path / "published"
    assert not list(published.glob("*.tmp"))
    follower = Follower(published)
    assert_same(follower.scorer, exported(run, tmp_path / "export"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_retrieval(folder)
    train(folder, before=save_slowly)
    return folder / "published"


def save_slowly() -> None:
    import time

    from recsys.checkpoint import Checkpoints

    whole = Checkpoints.save

    def save(*arguments: Any) -> None:
        time.sleep(1)
        whole(*arguments)

    Checkpoints.save = save  # type: ignore[method-assign]


def _damage_altered(folder: Path) -> None:
    path = folder / "delta-000000003/tables/user.bin"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _damage_torn(folder: Path) -> None:
    (folder / "delta-000000003/dense.bin").write_bytes(b"")


def _damage_missing(folder: Path) -> None:
    shutil.rmtree(folder / "delta-000000003")


def _damage_repeated(folder: Path) -> None:
    shutil.rmtree(folder / "delta-000000003")
    shutil.copytree(folder / "delta-000000002", folder / "delta-000000003")


def _damage_exchanged(folder: Path) -> None:
    (folder / "delta-000000003").rename(folder / "aside")
    (folder / "delta-000000004").rename(folder / "delta-000000003")
    (folder / "aside").rename(folder / "delta-000000004")


DAMAGES = [_damage_altered, _damage_torn, _damage_missing, _damage_repeated, _damage_exchanged]  # of the third


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_delta_that_is_not_whole_is_named_and_not_applied(published: Path, tmp_path: Path, damage: Any) -> None:
    shutil.copytree(published, tmp_path / "copy")
    damage(tmp_path / "copy")
    follower = Follower(tmp_path / "copy")
    assert follower.number == 2
    assert "delta-000000003" in (follower.problem or "")
    with pytest.raises(ExportError, match="delta-000000003"):
        follower.refresh()
    assert follower.number == 2


def _damage_last(folder: Path) -> None:
    shutil.rmtree(max(folder.glob("delta-*")))


@pytest.mark.parametrize("damage", [*DAMAGES, _damage_last])
def test_deltas_that_are_not_whole_become_no_base(published: Path, tmp_path: Path, damage: Any) -> None:
    """Also where one of them is gone: its rows would be those of the base."""
    copy = tmp_path / "copy"
    shutil.copytree(published, copy)
    out = copy / f"base-{1 + max(map(number_of, copy.iterdir())):09d}"
    wrong = max(copy.glob("delta-*")).name if damage is _damage_last else "delta-000000003"
    damage(copy)
    with pytest.raises(score.ExportError, match=wrong):
        rebase(out)
    assert not out.exists()


def test_delta_bytes_are_those_of_touched_rows(published: Path) -> None:
    """At most twice the bytes of the rows, which come with their number, beside the dense part."""
    manifest = json.loads((published / "base-000000001/manifest.json").read_text())
    deltas = list(published.glob("delta-*"))
    assert deltas and manifest["tables"]
    for delta in deltas:
        for name, table in manifest["tables"].items():
            size, stride = (delta / f"tables/{name}.bin").stat().st_size, table["vectors"]["stride"]
            assert size % (stride + 8) == 0
            assert size <= 2 * stride * (size // (stride + 8))
            assert size // (stride + 8) <= table["vectors"]["rows"]


def test_a_folder_of_others_is_left_as_it_is(tmp_path: Path) -> None:
    others = [".git/config", ".ssh/id", "notes.tmp/a", "base-notes/a", "delta-3.txt"]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    half = [tmp_path / name for name in (".base-000000001.x7_a", "base-000000002.tmp", "delta-000000003.tmp")]
    for folder in half:
        (folder / "tables").mkdir(parents=True)
    for name in ("notes.tmp", "base-notes", "delta-3.txt"):
        with pytest.raises(UserError, match=r"'train\.publish\.dir': .* which was not published; name another folder"):
            next_number(tmp_path, RunLock())
        assert all((tmp_path / other).exists() for other in others) and all(folder.exists() for folder in half)
        others = [other for other in others if not other.startswith(name)]
        (tmp_path / name).rename(tmp_path.parent / f"{tmp_path.name}-{name}")
    (tmp_path / "delta-000000041").mkdir()
    with RunLock() as lock:
        assert next_number(tmp_path, lock) == next_number(tmp_path, lock) == 42  # it is locked already
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", ".ssh", "delta-000000041"]


def test_a_folder_is_published_to_by_one_run_at_a_time(tmp_path: Path) -> None:
    write_retrieval(tmp_path)
    with RunLock() as lock:
        assert next_number(tmp_path / "published", lock) == 1
        (tmp_path / "published/base-000000001.tmp").mkdir()  # as of the run that has the lock
        before = sorted((tmp_path / "published").rglob("*"))
        told = run_recsys("train", *arguments_of(tmp_path), status=1)
        assert "error: config key 'train.publish.dir': another run publishes to" in told
        assert sorted((tmp_path / "published").rglob("*")) == before


def test_time_of_publishing_is_no_time_of_training(published: Path) -> None:
    """The whole one saves a checkpoint, whose time is left out once: after it no step is faster than others are."""
    speeds = [record["samples_per_s"] for record in records_of(published.parent / "run")]
    assert len(speeds) > 40 and max(speeds) < 1e6, max(speeds)
