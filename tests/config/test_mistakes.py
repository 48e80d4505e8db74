"""A mistake of the user ends the run with one sentence that names the key, file or column, and what to do."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import ROOT, run_train

from recsys.config import load_config
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.runtime.world import World

RANKER = "configs/dlrm_sample.yaml"
TOWER = """\
data: {train: data/sample/train, num_streams: 4}
features: {user_id: {table: user}, item_id: {table: item}}
tables: {user: {num_embeddings: 100, embedding_dim: 8}, item: {num_embeddings: 100, embedding_dim: 8}}
model: {name: two_tower, user_features: [user_id], item_features: [item_id], item_id: item_id}
train: {global_batch_size: 256}
"""

# What is changed in the ranker's config → what the sentence says.
KEYS = {
    "unknown section": ("trian.epochs=3", ["'trian' is not known", "did you mean 'train'?"]),
    "key of another model": ("model.name=deepfm", ["bottom_mlp' is not known", "under model of deepfm: name, "]),
    "unknown key": ("train.epoch=3", ["'train.epoch' is not known", "did you mean 'train.epochs'?", "allowed under"]),
    "key of another section": ("epochs=3", ["did you mean 'train.epochs'?"]),
    "unknown key of a feature": ("features.price.typ=float", ["did you mean 'features.price.type'?"]),
    "misspelt feature": ("features.user_idd.max_length=3", ["did you mean 'features.user_id'?", "user, item"]),
    "misspelt table": ("tables.usr.embedding_dim=8", ["'tables.usr.num_embeddings'", "did you mean 'tables.user'?"]),
    "no equals sign": ("train.epochs", ["'train.epochs' is not of the form key=value"]),
    "empty part of a key": ("train..epochs=3", ["not of the form key=value"]),
    "value not YAML": ("model.top_mlp=[1,2", ["'model.top_mlp=[1,2' is not readable YAML"]),
    "text for a number": ("train.epochs=three", ["'train.epochs' must be a whole number, found 'three'"]),
    "fraction": ("train.epochs=1.5", ["must be a whole number, found 1.5"]),
    "null": ("train.epochs=null", ["must be a whole number, found null"]),
    "number for a list": ("model.top_mlp=64", ["'model.top_mlp' must be a list, each a whole number, found 64"]),
    "number for a switch": ("data.processes=3", ["'data.processes' must be true or false, found 3"]),
    "number for a section": ("optimizer.tables=3", ["'optimizer.tables' must be a section of keys, found 3"]),
    "attention to nothing": ("model.attention={history: itemid}", ["'model.attention.history'", "mean 'item_id'?"]),
    "attention of a float": ("model.attention={price: item_id}", ["'model.attention'", "no id feature 'price'"]),
    "attention of itself": ("model.attention={history: history}", ["'history' is itself weighted by attention"]),
    "name without quotes": ("features.device={table: user, null: refuse}", ["'features.device'", "put it in quotes"]),
    "choice": ("optimizer.dense.name=adm", ["must be one of adam, adamw", "did you mean 'adam'?"]),
    "model": ("model.name=dlmr", ["'model.name'", "did you mean 'dlrm'?", "two_tower"]),
    "zero": ("train.max_steps=0", ["'train.max_steps' must be at least 1, found 0"]),
    "too many threads": ("run.num_threads=100000", ["'run.num_threads' must be at most 1024"]),
    "seed": ("seed=99999999999999999999", ["'seed' must be at most"]),
    "infinite rate": ("optimizer.dense.learning_rate=.inf", ["must be at most", "found inf"]),
    "state of BF16": ("optimizer.tables.state_dtype=BF16", ["'optimizer.tables.state_dtype'", "use FP32"]),
    "rows split by columns": (
        "tables.user.sharding_type=column_wise",
        ["'tables.user.sharding_type'", "allow_column_split=true"],
    ),
    "norms of rows split by columns": (
        "tables.user={sharding_type: column_wise, optimizer: {name: lamb}}",
        ["'tables.user.sharding_type'", "lamb", "allow_column_split=true"],
    ),
    "replicated lamb": (
        "tables.user={sharding_type: data_parallel, optimizer: {name: lamb}}",
        ["'tables.user.optimizer.name'", "adagrad, sgd, adam, ftrl, found lamb; use one of these, or set"],
    ),
    "key of a table's optimizer": ("tables.user.optimizer.nme=sgd", ["did you mean 'tables.user.optimizer.name'?"]),
    "rate of a table": ("tables.user.optimizer.learning_rate=-1", ["'tables.user.optimizer.learning_rate' must be"]),
    "no eps": ("optimizer.tables.eps=0", ["'optimizer.tables.eps' must be at least"]),
    "width": ("model.top_mlp=[0]", ["'model.top_mlp' must be at least 1"]),
    "batch size": ("train.global_batch_size=7", ["must be at least data.num_streams=8", "found 7"]),
    "nulls of a float": ("features.price.nulls=empty", ["'features.price.nulls' of a float", "mean or refuse"]),
    "nulls of an id": ("features.hour.nulls=mean", ["'features.hour.nulls' of an id", "empty or refuse"]),
    "clip of an id": ("features.hour.clip=[0, 1]", ["'features.hour.clip' is for features of type float"]),
    "dim of an id": ("features.hour.dim=3", ["'features.hour.dim' is for features of type float"]),
    "log of an id": ("features.hour.log1p=true", ["'features.hour.log1p' is for features of type float"]),
    "clip": ("features.price.clip=[3, 1]", ["'features.price.clip' must be a lower and an upper bound", "found [3"]),
    "length of a float": ("features.price.max_length=3", ["'features.price.max_length' is for features of type id"]),
    "boundaries": ("features.hour.boundaries=[3, 1]", ["hour.boundaries' must be one or more ascending numbers"]),
    "end of a list": ("features.history.keep=lats", ["must be one of first, last", "did you mean 'last'?"]),
    "hashes of identity": ("tables.hour.num_hashes=2", ["'tables.hour.num_hashes' is for mapping: hash"]),
    "count of a hash": ("tables.user.min_count=2", ["'tables.user.min_count' is for mapping: vocabulary", "hash"]),
    "quotient": ("tables.user.mapping=quotient_remainder", ["'tables.user.num_ids' is not set"]),
    "mapping": ("tables.user.mapping=vocab", ["must be one of hash, identity, vocabulary"]),
    "filter": ("data.filter=3", ["'data.filter' must be an expression", "found 3"]),
    "filter of": ("data.filter={trian: a}", ["'data.filter': there is no dataset 'trian'", "did you mean 'train'?"]),
    "bad rows": ("data.max_bad_rows=-1", ["'data.max_bad_rows' must be at least 0"]),
    "micro-batch": ("train.micro_batch_ids=0", ["'train.micro_batch_ids' must be at least 1"]),
    "dimension": ("tables.user.embedding_dim=6", ["must be a multiple of 4", "found 6"]),
    "row count": ("tables.user.num_embeddings=0", ["'tables.user.num_embeddings' must be at least 2"]),
    "unknown table": ("features.user_id.table=users", ["'features.user_id.table'", "did you mean 'user'?"]),
    "table without feature": (
        "tables.x={num_embeddings: 9, embedding_dim: 8}",
        ["'tables.x': no feature uses this table"],
    ),
    "dot in a name": ("features={a.b: {table: user}}", ["'features': 'a.b' is not a valid name", "use letters"]),
    "items for a ranker": ("data.items=x", ["'data.items'", "dlrm"]),
    "evaluations": ("train={eval_every_steps: 9, eval_every_epochs: 1}", ["exclude each other", "to null"]),
    "metric without evaluations": ("train.early_stop.metric=auc", ["needs train.eval_every_epochs"]),
    "metric": ("train.early_stop.metric=acu", ["there is no metric 'acu'", "did you mean 'auc'?"]),
    "metric of groups": (
        "train.early_stop.metric=gauc",
        ["`recsys evaluate RUN --group COLUMN`; here, name one of auc"],
    ),
    "no label column": ("data.label_column=null", ["'data.label_column' is not set"]),
}

# The config file's content → what the sentence says.
FILES = {
    "binary": (bytes(range(256)), ["is not readable YAML"]),
    "empty": (b"", ["must hold keys and values, found nothing"]),
    "list": (b"- 1", ["must hold keys and values"]),
    "Latin 1": ("run: {name: café}".encode("latin-1"), ["is not readable YAML"]),
    "key twice": (b"seed: 1\nseed: 2", ["duplicate key seed"]),
    "dots in a file": (b"train.epochs: 3", ["'train.epochs' is not known", "in a file it is 'train: {epochs: …}'"]),
    "misspelt model": (b"modle: {name: dlrm}", ["'modle' is not known", "did you mean 'model'?"]),
    "only floats": (
        b"{model: {name: dlrm}, features: {a: {type: float}}, tables: {}, data: {train: a, label_column: b}}",
        ["no feature of type id"],
    ),
    "label of two-tower": (
        TOWER.replace("num_streams: 4", "num_streams: 4, label_column: label").encode(),
        ["'data.label_column'", "reads no label"],
    ),
    "item of several rows": (
        TOWER.replace("item: {num_embeddings: 100,", "item: {num_embeddings: 100, num_hashes: 2,").encode(),
        ["'model.item_id': table 'item' gives an id several rows"],
    ),
    "feature twice": (TOWER.replace("[user_id]", "[user_id, user_id]").encode(), ["names 'user_id' twice"]),
    "both towers": (TOWER.replace("[user_id]", "[user_id, item_id]").encode(), ["'item_id' is in both"]),
}


def sentence(error: BaseException) -> str:
    message = str(error)
    assert "\n" not in message and "Traceback" not in message and len(message) < 500
    return message


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("override, said", KEYS.values(), ids=KEYS)
def test_key(override: str, said: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_config(RANKER, [override])
    assert all(part in sentence(caught.value) for part in said)


@pytest.mark.parametrize("content, said", FILES.values(), ids=FILES)
def test_config_file(content: bytes, said: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert all(part in sentence(caught.value) for part in said)


@pytest.mark.parametrize(
    "path, said",
    [
        ("configs/dlrm_sampel.yaml", "does not exist; did you mean 'configs/dlrm_sample.yaml'?"),
        ("configs", "is a folder, not a file; there are: configs/"),
        ("a" * 300, "does not exist"),
    ],
)
def test_path_of_the_config(path: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert said in sentence(caught.value)


Edit = Callable[[pa.Table], Sequence[pa.Table]]


def column(name: str, values: object, rows: slice = slice(None)) -> Edit:
    """Set some rows of a column, or all of it where the values have another type."""

    def edit(table: pa.Table) -> list[pa.Table]:
        old = table.column(name).to_pylist()
        old[rows] = list(values) if isinstance(values, Sequence) else [values] * len(old[rows])
        return [table.set_column(table.column_names.index(name), name, pa.array(old))]

    return edit


def second_file(edit: Edit) -> Edit:
    return lambda table: [table.slice(0, 1500), *edit(table.slice(1500))]


STRINGS = [str(i) for i in range(3000)]

# How data.train differs from the sample, further overrides → what the sentence says.
DATA: dict[str, tuple[Edit, list[str], list[str]]] = {
    "rating as label": (column("label", [1, 2, 3, 4, 5] * 600), [], ["'label' (data.label_column) holds 2", "0 or 1"]),
    "label null": (column("label", None, slice(9, 10)), [], ["(data.label_column) holds 1 null"]),
    "late label": (column("label", 3, slice(2999, 3000)), [], ["holds 3", "part-0.parquet"]),
    "label of strings": (column("label", STRINGS), [], ["(data.label_column) must hold numbers, found string"]),
    "negative weight": (column("weight", -1.0), [], ["(data.weight_column) holds -1.0", "0 or more"]),
    "weights all zero": (column("weight", 0.0), [], ["(data.weight_column) is 0 in every row"]),
    "float of strings": (column("price", STRINGS), [], ["'price' (price) must hold numbers, found string"]),
    "float not finite": (column("price", float("inf"), slice(9, 10)), [], ["holds inf", "only finite numbers"]),
    "id of floats": (column("user_id", 1.5), [], ["'user_id'", "ids must be whole numbers, found 1.5"]),
    "id of structs": (column("user_id", [{"a": 1}] * 3000), [], ["ids must be integers or strings, found struct"]),
    "nested lists": (column("history", [[[1]]] * 3000), [], ["ids must be integers or strings, found list"]),
    "id out of range": (column("hour", 24, slice(9, 10)), [], ["id 24 is outside 0 … 23", "raise num_embeddings"]),
    "negative id": (column("hour", -1, slice(2999, 3000)), [], ["id -1 is outside 0 … 23"]),
    "file lacks a column": (
        second_file(lambda table: [table.drop_columns(["hour"])]),
        [],
        ["'features.hour'", "part-1.parquet' has no column 'hour'"],
    ),
    "two types": (second_file(column("user_id", STRINGS[:1500])), [], ["'user_id' is string in", "but int64"]),
    "other type than valid": (
        column("user_id", STRINGS),
        [],
        ["'tables.user'", "string in column 'user_id' of data.train and int64 in column 'user_id' of data.valid"],
    ),
    "a table of two types": (
        column("history", [["a"]] * 3000),
        ["data.valid=null", "data.test=null"],
        ["'tables.item'", "string in column 'history' of data.train and int64 in column 'item_id' of data.train"],
    ),
    "column misspelt": (lambda table: [table], ["data.label_column=lable"], ["did you mean 'label'?", "it has: label"]),
    "column in capitals": (
        lambda table: [table.rename_columns([name.upper() for name in table.column_names])],
        [],
        ["did you mean 'USER_ID'?"],
    ),
    "no rows": (lambda table: [table.slice(0, 0)], [], ["'data.train'", "hold no rows"]),
}


def write(folder: Path, edit: Edit) -> Path:
    """Write what `edit` makes of the sample's training rows."""
    folder.mkdir(exist_ok=True)
    for i, table in enumerate(edit(pq.read_table(ROOT / "data/sample/train"))):
        pq.write_table(table, folder / f"part-{i}.parquet", row_group_size=500)
    return folder


