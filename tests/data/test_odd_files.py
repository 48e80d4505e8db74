"""Files that are odd and legal: each is read as it was meant. And encrypted ones, which are not."""

import base64
import datetime as dt
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from parquet_files import open_columns, read_all

from recsys.data.footers import footer_of
from recsys.data.parquet import read_column, read_head
from recsys.data.storage import BadDataError
from recsys.data.thrift import schema_end
from recsys.datasets.logs import LogFiles
from recsys.errors import UserError
from recsys.serving import score

ROWS = 500
TABLE = pa.table(
    {
        "user": [i * 7919 % 1000 for i in range(ROWS)],
        "price": [i / 8 for i in range(ROWS)],
        "name": [f"item-{i % 11}" if i % 5 else None for i in range(ROWS)],
        "tags": [[f"t{j}" for j in range(i % 4)] if i % 6 else None for i in range(ROWS)],
        "seen": [list(range(i % 3)) for i in range(ROWS)],
        "clicked": [i % 2 == 0 for i in range(ROWS)],
        "when": pa.array([dt.datetime(2026, 11, 1) + dt.timedelta(hours=i) for i in range(ROWS)], pa.timestamp("us")),
    }
)
OPTIONS = {
    **{codec: {"compression": codec} for codec in ("none", "snappy", "gzip", "lz4", "zstd", "brotli")},
    "page 2": {"data_page_version": "2.0", "write_page_checksum": True},
    "page 2, plain": {"data_page_version": "2.0", "use_dictionary": False, "compression": "none"},
    "no dictionary": {"use_dictionary": False, "write_page_checksum": True},
    "no statistics": {"write_statistics": False},
    "no checksum": {"write_page_checksum": False},
    "page index": {"write_page_index": True, "write_page_checksum": True},
    "many pages": {"data_page_size": 1, "write_batch_size": 7, "write_page_checksum": True},
    "rows of one": {"row_group_size": 1},
    "format 1.0": {"version": "1.0"},
    "no Arrow schema": {"store_schema": False},
    "int96": {"use_deprecated_int96_timestamps": True},
    "old lists": {"use_compliant_nested_type": False},
    "delta": {
        "use_dictionary": False,
        "column_encoding": {"user": "DELTA_BINARY_PACKED", "price": "BYTE_STREAM_SPLIT", "name": "DELTA_BYTE_ARRAY"},
    },
    "small dictionary": {"dictionary_pagesize_limit": 16, "data_page_size": 64, "write_batch_size": 8},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_ways_of_writing(tmp_path, options):
    file = tmp_path / "a.parquet"
    pq.write_table(TABLE, file, **{"row_group_size": 200, **OPTIONS[options]})
    dataset = open_columns(file, *TABLE.column_names)
    assert read_all(dataset).to_pydict() == TABLE.to_pydict()
    assert dataset.schema.field("when").type == pa.timestamp("us")
    assert read_head(dataset, 10).to_pydict() == TABLE.slice(0, min(10, dataset.row_groups.num_rows[0])).to_pydict()
    values = (
        7 * ROWS
        + 2 * 0
        + sum(max(1, len(tags or [])) for column in ("tags", "seen") for tags in TABLE[column].to_pylist())
    )
    assert dataset.row_groups.num_bytes.sum() == 4 * values
    filtered = open_columns(file, "user", filter="name == 'item-3' and price >= 10 or when < '2026-11-02'")
    rows = TABLE.to_pylist()
    assert read_column(filtered, "user").to_pylist() == [
        row["user"]
        for row in rows
        if (row["name"] == "item-3" and row["price"] >= 10) or row["when"] < dt.datetime(2026, 11, 2)
    ]


def test_times_of_int96_are_those_that_were_written(tmp_path: Path) -> None:
    """As Spark writes by default: `never` is often the year 9999, and int64 counts nanoseconds up to 2262."""
    times = [dt.datetime(9999, 12, 31), dt.datetime(1, 1, 1), dt.datetime(1970, 1, 1), None, dt.datetime.max]
    until = pa.array(times, pa.timestamp("us"))
    lists = pa.ListArray.from_arrays(range(6), until)
    table = pa.table(
        {"row": range(5), "until": until, "plan": pa.StructArray.from_arrays([until], ["until"]), "all": lists}
    )
    pq.write_table(table, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    assert read_all(open_columns(tmp_path, *table.column_names)).to_pydict() == table.to_pydict()
    assert read_head(open_columns(tmp_path, "plan.until"), 5)["plan.until"].to_pylist() == times
    (log,) = LogFiles("INPUT", [tmp_path])
    assert log.read(table.column_names).to_pydict() == table.to_pydict()
    assert score.opened(str(tmp_path / "a.parquet")).read().to_pydict() == table.to_pydict()
    for text, rows in (("until > '2500-01-01'", [0, 4]), ("plan.until < '1600-01-01'", [1]), ("until is None", [3])):
        assert read_column(open_columns(tmp_path, "row", filter=text), "row").to_pylist() == rows
    pq.write_table(table, tmp_path / "b.parquet")  # another writer, or an option of the same
    assert read_column(open_columns(tmp_path, "until"), "until").to_pylist() == 2 * times


@pytest.mark.parametrize("log", ["_delta_log", ".hoodie", "_spark_metadata"])
def test_a_table_whose_folder_keeps_earlier_versions_is_told_of(
    log: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / log).mkdir()
    (tmp_path / "day=1").mkdir()
    pq.write_table(TABLE, tmp_path / "day=1" / "a.parquet")
    for path in (tmp_path, tmp_path / "day=1", tmp_path / "*" / "a.parquet", tmp_path / "day=1" / "a.parquet"):
        caplog.clear()
        assert open_columns(path, "user").num_rows == ROWS
        told = f"'{tmp_path}' is a {'Delta' if log == '_delta_log' else 'Hudi'} table" in caplog.text
        assert told == (path == tmp_path and log != "_spark_metadata")


def test_columns_without_values_and_row_groups_without_rows(tmp_path):
    table = pa.table({"user": pa.nulls(4, pa.int64()), "none": pa.nulls(4), "tags": pa.nulls(4, pa.list_(pa.string()))})
    with pq.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
        for rows in (table, table.slice(0, 0), table):
            writer.write_table(rows)
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    dataset = open_columns(tmp_path, *table.column_names)
    assert read_all(dataset).to_pydict() == pa.concat_tables([table, table]).to_pydict()
    assert dataset.row_groups.index.tolist() == [0, 2] and dataset.num_files == 1
    assert dataset.row_groups.num_bytes.tolist() == [4 * 16] * 2
    with pytest.raises(UserError, match="hold no rows"):
        open_columns(tmp_path / "b.parquet", "user")


def test_columns_beside_those_that_are_wanted(tmp_path):
    table = {
        "deep": [{"user": 1, "more": [{"x": [1, 2]}, {"x": []}]}, None],
        "map": pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int64())),
        "user": [5, 6],
        "user.id": [7, 8],
        "twice": [0, 0],
        "tags": [["a"], ["b", "c"]],
        "tags.list.element": [1, 2],
        "ARROW:schema": [3, 4],
    }
    arrays = [pa.array(values) for values in table.values()]
    whole = pa.Table.from_arrays([*arrays, pa.array([1, 1])], [*table, "twice"])
    pq.write_table(whole, tmp_path / "a.parquet")
    for names in (
        ["user"],
        ["user.id", "user"],
        ["tags", "user"],
        ["tags.list.element", "ARROW:schema"],
        ["deep", "map"],
    ):
        dataset = open_columns(tmp_path, *names)
        assert read_all(dataset).to_pydict() == {name: whole[name].to_pylist() for name in names}
        assert read_head(dataset, 1).to_pydict() == {name: whole[name].to_pylist()[:1] for name in names}
    assert open_columns(tmp_path, "tags").row_groups.num_bytes.tolist() == [4 * (3 + 2)]
    assert open_columns(tmp_path, "user", "user.id").row_groups.num_bytes.tolist() == [4 * 4]
    with pytest.raises(UserError, match="has 2 columns 'twice'; keep only one"):
        open_columns(tmp_path, "twice")


