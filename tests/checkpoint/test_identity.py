"""What a run that goes on, or begins with another's weights, takes: the same rows and numbers, or a refusal by name."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from days import CONFIG, GROW, Day, write_day
from launch import fork_train, must_train
from retrieval import write_retrieval

from recsys.checkpoint import Checkpoints, Source, TrainState
from recsys.checkpoint.tensor_files import LocalShard, LocalTensor
from recsys.config import load_config
from recsys.data.inputs import Inputs, open_inputs
from recsys.errors import UserError
from recsys.runtime.world import World
from recsys.tables.spec import fill_initial
from recsys.training.build import build_model
from recsys.training.learning import learn_facts
from recsys.training.resume import check_files, start_training


def test_a_vocabulary_grows_from_day_to_day(world: World, tmp_path: Path) -> None:
    """Ids keep their rows and state, shared rows move behind the new ones, and new rows are those of a new table."""
    data = [write_day(tmp_path / f"d{i}", np.arange(10 * i, 10 * i + 20), i) for i in range(4)]
    day = Day(tmp_path / "r0", world, f"data.train={data[0]}").save()
    assert len(day.ids) == 20
    for i in range(1, 4):
        before, ids = day.tensors(), day.ids
        day = Day(tmp_path / f"r{i}", world, f"data.train={data[i]}", GROW, source=day)
        assert day.ids[: len(ids)] == ids and sorted(day.ids) == list(range(10 * i + 20))
        # As many rows again: the most frequent of the new ids first.
        users = pq.read_table(data[i]).column("user").to_numpy()
        counts = [int((users == user).sum()) for user in day.ids[len(ids) :]]
        assert counts == sorted(counts, reverse=True) and len(counts) == 10
        here, old = day.tensors(), 1 + len(ids)
        for name in ("tables/user", "table_optimizer/user/momentum1"):
            assert torch.equal(here[name][:old], before[name][:old])
            assert torch.equal(here[name][-4:], before[name][-4:])
            assert torch.equal(here[name][old:-4], day.fresh[name][old:-4])
        initial = torch.empty(len(day.ids) + 5, 8)
        fill_initial(initial, 0, 0, day.config.seed, "user", len(initial) ** -0.5)
        assert torch.equal(here["tables/user"][old:-4], initial[old:-4])
        assert day.loaded.rows == {"user": {"kept": old + 4, "new": 10}}
        assert torch.equal(here["tables/item"], before["tables/item"])
        day.save()
    assert pq.read_table(tmp_path / "r3/vocabulary/user.parquet").column("id").to_pylist() == day.ids


def test_a_vocabulary_grows_up_to_its_bound(world: World, tmp_path: Path) -> None:
    first = Day(tmp_path / "a", world, f"data.train={write_day(tmp_path / 'd1', np.arange(20), 1)}").save()
    today = f"data.train={write_day(tmp_path / 'd2', np.arange(20, 40), 2)}"
    for bound, number in ((25, 20), (28, 23), (60, 40)):
        grown = Day(tmp_path / f"b{bound}", world, today, GROW, f"tables.user.num_embeddings={bound}", source=first)
        assert len(grown.ids) == number and grown.ids[:20] == first.ids
        assert grown.config.tables["user"].num_embeddings == number + 5
    rare = Day(tmp_path / "rare", world, today, GROW, "tables.user.min_count=1000", source=first)
    assert rare.ids == first.ids
    assert Day(tmp_path / "same", world, today, source=first).ids == first.ids  # without being asked
    with pytest.raises(UserError, match=r"num_embeddings' is 24, but the vocabulary has 20 ids, .* need 25 rows"):
        Day(tmp_path / "less", world, today, "tables.user.num_embeddings=24", source=first)


def test_a_file_of_ids_is_honoured_or_refused(world: World, tmp_path: Path) -> None:
    data = f"data.train={write_day(tmp_path / 'd', np.arange(20), 1)}"
    first = Day(tmp_path / "a", world, data).save()
    file, key = tmp_path / "ids.parquet", f"tables.user.vocabulary={tmp_path}/ids.parquet"
    pq.write_table(pa.table({"id": first.ids}), file)
    assert Day(tmp_path / "same", world, data, key, source=first).ids == first.ids
    for ids, new in ((first.ids[::-1], 0), (first.ids[:-1], 0), ([*first.ids, 77, 76], 2)):
        pq.write_table(pa.table({"id": ids}), file)
        with pytest.raises(
            UserError, match=rf"'tables.user.vocabulary': .*{len(ids)} ids, {new} of them not among its 20"
        ):
            Day(tmp_path / "other", world, data, key, source=first)
        assert Day(tmp_path / "grown", world, data, key, GROW, source=first).ids == [*first.ids, *[77, 76][:new]]
        # Of a table that begins anew they are the ids.
        assert Day(tmp_path / "anew", world, data, key, "train.init.tables=none", source=first).ids == ids
    pq.write_table(pa.table({"id": list(range(100))}), file)
    with pytest.raises(UserError, match=r"'tables.user.num_embeddings' is 60, but the vocabulary has 100 ids"):
        Day(tmp_path / "long", world, data, key)
    pq.write_table(pa.table({"id": ["a", "b"]}), file)
    with pytest.raises(UserError, match="cannot be compared"):
        Day(tmp_path / "text", world, data, key, GROW, source=first)


def test_a_file_of_vectors_whose_ids_are_of_another_type_is_refused(world: World, tmp_path: Path) -> None:
    """Texts hash to other rows than the numbers that they spell, so that vectors would go to rows of other ids."""
    file, vectors = tmp_path / "item.parquet", pa.array([[1.0] * 8] * 30)
    data, key = f"data.train={write_day(tmp_path / 'd1', np.arange(20), 1)}", f"train.init.from_parquet.item={file}"
    day = Day(tmp_path / "a", world, data, key, "tables.item.num_embeddings=2000")
    numbers = pa.array(range(30))
    for ids in (texts := numbers.cast(pa.string()), texts.dictionary_encode()):
        pq.write_table(pa.table({"id": ids, "vector": vectors}), file)
        with pytest.raises(UserError, match=r"column 'id': its ids are string, and those of the data are numbers; wr"):
            start_training(day.inputs, day.built, None, day.folder)
        assert torch.equal(day.tensors()["tables/item"], day.fresh["tables/item"])
    pq.write_table(pa.table({"id": numbers.cast(pa.uint8()).dictionary_encode(), "vector": vectors}), file)
    start_training(day.inputs, day.built, None, day.folder)
    assert int((day.tensors()["tables/item"] == 1).all(1).sum()) == 30


def test_a_file_that_keeps_a_vocabulary_from_growing_is_told(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a compressed run, whose config names the file of the ids that are left."""
    first = Day(tmp_path / "a", world, f"data.train={write_day(tmp_path / 'd1', np.arange(20), 1)}").save()
    today, file = f"data.train={write_day(tmp_path / 'd2', np.arange(30), 2)}", tmp_path / "ids.parquet"
    for ids, told in ((first.ids, 1), ([*first.ids, 77], 0), (None, 0)):
        pq.write_table(pa.table({"id": ids or []}), file)
        caplog.clear()
        key = f"tables.user.vocabulary={file if ids else 'null'}"
        grown = Day(tmp_path / f"b{len(ids or [])}", world, today, GROW, key, source=first)
        assert caplog.text.count("names no new ids; set tables.user.vocabulary=null to take those of") == told
        assert len(grown.ids) == (30 if ids is None else len(ids))


