"""`recsys export`: what score.py computes without torch is what the run itself predicts and recommends."""

import io
import json
import pickle
import pickletools
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch import ROOT, run_recsys
from random_export import write_random
from retrieval import train_towers

from recsys.checkpoint.state import Marker, find_checkpoint
from recsys.checkpoint.tensor_files import read_rows
from recsys.data.sources import find_files
from recsys.ids import hash_column
from recsys.serving import score as score_module
from recsys.serving.export_dense import translations
from recsys.serving.export_tables import Files, write_table
from recsys.serving.score import ExportError, Rows, Scorer

onnxruntime = pytest.importorskip("onnxruntime")
BLOCKED = (
    "import pickle, runpy, sys; sys.modules |= dict.fromkeys(['torch', 'recsys', 'xxhash', 'omegaconf']); "
    "pickle.load = pickle.loads = pickle.Unpickler = None; "
)


def train(folder: Path, config: Path, *overrides: str) -> Path:
    run_recsys("train", config, f"run.dir={folder}/run", *overrides)
    return folder / "run"


def score(folder: Path, *arguments: object, status: int = 0) -> str:
    """Run score.py of an export where there is neither torch nor recsys, and nothing unpickles; return what it says."""
    code = f"{BLOCKED} sys.argv[1:] = sys.argv[2:]; runpy.run_path({str(folder / 'score.py')!r}, run_name='__main__')"
    command = [sys.executable, "-c", code, "", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and "Traceback" not in done.stderr, done.stderr[-3000:]
    return done.stderr.strip() if status else done.stdout.strip()


def assert_same_scores(ours: pa.Table, theirs: pa.Table) -> None:
    assert ours.column_names == theirs.column_names and len(ours) == len(theirs)
    for name in ours.column_names:
        if name.startswith("score"):
            # Of a model that has diverged, scores are small differences of numbers as large as the largest of them.
            largest = float(np.abs(theirs[name]).max(initial=0))
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5 + 1e-6 * largest)
        else:
            assert ours[name].to_pylist() == theirs[name].to_pylist(), name


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its export, and what it predicts of the sample's test rows."""
    folder = tmp_path_factory.mktemp("ranker")
    overrides = ["train.max_steps=20", "data.valid=null", "data.test=null", "tables.user={mapping: vocabulary}"]
    run = train(folder, ROOT / "configs" / "dlrm_sample.yaml", *overrides, "train.activation_checkpointing=true")
    run_recsys("export", run, folder / "out")
    run_recsys("predict", run, ROOT / "data/sample/test", folder / "predicted")
    return folder


def test_scores_are_those_of_the_run(ranker: Path, tmp_path: Path) -> None:
    out = tmp_path / "scores.parquet"
    assert score(ranker / "out", "predict", ROOT / "data/sample/test", out) == f"{out}: 500 rows"
    assert_same_scores(pq.read_table(out), pq.read_table(ranker / "predicted"))
    manifest = json.loads((ranker / "out" / "manifest.json").read_text())
    assert "/" not in manifest["made"]["run"] and manifest["made"]["step"] == 20


def test_files_are_those_that_training_finds(tmp_path: Path) -> None:
    """Folders named like files, links, and what other tools hide."""
    for folder in (".", "d=1", "d=1/_temporary/0", "d=1/.tmp", "d=2/e.parquet", "_log"):
        (tmp_path / "logs" / folder).mkdir(parents=True, exist_ok=True)
        for name in ("a.parquet", "_b.parquet", "_SUCCESS", "c.txt"):
            (tmp_path / "logs" / folder / name).touch()
    (tmp_path / "logs" / "d=3").symlink_to(tmp_path / "logs" / "d=1")
    for end in ("", "/", "/d=*", "/*/", "/**", "/**/*.parquet", "/*/a*", "/d=1/_temporary", "/d=[13]/_temporary/*/a*"):
        path = f"{tmp_path}/logs{end}"
        theirs = [name.replace("//", "/") for name in find_files("DATA", path).names]
        assert score_module.files_of(path) == theirs and theirs, end


