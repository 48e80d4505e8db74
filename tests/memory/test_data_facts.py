"""What the first rows and the footers tell of memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from arrow_pool import arrow_pool

from recsys.config import Config, load_config
from recsys.data.decode import SegmentReader
from recsys.data.inputs import Inputs, open_inputs
from recsys.data.window import convert_table
from recsys.errors import UserError
from recsys.ids import statistics_bytes
from recsys.memory import DataFacts, Decoding
from recsys.memory import data_facts as data_facts_module
from recsys.memory import sample as sample_module
from recsys.memory.autofit import Fitter
from recsys.memory.data_facts import data_facts
from recsys.memory.dry_run import rehearse_run
from recsys.memory.levers import Change, with_changes
from recsys.memory.sample import Sample
from recsys.runtime.machine import topology_of
from recsys.runtime.world import rehearse_world

ROWS = 30_000


def write(
    folder: Path, rows: pa.Table, features: dict[str, Any], row_group_rows: int | None = None, **sections: Any
) -> Path:
    """Write rows, and a config that reads them; `sections` of it are in place of, or beside, what stands here."""
    pq.write_table(rows, folder / "rows.parquet", row_group_size=row_group_rows)
    content: dict[str, Any] = {
        "data": {"train": str(folder / "rows.parquet"), "label_column": "label"},
        "tables": {"table": {"num_embeddings": 1000, "embedding_dim": 8}},
        "model": {"name": "dlrm"},
    }
    content = content | {name: content.get(name, {}) | section for name, section in sections.items()}
    (folder / "config.yaml").write_text(yaml.safe_dump(content | {"features": features}))
    return folder / "config.yaml"


@contextmanager
def opened(path: Path, *overrides: str, num_ranks: int = 1) -> Iterator[tuple[Config, Inputs]]:
    config = load_config(path, overrides)
    with rehearse_world(num_ranks, num_ranks, torch.device("cpu")) as world:
        yield config, open_inputs(config, world)


def facts_of(
    folder: Path, row_group_rows: int | None = None, distinct: int = 24, num_ranks: int = 1, **settings: Any
) -> DataFacts:
    rng = np.random.default_rng(0)
    ends = np.arange(0, 10 * ROWS + 1, 10).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(rng.integers(0, distinct, 10 * ROWS)))
    ids = {f"id{i}": pa.array(rng.integers(0, distinct, ROWS)) for i in range(3)}
    rows = pa.table({**ids, "history": lists, "label": pa.array(rng.integers(0, 2, ROWS))})
    path = write(folder, rows, {name: {"table": "table"} for name in [*ids, "history"]}, row_group_rows)
    with opened(path, *(f"{key}={value}" for key, value in settings.items()), num_ranks=num_ranks) as (config, inputs):
        return data_facts(config, inputs, num_ranks)


def test_streams_without_rows_hold_nothing(tmp_path: Path) -> None:
    """Three rows lie in three of eight streams."""
    few = {"data.max_rows": 3, "train.epochs": 2}
    assert facts_of(tmp_path, **few).window_bytes == facts_of(tmp_path, **few, **{"data.num_streams": 3}).window_bytes


@pytest.mark.parametrize("distinct", [24, 4000])
def test_counts_of_ids_go_by_the_distinct_ones(distinct: int, tmp_path: Path) -> None:
    found = facts_of(tmp_path, distinct=distinct).statistics_bytes
    assert found == pytest.approx(4 * statistics_bytes(distinct), rel=0.05)


def test_ids_of_long_lists_are_counted_in_little_memory() -> None:
    """Every rank counts them before it trains: of 2 million that would take more than many a run."""
    rng = np.random.default_rng(0)
    ids = pa.array(rng.integers(0, 1_000_000, 2_000_000))
    lists = pa.chunked_array([pa.ListArray.from_arrays(pa.array(np.arange(0, 2_000_001, 500), pa.int32()), ids)])
    with arrow_pool() as pool:
        distinct = sample_module._Distinct.of(lists)
    assert pool.max_memory() < 48 << 20
    assert (distinct.ids, distinct.among(0.0005)) == (2_000_000, 1000)
    assert distinct.among(1) == pytest.approx(1_000_000, rel=0.05)


def test_one_row_group_is_decoded_once_and_kept(tmp_path: Path) -> None:
    table = ROWS * (4 * 8 + 10 * 8 + 4)
    whole, many = facts_of(tmp_path).decoding[0], facts_of(tmp_path, ROWS // 10).decoding[0]
    lists = ROWS * 10 * (8 + 8 + 4)  # of the first column the ids, a copy, and Parquet's levels of them
    assert 1.2 * lists > whole.first > lists > 0 == many.first
    assert table < whole.later < whole.first
    assert many.later < table
    rest = facts_of(tmp_path, ROWS - ROWS // 10).decoding[0]  # a second one with a tenth of the rows is kept as well
    assert rest.later == pytest.approx(whole.later, rel=0.05)
    threads = {"data.num_threads": 8}  # but one row group is decoded by one of them
    assert facts_of(tmp_path, **threads).decoding[0].first == whole.first


@pytest.mark.parametrize(
    ("settings", "is_kept"), [({"data.filter": "id0 < 2"}, False), ({"data.max_rows": 2000}, True)]
)
def test_row_groups_are_decoded_whole_for_few_of_their_rows(
    settings: dict[str, Any], is_kept: bool, tmp_path: Path
) -> None:
    """A filter leaves of a row group only what matches; the first rows are cut from all of them."""
    few, all_rows = facts_of(tmp_path, **settings).decoding[0], facts_of(tmp_path).decoding[0]
    assert few.first == pytest.approx(all_rows.first, rel=0.02)
    table = ROWS * (4 * 8 + 10 * 8 + 4)
    assert few.later > table if is_kept else few.later < table / 3


def test_processes_decode_beside_their_rank(tmp_path: Path) -> None:
    first = facts_of(tmp_path).decoding[0].first
    config = load_config(tmp_path / "config.yaml", ["data.processes=true"])
    host = rehearse_run(config).prediction.ranks[0].phases["step"]["host"]
    assert host["loader_processes"] > first and "loader_decoding" not in host


def test_a_rank_decodes_at_once_what_its_rows_are_cut_from(tmp_path: Path) -> None:
    settings = {"data.num_threads": 3, "data.num_streams": 4, "data.shuffle": "false"}
    # Row groups of 9,000 and at the end 3,000 rows, streams of 7,500: half of the rows lie in two, the others in three.
    first, second = facts_of(tmp_path, 9000, num_ranks=2, **settings).decoding
    (alone,) = facts_of(tmp_path, 9000, **settings).decoding
    assert first.later < second.later < alone.later


@pytest.mark.parametrize(("num_threads", "num_streams"), [(1, 8), (2, 8), (1, 2)])
def test_a_row_group_is_kept_while_another_is_decoded(num_threads: int, num_streams: int, tmp_path: Path) -> None:
    """Where streams are shorter than row groups, as eight of three, and epochs follow; two threads decode both."""
    settings = {"data.num_threads": num_threads, "data.num_streams": num_streams, "data.window_mib": 1}
    settings |= {"train.epochs": 9, "train.global_batch_size": 1000}
    later, of_one_epoch = (
        facts_of(tmp_path, ROWS // 3, **settings, **{"train.max_steps": steps}).decoding[0].later
        for steps in (ROWS // 1000, ROWS // 3000)
    )
    table, decoded = ROWS // 3 * (4 * 8 + 10 * 8 + 4), ROWS // 3 * 10 * (8 + 8 + 4)
    second = {(1, 8): table, (2, 8): decoded, (1, 2): 0}[num_threads, num_streams]
    assert 1 < later / (decoded + second) < 1.6
    assert 1 < of_one_epoch / (decoded + second * 3 / 8) < 1.6


def test_a_row_group_is_kept_without_rows_that_a_filter_leaves_out(tmp_path: Path) -> None:
    settings = {"data.num_threads": 1, "data.num_streams": 8, "train.epochs": 9}
    of_all, filtered = (
        facts_of(tmp_path, ROWS // 3, **settings, **only).decoding[0].later for only in ({}, {"data.filter": "id0 < 2"})
    )
    assert of_all - filtered > 0.8 * (ROWS // 3 * (4 * 8 + 10 * 8 + 4))  # of twelve rows one is left


def test_a_thread_makes_a_window_once_its_row_group_is_decoded(tmp_path: Path) -> None:
    """What decoding takes beside the table is given back by then."""
    facts_of(tmp_path, ROWS // 10)
    with opened(tmp_path / "config.yaml", "data.num_threads=1", "data.num_streams=1") as (config, inputs):
        later, sample = data_facts(config, inputs, 1).decoding[0].later, Sample(inputs, "train")
        of_window = max(inputs.loader("train").window_rows()[0]) * (sample.row_bytes + 12)
    assert later == pytest.approx(of_window + 2 * sample.table_bytes(ROWS // 10), rel=0.01)  # another one is kept


def test_windows_of_an_evaluation_are_there_while_it_lasts(tmp_path: Path) -> None:
    facts_of(tmp_path)
    settings = ["data.valid=${data.train}", "train.eval_every_steps=1"]
    prediction = rehearse_run(load_config(tmp_path / "config.yaml", settings)).prediction
    kinds, data = prediction.ranks[0].phases, prediction.data
    assert kinds["step"]["host"]["loader_windows"] == kinds["save"]["host"]["loader_windows"] == data.window_bytes
    assert kinds["evaluation"]["host"]["loader_windows"] == data.window_bytes + data.eval_window_bytes
    assert data.eval_window_bytes > 0


def test_few_windows_are_cut_elsewhere_in_other_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of seven row groups over eight streams; where one of them is whole in two epochs, it is held twice."""
    settings = {"data.window_mib": 1, "train.epochs": 5}
    once = facts_of(tmp_path, 4300, **{**settings, "train.epochs": 1}).window_bytes
    found = facts_of(tmp_path, 4300, **settings).window_bytes
    monkeypatch.setattr(data_facts_module, "_EPOCHS_SEEN", 1)
    assert once <= facts_of(tmp_path, 4300, **settings).window_bytes < found <= 2 * once


