"""Recall and NDCG of baselines without training: popularity, items of similar users, EASE^R. Prints JSON.

`baselines.py data/gowalla --k 20` reads what `recsys prepare retrieval` has written. If a row of train is an
interaction, not a user with a list, `--user` names the column of users. If rows are users with lists in the order of
time, there is another baseline: the items that came right after the user's last item in other lists. If people choose
items again, `--with-seen` ranks what they had before as well, and has another baseline: just that, most frequent first.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import torch

MOST_ITEMS = 10_000  # for EASE^R, which inverts a matrix of all pairs of items
Scores = Callable[[torch.Tensor], torch.Tensor]


def matrix(lists: pa.ChunkedArray, corpus: pa.Array) -> torch.Tensor:
    """Return a sparse matrix, [lists, items], with a 1 for each item in each list."""
    rows = pc.list_parent_indices(lists.combine_chunks()).to_numpy()
    columns = pc.index_in(pc.list_flatten(lists).combine_chunks(), corpus).to_numpy()
    places = torch.from_numpy(np.stack([rows, columns]).astype(np.int64))
    return torch.sparse_coo_tensor(places, torch.ones(len(rows)), (len(lists), len(corpus))).coalesce()


def lists_of_train(train: pa.Table, user: str, item: str) -> pa.ChunkedArray:
    """Return the items of each user; rows of `train` are users with lists, or interactions."""
    if item not in train.column_names:
        return train["history"]
    return pa.TableGroupBy(train, user).aggregate([(item, "list")])[f"{item}_list"]


def scorers(train: torch.Tensor, l2: float) -> dict[str, Scores]:
    """Return by name functions from the items of queries to scores of all items, both dense [queries, items]."""
    counts = torch.sparse.sum(train, dim=0).to_dense()
    functions: dict[str, Scores] = {"popularity": lambda has: counts.expand_as(has)}
    # Items of users who have the same items, with the matrix of users and items normalised by the roots of both counts
    # (the linear filter of GF-CF: Shen et al. 2021, arXiv:2108.07567).
    users, items = train.indices()
    degrees, roots = torch.sparse.sum(train, dim=1).to_dense(), counts.clamp(min=1).sqrt()
    scaled = torch.sparse_coo_tensor(train.indices(), (degrees[users].sqrt() * roots[items]).reciprocal(), train.shape)
    there, back = scaled.coalesce().to_sparse_csr(), scaled.t().coalesce().to_sparse_csr()
    functions["alike users"] = lambda has: (back @ (there @ (has / roots).T)).T * roots
    if train.shape[1] <= MOST_ITEMS:
        # EASE^R (Steck 2019, arXiv:1905.03375, equation 8).
        inverse = torch.linalg.inv((train.t() @ train).to_dense() + l2 * torch.eye(train.shape[1]))
        weights = (inverse / -inverse.diagonal()).fill_diagonal_(0)
        functions["EASE^R"] = lambda has: has @ weights
    return functions


def followers(lists: pa.ChunkedArray, corpus: pa.Array) -> Scores:
    """Return the function from the last items of queries to how often each item followed these in lists of train."""
    flat = pc.index_in(pc.list_flatten(lists).combine_chunks(), corpus).to_numpy().astype(np.int64)
    rows = pc.list_parent_indices(lists.combine_chunks()).to_numpy()
    is_pair = rows[1:] == rows[:-1]
    places = torch.from_numpy(np.stack([flat[1:][is_pair], flat[:-1][is_pair]]))
    after = torch.sparse_coo_tensor(places, torch.ones(places.shape[1]), (len(corpus), len(corpus)))
    after = after.coalesce().to_sparse_csr()
    return lambda last: (after @ last.T).T


def most_frequent_of(train: torch.Tensor) -> Scores:
    """Return the function from all items that users had to how often they had them; equal counts: most popular first.

    `train` is a sparse matrix [users, items] of how often each has each.
    """
    counts = torch.sparse.sum(train, dim=0).to_dense()
    return lambda has: has + counts / (counts.max() + 1)


def last_of(lists: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the last item of each list, as a list with one item or none."""
    return pa.chunked_array([pa.array([each[-1:] for each in lists.to_pylist()], lists.type)])


def evaluate(score: Scores, queries: dict[str, torch.Tensor], k: int) -> dict[str, float]:
    """Return mean metrics over queries with targets; `queries` has history, seen and targets, each [queries, items]."""
    discounts, sums = 1 / torch.arange(2, k + 2).double().log2(), torch.zeros(3, dtype=torch.float64)
    for start in range(0, len(queries["targets"]), 500):
        chosen = torch.arange(start, min(start + 500, len(queries["targets"])))
        history, seen, targets = (queries[name].index_select(0, chosen).to_dense() for name in queries)
        best = score(history).masked_fill(seen > 0, -torch.inf).topk(k).indices
        targets = targets.clamp(max=1)  # an item that occurs twice counts once, as in training
        hits, number = targets.gather(1, best).double(), targets.sum(1).double()
        ideal = discounts.cumsum(0)[number.clamp(1, k).long() - 1]
        has_targets = number > 0
        shares = torch.stack([hits.sum(1) / number, (hits * discounts).sum(1) / ideal, has_targets.double()])
        sums += shares[:, has_targets].sum(1)
    return {f"recall@{k}": float(sums[0] / sums[2]), f"ndcg@{k}": float(sums[1] / sums[2])}


def main() -> None:
    """Parse the command line, and print the metrics of each baseline."""
    warnings.filterwarnings("ignore", message="Sparse")  # torch warns that sparse CSR tensors are new
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", type=Path)
    parser.add_argument("--user", default="user_id", help="column of data/train, if its rows are interactions")
    parser.add_argument("--item", default="item_id", help="column of data/items")
    parser.add_argument("--part", default="test", choices=("valid", "test"))
    parser.add_argument("--k", type=int, default=20)
    parser.add_argument("--with-seen", action="store_true", help="rank what users had, as data.seen_column=null does")
    parser.add_argument("--l2", type=float, default=500.0, help="of EASE^R, to be chosen on --part valid")
    arguments = parser.parse_args()
    for folder in ("train", arguments.part, "items"):
        if not (arguments.data / folder).is_dir():
            parser.error(f"'{arguments.data}' has no folder {folder}; name what `recsys prepare retrieval` has written")
    train, part, items = (pa.dataset.dataset(arguments.data / x).to_table() for x in ("train", arguments.part, "items"))
    user_in = train if arguments.item in train.column_names else None
    for flag, column, table in (("--item", arguments.item, items), ("--user", arguments.user, user_in)):
        if table is not None and column not in table.column_names:
            parser.error(f"{flag}: there is no column '{column}', only {', '.join(table.column_names)}")
    corpus = items[arguments.item].combine_chunks()
    queries = {name: matrix(part[name], corpus) for name in ("history", "seen", "targets")}
    had = queries["seen"]
    if arguments.with_seen:
        queries["seen"] = torch.zeros_like(had)
    lists = lists_of_train(train, arguments.user, arguments.item)
    functions = scorers(matrix(lists, corpus), arguments.l2)
    results = {name: evaluate(score, queries, arguments.k) for name, score in functions.items()}
    if arguments.item not in train.column_names:
        queries["history"] = matrix(last_of(part["history"]), corpus)
        results["next items"] = evaluate(followers(lists, corpus), queries, arguments.k)
    if arguments.with_seen:
        results["items had before"] = evaluate(
            most_frequent_of(matrix(lists, corpus)), {**queries, "history": had}, arguments.k
        )
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
