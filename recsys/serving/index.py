"""FAISS index of the vectors in a folder of Parquet files, and its recall of the exact best items."""

import json
from collections.abc import Iterator
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from recsys.errors import UserError
from recsys.runtime.files import replace_file, replacing
from recsys.runtime.logs import logger
from recsys.runtime.parquet import STREAMED

INDEX, REPORT = "_index.faiss", "_index.json"  # readers of Parquet folders skip names with an underscore in front
_K, _OWN_QUERIES = 20, 1000
_ROWS_AT_ONCE = 1 << 13
_PER_LIST = 64  # vectors to learn a centroid from; FAISS warns below 39


def faiss() -> Any:
    """Import and return the module. Raises UserError if it is not installed."""
    try:
        import faiss
    except ImportError as error:
        raise UserError("--faiss needs faiss-cpu, which is not installed: `pip install faiss-cpu`") from error
    return faiss


def build_index(folder: Path, kind: str, queries: np.ndarray | None, source: str) -> None:
    """Write `_index.faiss`, by inner product with row numbers as ids, and `_index.json` with its recall.

    The index is built in memory. IVF-PQ has about 4·√rows lists, of which a sixteenth is searched, and a byte for two
    numbers of a vector, or less if there are few vectors to learn from; for a single vector it is flat.

    Args:
        folder: of `Parts`, with column `vector`. kind: `flat` or `ivfpq`.
        queries: float32 [queries, dim] to measure the recall on; None: some of the vectors. source: of the queries,
            for the report.
    """
    num_rows = sum(pq.read_metadata(path).num_rows for path in folder.glob("part-*"))
    dim = next(_vectors(folder)).shape[1]
    index, description = _empty_index(kind, num_rows, dim)
    if not index.is_trained:
        index.train(_sample(folder, num_rows, max(_PER_LIST * index.nlist, 1 << 14)))
    for vectors in _vectors(folder):
        index.add(vectors)
    with replacing(folder / INDEX) as aside:
        faiss().write_index(index, str(aside))
    queries = _sample(folder, num_rows, _OWN_QUERIES) if queries is None else queries
    k = min(_K, num_rows)
    nearest = index.search(queries, k)[1]
    report = {
        "index": description,
        "metric": "inner product",
        "rows": num_rows,
        "dim": dim,
        "bytes": (folder / INDEX).stat().st_size,
        f"recall@{k}": _recall(folder, queries, nearest),
        "queries": {"number": len(queries), "of": source},
    }
    replace_file(folder / REPORT, json.dumps(report, indent=1) + "\n")
    logger.info("%s: %s finds %.4f of the exact best %d", folder / INDEX, description, report[f"recall@{k}"], k)


def _empty_index(kind: str, num_rows: int, dim: int) -> tuple[Any, str]:
    """Return an index without vectors, and its name in FAISS."""
    if kind == "flat" or num_rows == 1:  # codes need two vectors to learn from
        return faiss().IndexFlatIP(dim), "Flat"
    num_lists = max(1, min(4 * isqrt(num_rows), num_rows // _PER_LIST))
    num_codes = next(codes for codes in range(max(1, dim // 2), 0, -1) if dim % codes == 0)
    bits = max(1, min(8, num_rows.bit_length() - 1))  # a code is one of 2 ** bits, each learned from a vector at least
    name = f"IVF{num_lists},PQ{num_codes}x{bits}"
    index = faiss().index_factory(dim, name, faiss().METRIC_INNER_PRODUCT)
    index.nprobe = -(-num_lists // 16)
    index.pq.cp.min_points_per_centroid = 1  # FAISS would warn for each code of a small corpus; the recall tells more
    return index, f"{name}, nprobe={index.nprobe}"


def _vectors(folder: Path) -> Iterator[np.ndarray]:
    """Yield the vectors in order, in chunks: float32 [rows, dim]."""
    for path in sorted(folder.glob("part-*")):
        with pq.ParquetFile(path, **STREAMED) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=["vector"]):
                yield batch.column(0).flatten().to_numpy().reshape(batch.num_rows, -1)


def _sample(folder: Path, num_rows: int, number: int) -> np.ndarray:
    """Return at most `number` vectors, of evenly spaced rows: float32 [vectors, dim]."""
    step, first, chosen = -(-num_rows // number), 0, []
    for vectors in _vectors(folder):
        chosen.append(vectors[-first % step :: step].copy())
        first += len(vectors)
    return np.concatenate(chosen)


def _recall(folder: Path, queries: np.ndarray, nearest: np.ndarray) -> float:
    """Return the share of `nearest`, int64 [queries, k], that is as good as the exact k best.

    Products with the query count, up to rounding: among items with equal vectors, such as ids that share a table row,
    any is as good as another.
    """
    k = nearest.shape[1]
    best, scores, first = torch.empty(len(queries), 0), np.full(nearest.shape, -np.inf, np.float32), 0
    for vectors in _vectors(folder):
        products = queries @ vectors.T
        is_here = (nearest >= first) & (nearest < first + len(vectors))
        scores[is_here] = products[is_here.nonzero()[0], nearest[is_here] - first]
        best = torch.cat([best, torch.from_numpy(products)], 1)
        best, first = best.topk(min(k, best.shape[1]), 1).values, first + len(vectors)
    least = best[:, -1:] - 1e-6 * best.abs().amax(1, keepdim=True)
    return float(np.mean(scores >= least.numpy()))