def test_a_batch_holds_all_windows_that_its_rows_are_cut_from(tmp_path: Path) -> None:
    """The windows of the epoch have 1,000, 2,000, 4,000, 8,000 and 15,000 rows."""
    settings = {"data.num_threads": 0, "data.num_streams": 1, "data.window_mib": 1, "train.global_batch_size": 100}
    sizes = (100, ROWS // 3, ROWS)
    held = [facts_of(tmp_path, 1000, **{**settings, "train.global_batch_size": n}).window_bytes for n in sizes]
    assert np.array(held) / held[0] * 15_000 == pytest.approx([15_000, 23_000, ROWS], rel=1e-4)
    # A run that ends after a few steps does not make the later ones.
    short = [facts_of(tmp_path, 1000, **settings, **{"train.max_steps": n}).window_bytes for n in (5, 15, 31)]
    assert np.array(short) / held[0] * 15_000 == pytest.approx([1000, 2000, 4000], rel=1e-4)


@pytest.mark.parametrize("row_group_rows", [ROWS, 1000])
def test_memory_fit_knows_what_smaller_windows_hold(row_group_rows: int, tmp_path: Path) -> None:
    """A row group is not cut for a window, and a batch of many rows holds more windows than two."""
    wide = {f"features.history{i}": "{table: table, column: history}" for i in range(8)}
    settings = {**wide, "data.num_threads": 0, "data.num_streams": 1, "train.global_batch_size": ROWS}
    small = facts_of(tmp_path, row_group_rows, **settings, **{"data.window_mib": 1})
    assert small.window_bytes > 8 << 20
    with opened(tmp_path / "config.yaml", *(f"{key}={value}" for key, value in settings.items())) as (config, inputs):
        fitter = Fitter(config, data_facts(config, inputs, 1), topology_of(config), inputs=inputs)
        assert fitter.data_of(with_changes(config, [Change({"data.window_mib": 1}, "")])) == small


def test_small_data_leave_rows_of_an_evaluated_batch_without_ids() -> None:
    """Of a batch of users and one of items; where the data set has more rows than a batch, all have ids."""
    means = ({"user": 1.0, "history": 30.0, "item": 0.0}, {"user": 0.0, "history": 0.0, "item": 1.0})
    facts = DataFacts({}, 4, 0, (), {"valid": 100, "test": 250, "items": 2000}, "", eval_ids=means)
    assert facts.evaluated_ids(200) == means
    assert facts.evaluated_ids(1000) == ({"user": 0.25, "history": 7.5, "item": 0.0}, means[1])
    assert facts.evaluated_ids(4000)[1]["item"] == 0.5


def test_lists_of_rows_to_evaluate_are_longer_than_those_of_training(tmp_path: Path) -> None:
    """As where users' histories are cut from a log that goes on; of two data sets the longer lists count."""
    for role, length in (("valid", 40), ("test", 5)):
        lists = pa.array([[1] * length] * 500)
        ids = {name: pa.array([1] * 500) for name in ("id0", "id1", "id2", "label")}
        pq.write_table(pa.table({**ids, "history": lists}), tmp_path / f"{role}.parquet")
    settings = {f"data.{role}": tmp_path / f"{role}.parquet" for role in ("valid", "test")}
    facts = facts_of(tmp_path, **settings)
    assert facts.eval_ids == ({"id0": 1.0, "id1": 1.0, "id2": 1.0, "history": pytest.approx(40, rel=0.1)},)
    assert facts.mean_ids["history"] == pytest.approx(10, rel=0.1)


def test_texts_to_evaluate_are_those_of_their_own_rows(tmp_path: Path) -> None:
    """As where all items of a corpus have one of their own, and those of a log are of the few that many have seen."""
    for role, texts in (("train", ["seen"] * 20_000), ("valid", [f"{number:0200}" for number in range(20_000)])):
        pq.write_table(pa.table({"id": texts, "label": np.arange(20_000) % 2}), tmp_path / f"{role}.parquet")
    path = write(tmp_path, pq.read_table(tmp_path / "train.parquet"), {"id": {"table": "table"}}, model={"name": "fm"})
    with opened(path, f"data.valid={tmp_path}/valid.parquet") as (config, inputs):
        decoding = data_facts(config, inputs, 1).decoding[0]
    assert decoding.later < 1 << 20 and decoding.eval_later > 20_000 * 200


def sample_of(folder: Path, rows: pa.Table, feature: str) -> tuple[Sample, pa.Table]:
    """Write rows; return the first of them as predictions take them, and all as they are decoded."""
    path = write(folder, rows, {feature: {"table": "table"}}, model={"interaction": "dot_and_embeddings"})
    with opened(path) as (_, inputs):
        return Sample(inputs, "train"), SegmentReader(inputs.datasets["train"]).row_group(0)


def test_lists_that_get_shorter_are_expected_with_their_weights(tmp_path: Path) -> None:
    """Users who did most come first, as they do in logs: the first row group holds more than half of all ids."""
    lengths = np.repeat([40, 10, 5, 2], 1000)
    ends = np.r_[0, lengths.cumsum()].astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.arange(ends[-1]) % 999))
    weights = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.ones(ends[-1], np.float32)))
    columns = {"ids": lists, "weights": weights, "label": pa.array(np.arange(4000) % 2)}
    sections = {"data": {"num_threads": 1, "num_streams": 2}, "model": {"interaction": "dot_and_embeddings"}}
    sections["train"] = {"global_batch_size": 100, "epochs": 2}
    path = write(tmp_path, pa.table(columns), {"ids": {"table": "table", "weights": "weights"}}, 1000, **sections)
    with opened(path) as (config, inputs):
        tables = list(map(SegmentReader(inputs.datasets["train"]).row_group, range(4)))
        taken = sum(convert_table(table, inputs.spec("train")).num_bytes for table in tables)
        sample, facts = Sample(inputs, "train"), data_facts(config, inputs, 1)
        row_bytes, decoding = sample.row_bytes, facts.decoding[0]
        most = max(len(batch.ids.values()) for batch in inputs.loader("train").batches(num_epochs=30))
    assert facts.source == "the first 1,000 rows, with lists as long as footers tell of all rows"
    assert facts.mean_ids["ids"] == pytest.approx(lengths.mean(), rel=0.05)  # not the 40 of the first rows
    assert facts.most_ids["ids"] * 100 == pytest.approx(most, rel=0.1)
    # Two windows of each of two streams hold all rows twice, and blocks keep the pages of the longest lists.
    assert 2.2 * taken < facts.window_bytes < 2 * 4 * tables[0].nbytes
    with opened(path, "train.epochs=1") as (config, inputs):  # all are there at once, and none comes after another
        assert data_facts(config, inputs, 1).window_bytes == pytest.approx(taken, rel=0.05)
    assert taken > 8 * ends[-1]  # of an id and its weight
    assert row_bytes * 4000 == pytest.approx(taken, rel=0.05)
    assert decoding.later > max(table.nbytes for table in tables)


