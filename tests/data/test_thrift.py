"""Reading single columns' facts from a footer, against what pyarrow reads from whole footers."""

import datetime as dt
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.data.thrift import num_values, statistics

LONG = "n" * 300
TABLE = pa.table(
    {
        "i8": pa.array([-3, None, 7, 100], pa.int8()),
        "u32": pa.array([2**32 - 1, 0, None, 5], pa.uint32()),
        "i64": pa.array([-(2**62), 2**62, 5, 5]),
        "u64": pa.array([2**64 - 1, 1, 2, 3], pa.uint64()),
        "f": pa.array([1.5, float("nan"), -2.5, None], pa.float32()),
        "d": pa.array([0.1, 0.2, None, None]),
        "b": pa.array([True, False, None, True]),
        "s": ["é", "a", None, "zz"],
        "long": ["x" * 3000, "y" * 3000, "z", None],
        "bytes": pa.array([b"\xff\x00", b"", None, b"a"]),
        "date": pa.array([dt.date(1960, 1, 1), dt.date(2026, 11, 1), None, None]),
        "us": pa.array([-1, 5, None, 7], pa.timestamp("us", "UTC")),
        "ns": pa.array([1, 2, 3, None], pa.timestamp("ns")),
        "l": [[1, 2], [], None, [3, None]],
        "ls": [["a"], ["b", "c"], [], []],
        "null": pa.nulls(4),
        "a.b": [1, 2, 3, 4],
        LONG: [4, 3, 2, 1],
        "constant": ["same"] * 4,
    }
)


def footer(path: Path) -> bytes:
    content = path.read_bytes()
    return content[-8 - int.from_bytes(content[-8:-4], "little") : -8]


@pytest.fixture(params=[{}, {"data_page_version": "2.0", "use_dictionary": False}, {"write_statistics": False}])
def file(request, tmp_path) -> Path:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=3, **request.param)
    return tmp_path / "a.parquet"


def test_facts_are_those_that_pyarrow_finds(file):
    metadata, content = pq.read_metadata(file), footer(file)
    for number in range(metadata.num_columns):
        dotted = metadata.schema.column(number).path
        name = next(name for name in TABLE.column_names if dotted == name or dotted.startswith(f"{name}.list"))
        path = [name, *dotted.removeprefix(name).split(".")[1:]]
        chunks = [metadata.row_group(i).column(number) for i in range(2)]
        assert num_values(content, path, 2) == [chunk.num_values for chunk in chunks], name
        if len(path) == 1:
            for chunk, (least, most, nulls) in zip(
                chunks, statistics(content, path, 2, TABLE.schema.field(name).type), strict=True
            ):
                known = chunk.statistics
                assert nulls == (None if known is None else known.null_count), name
                if known is None or not known.has_min_max:
                    assert least is None and most is None, name
                    continue
                kind = TABLE.schema.field(name).type
                expected = (known.min_raw, known.max_raw) if pa.types.is_temporal(kind) else (known.min, known.max)
                assert (least, most) == expected, name


def test_types_without_an_order_have_no_bounds(file):
    kinds = (pa.decimal128(5, 2), pa.binary(8), pa.time64("us"), pa.float16(), pa.list_(pa.int64()))
    assert all(statistics(footer(file), ["i64"], 2, kind)[0][:2] == (None, None) for kind in kinds)
    assert statistics(footer(file), ["i8"], 2, pa.int64())[0][:2] == (None, None)  # 4 bytes are no int64


def test_a_column_that_is_not_there_once_in_each_row_group(file):
    content = footer(file)
    for path, count in ((["other"], 2), (["i8"], 1), (["i8"], 3), (["l"], 2), (["l", "list"], 2)):
        with pytest.raises(OSError, match="does not describe column"):
            num_values(content, path, count)


def test_damaged_footers_end_in_an_error_or_a_value(file):
    rng = random.Random(1)
    content = footer(file)
    for _ in range(3000):
        damaged = bytearray(content)
        start = rng.randrange(len(damaged))
        damaged[start : start + rng.choice([1, 1, 8, 64])] = rng.randbytes(rng.choice([0, 1, 8, 64]))
        for column, kind in (("s", pa.string()), ("i64", pa.int64())):
            try:
                assert all(count >= 0 for count in num_values(bytes(damaged), [column], 2))
                pa.array([least for least, _, _ in statistics(bytes(damaged), [column], 2, kind)], kind)
            except OSError:
                pass
