"""`recsys.train`, `recsys.open_run`: a run from Python, with Arrow tables."""

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from launch import ROOT, run_recsys
from omegaconf import OmegaConf
from retrieval import NUM_ITEMS, train_towers, write_retrieval

import recsys
from recsys import errors
from recsys.config import load_config
from recsys.data import inputs
from recsys.errors import LAUNCHER_FILE, UserError, read_launcher_error
from recsys.serving import api
from recsys.serving.embeddings import rows_of_tower, table_of
from recsys.serving.finished import Finished
from recsys.serving.predict import check_recommends
from recsys.serving.score import ExportError, as_table


@pytest.mark.slow
def test_a_ranker(tmp_path: Path) -> None:
    config = OmegaConf.to_container(OmegaConf.load(ROOT / "configs/dlrm_sample.yaml"))
    for role in ("train", "valid", "test"):
        config["data"][role] = str(ROOT / "data/sample" / role)
    run = recsys.train(config, "train.max_steps=10", f"run.dir={tmp_path}/run")
    rows = pq.read_table(ROOT / "data/sample/test")
    table = run.predict(rows, keep=["user_id", "price"])
    assert table.drop_columns("score").equals(rows.select(["user_id", "price"]))
    run_recsys("predict", f"{tmp_path}/run", ROOT / "data/sample/test", f"{tmp_path}/out")
    by_command = pq.read_table(tmp_path / "out")
    np.testing.assert_allclose(table["score"], by_command["score"], rtol=0, atol=1e-6)
    torch.set_float32_matmul_precision("high")  # as another run that is opened, with precision.tf32
    again = run.predict(rows.slice(3, 5))
    assert torch.get_float32_matmul_precision() == "highest"
    np.testing.assert_allclose(again["score"], table["score"].slice(3, 5), rtol=0, atol=1e-6)
    assert run.embeddings("hour").num_rows == 24
    for wrong, said in ((7, "DATA is of type int"), (rows.drop_columns("price"), "has no column 'price'")):
        with pytest.raises(UserError, match=said):
            run.predict(wrong)
    with pytest.raises(UserError, match="has no vectors of items"):
        run.recommend(rows)
    other = recsys.open_run(f"{tmp_path}/run", "run.device=cpu")  # in the same group of one process
    assert re.fullmatch(f"<Run {tmp_path}/run at step \\d+>", repr(other))
    assert other.predict(rows.slice(3, 5)).equals(again)
    with pytest.raises(UserError, match="this process has a run open on cpu"):
        recsys.open_run(f"{tmp_path}/run", "run.device=cuda")
    with pytest.raises(UserError, match=r"^RUN: 'nowhere' does not exist"):
        recsys.open_run("nowhere")


def test_items_are_read_once_and_for_recommendations_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, users = train_towers(tmp_path, "train.epochs=1"), pq.read_table(tmp_path / "valid.parquet")
    reads, read = list[str](), inputs.read_corpus
    monkeypatch.setattr(inputs, "read_corpus", lambda config, items: reads.append(items.key) or read(config, items))
    without, opened = recsys.open_run(run, "data.items=nowhere"), recsys.open_run(run)
    pairs = pq.read_table(tmp_path / "train.parquet").slice(0, 40)
    assert without.predict(pairs).equals(opened.predict(pairs)) and not reads
    with pytest.raises(UserError, match=r"config key 'data.items': '.*/nowhere' does not exist"):
        without.recommend(users)
    best = opened.recommend(users, k=5)
    assert opened.recommend(users.slice(7, 2), k=5).equals(best.slice(7, 2)) and reads == ["data.items"]
    assert opened.embeddings("item", pq.read_table(tmp_path / "items.parquet").slice(0, 3)).num_rows == 3
    assert opened.recommend(users, k=5).equals(best)
    monkeypatch.chdir(run)
    beside = recsys.open_run(".", "run.num_threads=1", "data.items=../items.parquet")
    assert torch.get_num_threads() == 1
    monkeypatch.chdir("/")  # files of the run that are read later are found all the same
    assert beside.embeddings("tables.user", pairs).equals(opened.embeddings("tables.user", pairs))
    assert beside.recommend(users, k=5).equals(best)
    texts = pairs.set_column(0, "user", pairs["user"].cast(pa.string()))
    with pytest.raises(UserError, match=r"its ids are string .* and int64 .* of data\.train"):  # as its footers say
        beside.predict(texts)


