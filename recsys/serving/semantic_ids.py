"""Semantic ids: a few small codes for each item, similar for items with similar vectors (arXiv:2305.05065)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recsys.errors import UserError
from recsys.runtime.arguments import Parser, positive
from recsys.runtime.parquet import prepare_parquet, write_parquet
from recsys.runtime.signals import ending_orderly

_AT_ONCE = 1 << 22  # distances, of vectors and centres
_MOST_ROUNDS = 50
_SAME = "same"  # the column that numbers items of equal codes


@dataclass(frozen=True)
class Codes:
    """Codes of vectors.

    Attributes:
        codes: int64 [vectors, levels], each from 0. unexplained: share of the variance of vectors that remains after
            the centres up to each level.
    """

    codes: np.ndarray
    unexplained: list[float]


def residual_codes(vectors: np.ndarray, levels: int, number: int, seed: int) -> Codes:
    """Return codes by residual k-means: each level clusters what earlier levels leave of the vectors.

    Args:
        vectors: float32 [vectors, dim]. number: codes of each level.
    """
    residuals = vectors - vectors.mean(0)
    total, generator = float(np.square(residuals).sum()) or 1.0, np.random.default_rng(seed)
    codes, unexplained = [], []
    for _ in range(levels):
        centres, nearest = _k_means(residuals, min(number, len(residuals)), generator)
        residuals = residuals - centres[nearest]
        codes.append(nearest)
        unexplained.append(float(np.square(residuals).sum()) / total)
    return Codes(np.stack(codes, axis=1), unexplained)


def _k_means(points: np.ndarray, number: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return centres, [number, dim], and the nearest of each point, by Lloyd's algorithm from k-means++ seeds.

    If fewer points are distinct than there are centres, some centres are equal, and the later ones have no points.
    """
    centres = points[[generator.integers(len(points))]]
    distances = np.square(points - centres[0]).sum(1)
    while len(centres) < number:
        sums = np.cumsum(distances, dtype=np.float64)
        place = min(int(np.searchsorted(sums, generator.random() * sums[-1], side="right")), len(points) - 1)
        centres = np.concatenate([centres, points[[place]]])
        distances = np.minimum(distances, np.square(points - centres[-1]).sum(1))
    nearest = np.full(len(points), -1)
    for _ in range(_MOST_ROUNDS):
        before, (nearest, distances) = nearest, _nearest(points, centres)
        counts = np.bincount(nearest, minlength=number)
        # Centres without points get the points that are farthest from their own centres.
        farthest = iter(np.argsort(-distances, kind="stable"))
        for empty in np.flatnonzero(counts == 0):
            nearest[next(farthest)] = empty
        if (nearest == before).all():
            break
        order = np.argsort(nearest, kind="stable")
        first = np.searchsorted(nearest[order], np.arange(number))
        present = np.unique(nearest)
        sums = np.add.reduceat(points[order], first[present])
        centres[present] = sums / np.bincount(nearest, minlength=number)[present, None]
    return centres, _nearest(points, centres)[0]  # computed again, since moved points may have separated equal ones


