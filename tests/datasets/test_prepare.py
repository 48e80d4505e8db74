"""The converters: what they write is complete, deterministic and what data/README.md says."""

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.datasets import delimited, movielens, synthetic, writer
from recsys.datasets.delimited import CsvOptions, convert_csv
from recsys.datasets.prepare import prepare
from recsys.datasets.synthetic import SyntheticOptions, write_synthetic
from recsys.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "prepare_data.py"


def read(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("part-*.parquet"))])


def cli(*arguments: object) -> None:
    prepare([str(argument) for argument in arguments])


# Writing


def test_parts_have_row_groups_compression_checksums(tmp_path):
    batches = [pa.table({"x": np.arange(n)}) for n in (3, 250, 1)]
    writer.write_parts(batches, tmp_path / "new", 100, 1000)
    path = tmp_path / "new" / "part-00000.parquet"
    footer = pq.read_metadata(path)
    assert [footer.row_group(i).num_rows for i in range(footer.num_row_groups)] == [100, 100, 54]
    assert footer.row_group(0).column(0).compression == "ZSTD"
    assert pq.read_table(path).equals(pa.concat_tables(batches))
    content = bytearray(path.read_bytes())
    column = footer.row_group(2).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content[start + column.total_compressed_size - 1] ^= 1  # the last byte of the last page
    path.write_bytes(content)
    with pytest.raises(OSError, match="CRC"):
        pq.read_table(path, page_checksum_verification=True)


def test_many_parts_are_named_in_order(tmp_path):
    writer.write_parts([pa.table({"x": np.arange(245)})], tmp_path, 10, 20)
    assert read(tmp_path)["x"].to_pylist() == list(range(245))
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "part-00012.parquet"


def test_parts_fill_files_in_order(tmp_path):
    tables = [pa.table({"x": np.arange(i * 10, i * 10 + 10)}) for i in range(5)]
    writer.write_parts(tables, tmp_path, row_group_rows=8, rows_per_file=20)
    assert [pq.read_metadata(path).num_rows for path in sorted(tmp_path.iterdir())] == [20, 20, 10]
    assert read(tmp_path)["x"].to_pylist() == list(range(50))


def test_output_folder_is_replaced_whole_or_not_at_all(tmp_path):
    out = tmp_path / "out"
    with writer.replacing(out, {"n": 1}, overwrite=False) as folder:
        (folder / "old").touch()
    with pytest.raises(UserError, match="--overwrite"), writer.replacing(out, {}, overwrite=False):
        pass
    with pytest.raises(RuntimeError), writer.replacing(out, {"n": 2}, overwrite=True):
        raise RuntimeError
    assert writer.read_marker(out) == {"n": 1} and (out / "old").exists()
    with writer.replacing(out, {"n": 3}, overwrite=True):
        pass
    assert writer.read_marker(out) == {"n": 3} and not (out / "old").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_of_someone_else_is_never_replaced(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="not made by"), writer.replacing(tmp_path, {}, overwrite=True):
        pass
    assert (tmp_path / "thesis.tex").exists()


# Synthetic


def small(**changes) -> SyntheticOptions:
    values = {"rows": 20_000, "valid_rows": 4000, "test_rows": 2000, "users": 300, "items": 100, "files": 2}
    return SyntheticOptions(**{**values, **changes})


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    out = tmp_path_factory.mktemp("synthetic") / "plain"
    assert write_synthetic(out, small())
    return out


def test_synthetic_rows_do_not_depend_on_files_or_row_groups(plain, tmp_path):
    write_synthetic(tmp_path / "a", small(files=3, row_group_rows=700))
    for split in ("train", "valid", "test"):
        assert read(plain / split).equals(read(tmp_path / "a" / split))
    write_synthetic(tmp_path / "b", small(seed=1))
    assert not read(plain / "train")["user_id"].equals(read(tmp_path / "b" / "train")["user_id"])


def test_synthetic_crosses_chunks_without_repeating(tmp_path):
    write_synthetic(tmp_path / "a", small(rows=synthetic.CHUNK_ROWS + 5000, valid_rows=1, test_rows=1))
    user = read(tmp_path / "a" / "train")["user_id"].to_numpy()
    assert len(user) == synthetic.CHUNK_ROWS + 5000
    assert not np.array_equal(user[:5000], user[-5000:])