@pytest.mark.parametrize("alpha", [1.3, 1.05])
def test_texts_beyond_the_dictionary_of_the_file_are_expected(alpha: float, tmp_path: Path) -> None:
    """A dictionary that grows beyond 1 MiB is given up by writers, and Arrow's grows with every page that follows."""
    numbers = np.random.default_rng(0).zipf(alpha, 120_000 * 10) % 1_000_000
    ends = np.arange(0, len(numbers) + 1, 10).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array([f"a text {number}" for number in numbers]))
    sample, decoded = sample_of(tmp_path, pa.table({"words": lists, "label": pa.array(ends[1:] % 2)}), "words")
    assert sample.table_bytes(decoded.num_rows) == pytest.approx(decoded.nbytes, rel=0.25)


@pytest.mark.parametrize("most", [1 << 20, 1 << 26])
def test_texts_are_decoded_to_a_dictionary_beside_what_finds_them(most: int, tmp_path: Path) -> None:
    """100,000 of 80 bytes: 8 MB, which fill a buffer of 8 MiB, twice, and 8 MiB of a hash table. If all are in the
    file's dictionary, that is there as well, and its decoder has another copy."""
    rows = pa.table({"x": [f"{number:080}" for number in range(100_000)], "label": np.arange(100_000) % 2})
    path = write(tmp_path, rows, {"x": {"table": "table"}}, model={"interaction": "dot_and_embeddings"})
    # Arrow decompresses pages in another pool.
    pq.write_table(rows, tmp_path / "rows.parquet", dictionary_pagesize_limit=most, compression="none")
    with opened(path) as (_, inputs):
        sample, reader = Sample(inputs, "train"), SegmentReader(inputs.datasets["train"])
        with arrow_pool() as pool:
            reader.row_group(0)
    assert sample.decoding_bytes(100_000) == pytest.approx(pool.max_memory(), rel=0.1)


