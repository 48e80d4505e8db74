"""Ids that data.train shows no more give their rows to new ones: `train.init.evict_after_runs`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from days import CONFIG, GROW, Day, write_day
from launch import must_train

from recsys.config import load_config
from recsys.errors import UserError
from recsys.runtime.world import World
from recsys.training.resume import start_training

STATE = "table_optimizer/user/momentum1"


def unseen_runs(folder: Path) -> dict[int, int]:
    ids, unseen = pq.read_table(folder / "vocabulary/user.parquet").to_pydict().values()
    return dict(zip(ids, unseen, strict=True))


def test_users_come_and_go_and_the_table_stays_as_large(world: World, tmp_path: Path) -> None:
    """Ten users a day leave for good. A row that changes hands begins anew, and all others go on, with their state."""
    data = [write_day(tmp_path / f"d{i}", np.arange(10 * i, 10 * i + 20), i) for i in range(6)]
    day = Day(tmp_path / "r0", world, f"data.train={data[0]}").save()
    sizes, evict = [], "train.init.evict_after_runs=2"
    for i in range(1, 6):
        before, ids = day.tensors(), day.ids
        day = Day(tmp_path / f"r{i}", world, f"data.train={data[i]}", GROW, evict, source=day)
        here, sizes = day.tensors(), [*sizes, len(day.ids)]
        seen = {*range(10 * i, 10 * i + 20)}
        assert seen <= {*day.ids} and len({*day.ids}) == len(day.ids)
        for place, id_ in enumerate(day.ids):
            stayed = place < len(ids) and ids[place] == id_
            for name in ("tables/user", STATE):
                expected = before[name] if stayed else day.fresh[name]
                assert torch.equal(here[name][1 + place], expected[1 + place]), (i, id_, name)
        for name in ("tables/user", STATE):
            assert torch.equal(here[name][0], before[name][0]) and torch.equal(here[name][-4:], before[name][-4:])
        gone = len({*ids} - {*day.ids})
        rows = {"kept": 5 + len(ids) - gone, "new": 10} | ({"evicted": gone} if gone else {})
        assert day.loaded.rows == {"user": rows}
        told = [day.loaded.loaded[name] for name in ("tables/user", STATE)]
        assert told[0] == told[1] and "10 new" in told[0]
        assert day.inputs.facts is not None and not day.inputs.facts.unseen_runs  # in the file alone
        assert unseen_runs(day.folder) == {id_: max(0, i - id_ // 10) for id_ in day.ids}
        day.save()
    # On the first day nobody has been away twice; then ten go as ten come.
    assert sizes == [30, 30, 30, 30, 30]


def test_a_table_that_is_full_takes_new_ids(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Day(tmp_path / "a", world, f"data.train={write_day(tmp_path / 'd1', np.arange(20), 1)}").save()
    today = (f"data.train={write_day(tmp_path / 'd2', np.arange(13, 33), 2)}", GROW, "tables.user.num_embeddings=25")
    assert Day(tmp_path / "full", world, *today, source=first).ids == first.ids
    full = "table user is full: new ids that share the rows of num_buckets: 13; raise tables.user.num_embeddings"
    assert f"{full}, or set train.init.evict_after_runs, so that" in caplog.text
    caplog.clear()
    after = Day(tmp_path / "b", world, *today, "train.init.evict_after_runs=1", source=first)
    assert len(after.ids) == 20 and len({*after.ids} - {*first.ids}) == 13 and {*range(13, 20)} <= {*after.ids}
    assert "full" not in caplog.text
    patient = Day(tmp_path / "c", world, *today, "train.init.evict_after_runs=2", source=first).save()
    assert patient.ids == first.ids and f"{full}, or lower train.init.evict_after_runs=2" in caplog.text
    # A run that does not count ids passes on how long they have not been seen.
    passed = Day(tmp_path / "d", world, *today[::2], source=patient).save()
    assert unseen_runs(passed.folder) == unseen_runs(patient.folder) == {i: int(i < 13) for i in range(20)}
    third = Day(tmp_path / "e", world, *today, "train.init.evict_after_runs=2", source=passed)
    assert {*range(13, 20)} <= {*third.ids} and third.loaded.rows["user"]["evicted"] == 13


def test_ids_that_the_next_expert_has_are_not_told_as_left_out(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    width = "num_embeddings: 60, embedding_dim: 8, mapping: vocabulary, num_buckets: 4"
    experts = ("tables.user.experts.others=[cold]", f"tables.cold={{{width}}}", "tables.user.num_embeddings=25")
    first = Day(tmp_path / "a", world, f"data.train={write_day(tmp_path / 'd1', np.arange(20), 1)}", *experts).save()
    today = (f"data.train={write_day(tmp_path / 'd2', np.arange(13, 33), 2)}", GROW)
    second = Day(tmp_path / "b", world, *today, *experts, source=first)
    assert second.ids == first.ids and {*second.inputs.facts.vocabularies["cold"].to_pylist()} == {*range(20, 33)}
    assert "full" not in caplog.text
    Day(tmp_path / "c", world, *today, *experts, "tables.cold.num_embeddings=8", source=first)
    assert "table cold is full: new ids that share the rows of num_buckets: 10; raise tables.cold" in caplog.text


def test_a_file_of_ids_evicts_none(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Day(tmp_path / "a", world, f"data.train={write_day(tmp_path / 'd1', np.arange(20), 1)}").save()
    file = tmp_path / "ids.parquet"
    pq.write_table(pa.table({"id": range(13, 33)}), file)
    today = (f"data.train={write_day(tmp_path / 'd2', np.arange(13, 33), 2)}", GROW, f"tables.user.vocabulary={file}")
    second = Day(tmp_path / "b", world, *today, source=first)
    assert second.ids == [*first.ids, *range(20, 33)] and "evict_after_runs" not in caplog.text
    assert Day(tmp_path / "c", world, *today, "train.init.evict_after_runs=1", source=first).ids == second.ids
    assert "of which train.init.evict_after_runs evicts none; set tables.user.vocabulary=null to take" in caplog.text
    pq.write_table(pa.table({"id": ["a", "b"]}), file)
    with pytest.raises(
        UserError, match=rf"'tables.user.vocabulary': the ids of '{file}' and those of '.*cannot be compared"
    ):
        Day(tmp_path / "d", world, *today, source=first)


def test_where_nothing_grows_nothing_is_evicted(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG)
    keys = ["data.train=a", "train.init_from=b", "train.init.evict_after_runs=1"]
    with pytest.raises(
        UserError, match=r"'train.init.evict_after_runs' .* train.init.grow_vocabularies=true; set it too"
    ):
        load_config(tmp_path / "c.yaml", keys)
    with pytest.raises(UserError, match="evict_after_runs' must be at least 1, found 0"):
        load_config(tmp_path / "c.yaml", [*keys[:2], GROW, "train.init.evict_after_runs=0"])
    assert load_config(tmp_path / "c.yaml", [*keys, GROW]).train.init.evict_after_runs == 1


def test_a_day_that_goes_on_still_tells_what_it_began_with(world: World, tmp_path: Path) -> None:
    """Killed and started again, it must not lose how many rows were new and whose were evicted."""
    days = [write_day(tmp_path / f"d{i}", np.arange(10 * i, 10 * i + 20), i) for i in range(2)]
    first = Day(tmp_path / "a", world, f"data.train={days[0]}").save()
    second = Day(tmp_path / "b", world, f"data.train={days[1]}", GROW, "train.init.evict_after_runs=1", source=first)
    start_training(second.inputs, second.built, first.source(second.config), second.folder)
    began = (second.folder / "loaded.json").read_text()
    assert json.loads(began)["rows"] == {"user": {"kept": 15, "new": 10, "evicted": 10}}
    second.save()
    goes_on = replace(second.source(second.config), init=None)
    assert start_training(second.inputs, second.built, goes_on, second.folder).step == 1
    assert (second.folder / "loaded.json").read_text() == began


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((3, "row_wise", "FP16"), (2, "column_wise", "FP32"), (2, "data_parallel", "FP16"), (3, "auto", "FP32"))
]


@pytest.mark.parametrize("nproc, kind, data_type", [(2, "row_wise", "FP32"), *SLOW])
def test_all_ranks_evict_alike(nproc: int, kind: str, data_type: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)

    def train(run: str, *options: str, nproc: int = 1) -> None:
        always = ("optimizer.tables.name=adagrad", f"tables.user.data_type={data_type}")
        must_train(str(tmp_path / "config.yaml"), f"run.dir={tmp_path}/{run}", *options, *always, nproc=nproc)

    days = [write_day(tmp_path / f"d{i}", np.arange(10 * i, 10 * i + 20), i) for i in range(2)]
    train("a", f"data.train={days[0]}")
    start = (f"data.train={days[1]}", f"train.init_from={tmp_path}/a", GROW, "train.init.evict_after_runs=1")
    train("b", *start, f"tables.user.sharding_type={kind}", nproc=nproc)
    train("one", *start)
    assert json.loads((tmp_path / "b/loaded.json").read_text())["rows"]["user"] == {
        "kept": 15,
        "new": 10,
        "evicted": 10,
    }
    assert unseen_runs(tmp_path / "b") == unseen_runs(tmp_path / "one") == dict.fromkeys(range(10, 30), 0)
    found = [load_tables(tmp_path / run / "checkpoints/step-000000003", "") for run in ("b", "one")]
    tolerances = {"rtol": 1e-4, "atol": 1e-6} if data_type == "FP32" else {"rtol": 2e-3, "atol": 1e-4}
    for name in found[1]:
        if name.startswith(("tables/", "table_optimizer/", "dense/")):
            torch.testing.assert_close(found[0][name], found[1][name], **tolerances)
    before = load_tables(tmp_path / "a/checkpoints/step-000000003", "")
    assert before["tables/user"].shape == found[0]["tables/user"].shape