@pytest.mark.slow
def test_two_towers(tmp_path: Path) -> None:
    run = recsys.train(write_retrieval(tmp_path), "train.epochs=2", f"run.dir={tmp_path}/run")
    users = pq.read_table(tmp_path / "valid.parquet")
    best = run.recommend(users, k=5)
    items, of_users = run.embeddings("item"), run.embeddings("user", users)
    assert best.column_names == ["user", "items", "scores"] and items.num_rows == NUM_ITEMS
    vectors = [np.stack(table["vector"].to_numpy(zero_copy_only=False)) for table in (of_users, items)]
    scores = vectors[0] @ vectors[1].T
    place = {item: number for number, item in enumerate(items["item"].to_pylist())}
    for row, seen, own in zip(best.to_pylist(), users["seen"].to_pylist(), scores, strict=True):
        own[[place[item] for item in seen]] = -np.inf
        np.testing.assert_allclose(np.sort(own)[-5:][::-1], row["scores"], rtol=0, atol=1e-6)
        np.testing.assert_allclose(own[[place[item] for item in row["items"]]], row["scores"], rtol=0, atol=1e-6)
    assert isinstance(best, pa.Table)


def test_mistakes_of_arguments_are_told_before_anything_starts() -> None:
    train: Any = recsys.train
    for config, number, said in (
        (None, 1, "the config is of type NoneType, but must be the path"),
        ({"train": {"max_steps": object()}}, 1, r"config key 'train\.max_steps': .*; values are texts"),
        ("my.yaml", 0, "num_processes is 0, but must be a whole number above 0"),
        ("my.yaml", 1.5, r"num_processes is 1\.5"),
        ("my.yaml", None, "num_processes is None"),
    ):
        with pytest.raises(UserError, match=said):
            train(config, num_processes=number)
    with pytest.raises(UserError, match=r"overrides: found .* must be a list of texts"):
        train(str(ROOT / "configs/dlrm_sample.yaml"), {"train.epochs": 3}, ["seed=1"])
    opened: Any = recsys.open_run
    for change in (None, 3, ["data.filter=null"], {"data.filter": None}):
        with pytest.raises(UserError, match=r"overrides: found .* must be a list of texts"):
            opened("nowhere", change)