def test_each_column_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"a text {number} that goes on for {'so ' * 30}long" for number in range(40_000)]
    rows = pa.table({"id": texts, "label": np.arange(len(texts)) % 2})
    count, counted = sample_module._Distinct.of, []
    monkeypatch.setattr(sample_module._Distinct, "of", lambda column: [counted.append(column), count(column)][1])
    sample, decoded = sample_of(tmp_path, rows, "id")
    assert sample.table_bytes(decoded.num_rows) > 40_000 * 100 and len(counted) == 1
    assert list(sample.distinct_ids(40_000)) == [40_000] and len(counted) == 1


def test_a_whole_dictionary_is_not_expected_to_grow(tmp_path: Path) -> None:
    """The first rows hold texts once each, and the file's dictionary is all that there are."""
    texts = np.array([f"text {number}" for number in range(20_000)])
    chosen = np.r_[texts, np.random.default_rng(0).choice(texts, 180_000)]
    sample, decoded = sample_of(tmp_path, pa.table({"id": chosen, "label": np.arange(len(chosen)) % 2}), "id")
    assert sample.table_bytes(decoded.num_rows) == pytest.approx(decoded.nbytes, rel=0.05)


def test_rows_that_do_not_fit_are_told_with_their_file(tmp_path: Path) -> None:
    """Those behind the first 1,000, which are looked at before."""
    columns = {"item": [5] * 1500 + [99] * 500, "label": [0, 1] * 1000}
    identity = {"table": {"num_embeddings": 50, "embedding_dim": 8, "mapping": "identity"}}
    path = write(tmp_path, pa.table(columns), {"item": {"table": "table"}}, tables=identity, model={"name": "fm"})
    refused = pytest.raises(UserError, match=r"id 99 is outside 0 … 49 .*\(in row group 0 of .*rows.parquet\)$")
    with opened(path) as (config, inputs), refused:
        data_facts(config, inputs, 1)