def test_figures_go_with_the_dense_part(world: World, tmp_path: Path) -> None:
    data = [f"data.train={write_day(tmp_path / f'd{i}', np.arange(20), i)}" for i in range(2)]
    first = Day(tmp_path / "a", world, data[0]).save()

    def figures(*options: str) -> Any:
        return Day(tmp_path / "b", world, data[1], *options, source=first).inputs.facts.floats["price"]

    here = Day(tmp_path / "c", world, data[1]).inputs.facts.floats["price"]
    assert figures() == first.inputs.facts.floats["price"] != here
    assert figures("train.init.dense=none") == here
    logs = figures("features.price.log1p=true", "train.init.allow_changes=[features.price.log1p]")
    assert logs.mean < 6 and logs.raw_mean == here.raw_mean


def test_figures_stay_where_something_else_of_a_features_name_has_changed(world: World, tmp_path: Path) -> None:
    """Here the table `price` has another type, and the key `optimizer.dense.name` another value."""
    data = [f"data.train={write_day(tmp_path / f'd{i}', np.arange(20), i)}" for i in range(2)]
    named = ("features.dense={type: float, column: price, standardise: true}",)
    named += ("features.copy={table: price, column: item}", "tables.price={num_embeddings: 100, embedding_dim: 8}")
    first = Day(tmp_path / "a", world, data[0], *named).save()
    changes = ("tables.price.data_type=FP16", "train.init.convert_tables=true")
    changes += ("optimizer.dense.name=adagrad", "train.init.optimizers=matching")
    second = Day(tmp_path / "b", world, data[1], *named, *changes, source=first)
    assert second.inputs.facts.floats == first.inputs.facts.floats