def test_names_of_all_kinds(tmp_path):
    names = [
        "n" * 3000,
        "größe",
        "a b",
        "\N{GRINNING FACE}",
        "x\ny",
        "*",
        "'",
        '"',
        "list",
        "..",
        "a/b",
        "=",
        "item[0]",
    ]
    table = pa.table({name: [[i], [i, i]] if i % 2 else [i, i] for i, name in enumerate(names)})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_all(open_columns(tmp_path, *names)).to_pydict() == table.to_pydict()
    text = " and ".join(f"col({name!r}) is not None" for name in names)
    assert open_columns(tmp_path, names[0], filter=text).num_rows == 2


def test_types_of_all_kinds(tmp_path):
    columns = {
        "decimal": pa.array([Decimal("1.25"), None], pa.decimal128(20, 2)),
        "wide decimal": pa.array([Decimal("-1.25"), None], pa.decimal256(50, 2)),
        "time": pa.array([1, 2], pa.time64("us")),
        "duration": pa.array([1, 2], pa.duration("us")),
        "fixed": pa.array([b"ab", b"cd"], pa.binary(2)),
        "half": pa.array([1.0, 2.0], pa.float16()),
        "date64": pa.array([0, 86_400_000], pa.date64()),
        "category": pa.array([7, 8]).dictionary_encode(),
        "view": pa.array(["a", "b"], pa.string_view()),
        "bytes view": pa.array([b"a", b"b"], pa.binary_view()),
        "list of lists": pa.array([[[1], []], []]),
        "list of fixed": pa.array([[b"ab"], []], pa.list_(pa.binary(2))),
        "large": pa.array([["a"], []], pa.large_list(pa.large_string())),
        "fixed list": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
        "uuid": pa.array([b"0" * 16, b"1" * 16], pa.uuid()),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}", "[]"])),
    }
    table = pa.table(columns)
    pq.write_table(table, tmp_path / "a.parquet", write_page_checksum=True)
    dataset = open_columns(tmp_path, *columns)
    found = read_all(dataset)
    for name in columns:
        held = {"duration": [1, 2], "uuid": [b"0" * 16, b"1" * 16]}.get(name, table[name].to_pylist())
        assert found[name].to_pylist() == held, name
    assert read_column(open_columns(tmp_path, "category"), "category").to_pylist() == [7, 8]
    # Two rows of 12 columns, and of 4 with lists: their lengths and 3 + 2 + 2 + 4 elements, where an empty list is one.
    assert dataset.row_groups.num_bytes.tolist() == [4 * (2 * 12 + 2 * 4 + 3 + 2 + 2 + 4)]