def test_only_predictions_are_overwritten(ranker: Path, tmp_path: Path) -> None:
    """A glob that the shell has expanded names a second file of the data where the output is expected."""
    data, log, config = ROOT / "data/sample/test/part-00000.parquet", tmp_path / "log.parquet", tmp_path / "c.yaml"
    log.write_bytes(before := data.read_bytes())
    assert f"'{log}' exists and has no score" in score(ranker / "out", "predict", data, log, status=1)
    config.write_text("data:")
    assert f"'{config}' cannot be written" in score(ranker / "out", "predict", data, config, status=1)
    assert log.read_bytes() == before and config.read_text() == "data:"
    (out := tmp_path / "out.parquet").touch()  # as mktemp does
    for _ in range(2):
        assert score(ranker / "out", "predict", data, out, "--keep", "user_id").startswith(f"{out}: ")


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(40)])
def test_random_runs(seed: int, tmp_path: Path) -> None:
    run = train(tmp_path, write_random(tmp_path, seed))
    run_recsys("export", run, tmp_path / "out")
    run_recsys("predict", run, tmp_path / "test.parquet", tmp_path / "predicted", "--keep", "label")
    score(tmp_path / "out", "predict", tmp_path / "test.parquet", tmp_path / "s.parquet", "--keep", "label")
    assert_same_scores(pq.read_table(tmp_path / "s.parquet"), pq.read_table(tmp_path / "predicted"))


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two towers and its export."""
    folder = tmp_path_factory.mktemp("towers")
    run_recsys("export", train_towers(folder, "train.epochs=3"), folder / "out")
    return folder


@pytest.mark.slow
def test_items_are_those_of_the_run(towers: Path, tmp_path: Path) -> None:
    rows, users = pq.read_table(towers / "valid.parquet"), tmp_path / "users.parquet"
    seen = pa.array([[*items[:10], None, "no such item"] for items in rows["seen"].to_pylist()])
    pq.write_table(rows.set_column(rows.column_names.index("seen"), "seen", seen), users)
    run_recsys("recommend", towers / "run", users, tmp_path / "best", "--k", "7", "--keep", "user,seen")
    score(towers / "out", "recommend", users, tmp_path / "s.parquet", "--k", 7, "--keep", "user,seen")
    ours, theirs = pq.read_table(tmp_path / "s.parquet"), pq.read_table(tmp_path / "best")
    assert ours.drop("scores").equals(theirs.drop("scores"))
    assert any("item-0" in items for items in ours["items"].to_pylist())  # which a null in `seen` does not bar
    np.testing.assert_allclose(*(each["scores"].combine_chunks().flatten() for each in (ours, theirs)), atol=1e-6)

    run_recsys("predict", towers / "run", towers / "train.parquet", tmp_path / "predicted")
    score(towers / "out", "predict", towers / "train.parquet", tmp_path / "rows.parquet")
    assert_same_scores(pq.read_table(tmp_path / "rows.parquet"), pq.read_table(tmp_path / "predicted"))


def test_candidates_and_unknown_items(towers: Path) -> None:
    scorer, users = Scorer(towers / "out"), pq.read_table(towers / "valid.parquet").slice(0, 2)
    lists = pa.array([["item-1", None, "no such item", "item-0"], None])
    best = scorer.recommend(users.append_column("some", lists), seen=None, candidates="some").to_pydict()
    assert [sorted(items) for items in best["items"]] == [["item-0", "item-1"], []]
    assert len(scorer.recommend(users, k=100, seen=None)["items"][0]) == 60
    assert scorer.recommend(users.slice(0, 0)).num_rows == 0
    for k in (0, None, "20", 1.5):
        with pytest.raises(ExportError, match=r"k is .*, but must be a whole number above 0"):
            scorer.recommend(users, k=k)  # type: ignore[arg-type]
    assert scorer.recommend(users, k=np.int64(3)) == scorer.recommend(users, k=3)  # type: ignore[arg-type]
    for folder in (None, 3, b"out", "nowhere"):
        with pytest.raises(ExportError, match=r"nowhere/manifest.json' cannot be read|/manifest.json' is not the m"):
            Scorer(folder)  # type: ignore[arg-type]
    assert scorer.recommend(users.to_batches()[0]) == scorer.recommend(users) == scorer.recommend(users.to_pydict())
    with pytest.raises(
        ExportError, match="rows are of type list, and may be an Arrow table or batch, a dict of columns or"
    ):
        scorer.recommend([1, 2])
    for id, said in ((1, "of type int64 are not texts, which"), (1.5, "must be whole"), ({"a": 1}, "must be int")):
        with pytest.raises(ExportError, match=f"^column 'odd': ids {said}"):
            scorer.recommend(users.append_column("odd", pa.array([[id], []])), seen="odd")


@pytest.mark.parametrize(
    ("encoding", "stride", "atol"),
    [("fp32", 32, 0), ("stored", 16, 0), ("fp16", 16, 0), ("int8", 16, 1e-3), ("int4", 8, 0.02), ("int2", 6, 0.1)],
)
def test_rows_in_fewer_bytes(ranker: Path, tmp_path: Path, encoding: str, stride: int, atol: float) -> None:
    checkpoint = find_checkpoint(ranker / "run")
    entry = Marker.read(checkpoint).tensors["tables/item"]
    described = write_table(Files(tmp_path), "item", checkpoint, entry, encoding)
    assert (described["stride"], (tmp_path / "tables/item.bin").stat().st_size) == (stride, 1000 * stride)
    rows, found = np.array([3, 999, 0, 3]), Rows(tmp_path, described)
    np.testing.assert_allclose(
        found.take(rows), read_rows(checkpoint, entry, 0, 1000).float().numpy()[rows], rtol=0, atol=atol
    )


def test_a_changed_file_is_named(ranker: Path, tmp_path: Path) -> None:
    names = [path.relative_to(ranker / "out") for path in (ranker / "out").rglob("*") if path.is_file()]
    kept = [name for name in names if name.suffix != ".py"]
    assert len(kept) >= 10
    folder = tmp_path / "copy"
    shutil.copytree(ranker / "out", folder)
    for name in kept:
        whole = (folder / name).read_bytes()
        middle = len(whole) // 2
        altered = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for content in (altered, whole[:-3], whole + b" x", b""):
            (folder / name).write_bytes(content)
            with pytest.raises(ExportError, match=str(name)):
                Scorer(folder)
        (folder / name).unlink()
        if name.suffix == ".pt2":  # nothing reads it
            Scorer(folder)
        else:
            with pytest.raises(ExportError, match=f"{name}' cannot be read .No such file"):
                Scorer(folder)
        (folder / name).write_bytes(whole)
    Scorer(folder)


def pickles_in(name: str, content: bytes) -> list[str]:
    """Return the names of what is a pickle in a file: itself, or members of archives in it."""
    if zipfile.is_zipfile(io.BytesIO(content)):
        archive = zipfile.ZipFile(io.BytesIO(content))
        return [each for member in archive.namelist() for each in pickles_in(f"{name}/{member}", archive.read(member))]
    try:
        pickletools.dis(content, out=io.StringIO())
    except Exception:  # of many kinds: it is none, cut off, or has more behind
        begins = content[:1] == b"\x80" and content[1:2] in (b"\2", b"\3", b"\4", b"\5")
        # A weight may begin so too, by chance: then no opcode follows.
        is_pickle = begins and (len(content) < 3 or content[2:3].decode("latin-1") in pickletools.code2op)
    else:
        is_pickle = True
    return [name] if is_pickle else []


def test_no_file_holds_a_pickle(ranker: Path, tmp_path: Path) -> None:
    paths = [path for path in (ranker / "out").rglob("*") if path.is_file()]
    assert not [each for path in paths for each in pickles_in(path.name, path.read_bytes())]
    with zipfile.ZipFile(ranker / "out" / "dense.pt2") as archive:  # where torch would say that members are pickles
        assert not any(b'"use_pickle": true' in archive.read(name) for name in archive.namelist())
    torch.save(torch.zeros(2), tmp_path / "x.pt")
    assert pickles_in("x", (tmp_path / "x.pt").read_bytes()) == ["x/x/data.pkl"]
    assert pickles_in("x", pickle.dumps({"a": 1}, 0)) == ["x"]


def test_the_program_for_torch_is_that_of_the_graph(ranker: Path) -> None:
    session = onnxruntime.InferenceSession(str(ranker / "out" / "dense.onnx"), providers=["CPUExecutionProvider"])
    torch.manual_seed(0)
    inputs = {each.name: torch.randn(5, each.shape[1]) for each in session.get_inputs()}
    (found,) = torch.export.load(ranker / "out" / "dense.pt2").module()(*inputs.values())
    (expected,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=0, atol=1e-6)


class Logarithms(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(x)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_logarithms_of_small_probabilities_keep_their_digits() -> None:
    x = torch.linspace(-30, 30, 101)
    program = torch.export.export(Logarithms(), (x,))
    model = torch.onnx.export(program, dynamo=True, verbose=False, custom_translation_table=translations())
    session = onnxruntime.InferenceSession(model.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    np.testing.assert_allclose(found, Logarithms()(x), rtol=1e-6, atol=1e-7)


def test_large_files_of_vectors_are_verified_on_request(
    ranker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ranker / "out", tmp_path / "copy")
    with (tmp_path / "copy/tables/item.bin").open("r+b") as file:
        file.write(b"x")
    monkeypatch.setattr(score_module, "VERIFIED_BYTES", 31_999)
    Scorer(tmp_path / "copy")
    with pytest.raises(ExportError, match=r"tables/item.bin' has changed"):
        Scorer(tmp_path / "copy", verify=True)


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("user_id", "x", "ids were numbers in training, and are string"),
        ("user_id", 0.5, "ids must be whole numbers"),
        ("user_id", 2.0**53, "ids must be whole numbers below 2**53, found 9007199254740992.0"),
        ("hour", 99, "id 99 is outside 0 … 23"),
        ("price", "1", "must hold numbers"),
        ("price", np.nan, "only finite"),
        ("history", [0.25], "column 'history' (feature 'history'): ids must be whole numbers"),
        ("history", 7, "rows have one id a row here, and had lists of ids in training; write both alike"),
        ("item_id", [7], "rows have lists of ids here, and had one id a row in training; write both alike"),
        ("item_id", None, "column 'item_id' is missing"),
    ],
)
def test_mistakes_in_data(ranker: Path, column: str, values: object, said: str) -> None:
    table = pq.read_table(ROOT / "data/sample/test").slice(0, 50)
    bad = table.drop(column)
    if values is not None:
        bad = bad.append_column(column, pa.array([values] * len(table)))
    with pytest.raises(ExportError, match=re.escape(said)):
        Scorer(ranker / "out").score(bad)


def test_columns_in_other_forms_of_arrow(ranker: Path) -> None:
    scorer, rows = Scorer(ranker / "out"), pq.read_table(ROOT / "data/sample/test").slice(0, 50)
    texts = ("device", "category")
    for form in (
        lambda column: column.dictionary_encode(),
        lambda column: pa.chunked_array([pa.compute.run_end_encode(column.combine_chunks())]),
        lambda column: column.cast(pa.string_view()),
        lambda column: column.cast(pa.large_string()),
    ):
        other = pa.table({name: form(rows[name]) if name in texts else rows[name] for name in rows.column_names})
        assert scorer.score(other).equals(scorer.score(rows))
        assert score_module.as_table(other) is other  # up to 24, pyarrow crashes in pa.table of a cast string_view


def test_rows_are_scored_in_pieces(ranker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, rows = Scorer(ranker / "out"), pq.read_table(ROOT / "data/sample/test").slice(0, 50)
    whole = scorer.score(rows)
    monkeypatch.setattr(score_module, "PAIRS_AT_ONCE", 7)
    assert_same_scores(scorer.score(rows), whole)


def test_every_length_of_text_has_the_hash_of_training() -> None:
    generator = np.random.default_rng(0)
    texts = [generator.bytes(length) for length in [*range(270), 511, 512, 1023, 1024, 1025, 1088, 2049, 5000]]
    for seed in (0, 1, 2**31 + 5, 2**64 - 1):
        np.testing.assert_array_equal(
            score_module.hash_texts(pa.array(texts, pa.large_binary()), seed), hash_column(pa.array(texts), seed)
        )


def test_a_server_answers(ranker: Path) -> None:
    """What litserve calls, without litserve; it answers a mistake by its sentence."""
    stub = "import types, sys; sys.modules['litserve'] = types.SimpleNamespace(LitAPI=object); sys.modules['fastapi']"
    stub += " = types.SimpleNamespace(HTTPException=type('Refused', (Exception,), {}))"
    rows = pq.read_table(ROOT / "data/sample/test").slice(0, 2).to_pydict()
    code = f"{stub}; import serve; api = serve.Scores(); api.setup('cpu'); print(api.predict({rows!r})['score'])"
    code += f"; api.predict({rows | {'device': 'tv'}!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ranker / "out", capture_output=True, text=True, timeout=60)
    expected = pq.read_table(ranker / "predicted")["score"].to_pylist()[:2]
    np.testing.assert_allclose(json.loads(done.stdout), expected, atol=1e-5)
    assert re.search(r"Refused: \(400, .*column 'device' is of type str, but must be a list of values", done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["texts", "numbers"])
def test_partition_keys_are_columns(kind: str, tmp_path: Path) -> None:
    """A model of a partition column scores as the run does; keys of digits alone are texts where training had such."""
    rows = pq.read_table(ROOT / "data/sample/train").slice(0, 900)
    for number in range(6):
        role, key = "train" if number < 3 else "test", f"{number % 3}" if kind == "numbers" else f"d%20{number % 3}"
        folder = tmp_path / role / f"place={key}" / "day=2026-11-01"
        folder.mkdir(parents=True)
        pq.write_table(rows.slice(150 * number, 150), folder / "part-0.parquet")
    data = (f"data.train={tmp_path}/train", "data.valid=null", "data.test=null")
    run = train(tmp_path, ROOT / "configs/dlrm_sample.yaml", *data, "train.max_steps=8",
                "features.place={table: place}", "tables.place={num_embeddings: 10, embedding_dim: 8}")  # fmt: skip
    run_recsys("export", run, tmp_path / "out")
    keep = ("--keep", "item_id,place,day")
    run_recsys("predict", run, tmp_path / "test", tmp_path / "predicted", *keep)
    score(tmp_path / "out", "predict", tmp_path / "test", tmp_path / "s.parquet", *keep)
    ours, theirs = pq.read_table(tmp_path / "s.parquet"), pq.read_table(tmp_path / "predicted", partitioning=None)
    assert_same_scores(ours, theirs)
    assert ours.schema.types == theirs.schema.types
    assert set(ours["place"].to_pylist()) == ({0, 1, 2} if kind == "numbers" else {"d 0", "d 1", "d 2"})
    if kind == "texts":  # which may be digits alone in another data set
        (tmp_path / "test" / "place=d%201").rename(tmp_path / "place=7")
        score(tmp_path / "out", "predict", tmp_path / "place=7", tmp_path / "s.parquet", *keep)
        assert set(pq.read_table(tmp_path / "s.parquet")["place"].to_pylist()) == {"7"}


def test_keys_that_not_all_paths_have() -> None:
    null = "__HIVE_DEFAULT_PARTITION__"
    found = score_module.partitions_of(["a=1/b=x/p", f"a={null}/p", "a=b/a=07/c=1/p"], ["c"])
    plain = {path: {key: value.as_py() for key, value in keys.items()} for path, keys in found.items()}
    assert list(plain.values()) == [{"a": 1, "b": "x"}, {"a": None}, {"a": 7, "c": "1"}]


def test_who_is_to_blame_is_named(ranker: Path, tmp_path: Path) -> None:
    out = tmp_path / ("s" * 250)  # with what is put behind it for a while, more than a name may have
    said = score(ranker / "out", "predict", ROOT / "data/sample/test", out, status=1)
    assert f"error: '{out}' cannot be written (" in said
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    said = score(ranker / "out", "predict", tmp_path / "torn.parquet", tmp_path / "s", status=1)
    assert f"'{tmp_path}/torn.parquet' cannot be scored" in said


def test_mistakes(ranker: Path, tmp_path: Path) -> None:
    assert "already exists" in run_recsys("export", ranker / "run", ranker / "out", status=1)
    assert "has no vectors of items" in score(
        ranker / "out", "recommend", ROOT / "data/sample/test", tmp_path / "s", status=1
    )
    assert "is a folder, or is to lie in none; name a file" in score(
        ranker / "out", "predict", ROOT / "data/sample/test", tmp_path, status=1
    )
    nowhere = tmp_path / "nowhere" / "s"
    said = score(ranker / "out", "predict", ROOT / "data/sample/test", nowhere, status=1)
    assert said.endswith(f"'{nowhere}' is a folder, or is to lie in none; name a file")
    assert "cannot be" in score(ranker / "out", "predict", tmp_path / "nothing.parquet", tmp_path / "s", status=1)
    empty = tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(ROOT / "data/sample/test").slice(0, 0), empty)
    assert f"'{empty}' holds no rows" in score(ranker / "out", "predict", empty, tmp_path / "s", status=1)
    assert not [path for path in ranker.iterdir() if path.name.startswith(".out")]


@pytest.mark.parametrize("num_threads", ["2", 0, -1, 1.5, None])
def test_a_number_of_threads_is_refused_by_name(num_threads: Any, ranker: Path) -> None:
    with pytest.raises(ExportError, match=re.escape(f"num_threads is {num_threads!r}, but must be a whole number")):
        Scorer(ranker / "out", num_threads=num_threads)