def test_synthetic_second_run_does_nothing_other_options_are_refused(plain):
    before = (plain / "teacher.json").stat().st_mtime_ns
    assert not write_synthetic(plain, small())
    assert (plain / "teacher.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="--overwrite"):
        write_synthetic(plain, small(seed=9))


def test_labels_are_drawn_by_the_teacher_whose_auc_is_stated(plain):
    rows = synthetic.Rows(small(), 1, 0, np.full(4000, 7, np.int32))
    columns, logits = synthetic.UserItemShape(small()).chunk(rows)
    logit = logits["label"]
    table, stated = read(plain / "valid"), json.loads((plain / "teacher.json").read_text())["valid"]
    assert table["user_id"].to_pylist() == columns["user_id"].to_pylist()
    label = table["label"].to_numpy()
    positive, negative = logit[label == 1], logit[label == 0]
    auc = (positive[:, None] > negative).mean()
    assert stated["auc"] == pytest.approx(auc, abs=1e-5) and 0.75 < auc < 0.9
    probability = 1 / (1 + np.exp(-logit))
    loss = -np.log(np.where(label == 1, probability, 1 - probability)).mean()
    assert stated["log_loss"] == pytest.approx(loss, abs=1e-6)
    for low in (0.0, 0.25, 0.5, 0.75):
        near = (probability >= low) & (probability < low + 0.25)
        assert label[near].mean() == pytest.approx(probability[near].mean(), abs=0.06)


@pytest.mark.parametrize("correlation", [-0.5, pytest.param(0.8, marks=pytest.mark.slow)])
def test_purchases_of_clicked_views_and_the_best_auc_of_all(correlation, tmp_path):
    options = small(shape="views", correlation=correlation)
    write_synthetic(tmp_path / "a", options)
    table, stated = read(tmp_path / "a" / "valid"), json.loads((tmp_path / "a" / "teacher.json").read_text())["valid"]
    shape = synthetic.ViewsShape(options)
    columns, logits = shape.chunk(synthetic.Rows(options, 1, 0, np.full(4000, 7, np.int32)))
    assert table.column_names[:3] == ["click", "buy", "day"]
    assert table["user_id"].to_pylist() == columns["user_id"].to_pylist()
    click, buy = (table[name].to_numpy() for name in ("click", "buy"))
    of_click, after = (1 / (1 + np.exp(-logits[name])) for name in ("click", "buy"))
    for label, probability, name in ((click, of_click, "click"), (buy, of_click * after, "buy")):
        auc = (probability[label == 1][:, None] > probability[label == 0]).mean()
        loss = -np.log(np.where(label == 1, probability, 1 - probability)).mean()
        assert stated[name]["auc"] == pytest.approx(auc, abs=1e-5)
        assert stated[name]["log_loss"] == pytest.approx(loss, abs=1e-6)
    assert not buy[click == 0].any() and buy[click == 1].mean() == pytest.approx(after[click == 1].mean(), abs=0.03)
    rows = synthetic.Rows(options, 0, 9, np.zeros(20_000, np.int32))
    user, item = (field.draw(rows, rows.day) for field in (shape.user, shape.item))
    tastes = synthetic.affinity(shape.user, user, shape.item, item), shape._logits(user, item, user)["buy"]
    assert np.corrcoef(*tastes)[0, 1] == pytest.approx(correlation, abs=0.12)


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.3])
def test_ids_follow_the_power_law_and_rank_is_not_id(alpha):
    size, count = 1000, 400_000
    options = small(alpha=alpha)
    rows = synthetic.Rows(options, 0, 0, np.zeros(count, np.int32))
    field = synthetic.IdField(options, 0, size)
    ids, counts = np.unique(field.ids(field.draw(rows, rows.day)), return_counts=True)
    order = np.argsort(-counts)
    rank = np.arange(10, 200)  # the law of the head is rounded, the tail is noise
    slope = np.polyfit(np.log(rank + 1.5), np.log(counts[order][rank]), 1)[0]
    assert slope == pytest.approx(-alpha, abs=0.08)
    assert ids.min() >= 0 and ids.max() > 2**62
    assert abs(np.corrcoef(np.argsort(order), np.arange(len(ids)))[0, 1]) < 0.15


