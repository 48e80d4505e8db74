"""Batches of compiled loops are those of NumPy's, to the last byte: of columns of many types, shuffled, on threads."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.config import load_config
from recsys.config.choices import Device
from recsys.data.inputs import open_inputs
from recsys.runtime import loops
from recsys.runtime.world import open_world

pytest.importorskip("numba")
NUM_ROWS = 3000
CONFIG = """\
data: {train: DATA, label_column: label, window_mib: 1, shuffle: true}
features:
  number: {table: t, nulls: empty}
  text: {table: text}
  word: {table: word}
  few: {table: few, boundaries: [0.0, 0.5]}
  several: {table: several, max_length: 4, nulls: empty}
  words: {table: words}
  heavy: {table: heavy, weights: heavy_weights}
  price: {type: float, log1p: true, clip: [0.0, 100.0]}
  share: {type: float}
  flag: {type: float}
tables:
  t: {num_embeddings: 50, embedding_dim: 4, mapping: quotient_remainder, num_ids: 300}
  text: {num_embeddings: 1000, embedding_dim: 4}
  word: {num_embeddings: 30, embedding_dim: 4, num_hashes: 2}
  few: {num_embeddings: 5, embedding_dim: 4}
  several: {num_embeddings: 500, embedding_dim: 4}
  words: {num_embeddings: 64, embedding_dim: 4}
  heavy: {num_embeddings: 77, embedding_dim: 4}
model: {name: dlrm, bottom_mlp: [4], top_mlp: [4]}
train: {global_batch_size: 64}
"""


def write(folder: Path, seed: int) -> None:
    """Files of some rows each, in row groups of other sizes."""
    generator = np.random.default_rng(seed)
    for i, rows in enumerate(np.diff([0, *sorted(generator.integers(1, NUM_ROWS, 3).tolist()), NUM_ROWS]).tolist()):
        pq.write_table(
            table(generator, rows), folder / f"{i}.parquet", row_group_size=int(generator.integers(50, 2000))
        )


def table(generator: np.random.Generator, rows: int) -> pa.Table:
    def drawn(number: int, most: int = 1000) -> np.ndarray:
        return generator.integers(-most, most, number)

    def lists(values: Any, lengths: np.ndarray) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(np.append(0, np.cumsum(lengths)), pa.int32()), pa.array(values))

    lengths = [generator.integers(0, 7, rows) for _ in range(3)]
    totals = [int(each.sum()) for each in lengths]
    masked = pa.array(drawn(totals[0]).astype(np.int16), mask=generator.random(totals[0]) < 0.1)
    return pa.table(
        {
            "number": pa.array(drawn(rows), mask=generator.random(rows) < 0.1),
            "text": pa.array([f"{each:x}" * (each % 9) for each in drawn(rows, 10**9)]),
            "word": pa.array([f"w{each}" for each in drawn(rows, 20)]).dictionary_encode(),
            "few": pa.array(generator.standard_normal(rows)),
            "several": lists(masked, lengths[0]),
            "words": lists([f"w{each}" for each in drawn(totals[1], 40)], lengths[1]),
            "heavy": lists(drawn(totals[2]), lengths[2]),
            "heavy_weights": lists(generator.random(totals[2]), lengths[2]),
            "price": pa.array(generator.random(rows) * 200, mask=generator.random(rows) < 0.1),
            "share": pa.array(generator.random(rows).astype(np.float16)),
            "flag": pa.array(generator.random(rows) < 0.5),
            "label": pa.array(generator.integers(0, 2, rows, np.int8)),
        }
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_batches_are_the_same(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", seed)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("DATA", str(tmp_path / "data")))
    monkeypatch.setattr(loops, "_compiled", None)
    expected = batches(tmp_path, num_threads=1)
    assert not loops.are_compiled()
    assert batches(tmp_path, num_threads=3) == expected
    assert loops.are_compiled() and len(expected) == 2 * -(-NUM_ROWS // 64)


def batches(folder: Path, num_threads: int) -> list[bytes]:
    """Each batch's bytes, of two epochs."""
    config = load_config(folder / "config.yaml", [f"data.num_threads={num_threads}"])
    with open_world(Device.cpu, num_threads=1) as world:
        loader = open_inputs(config, world).loader("train")
        return [batch.content.numpy().tobytes() for batch in loader.batches(num_epochs=2) if batch.content is not None]