def test_names_of_vectors_and_numbers_of_items_have_their_type() -> None:
    config = load_config(ROOT / "configs/two_tower_sample.yaml", ["data.items=nowhere"])
    run = Finished(config, Path("nowhere"), ())
    for name in (None, 3, ["item"], b"item", "items"):
        with pytest.raises(UserError, match=r"^the run has no vectors of '.*known: user, item, tables\.user"):
            table_of(run, name, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--keep names columns of users or items, but vectors of table 'category'"):
        table_of(run, "category", ["item_id"])
    assert table_of(run, "item", ["item_id"]) is None
    for k in (0, None, "20", 1.0):
        with pytest.raises(UserError, match=r"^k is .*must be a whole number above 0"):
            check_recommends(run, k)  # type: ignore[arg-type]
    check_recommends(run, np.int64(20))


def test_only_the_first_rows_are_read_of_the_runs_items_and_where_the_user_asks_for_it() -> None:
    options = ["data.items=nowhere", "data.max_rows=3"]
    config = load_config(ROOT / "configs/two_tower_sample.yaml", options)
    trained, asked = Finished(config, Path("nowhere"), ()), Finished(config, Path("nowhere"), ("data.max_rows",))
    assert rows_of_tower(trained, "item", None, None).max_rows == 3  # as in evaluate, recommend and export
    assert [run.given("rows", "elsewhere", None).max_rows for run in (trained, asked)] == [None, 3]


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_mistake_that_training_tells_is_raised_as_it_is_told(num_processes: int, tmp_path: Path) -> None:
    where = f"data.train={tmp_path}/nowhere", f"run.dir={tmp_path}/run"
    with pytest.raises(UserError) as raised:
        recsys.train(ROOT / "configs/dlrm_sample.yaml", *where, num_processes=num_processes)
    assert str(raised.value) == f"config key 'data.train': '{tmp_path}/nowhere' does not exist"


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_ctrl_c_saves_as_it_does_of_the_command(num_processes: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = f"""import signal
import recsys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
try:
    recsys.train("configs/dlrm_sample.yaml", "train.epochs=10000", "run.dir={run}", num_processes={num_processes})
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        written = run / "metrics.jsonl"
        while not (written.exists() and written.read_text()):  # before the first steps nothing is to be saved
            assert process.poll() is None
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    assert "interrupted" in said.splitlines() and (run / "checkpoints/latest").exists()
    log = (run / "logs/rank_0.log").read_text()
    assert log.rstrip().endswith(f'go on with: the same call, recsys.train(…, "run.dir={run}", "run.resume=true")')


def test_what_a_process_has_told_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "error.json"
    assert read_launcher_error(told) is None
    monkeypatch.setenv(LAUNCHER_FILE, str(told))
    monkeypatch.setattr(errors, "_end_process", lambda status: None)
    end: Any = errors.end_run
    for error, lines in (
        (UserError("no room for 'ä'", "table a: 3 GiB", "table b"), ("no room for 'ä'", "table a: 3 GiB", "table b")),
        (errors.StuckError("rank 1 waits"), ("rank 1 waits",)),
        (ZeroDivisionError("of the program itself"), None),
    ):
        end(error)
        read = read_launcher_error(told)
        assert (read and read.args) == lines


def test_a_config_of_python_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "configs/dlrm_sample.yaml", tmp_path / "base.yaml")
    monkeypatch.chdir(tmp_path)
    changes = {"base": "base.yaml", "data": {"train": tmp_path}, "seed": np.int64(3), "model": {"top_mlp": (8, 4)}}
    (tmp_path / "aside").mkdir()
    config = load_config(api._config_file(changes, tmp_path / "aside"))
    assert config.data.train == str(tmp_path) and config.seed == 3 and config.model.top_mlp == [8, 4]


def test_one_of_several_ranks_opens_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for attempt in (lambda: recsys.open_run("nowhere"), lambda: recsys.train("nowhere.yaml")):
        with pytest.raises(UserError, match="in one process only, but a launcher started this one as rank 0 of 2"):
            attempt()
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(api, "_worlds", {})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(
        UserError, match=r"is in a process group of torch\.distributed, .* call .*destroy_process_group"
    ):
        recsys.open_run("nowhere")


def test_a_fork_of_a_process_with_an_open_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for ever in its first exchange, of one rank with itself."""
    monkeypatch.setattr(api, "_worlds", {os.getppid(): None})
    run = object.__new__(api.Run)
    for attempt in (
        lambda: recsys.open_run("nowhere"),
        lambda: run.predict("nowhere"),
        lambda: run.embeddings("item"),
    ):
        with pytest.raises(UserError, match=r"forked from one that has a run open, .*get_context\('spawn'\)"):
            attempt()


def test_a_trained_class_of_ones_own_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "run_attended", lambda command, environment: 0)
    opened = list[Any]()
    monkeypatch.setattr(api, "open_run", lambda run, **named: opened.append((run, named)))
    recsys.train(ROOT / "configs/dlrm_sample.yaml", "run.dir=runs/mine")
    assert opened == [("runs/mine", {"trust_code": True})]


def test_runs_that_begin_in_one_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "20261128-120000")
    opened, config = list[str](), ROOT / "configs/dlrm_sample.yaml"

    def begin(command: Sequence[str], environment: Mapping[str, str]) -> int:
        (Path(command[-1].removeprefix("run.dir=")) / "config.yaml").touch()
        return 0

    monkeypatch.setattr(api, "run_attended", begin)
    monkeypatch.setattr(api, "open_run", lambda run, **named: opened.append(run))
    recsys.train(config)
    recsys.train(config)
    monkeypatch.setattr(api, "run_attended", lambda command, environment: 1)
    with pytest.raises(subprocess.CalledProcessError):
        recsys.train(config)
    assert opened == ["runs/dlrm_sample-20261128-120000", "runs/dlrm_sample-20261128-120000-2"]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [Path(run).name for run in opened]
    with pytest.raises(UserError, match=r"'run\.resume' continues the run in run\.dir, which is not set"):
        recsys.train(config, "run.resume=true")