@pytest.mark.parametrize("unseen", [0.0, 0.3])
def test_share_of_unseen_ids(tmp_path, unseen):
    write_synthetic(tmp_path / "a", small(unseen=unseen, alpha=0.5))
    train, valid = read(tmp_path / "a" / "train"), read(tmp_path / "a" / "valid")
    for name in ("user_id", "item_id"):
        assert np.mean(~np.isin(valid[name], train[name])) == pytest.approx(unseen, abs=0.03)


def test_drift_replaces_ids_day_by_day(plain, tmp_path):
    write_synthetic(tmp_path / "a", small(drift=0.1))
    for folder, kept in ((plain, 1.0), (tmp_path / "a", 0.4)):
        table = read(folder / "train")
        day, user = table["day"].to_numpy(), table["user_id"].to_numpy()
        assert set(day) == set(range(7)) and (np.diff(day) >= 0).all()
        known = np.isin(np.unique(user[day == 6]), user[day == 0]).mean()
        assert known == pytest.approx(kept, abs=0.08)
        assert set(read(folder / "valid")["day"].to_pylist()) == {7}


def test_user_item_columns(plain):
    table = read(plain / "train")
    assert {field.name: field.type for field in table.schema} == {
        "label": pa.int8(),
        "day": pa.int32(),
        "user_id": pa.int64(),
        "item_id": pa.int64(),
        "category": pa.string(),
        "device": pa.string(),
        "hour": pa.int8(),
        "price": pa.float32(),
        "weight": pa.float32(),
        "history": pa.list_(pa.int64()),
    }
    assert [name for name in table.column_names if table[name].null_count] == ["device", "price"]
    lengths = [len(items) for items in table["history"].to_pylist()]
    assert min(lengths) == 0 and max(lengths) == synthetic.MAX_HISTORY
    assert set(table["history"].combine_chunks().flatten().to_pylist()) <= set(table["item_id"].to_pylist())


def test_criteo_shape(tmp_path):
    write_synthetic(tmp_path / "a", small(shape="criteo", items=500))
    table = read(tmp_path / "a" / "train")
    assert len(table.column_names) == 41
    for index in range(26):
        assert table.schema.field(f"cat_{index}").type == pa.int64()
    for index in range(13):
        column = table[f"int_{index}"]
        assert column.type == pa.float32() and 0.02 < column.null_count / len(column) < 0.1
    assert 450 < len(table["cat_25"].unique()) <= 501
    assert 0.7 < json.loads((tmp_path / "a" / "teacher.json").read_text())["test"]["auc"] < 0.9


def test_sample_is_what_its_command_makes(tmp_path):
    command = "synthetic --rows 3000 --valid-rows 500 --test-rows 500 --users 200 --items 100 --files 2"
    cli(*command.split(), "--row-group-rows", 500, "--seed", 1, "--out", tmp_path / "sample")
    for split in ("train", "valid", "test"):
        assert read(tmp_path / "sample" / split).equals(read(ROOT / "data" / "sample" / split))
    files = sorted((ROOT / "data" / "sample").rglob("*"))
    assert sum(path.stat().st_size for path in files if path.is_file()) < 200_000
    train = [pq.read_metadata(path) for path in files if path.match("train/part-*.parquet")]
    assert len(train) >= 2 and all(footer.num_row_groups >= 2 for footer in train)


# Delimited files