def test_a_repeated_field_without_a_group_is_a_list(tmp_path):
    """As Protocol Buffers are written. Arrow writes none; its lists without nulls differ from these in the footer."""
    lists = pa.array([[1, 2], [], [3]], pa.list_(pa.field("element", pa.int32(), nullable=False)))
    table = pa.Table.from_arrays([lists], schema=pa.schema([pa.field("x", lists.type, nullable=False)]))
    file = tmp_path / "a.parquet"
    pq.write_table(table, file, store_schema=False)
    content = file.read_bytes()
    footer = footer_of(content)
    schema = b"\x15\x04\x19\x2c\x48\x06schema\x15\x02\x00\x15\x02\x25\x04\x18\x01x\x00"  # repeated int32 x
    rest = footer[schema_end(footer) :].replace(b"\x38\x01x\x04list\x07element", b"\x18\x01x")
    data = content[: -8 - len(footer)]
    file.write_bytes(data + schema + rest + (len(schema) + len(rest)).to_bytes(4, "little") + b"PAR1")
    assert "repeated int32 field_id=-1 x" in str(pq.read_metadata(file).schema)
    dataset = open_columns(file, "x")
    assert read_all(dataset)["x"].to_pylist() == [[1, 2], [], [3]]
    assert dataset.row_groups.num_bytes.tolist() == [4 * (3 + 4)]  # lengths, and a value of the empty list too


# Encryption


class Keys(pe.KmsClient):
    """Keys that are wrapped by writing them down."""

    def __init__(self, config):
        super().__init__()

    def wrap_key(self, key_bytes, master_key_identifier):
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key, master_key_identifier):
        return base64.b64decode(wrapped_key)


@pytest.mark.parametrize("plaintext_footer", [True, False])
def test_encrypted_files(tmp_path, plaintext_footer):
    file = tmp_path / "a.parquet"
    table = pa.table({"user": [1, 2], "name": ["a", "b"], "tags": [["a"], ["b"]], "open": [3, 4]})
    config = pe.EncryptionConfiguration(
        footer_key="footer",
        column_keys={"key": ["user", "name", "tags.list.element"]},
        plaintext_footer=plaintext_footer,
    )
    properties = pe.CryptoFactory(Keys).file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(file, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    if not plaintext_footer:
        with pytest.raises(BadDataError, match=r"'.*a.parquet' is not a readable Parquet file \(it is encrypted\)"):
            open_columns(file, "open")
        return
    if int(pa.__version__.partition(".")[0]) < 26:  # as with Python 3.10: it then reads no column of such a file
        with pytest.raises(BadDataError, match=r"column 'open' of row group 0 of .* cannot be read"):
            read_all(open_columns(file, "open"))
        return
    for column in ("user", "name"):
        with pytest.raises(BadDataError, match=f"column '{column}' of row group 0 of '{file}' cannot be read"):
            read_all(open_columns(file, "open", column))
    with pytest.raises(BadDataError, match=r"does not describe column 'tags\.list\.element' once"):
        open_columns(file, "tags")
    with pytest.raises(BadDataError, match="does not describe column 'name' once"):
        open_columns(file, "open", filter="name == 'a'")
    assert read_all(open_columns(file, "open"))["open"].to_pylist() == [3, 4]
