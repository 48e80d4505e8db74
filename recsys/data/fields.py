"""Fields of structs as columns: `device.os` is the field `os` of the struct column `device`.

In a list of structs, `items.id` is the list of their ids. A column whose own name is `device.os` has precedence.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq


class InFile(NamedTuple):
    """A column in a row group of a file.

    Attributes:
        stored, raw: bytes of its pages as they are in the file, and decompressed.
        dictionary: bytes of its dictionary, decompressed, if that is compressed as well as the rest.
        values: number of values. is_compressed: whether `stored` is compressed.
    """

    stored: int
    raw: int
    dictionary: int
    values: int
    is_compressed: bool


@dataclass(frozen=True)
class Place:
    """Where a column is in a Parquet file.

    Attributes:
        dtype: its type; a list for a field in a list of structs.
        steps: names of the column and of the fields inside it, from the root; most columns have one.
        leaves, paths: numbers and names of its Parquet columns; pyarrow's readers read single ones by name.
    """

    dtype: pa.DataType
    steps: list[str]
    leaves: list[int]
    paths: list[str]

    @classmethod
    def of(cls, field: pa.Field) -> "Place":
        """Return the place of a field, from the metadata that `Place.field` has given it."""
        return cls(field.type, *json.loads(field.metadata[b"place"]))

    def field(self, name: str, dtype: pa.DataType, **metadata: str) -> pa.Field:
        """Return a field of a schema whose metadata hold the place; its type may be another than that in the file."""
        place = json.dumps([self.steps, self.leaves, self.paths])
        return pa.field(name, dtype, metadata={"place": place, **metadata})

    def take(self, table: pa.Table) -> pa.ChunkedArray:
        """Return the column from a table that was read with `paths`; a field of a null struct is null.

        Raises:
            OSError: it refers to entries that its dictionary does not have.
        """
        column = table.column(self.steps[0])
        if len(self.steps) > 1:
            chunks = column.chunks or [pa.array([], column.type)]
            column = pa.chunked_array([_inside(chunk, self.steps[1:]) for chunk in chunks])
        for chunk in column.chunks:
            _check_entries(chunk)
        return column

    def in_file(self, row_group: pq.RowGroupMetaData) -> "InFile":
        """Return what its Parquet columns are in a row group."""
        chunks = [row_group.column(leaf) for leaf in self.leaves]
        # The dictionary comes first, and footers do not say how large it is when decompressed.
        dictionaries = [
            (chunk.data_page_offset - chunk.dictionary_page_offset)
            * chunk.total_uncompressed_size
            // max(1, chunk.total_compressed_size)
            for chunk in chunks
            if chunk.has_dictionary_page
        ]
        return InFile(
            stored=sum(chunk.total_compressed_size for chunk in chunks),
            raw=sum(chunk.total_uncompressed_size for chunk in chunks),
            dictionary=sum(dictionaries),
            values=sum(chunk.num_values for chunk in chunks),
            is_compressed=any(chunk.compression != "UNCOMPRESSED" for chunk in chunks),
        )

    def parts(self) -> list[list[str]]:
        """Return each path split into its names: those of the steps, which may have dots themselves, and the writer's
        for elements of lists."""
        return [_parts(path, self.steps) for path in self.paths]


def places(fields: Iterable[pa.Field], schema: pq.ParquetSchema, first: int = 0) -> dict[str, Place]:
    """Return by name the place of each column of a file, and of each field inside one.

    Args:
        fields: the columns with the types as which they are read. schema: Parquet's schema of the same file.
        first: number of the first of their Parquet columns.
    """
    fields, by_name = list(fields), dict[str, Place]()
    bounds = list(pairwise(accumulate((_num_leaves(field.type) for field in fields), initial=first)))
    for field, (start, stop) in zip(fields, bounds, strict=True):
        paths = [schema.column(leaf).path for leaf in range(start, stop)]
        by_name.setdefault(field.name, Place(field.type, [field.name], list(range(start, stop)), paths))
    for field, (start, _) in zip(fields, bounds, strict=True):
        for name, place in places(_fields(field.type), schema, start).items():
            dtype = pa.list_(place.dtype) if pa.types.is_list(field.type) else place.dtype
            inner = replace(place, dtype=dtype, steps=[field.name, *place.steps])
            by_name.setdefault(f"{field.name}.{name}", inner)
    return by_name


def names(fields: Iterable[pa.Field], before: str = "") -> Iterator[str]:
    """Yield the names of columns that hold values; for a struct, those of its fields."""
    for field in fields:
        inner = _fields(field.type)
        yield from names(inner, f"{before}{field.name}.") if inner else [before + field.name]


def advice(column: str | None, dtype: pa.DataType) -> str:
    """Return advice, for messages, on what to name instead of a column of structs; empty for other types."""
    fields = _fields(dtype)
    return f"; name a field of the struct, such as '{column}.{fields[0].name}'" if fields else ""


def _num_leaves(dtype: pa.DataType) -> int:
    return sum(_num_leaves(dtype.field(i).type) for i in range(dtype.num_fields)) if pa.types.is_nested(dtype) else 1


def _parts(path: str, steps: Sequence[str]) -> list[str]:
    parts: list[str] = []
    for step in steps:
        before, _, path = f".{path}.".partition(f".{step}.")
        parts += [*filter(None, before.split(".")), step]
        path = path.removesuffix(".")
    return [*parts, *filter(None, path.split("."))]


def _fields(dtype: pa.DataType) -> list[pa.Field]:
    """Return the fields of a struct or of the structs in a list; empty for other types."""
    dtype = dtype.value_type if pa.types.is_list(dtype) else dtype
    return [dtype.field(i) for i in range(dtype.num_fields)] if pa.types.is_struct(dtype) else []


def _check_entries(array: pa.Array) -> None:
    # Arrow does not check this when it reads a column as a dictionary; looking up such an entry reads arbitrary memory.
    values = array.values if pa.types.is_list(array.type) else array
    if pa.types.is_dictionary(values.type):
        ends = pc.min_max(values.indices).as_py()
        if ends["max"] is not None and not 0 <= ends["min"] <= ends["max"] < len(values.dictionary):
            raise OSError("it refers to entries that its dictionary does not have")


def _inside(array: pa.Array, steps: Sequence[str]) -> pa.Array:
    if not steps:
        return array
    if not pa.types.is_list(array.type):
        return _inside(pc.struct_field(array, [steps[0]]), steps[1:])
    values, bounds = _inside(array.values, steps), array.buffers()[:2]
    return pa.Array.from_buffers(
        pa.list_(values.type), len(array), bounds, array.null_count, array.offset, children=[values]
    )