LOG = "user,item,stars,ts,tags\n" + "".join(
    f"{i % 50},{i % 7},{i % 5 + 1},{(i * 37) % 1000},a|b {i}\n" for i in range(1000)
)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_csv_values_types_lists_labels_nulls(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text('1\t5\tx| y||\t7 8\t"two\nlines"\n2\t\t\t\tNA\n3\t3.5\tz\t9\tw\n')
    options = CsvOptions(
        delimiter="\t",
        columns=["id", "stars", "tags", "seen", "note"],
        types={"id": "string", "stars": "float32"},
        lists={"tags": ("|", "string"), "seen": (" ", "int64")},
        label="stars>=4",
        null_values=["NA"],
    )
    convert_csv([path], tmp_path / "out", options)
    table = read(tmp_path / "out")
    assert table.to_pydict() == {
        "id": ["1", "2", "3"],
        "stars": [5.0, None, 3.5],
        "tags": [["x", "y"], [], ["z"]],
        "seen": [[7, 8], [], [9]],
        "note": ["two\nlines", None, "w"],
        "label": [1, None, 0],
    }
    lists = [pa.list_(pa.string()), pa.list_(pa.int64())]
    assert table.schema.types == [pa.string(), pa.float32(), *lists, pa.string(), pa.int8()]


def test_csv_files_have_one_schema_and_gzip_reads_as_plain(log, tmp_path):
    reordered = tmp_path / "b.csv.gz"
    reordered.write_bytes(gzip.compress(b"item,user,stars,ts,tags\n,51,2,3,q\n"))
    convert_csv([log, reordered], tmp_path / "out", CsvOptions(rows_per_file=400, row_group_rows=150))
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 3
    table = read(tmp_path / "out")
    assert table.num_rows == 1001
    last = {"user": 51, "item": None, "stars": 2, "ts": 3, "tags": "q"}
    assert table.slice(1000).to_pylist() == [last]


@pytest.mark.parametrize("rule", ["random", "time:ts", "user:user", "user:tags"])
def test_csv_split_parts_all_rows_by_the_rule(log, tmp_path, rule):
    options = CsvOptions(split=(0.7, 0.2, 0.1), split_by=rule)
    for name in ("one", "two"):
        convert_csv([log], tmp_path / name, options)
    parts = [read(tmp_path / "one" / split) for split in ("train", "valid", "test")]
    again = [read(tmp_path / "two" / split) for split in ("train", "valid", "test")]
    assert all(part.equals(other) for part, other in zip(parts, again, strict=True))
    wanted = Counter(line.split(",")[4] for line in LOG.splitlines()[1:])
    assert Counter(pa.concat_tables(parts)["tags"].to_pylist()) == wanted
    slack = {"time:ts": 0, "user:user": 160}.get(rule, 60)
    assert [part.num_rows for part in parts] == pytest.approx([700, 200, 100], abs=slack)
    if rule == "time:ts":
        assert max(parts[0]["ts"].to_pylist()) < min(parts[1]["ts"].to_pylist())
        assert max(parts[1]["ts"].to_pylist()) < min(parts[2]["ts"].to_pylist())
    if rule.startswith("user:"):
        users = [set(part[rule[5:]].to_pylist()) for part in parts]
        assert not (users[0] & users[1] or users[0] & users[2] or users[1] & users[2])


def test_csv_where_is_for_all_that_follows(log, tmp_path):
    """Cuts of time are those of the rows taken."""
    where = "item == 3 and tags != 'a|b 10'"
    options = CsvOptions(where=where, split=(0.5, 0.5), split_by="time:ts", types={"item": "int32"})
    convert_csv([log], tmp_path / "out", options)
    parts = [read(tmp_path / "out" / split) for split in ("train", "valid")]
    assert {*parts[0]["item"].to_pylist(), *parts[1]["item"].to_pylist()} == {3}
    assert sum(part.num_rows for part in parts) == len(range(3, 1000, 7)) - 1
    assert parts[0].num_rows == pytest.approx(parts[1].num_rows, abs=1)


def test_random_split_depends_on_the_seed(log, tmp_path):
    for seed in (0, 1):
        convert_csv([log], tmp_path / str(seed), CsvOptions(split=(0.5, 0.5), seed=seed))
    assert not read(tmp_path / "0" / "train").equals(read(tmp_path / "1" / "train"))


def test_random_split_goes_by_row_number_whatever_is_read_at_once(log, tmp_path, monkeypatch):
    for name, block_bytes in (("one", delimited.BLOCK_BYTES), ("many", 4000)):
        monkeypatch.setattr(delimited, "BLOCK_BYTES", block_bytes)
        convert_csv([log], tmp_path / name, CsvOptions(split=(0.5, 0.5)))
    assert read(tmp_path / "one" / "train").equals(read(tmp_path / "many" / "train"))


MISTAKES = {
    "csv {tmp}/none.csv --out {tmp}/o": "none.csv is not a file",
    "csv {tmp}/is.parquet --out {tmp}/o": "is.parquet is Parquet already, which training reads as it is",
    "csv {log} --out {tmp}/o --label starz>=4": "did you mean 'stars'?",
    "csv {log} --out {tmp}/o --label stars": "--label: column 'stars' is int64, which is not a condition",
    "csv {log} --out {tmp}/o --label stars>=good": "no column 'good'; there are user, item, stars, ts, tags",
    "csv {log} --out {tmp}/o --label tags>=4": "column 'tags' is string, and cannot be compared with 4",
    "csv {log} --out {tmp}/o --types stars=int": "allowed are int8",
    "csv {log} --out {tmp}/o --types starz=int8": "'starz'",
    "csv {log} --out {tmp}/o --types tags=int64": "log.csv: In CSV column #4: Row #2",
    "csv {log} --out {tmp}/o --list tags=|:int64": "column 'tags' as list of int64",
    "csv {log} --out {tmp}/o --split 0.5,0.4": "add up to 1",
    "csv {log} --out {tmp}/o --split 0.5,nan": "add up to 1, got (0.5, nan)",
    "csv {log} --out {tmp}/o --split 0.5,x": "numbers separated by commas",
    "csv {log} --out {tmp}/o --split 0.5,0.5 --split-by time": "time:COLUMN",
    "csv {log} --out {tmp}/o --split 0.5,0.5 --split-by time:tags": "must be a number",
    "csv {log} --out {tmp}/o --delimiter ab": "one ASCII character",
    "csv {tmp}/semicolons.csv --out {tmp}/o": "has one column, 'user;item'; if ';' divides it, add --delimiter ';'",
    "csv {tmp}/commas.csv --out {tmp}/o": "Expected 1 columns, got 2: 1;a, b; if another sign than a comma divides its",
    "csv {log} {tmp}/ragged.csv --out {tmp}/o": "ragged.csv: CSV parse error: Row #3",
    "csv {log} {tmp}/other.csv --out {tmp}/o": "other.csv has columns a",
    "csv {tmp}/header.csv --out {tmp}/o": "no row",
    "csv {tmp}/twice.csv --out {tmp}/o": "more than one column 'a'",
    "csv {log} --out {log}": "must name a folder",
    "csv {log} --out {tmp}/o --where starz>4": "no column 'starz'; there are user, item, stars, ts, tags; did you mean",
    "csv {log} --out {tmp}/o --where stars=4": "--where: 'stars=4' cannot be understood (write == for equal)",
    "csv {log} --out {tmp}/o --where stars>9": "too few rows match --where",
    "retrieval {log} --out {tmp}/o --valid {log} --split-column part": "--valid and --test are a split by themselves",
    "csv {log} --out {tmp}": "not made by this script",
    "synthetic --out {tmp}/o --alpha nan": "--alpha must be at least 0, got nan",
    "synthetic --out {tmp}/o --unseen 1.5": "--unseen must be at most 1",
    "synthetic --out {tmp}/o --shape cube": "invalid choice",
    "movielens-100k --out {tmp}/o --cache {tmp}/bad": "not the RecBole 1.2.1 wheel",
    "download": "invalid choice: 'download'",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_gets_one_sentence(command, log, tmp_path, capsys):
    (tmp_path / "ragged.csv").write_text("user,item,stars,ts,tags\n1,2,3,4,5\n1,2\n")
    (tmp_path / "other.csv").write_text("a\n1\n")
    (tmp_path / "semicolons.csv").write_text("user;item\n1;2\n")
    (tmp_path / "commas.csv").write_text("user;item\n1;a, b\n")
    (tmp_path / "header.csv").write_text("a,b\n")
    (tmp_path / "is.parquet").write_bytes(b"PAR1")
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / movielens.WHEEL).write_text("no zip")
    with pytest.raises(UserError) as error:
        cli(*[word.format(tmp=tmp_path, log=log) for word in command.split()])
    assert "\n" not in str(error.value) and MISTAKES[command] in str(error.value)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "o").exists() and not list(tmp_path.glob(".*"))


def test_script_runs_from_any_folder_without_torch(tmp_path):
    sizes = ("--users=50", "--items=50", "--rows=200", "--valid-rows=50", "--test-rows=50")
    words = ["x", "synthetic", "--out=o", *sizes]
    run = f"sys.argv = {words}; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    code = f"import runpy, sys\ntry:\n  {run}\nfinally:\n  assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "train: 200 rows" in done.stdout, done.stderr