def test_facts_that_were_swapped_are_refused(world: World, tmp_path: Path) -> None:
    data = f"data.train={write_day(tmp_path / 'd', np.arange(20), 1)}"
    first = Day(tmp_path / "a", world, data).save()
    path = tmp_path / "a/vocabulary/user.parquet"
    for name, change in (
        ("user.parquet", lambda: pq.write_table(pa.table({"id": first.ids[::-1]}), path)),
        ("floats.json", lambda: (tmp_path / "a/vocabulary/floats.json").write_text("{}")),
    ):
        shutil.copytree(tmp_path / "a/vocabulary", tmp_path / "kept")
        change()
        for init in (first.config.train.init, None):
            with pytest.raises(UserError, match=f"{name}' is not what checkpoint .* was trained with"):
                source = first.source(first.config)
                learn_facts(first.inputs, tmp_path / "b", Source(source.path, source.marker, init))
        shutil.rmtree(tmp_path / "a/vocabulary")
        (tmp_path / "kept").rename(tmp_path / "a/vocabulary")


def test_rows_are_moved_whatever_pieces_they_lie_in() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        kept, new, shared, columns = (int(generator.integers(1, 9)) for _ in range(4))
        here, there = kept + new + shared, kept + shared
        spans = [(0, 0, kept), (here - shared, kept, shared)]
        source = torch.arange(there * columns).reshape(there, columns)
        target = torch.full((here, columns), -1)
        cuts = sorted({0, here, *generator.integers(0, here, 3).tolist()})
        middle = int(generator.integers(0, columns))
        places = [(a, b, c, d) for a, b in pairwise(cuts) for c, d in ((0, middle), (middle, columns))]
        local = tuple(LocalShard(target[a:b, c:d], (a, c)) for a, b, c, d in places)
        moved = LocalTensor((here, columns), target.dtype, local).moved((there, columns), spans)
        assert moved.size == (there, columns)
        for shard in moved.shards:
            row, column = shard.offsets
            shard.tensor.copy_(source[row : row + shard.tensor.shape[0], column : column + shard.tensor.shape[1]])
        assert torch.equal(target[:kept], source[:kept]) and torch.equal(target[here - shared :], source[kept:])
        assert (target[kept : here - shared] == -1).all()


def test_the_best_metric_is_of_the_same_data(world: World, tmp_path: Path) -> None:
    train_data, valid = write_day(tmp_path / "d", np.arange(20), 1), write_day(tmp_path / "v", np.arange(20), 2)
    stop = (f"data.valid={valid}", "train.early_stop.metric=auc", "train.eval_every_steps=1")

    def state(*options: str) -> TrainState:
        (tmp_path / "given.yaml").write_text(CONFIG)
        config = load_config(tmp_path / "given.yaml", [f"data.train={train_data}", *options])
        inputs = learn_facts(open_inputs(config, world), tmp_path)
        checkpoints = Checkpoints(tmp_path / "checkpoints", world, 1)
        found, built = checkpoints.newest_valid(), build_model(inputs)
        source = Source(*found, None) if found else None
        if source:
            check_files(inputs, source)
        state = start_training(inputs, built, source, tmp_path)
        if found is None:
            checkpoints.save(built.tensors, state)
        return state

    assert state(*stop).fingerprints.keys() == {"train", "valid"}
    assert state(*stop).fingerprints.keys() == {"train", "valid"}
    write_day(valid, np.arange(20), 3)
    with pytest.raises(UserError, match=r"data.valid are not those .* so its best auc means nothing"):
        state(*stop)


def test_items_are_drawn_from_the_same_data(world: World, tmp_path: Path) -> None:
    """Of a model that draws no items, data.items may change: they are only evaluated on."""
    given = write_retrieval(tmp_path)
    items = pq.read_table(tmp_path / "items.parquet")

    def inputs(drawn: int) -> Inputs:
        return open_inputs(load_config(given, [f"model.sampled_negatives={drawn}"]), world)

    for drawn, later in ((0, 0), (16, 0), (16, 16)):
        pq.write_table(items, tmp_path / "items.parquet", row_group_size=37)
        folder, first = tmp_path / f"{drawn}-{later}", inputs(drawn)
        folder.mkdir()
        built, checkpoints = build_model(learn_facts(first, folder)), Checkpoints(folder, world, 1)
        checkpoints.save(built.tensors, start_training(first, built, None, folder))
        found = checkpoints.newest_valid()
        assert found is not None
        source = Source(*found, None)
        check_files(inputs(later), source)
        pq.write_table(items.slice(1), tmp_path / "items.parquet", row_group_size=37)
        if not later:
            check_files(inputs(later), source)
            continue
        with pytest.raises(
            UserError, match=r"data.items are not those .* so its sequence of drawn items means nothing"
        ):
            check_files(inputs(later), source)