def test_names_to_keep_are_a_list() -> None:
    for keep in ("user_id", [3], 3, True):
        with pytest.raises(UserError, match=r"keep: found .*, but must be a list of texts, such as \['user_id'\]"):
            api._texts("keep", keep, "'user_id'")
    assert api._texts("keep", iter(["user_id"]), "'user_id'") == ["user_id"]  # an iterator gives its texts once
    unequal = api._as_files({"a": [1, 2], "b": [1]})
    with pytest.raises(UserError, match=r"a mapping of columns of the same length \(Column 1 .* length 2"), unequal:
        pass
    for letters in ("ab", b"ab", {"a": 1, "b": 2}):
        said = rf"\(?column 'b' is of type {type(letters).__name__}, but must be a list of values"
        with (
            pytest.raises(UserError, match=rf"of the same length {said}"),
            api._as_files({"a": ["x", "y"], "b": letters}),
        ):
            pass
        with pytest.raises(ExportError, match=rf"rows are of type dict, .*: {said}"):
            as_table({"a": ["x", "y"], "b": letters})
    for large in ([2**63], [1, None, 2**64 - 1], [[2**63]]):
        with (
            pytest.raises(UserError, match=r"same length, numbers from 2.*63 on as uint64"),
            api._as_files({"a": large}),
        ):
            pass
        with pytest.raises(ExportError, match=r"rows are of type dict, .* numbers from 2.*63 on as uint64"):
            as_table({"a": large})
    with pytest.raises(ExportError, match="column 'a': 'utf-8' codec can't encode"):
        as_table({"a": ["\ud800"]})
    assert as_table({"a": np.array([2**63], np.uint64)})["a"].to_pylist() == [2**63]


class Frame:
    """What pandas' data frames have that Arrow or this API looks at."""

    columns = ("a",)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise pa.ArrowInvalid("Could not convert 'x' with type str", "Conversion failed for column a with type object")


def test_what_arrow_takes_no_values_of_is_told_with_its_column() -> None:
    given: Any = MappingProxyType({"a": np.array([1, 2])})  # as a file of np.load, no dict
    with api._as_files(given) as folder:
        assert pq.read_table(folder)["a"].to_pylist() == [1, 2]
    for data, said in (
        ({"b": [1], "a": np.array(["x", math.nan], object)}, r"dict, .* length \(column 'a': .*float"),
        ({"b": [1], "a": np.ones((1, 1))}, r"dict, .* length \(column 'a': only handle 1-dimensional arrays\)"),
        (
            Frame(),
            r"Frame, .* \(Could not convert 'x' with type str; Conversion failed for column a with type object\)",
        ),
        (7, r"int, .* a mapping of columns of the same length$"),
    ):
        with pytest.raises(UserError, match=f"^DATA is of type {said}"), api._as_files(data):
            pass


def test_dictionaries_that_hold_a_null_are_written_as_what_they_stand_for() -> None:
    entries, of_two = pa.array(["a", None, "b"]), pa.array([0, 2, 2, 3, 4])
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, None]), entries)
    structs = pa.StructArray.from_arrays([texts], ["x"])
    forms = [texts, structs, pa.ListArray.from_arrays(of_two.cast(pa.int32()), structs)]
    forms += [pa.DictionaryArray.from_arrays(texts.indices, entries.cast(pa.string_view())), texts.slice(1, 2)]
    forms += [pa.LargeListArray.from_arrays(of_two, texts), pa.FixedSizeListArray.from_arrays(texts, 2)]
    forms += [pa.ListViewArray.from_arrays(pa.array([2, 0], pa.int32()), pa.array([2, 2], pa.int32()), texts)]
    for form in forms:
        plain = pa.chunked_array([form.slice(0, 0), form.slice(0, 1).filter(pa.array([False])), form])
        with api._as_files(pa.table({"c": plain, "d": pa.array(["x"] * len(form)).dictionary_encode()})) as folder:
            found = pq.read_table(folder)
            assert found["c"].to_pylist() == form.to_pylist() and pa.types.is_dictionary(found["d"].type), form.type