def read_all(config_path: Path | str, overrides: list[str], world: World) -> None:
    """Do with the data what a run does, without training."""
    inputs = open_inputs(load_config(config_path, overrides), world)
    for role in inputs.datasets:
        for _ in inputs.loader(role).batches():
            pass


@pytest.mark.parametrize("edit, overrides, said", DATA.values(), ids=DATA)
def test_data(edit: Edit, overrides: list[str], said: list[str], world: World, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_all(RANKER, [f"data.train={write(tmp_path, edit)}", *overrides], world)
    assert all(part in sentence(caught.value) for part in said)


# data.train → what the sentence says; TMP is a folder that test_path makes.
PATHS = {
    "misspelt": ("data/sample/trian", ["does not exist", "did you mean 'data/sample/train'?"]),
    "glob": ("data/sample/train/*.parq", ["no file matches 'data/sample/train/*.parq'"]),
    "empty folder": ("TMP/empty", ["has no *.parquet file; it is empty"]),
    "folder of text": ("TMP/text", ["has no *.parquet file; it holds a.csv"]),
    "text": ("TMP/text/a.csv", ["a.csv' is not a readable Parquet file", "python -m recsys prepare csv"]),
    "cut short": ("TMP/short.parquet", ["short.parquet' is not a readable Parquet file"]),
    "damaged": ("TMP/damaged.parquet", ["row group 0 of", "cannot be read"]),
    "one file twice": ("[data/sample/train, data/sample/train/part-00000.parquet]", ["twice"]),
    "pipe": ("/dev/null", ["is not a regular file"]),
}


@pytest.mark.parametrize("path, said", PATHS.values(), ids=PATHS)
def test_path(path: str, said: list[str], world: World, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.csv").write_text("user_id,item_id\n1,2\n")
    content = (ROOT / "data/sample/train/part-00000.parquet").read_bytes()
    (tmp_path / "short.parquet").write_bytes(content[:5000])
    (tmp_path / "damaged.parquet").write_bytes(content[:8] + b"\xff" * 30_000 + content[30_008:])
    with pytest.raises(UserError) as caught:
        read_all(RANKER, [f"data.train={path.replace('TMP', str(tmp_path))}"], world)
    message = sentence(caught.value)
    assert "'data.train'" in message and all(part in message for part in said)


ITEMS = pa.table({"item_id": pq.read_table(ROOT / "data/sample/train")["item_id"].unique()})
USERS = pa.table({"user_id": [1, 2], "targets": [ITEMS["item_id"].to_pylist()[:2], []], "seen": [[], [5]]})

# items, users to evaluate → what the sentence says.
RETRIEVAL = {
    "item twice": (pa.concat_tables([ITEMS, ITEMS.slice(0, 1)]), USERS, ["occurs 2 times", "'data.items'"]),
    "item null": (pa.table({"item_id": [1, None]}), USERS, ["holds 1 null"]),
    "items of another type": (
        ITEMS.cast(pa.schema([("item_id", pa.string())])),
        USERS,
        ["string in column 'item_id' of data.items"],
    ),
    "list of items": (pa.table({"item_id": [[1], [2]]}), USERS, ["'model.item_id'", "not one id a row"]),
    "no targets column": (ITEMS, USERS.drop_columns(["targets"]), ["'data.targets_column'", "no column 'targets'"]),
    "targets of strings": (ITEMS, USERS.set_column(1, "targets", [[["a"], []]]), ["cannot be compared"]),
    "targets not among the items": (
        ITEMS,
        USERS.set_column(1, "targets", [[[7], [8]]]),
        ["'data.valid'", "with column 'item_id' of data.items"],
    ),
}


@pytest.mark.parametrize("items, users, said", RETRIEVAL.values(), ids=RETRIEVAL)
def test_retrieval(items: pa.Table, users: pa.Table, said: list[str], world: World, tmp_path: Path) -> None:
    (tmp_path / "tower.yaml").write_text(TOWER)
    pq.write_table(items, tmp_path / "items.parquet")
    pq.write_table(users, tmp_path / "users.parquet")
    overrides = [f"data.items={tmp_path}/items.parquet", f"data.valid={tmp_path}/users.parquet"]
    with pytest.raises(UserError) as caught:
        read_all(tmp_path / "tower.yaml", overrides, world)
    assert all(part in sentence(caught.value) for part in said)


def check_two_ranks(config: Path | str, overrides: list[str], said: Sequence[str]) -> str:
    """Run two ranks under torchrun; return standard output. The sentence is printed, and is the root cause."""
    done = run_train(str(config), *overrides, nproc=2, timeout=100)
    ours, _, summary = done.stderr.partition("FAILED")
    printed = [line for line in ours.splitlines() if line.startswith("error: ")]
    root = summary.rpartition("Root Cause")[2]
    assert done.returncode == 1, done.stderr
    assert 1 <= len(printed) <= 2, done.stderr  # torchrun may end the second rank before it has told
    told = [line for line in printed if all(part in line for part in said)]
    assert told and any(line in root for line in told), done.stderr
    others = [line for line in printed if line not in told]
    assert all(line.startswith("error: another rank ended") for line in others), done.stderr
    # torchrun's own, which tells of the failed rank, is the only traceback.
    assert done.stderr.count("Traceback") == 1 and "ChildFailedError" in done.stderr, done.stderr
    return done.stdout


def test_two_ranks_with_a_wrong_key() -> None:
    check_two_ranks(RANKER, ["train.epoch=3"], KEYS["unknown key"][1])


@pytest.mark.slow
def test_two_ranks_with_data_that_do_not_fit(tmp_path: Path) -> None:
    edit, overrides, said = DATA["rating as label"]
    train = write(tmp_path / "data", edit)
    check_two_ranks(RANKER, [f"data.train={train}", f"run.dir={tmp_path}/run", *overrides], said)


@pytest.mark.slow
def test_a_row_that_only_one_rank_meets_and_late(tmp_path: Path) -> None:
    # Streams of several windows of 1 MiB each; the last row is in rank 1's last stream.
    rows, generator = 40_000, np.random.default_rng(1)
    histories = generator.integers(1, 2**60, (rows, 100))
    ids = np.arange(rows) % 50
    ids[-1] = 50
    table = pa.table({"user": ids, "history": list(histories), "label": ids % 2})
    pq.write_table(table, tmp_path / "late.parquet", row_group_size=500, use_dictionary=False)
    (tmp_path / "late.yaml").write_text(
        "model: {name: dlrm}\nfeatures: {user: {table: user}, history: {table: item}}\n"
        "tables: {user: {num_embeddings: 50, embedding_dim: 4, mapping: identity},"
        " item: {num_embeddings: 100, embedding_dim: 4}}\n"
        f"data: {{train: {tmp_path}/late.parquet, label_column: label, shuffle: false, window_mib: 1}}\n"
        f"run: {{dir: {tmp_path}/run}}\ntrain: {{global_batch_size: 512, log_every_steps: 1}}\n"
    )
    output = check_two_ranks(tmp_path / "late.yaml", [], ["'user'", "id 50 is outside 0 … 49", "late.parquet"])
    assert "step  1/" in output


@pytest.mark.slow
@pytest.mark.parametrize("override, said", KEYS.values(), ids=KEYS)
def test_two_ranks_with_each_key(override: str, said: list[str]) -> None:
    check_two_ranks(RANKER, [override], said)


@pytest.mark.slow
@pytest.mark.parametrize("edit, overrides, said", DATA.values(), ids=DATA)
def test_two_ranks_with_each_data(edit: Edit, overrides: list[str], said: list[str], tmp_path: Path) -> None:
    train = write(tmp_path / "data", edit)
    check_two_ranks(RANKER, [f"data.train={train}", f"run.dir={tmp_path}/run", *overrides], said)


RUNS = {
    "device": (["run.device=cuda"], ["'run.device' is cuda"]),
    "debug": (["--debug"], ["--debug runs one process"]),
    "ranks": (
        ["data.num_streams=1", "train.eval_batch_size=1"],
        ["'train.eval_batch_size' is 1", "1 of 2 ranks would have no row"],
    ),
    "no checkpoint": (["train.init_from=configs"], ["'configs' holds no checkpoint"]),
    "learning rate": (["optimizer.dense.learning_rate=1e29"], ["is not finite", "lower optimizer.dense.learning_rate"]),
    "memory": (["tables.user.num_embeddings=100000000000"], ["fit under no plan"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("overrides, said", RUNS.values(), ids=RUNS)
def test_two_ranks_with_each_run(overrides: list[str], said: list[str], tmp_path: Path) -> None:
    if "run.device=cuda" in overrides and pytest.importorskip("torch").cuda.is_available():
        pytest.skip("there is a GPU")
    check_two_ranks(RANKER, [f"run.dir={tmp_path}/run", *overrides], said)