def _nearest(points: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest centre of each point, the first of equally near ones, and its squared distance."""
    nearest, distances = np.empty(len(points), np.int64), np.empty(len(points), np.float32)
    squares = np.square(centres).sum(1)
    step = max(1, _AT_ONCE // len(centres))
    for start in range(0, len(points), step):
        chunk = points[start : start + step]
        distance = squares - 2 * (chunk @ centres.T)
        nearest[start : start + step] = best = distance.argmin(1)
        distances[start : start + step] = distance[np.arange(len(chunk)), best] + np.square(chunk).sum(1)
    return nearest, distances


def semantic_ids(source: Path, out: Path, levels: int, number: int, seed: int) -> Iterator[str]:
    """Write a Parquet file of codes by item; yield lines of a summary.

    Its columns are those of `source` except `vector`, then int64 `code_1` … and `same`, which numbers items with equal
    codes from 0.

    Args:
        source: folder of `recsys embeddings RUN item`, or Parquet with a column `vector`.

    Raises:
        UserError: there are no such vectors, or `out` is a folder, a file of something else, or cannot be written.
    """
    prepare_parquet(out, "code_1", _SAME)
    try:
        table = pq.read_table(source)
    except (OSError, pa.ArrowInvalid) as error:
        problem = f"cannot be read as Parquet ({error})" if source.exists() else "does not exist"
        raise UserError(f"'{source}' {problem}; name vectors of `recsys embeddings`") from error
    if "vector" not in table.column_names or not len(table):
        raise UserError(
            f"'{source}' has no vectors in a column 'vector'; name a folder of `recsys embeddings RUN item`"
        )
    new_columns = [*(f"code_{level + 1}" for level in range(levels)), _SAME]
    if present := [name for name in table.column_names if name in new_columns]:
        raise UserError(f"'{source}' has a column '{present[0]}', which would be written twice; rename it there")
    codes = residual_codes(_vectors(table["vector"], source), levels, number, seed)
    _, alike = np.unique(codes.codes, axis=0, return_inverse=True)
    order = np.argsort(alike, kind="stable")
    same = np.empty(len(alike), np.int64)
    same[order] = np.arange(len(alike)) - np.searchsorted(alike[order], alike[order])
    table = table.drop_columns(["vector"])
    for name, numbers in zip(new_columns, [*codes.codes.T, same], strict=True):
        table = table.append_column(name, pa.array(numbers))
    write_parquet(out, [table])
    for level, left in enumerate(codes.unexplained, start=1):
        yield f"level {level}: {left:.1%} of the variance left"
    different, most = int((same == 0).sum()), same.max() + 1
    yield f"{out}: {len(table):,} items, {different:,} different codes, {most:,} items of the same at most"
    if number >= len(table):
        yield f"code_1 tells vectors apart as ids do; with --codes below {len(table):,} items of like vectors share it"


def _vectors(column: pa.ChunkedArray, source: Path) -> np.ndarray:
    """Return the vectors of a column as float32 [vectors, dim].

    Raises:
        UserError: a row has no list of finite numbers, or a list of another length than other rows.
    """
    try:
        lists = column.combine_chunks()
        lists = getattr(lists, "storage", lists)  # of tensors
        lengths = pc.list_value_length(lists).fill_null(0).to_numpy()
        numbers = lists.flatten().cast(pa.float32()).fill_null(math.nan).to_numpy()  # Arrow casts no views of lists
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(
            f"'{source}' has {column.type} in its column 'vector'; write a list of numbers for each item"
        ) from error
    dim = max(1, lengths.max())
    problem = f"has not {dim} numbers, as others have"
    is_bad = lengths != dim
    if not is_bad.any():
        numbers, problem = numbers.reshape(-1, dim), "has a number that is null, NaN or infinite"
        is_bad = ~np.isfinite(numbers).all(1)
    if is_bad.any():
        raise UserError(
            f"'{source}': the vector of row {is_bad.argmax():,} {problem}; leave out items without a complete vector"
        )
    return numbers


def main(parser: Parser, arguments: Sequence[str]) -> int:
    """Run `recsys semantic-ids`, whose arguments are added to the parser here; return the exit status 0."""
    parser.add_argument("vectors", metavar="VECTORS", type=Path, help="folder of `recsys embeddings RUN item`")
    parser.add_argument("out", metavar="OUT.parquet", type=Path, help="file to write: items with their codes, code_1 …")
    parser.add_argument("--levels", type=positive, default=3, help="number of codes of an item (3)")
    parser.add_argument("--codes", type=positive, default=256, help="number of different codes on each level (256)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the k-means (1)")
    words = parser.parse_args(arguments)
    if words.seed < 0:
        parser.error(f"--seed must be at least 0, got {words.seed}")
    with ending_orderly():
        for line in semantic_ids(words.vectors, words.out, words.levels, words.codes, words.seed):
            print(line)
    return 0
