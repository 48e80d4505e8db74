"""benchmarks/baselines.py: rows of train that are interactions give what users with lists give; next items."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.baselines import followers, last_of, lists_of_train, main, matrix, scorers


def test_interactions_and_lists_of_users_are_the_same() -> None:
    interactions = pa.table({"customer": ["b", "a", "b", "c"], "article": [1, 2, 3, 1], "history": [[], [], [1], []]})
    users = pa.table({"customer": ["b", "a", "c"], "history": [[1, 3], [2], [1]]})
    corpus = pa.array([1, 2, 3])
    dense = [matrix(lists_of_train(rows, "customer", "article"), corpus).to_dense() for rows in (interactions, users)]
    assert sorted(dense[0].tolist()) == sorted(dense[1].tolist()) == [[0, 1, 0], [1, 0, 0], [1, 0, 1]]
    popularity = scorers(dense[0].to_sparse(), 1.0)["popularity"](dense[0][:1])
    assert popularity.tolist() == [[2, 1, 1]]


def test_items_that_came_next_are_counted_within_lists_alone() -> None:
    """Of 1 came 2 twice and 3 once; what the next user begins with came after nothing."""
    lists, corpus = pa.chunked_array([[[1, 2, 1], [3]], [[1, 3], [1, 2], []]]), pa.array([1, 2, 3])
    queries = pa.chunked_array([[[3, 1], [], [1, 2], [1, 3]]])
    last = matrix(last_of(queries), corpus).to_dense()
    assert last.tolist() == [[1, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert followers(lists, corpus)(last).tolist() == [[0, 2, 1], [0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_items_had_before_are_ranked_by_how_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """3 was had most often, and 2 is more popular than 1; a target that occurs twice counts once."""
    lists = {"history": [[3, 1, 3, 2], [2, 2]]}
    queries = {"history": [[3, 1, 3, 2], [2, 2]], "seen": [[3, 1, 3, 2], [2, 2]], "targets": [[3, 2, 3], [4]]}
    for name, columns in (("train", lists), ("test", queries), ("items", {"sku": [1, 2, 3, 4]})):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(columns), tmp_path / name / "a.parquet")
    results = {}
    for words in ([], ["--with-seen"]):
        monkeypatch.setattr("sys.argv", ["baselines.py", str(tmp_path), "--item", "sku", "--k", "2", *words])
        main()
        results[bool(words)] = json.loads(capsys.readouterr().out)
    assert results[True]["items had before"]["recall@2"] == 0.5 == results[True]["items had before"]["ndcg@2"]
    assert results[True]["popularity"]["recall@2"] == 0.5  # 2 and 3
    assert "items had before" not in results[False]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "none' has no folder train; name what `recsys prepare retrieval` has written"),
        ([".", "--item", "article"], "--item: there is no column 'article', only sku"),
        ([".", "--item", "sku", "--user", "who"], "--user: there is no column 'who', only customer, sku"),
    ],
)
def test_wrong_words_are_told(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, columns in (
        ("train", {"customer": [1], "sku": [2]}),
        ("test", {"customer": [1]}),
        ("items", {"sku": [2]}),
    ):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(columns), tmp_path / name / "a.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["baselines.py", *words])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