def test_what_a_vocabulary_counts_is_decoded(tmp_path: Path) -> None:
    assert facts_of(tmp_path).counted_bytes == 0
    found = facts_of(tmp_path, **{"tables.table.mapping": "vocabulary"})
    assert found.counted_bytes > ROWS * 10 * (8 + 8 + 4) and found.counted_ids.keys() == {"table"}


@pytest.mark.parametrize("is_list", [False, True])
def test_a_vocabulary_of_texts_is_counted_with_these(is_list: bool, tmp_path: Path) -> None:
    """Of 60 bytes each, once in what is counted, twice more while they are chosen, and once in what is chosen."""
    facts_of(tmp_path, ROWS // 10)
    sizes = []
    for texts in (pa.array(range(ROWS)), pa.array([f"{i:060}" for i in range(ROWS)])):
        ids = pa.ListArray.from_arrays(pa.array(np.arange(ROWS + 1, dtype=np.int32)), texts) if is_list else texts
        rows = pq.read_table(tmp_path / "rows.parquet").set_column(0, "id0", ids)
        pq.write_table(rows, tmp_path / "texts.parquet", row_group_size=ROWS // 10)
        vocabulary = "{num_embeddings: 30000, embedding_dim: 8, mapping: vocabulary, num_buckets: 1}"
        settings = [f"data.train={tmp_path}/texts.parquet", "features.id0.table=texts", f"tables.texts={vocabulary}"]
        prediction = rehearse_run(load_config(tmp_path / "config.yaml", settings)).prediction
        assert prediction.data.counted_shown == ({} if is_list else {"texts": [ROWS]})  # of lists more than rows
        sizes.append(prediction.ranks[0].phases["vocabularies"]["host"])
    of_numbers, of_texts = sizes
    assert of_texts["id_counts"] - of_numbers["id_counts"] == pytest.approx((3 * 64 + 65) * ROWS, rel=0.01)
    assert of_texts["vocabularies"] == pytest.approx(64 * ROWS, rel=0.01) and "vocabularies" not in of_numbers


def test_what_is_decoded_first_is_there_before_what_steps_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts_of(tmp_path)
    monkeypatch.setattr(data_facts_module, "_decoding_by_rank", lambda *_: (Decoding(first=1 << 30),))
    host = rehearse_run(load_config(tmp_path / "config.yaml")).prediction.ranks[0].phases["step"]["host"]
    others = ("process", "table_weight", "table_optimizer")
    dense = [kind for kind in host if kind.startswith("dense_")]
    assert sum(host.values()) - sum(host.get(kind, 0) for kind in (*others, *dense)) < (1 << 30) + (20 << 20)


@pytest.mark.parametrize(("millions", "measured"), [(3, 78.8), (4, 89.5), (5, 86.1), (12, 75.2)])
def test_numbers_are_merged_by_a_table_of_a_power_of_two(millions: int, measured: float) -> None:
    host = DataFacts({}, 4, 0, (), {}, "", counted_ids={"table": millions * 10**6}).counting_bytes(0, 1)
    assert sum(host.values()) / millions / 1e6 == pytest.approx(measured, rel=0.05)


def test_ranks_gather_no_more_ids_than_the_data_show() -> None:
    all_alike = DataFacts({}, 4, 0, (), {}, "", counted_ids={"table": 1000})
    shared_out = replace(all_alike, counted_shown={"table": [600, 400]})
    counts = [facts.counting_bytes(0, 2)["id_counts"] for facts in (all_alike, shared_out)]
    assert counts[0] - counts[1] == 1000 * 3 * 16 + 400 * 16  # of what is gathered, and of what the rank counts


def test_batches_take_what_the_loader_makes(tmp_path: Path) -> None:
    """With vectors and two labels, also where evaluations have larger ones."""
    rng = np.random.default_rng(0)
    vectors = pa.array(list(rng.normal(size=(ROWS, 64)).astype(np.float32)))
    columns = {"item": rng.integers(0, 50, ROWS), "click": rng.integers(0, 2, ROWS), "buy": rng.integers(0, 2, ROWS)}
    rows = pa.table({**columns, "text": vectors, "price": rng.random(ROWS)})
    features = {"item": {"table": "table"}, "text": {"type": "float", "dim": 64}, "price": {"type": "float"}}
    labels = {"label_column": None, "labels": {"click": "click", "buy": "buy"}}
    path = write(tmp_path, rows, features, data=labels, model={"name": "mmoe"})
    with opened(path) as (config, inputs):
        facts, made = data_facts(config, inputs, 1), next(inputs.loader("train").batches())
    batch_bytes = facts.batch_bytes(config, 1024, facts.mean_ids)
    assert made.content is not None and batch_bytes == pytest.approx(made.content.nbytes, abs=5 * 64)
    options = ["data.valid=${data.train}", "data.prefetch_batches=0", f"train.eval_batch_size={8 * 1024}"]
    for device, batches, locked in (("cpu", 1, batch_bytes), ("cuda", 2, 1 << 19)):
        there = [f"topology.device={device}", "topology.device_memory=80GiB"]
        (rank,) = rehearse_run(load_config(path, [*options, *there])).prediction.ranks
        kinds = {phase: {**found["device"], **found["host"]} for phase, found in rank.phases.items()}
        assert kinds["step"]["loader_batches"] == batches * locked
        assert kinds["evaluation"]["loader_batches"] == batches * (1 + 8) * locked
        if device == "cuda":
            assert kinds["step"]["batches"] == kinds["evaluation"]["batches"] / 8 == 2 * batch_bytes