def test_a_file_that_changed_is_told(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, data = tmp_path / "ids.parquet", f"data.train={write_day(tmp_path / 'd', np.arange(20), 1)}"
    pq.write_table(pa.table({"id": [1, 2, 3]}), file)
    first = Day(tmp_path / "a", world, data, f"tables.user.vocabulary={file}").save()
    source = first.source(first.config)
    for ids, told in (([1, 2, 3], 0), ([3, 2, 1], 1)):
        pq.write_table(pa.table({"id": ids}), file)
        again = learn_facts(first.inputs, tmp_path / "a", Source(source.path, source.marker, None))
        assert again.facts and again.facts.vocabularies["user"].to_pylist() == [1, 2, 3]
        assert caplog.text.count("now lists other ids; the run continues with its own copy") == told


def train(folder: Path, *options: str, nproc: int = 1) -> str:
    (folder.parent / "config.yaml").write_text(CONFIG)
    return must_train(str(folder.parent / "config.yaml"), f"run.dir={folder}", *options, nproc=nproc).stdout


def refused(folder: Path, *options: str) -> str:
    done = fork_train(str(folder.parent / "config.yaml"), f"run.dir={folder}", "run.resume=true", *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stderr


def test_going_on_takes_the_same_data_and_settings(tmp_path: Path) -> None:
    data, run = write_day(tmp_path / "d", np.arange(20), 1), tmp_path / "run"
    train(run, f"data.train={data}", "train.max_steps=10", nproc=2)
    said = refused(run, f"data.train={data}", "tables.item.hash_seed=7", "train.epochs=2")
    assert "'tables.item.hash_seed' is 7, and was 0" in said
    assert load_config(run / "config.yaml").tables["item"].hash_seed == 0
    # Staged elsewhere, and of another time, they are the same.
    shutil.copytree(data, tmp_path / "elsewhere")
    longer = ("run.resume=true", "train.epochs=2", "train.max_steps=12")
    assert "resumed at step 10" in train(run, f"data.train={tmp_path}/elsewhere", "tables.user.min_count=2", *longer)
    # Ids are those of the whole run, an epoch of 600 rows and two steps, whatever ranks counted them.
    counted = json.loads((run / "result.json").read_text())["data"]["ids"]
    assert {name: (counted[name]["ids"], counted[name]["distinct_ids"]) for name in counted} == {
        "user": (728, 20),
        "item": (728, 30),
    }
    table = pq.read_table(data / "a.parquet")
    pq.write_table(table.set_column(3, "label", [1 - table.column("label").to_numpy()]), data / "a.parquet")
    said = refused(run, f"data.train={data}", "train.epochs=3")
    where = f"(they lie in '{data}', and lay in '{tmp_path}/elsewhere'; 'a.parquet' is another there)"
    assert "data.train are not those" in said and where in said


@pytest.mark.slow
@pytest.mark.parametrize("nproc, kind", [(2, "row_wise"), (3, "row_wise"), (2, "column_wise"), (2, "data_parallel")])
def test_vocabularies_grow_alike_on_all_ranks(nproc: int, kind: str, tmp_path: Path) -> None:
    days = [write_day(tmp_path / f"d{i}", np.arange(10 * i, 10 * i + 20), i) for i in range(2)]
    options = ("optimizer.tables.name=adagrad",)
    train(tmp_path / "a", f"data.train={days[0]}", *options)
    start = (f"data.train={days[1]}", f"train.init_from={tmp_path}/a", GROW, *options)
    train(tmp_path / "b", *start, f"tables.user.sharding_type={kind}", nproc=nproc)
    train(tmp_path / "one", *start)
    found = [load_tables(tmp_path / run / "checkpoints/step-000000003", "") for run in ("b", "one")]
    for name in found[1]:
        if name.startswith(("tables/", "table_optimizer/", "dense/")):
            torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-6)
    listed = json.loads((tmp_path / "b/loaded.json").read_text())
    assert listed["rows"] == {"user": {"kept": 25, "new": 10}}
