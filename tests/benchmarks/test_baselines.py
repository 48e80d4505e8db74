"""benchmarks/baselines.py: rows of train that are interactions give what users with lists give."""

import pyarrow as pa

from benchmarks.baselines import lists_of_train, matrix, scorers


def test_interactions_and_lists_of_users_are_the_same() -> None:
    interactions = pa.table({"customer": ["b", "a", "b", "c"], "article": [1, 2, 3, 1], "history": [[], [], [1], []]})
    users = pa.table({"customer": ["b", "a", "c"], "history": [[1, 3], [2], [1]]})
    corpus = pa.array([1, 2, 3])
    dense = [matrix(lists_of_train(rows, "customer", "article"), corpus).to_dense() for rows in (interactions, users)]
    assert sorted(dense[0].tolist()) == sorted(dense[1].tolist()) == [[0, 1, 0], [1, 0, 0], [1, 0, 1]]
    popularity = scorers(dense[0].to_sparse(), 1.0)["popularity"](dense[0][:1])
    assert popularity.tolist() == [[2, 1, 1]]
