"""Codes of items by residual k-means: those of planted groups within groups, and as features of a run."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launch import run_recsys

from recsys.__main__ import main
from recsys.errors import UserError
from recsys.runtime.arguments import Parser
from recsys.serving.semantic_ids import main as semantic_ids_main
from recsys.serving.semantic_ids import residual_codes, semantic_ids

GROUPS = 8


def planted(num_vectors: int) -> tuple[np.ndarray, np.ndarray]:
    """Return vectors of eight groups far from each other, each of eight that are near, and their numbers."""
    generator = np.random.default_rng(0)
    far, near = np.eye(GROUPS, 16) * 100, np.eye(GROUPS, 16, 8) * 10
    numbers = generator.integers(0, GROUPS, (num_vectors, 2))
    return (far[numbers[:, 0]] + near[numbers[:, 1]] + generator.normal(0, 0.1, (num_vectors, 16))).astype(
        np.float32
    ), numbers


def test_levels_are_groups_within_groups() -> None:
    vectors, numbers = planted(2000)
    found = residual_codes(vectors, 2, GROUPS, seed=0)
    for level in range(2):
        pairs = {
            (int(code), int(number)) for code, number in zip(found.codes[:, level], numbers[:, level], strict=True)
        }
        assert len(pairs) == GROUPS, "a code for each group"
    assert found.unexplained[0] < 0.02 and found.unexplained[1] < 1e-4
    np.testing.assert_array_equal(residual_codes(vectors, 2, GROUPS, seed=0).codes, found.codes)


def test_fewer_vectors_than_codes_and_vectors_that_are_alike() -> None:
    few = np.array([[0.0, 1], [5, 5], [5, 5]], np.float32)
    found = residual_codes(few, 3, 256, seed=1)
    assert found.codes[1].tolist() == found.codes[2].tolist() and found.codes.max() < 3
    assert found.unexplained[-1] < 1e-9
    assert residual_codes(np.zeros((4, 2), np.float32), 2, 2, seed=1).unexplained == [0, 0]


@pytest.mark.parametrize("seed", range(8))
def test_equal_vectors_have_equal_codes_and_no_others(seed: int) -> None:
    draw = np.random.default_rng(seed)
    different = draw.normal(size=(draw.integers(1, 40), draw.integers(1, 9))).astype(np.float32)
    which = draw.integers(0, len(different), draw.integers(1, 300))
    codes = residual_codes(different[which], 3, int(draw.integers(1, 64)), seed).codes
    of_vectors = {(int(number), *row) for number, row in zip(which, codes.tolist(), strict=True)}
    assert len(of_vectors) == len(set(which.tolist())), "one row of codes for each vector"
    enough = residual_codes(different[which], 1, len(different), seed).codes
    assert len(np.unique(enough)) == len(set(which.tolist())), "where there are enough, a code for each vector"


def test_a_file_of_codes_that_rows_are_joined_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors, numbers = planted(300)
    (tmp_path / "vectors").mkdir()
    table = pa.table({"item_id": np.arange(300) * 7, "vector": list(vectors)})
    for part in range(2):
        pq.write_table(table.slice(150 * part, 150), tmp_path / "vectors" / f"part-{part}.parquet")
    assert (
        main(["semantic-ids", f"{tmp_path}/vectors", f"{tmp_path}/codes.parquet", "--levels", "2", "--codes", "8"]) == 0
    )
    codes = pq.read_table(tmp_path / "codes.parquet")
    assert codes.column_names == ["item_id", "code_1", "code_2", "same"] and len(codes) == 300
    assert codes["item_id"].to_pylist() == table["item_id"].to_pylist()
    whole = set(zip(*(codes[name].to_pylist() for name in ("code_1", "code_2", "same")), strict=True))
    assert len(whole) == 300
    said = capsys.readouterr().out
    assert f"{len({tuple(each) for each in numbers.tolist()})} different codes" in said and "as ids do" not in said
    *_, said = semantic_ids(tmp_path / "vectors", tmp_path / "codes.parquet", 2, 300, 1)
    assert said == "code_1 tells vectors apart as ids do; with --codes below 300 items of like vectors share it"


KINDS = [
    pa.large_list(pa.float64()),
    pa.list_(pa.float32(), 16),
    pa.list_view(pa.float32()),
    pa.large_list_view(pa.float64()),
]


@pytest.mark.parametrize("kind", [*KINDS, None], ids=str)
def test_vectors_may_be_lists_of_any_kind(kind: pa.DataType | None, tmp_path: Path) -> None:
    vectors, codes = planted(40)[0], []
    for name, of in (("a", pa.list_(pa.float32())), ("b", kind)):
        column = pa.FixedShapeTensorArray.from_numpy_ndarray(vectors) if of is None else pa.array(list(vectors), of)
        pq.write_table(pa.table({"vector": column}), tmp_path / f"{name}.parquet", row_group_size=17)
        list(semantic_ids(tmp_path / f"{name}.parquet", tmp_path / "codes.parquet", 2, 4, 1))
        codes.append(pq.read_table(tmp_path / "codes.parquet"))
    assert codes[0].equals(codes[1])


@pytest.mark.parametrize("there", ["the vectors", "other vectors", "a log", "a text", "nothing", "codes"])
def test_only_codes_are_overwritten(there: str, tmp_path: Path) -> None:
    """A glob that the shell has expanded names a second file of vectors where the output is expected."""
    source = tmp_path / "a.parquet"
    pq.write_table(pa.table({"item_id": np.arange(9), "vector": list(planted(9)[0])}), source)
    out = source if there == "the vectors" else tmp_path / "b.parquet"
    if there == "other vectors":
        out.write_bytes(source.read_bytes())
    elif there == "a log":
        pq.write_table(pa.table({"same": [1], "clicked": [0]}), out)
    elif there in ("a text", "nothing"):  # as mktemp leaves it
        out.write_text("data:" if there == "a text" else "")
    elif there == "codes":
        assert main(["semantic-ids", str(source), str(out)]) == 0
    before = out.read_bytes()
    if there in ("nothing", "codes"):
        assert main(["semantic-ids", str(source), str(out), "--levels", "2"]) == 0
        assert pq.read_schema(out).names == ["item_id", "code_1", "code_2", "same"]
    else:
        with pytest.raises(UserError, match=f"^OUT: '{out}' exists and has no column 'code_1'"):
            list(semantic_ids(source, out, 2, 8, 1))
        assert out.read_bytes() == before


@pytest.mark.parametrize("content", [None, {"item_id": [1]}, {"vector": pa.array([], pa.list_(pa.float32()))}])
def test_what_has_no_vectors(content: dict | None, tmp_path: Path) -> None:
    if content is not None:
        pq.write_table(pa.table(content), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match="does not exist.*`recsys embeddings" if content is None else "`recsys embeddings"
    ):
        list(semantic_ids(tmp_path / "a.parquet", tmp_path / "out.parquet", 3, 8, 1))


@pytest.mark.parametrize(
    "vectors, problem",
    [
        (pa.array([[1, 2, 3, 4], None, [5, 6, 7, 8], [1, 1, 1, 1]], pa.list_(pa.float32())), "row 1 has not 4"),
        (pa.array([[1], [2, 3, 4]], pa.list_(pa.float64())), "row 0 has not 3"),
        (pa.array([[1, 2], None], pa.list_(pa.float32(), 2)), "row 1 has not 2"),
        (pa.array([[], []], pa.list_(pa.float32())), "row 0 has not 1"),
        (pa.array([[1, 2], [np.nan, 3]], pa.list_(pa.float32())), "row 1 has a number that is null, NaN"),
        (pa.array([[1, None], [2, 3]], pa.list_(pa.float32())), "row 0 has a number that is null"),
        (pa.array([1.0, 2.0]), "double in its column 'vector'"),
        (pa.array([["a"], ["b"]]), "string> in its column 'vector'"),
    ],
)
def test_vectors_that_are_not_whole(vectors: pa.Array, problem: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"vector": vectors}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=problem):
        list(semantic_ids(tmp_path / "a.parquet", tmp_path / "out.parquet", 3, 8, 1))


def terminated_writing() -> None:
    write = pq.ParquetWriter.write_table

    def end(*arguments: Any) -> None:
        write(*arguments)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)

    pq.ParquetWriter.write_table = end  # type: ignore[method-assign]


def test_codes_that_sigterm_ends_leave_nothing(tmp_path: Path) -> None:
    vectors = tmp_path / "vectors.parquet"
    pq.write_table(pa.table({"item": [1, 2], "vector": [[1.0, 2.0], [2.0, 1.0]]}), vectors)
    told = run_recsys("semantic-ids", vectors, tmp_path / "codes.parquet", status=143, before=terminated_writing)
    assert told.splitlines()[-1] == "ended by SIGTERM" and list(tmp_path.iterdir()) == [vectors]


def test_columns_and_seeds_that_cannot_be(tmp_path: Path) -> None:
    pq.write_table(pa.table({"same": [1], "vector": [[1.0]]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a column 'same', which would be written twice"):
        list(semantic_ids(tmp_path / "a.parquet", tmp_path / "out.parquet", 3, 8, 1))
    with pytest.raises(UserError, match="--seed must be at least 0, got -1"):
        semantic_ids_main(Parser(), [f"{tmp_path}/a.parquet", f"{tmp_path}/out.parquet", "--seed", "-1"])
