"""The tree of a filter: conditions on columns, evaluated for rows, or for row groups from their statistics."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import UserError
from recsys.ids import hash_uniform, numpy_type
from recsys.runtime.counter_random import make_key

KEY = "config key 'data.filter'"
BY_DATASET = "a filter of one data set alone is written as data.filter={train: …}"

KERNELS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
    "and": pc.and_kleene,
    "or": pc.or_kleene,
}
_OPPOSITE = {"==": "!=", "!=": "==", "<": ">=", "<=": ">", ">": "<=", ">=": "<"}
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
# Test of a column's type, types of the literals that such a column is compared with, advice for messages.
_LITERALS: tuple[tuple[Callable[[pa.DataType], bool], tuple[type, ...], str], ...] = (
    (pa.types.is_boolean, (bool, int), "write True or False"),
    (pa.types.is_integer, (int,), "write an integer of that type, without quotes"),
    (
        lambda dtype: pa.types.is_floating(dtype) or pa.types.is_decimal(dtype),
        (int, float),
        "write a number, without quotes",
    ),
    (pa.types.is_date, (str,), "write a date such as '2026-11-01'"),
    (pa.types.is_timestamp, (str,), "write a time such as '2026-11-01' or '2026-11-01 12:30:00'"),
    (pa.types.is_struct, (), "compare one of its fields, as device.os"),
    (pa.types.is_nested, (), "a list has only 'is None' and 'is not None'"),
    (pa.types.is_null, (bool, int, float, str), "write 'is None'"),
    (lambda dtype: dtype in _TEXTS, (str,), "write a value in quotes"),
    (lambda dtype: True, (), "such a column has only 'is None', 'is not None' and comparisons with one of its type"),
)


class Bounds(NamedTuple):
    """Bounds of a column in each of n row groups.

    Attributes:
        least, most: pa.Array [n] of the column's type; bounds of the values that are not null; null if unknown.
        nulls, values: bool [n], whether there may be nulls, and whether there may be other values.
    """

    least: pa.Array
    most: pa.Array
    nulls: np.ndarray
    values: np.ndarray


class Origin(NamedTuple):
    """Where rows come from: the first `num_rows` of a row group, which `group` identifies."""

    group: str
    num_rows: int


class Outcomes(NamedTuple):
    """Whether a condition may be true, false or null for some row of each of n row groups; bool [n] each.

    Conservative: True means possible, False means impossible.
    """

    true: np.ndarray
    false: np.ndarray
    null: np.ndarray


class Column(str):
    """The name of the column on the right side of a comparison of two columns."""


@dataclass(frozen=True)
class Condition:
    """A filter, or a part of one.

    Attributes:
        operator: `and`, `or` or `not`, of `parts`; or of a column: `is None`, `in` (value: literals), `is true`, or a
            comparison with a literal or a `Column`; or `sampled` (value: share and seed), without a column. `bind`
            makes Arrow scalars of the literals.
    """

    operator: str
    parts: tuple["Condition", ...] = ()
    column: str = ""
    value: Any = None

    def columns(self) -> set[str]:
        """Return the names of the columns."""
        own = {name for name in (self.column, self.value if isinstance(self.value, Column) else "") if name}
        return own.union(*(part.columns() for part in self.parts))

    def bind(self, schema: pa.Schema) -> "Condition":
        """Return the condition with literals in the columns' types. Raises UserError if they do not fit these."""
        if self.parts:
            return replace(self, parts=tuple(part.bind(schema) for part in self.parts))
        if self.operator == "sampled":
            return self
        dtype = schema.field(self.column).type
        if isinstance(self.value, Column):
            _check_pair(self.operator, self.column, dtype, self.value, schema.field(self.value).type)
        if self.operator == "is None" or isinstance(self.value, Column):
            return self
        if self.operator == "in":
            return replace(self, value=tuple(_bound(self.column, dtype, "==", literal)[1] for literal in self.value))
        if self.operator != "is true":
            operator, scalar = _bound(self.column, dtype, self.operator, self.value)
            return replace(self, operator=operator, value=scalar)
        if not (pa.types.is_boolean(dtype) or pa.types.is_null(dtype)):
            raise UserError(
                f"{KEY}: column '{self.column}' is {dtype}, which is not a condition; compare it with a value"
            )
        return replace(self, operator="==", value=pa.scalar(True))

    def mask(self, table: pa.Table, origin: Origin | None = None) -> pa.ChunkedArray:
        """Return the value of the condition for each row, bool with nulls [rows]; columns may be dictionary-encoded."""
        if self.operator == "not":
            return pc.invert(self.parts[0].mask(table, origin))
        if self.parts:
            return reduce(KERNELS[self.operator], (part.mask(table, origin) for part in self.parts))
        if self.operator == "sampled":
            return _sampled(self.value, origin)
        column = table.column(self.column)
        if self.operator == "is None":
            return pc.is_null(column)
        if not isinstance(self.value, Column):
            return _of_values(column, self._test)
        pair = [_of_values(side, lambda values: values) for side in (column, table.column(self.value))]
        if pair[0].type != pair[1].type:
            dtype = _common_type([side.type for side in pair])
            pair = [side.cast(dtype, safe=False) for side in pair]
        return KERNELS[self.operator](*pair)

    def _test(self, values: pa.Array) -> pa.Array:
        if self.operator != "in":
            return KERNELS[self.operator](values, self.value)
        if pa.types.is_decimal(values.type):  # literals have different types, and perhaps no type holds them all
            return reduce(pc.or_kleene, (pc.equal(values, scalar) for scalar in self.value))
        if pa.types.is_floating(values.type):
            values = _unsigned_zeros(values)
        # The kernel returns false for null, so that `not in` would be true.
        return pc.if_else(pc.is_valid(values), pc.is_in(values, self._literals), pa.scalar(None, pa.bool_()))

    @cached_property
    def _literals(self) -> pa.Array:
        """The literals of `in`, in one type; made once, since for thousands it takes longer than looking for them."""
        dtypes = {scalar.type for scalar in self.value}
        dtype = dtypes.pop() if len(dtypes) == 1 else pa.int64()
        literals = pa.array([scalar.cast(dtype) for scalar in self.value], dtype)
        return _unsigned_zeros(literals) if pa.types.is_floating(dtype) else literals

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        """Return the possible outcomes in each of `n` row groups, given the bounds of the columns."""
        parts = self.parts
        if self.operator == "in":
            parts = tuple(Condition("==", column=self.column, value=scalar) for scalar in self.value)
        if self.operator == "not":
            true, false, null = parts[0].outcomes(bounds, n)
            return Outcomes(false, true, null)
        if parts:  # reduced one after the other, because there may be thousands of literals
            return reduce(_both if self.operator == "and" else _either, (part.outcomes(bounds, n) for part in parts))
        if self.operator == "sampled" or isinstance(self.value, Column):
            return Outcomes(*np.ones((3, n), np.bool_))
        column = bounds[self.column]
        if self.operator == "is None":
            return Outcomes(column.nulls, column.values, np.zeros(n, np.bool_))
        operators = self.operator, _OPPOSITE[self.operator]
        true, false = (_may_hold(operator, column, self.value) for operator in operators)
        if pa.types.is_floating(column.least.type):  # NaN, which bounds leave out, is unequal to all and has no order
            true, false = true | (self.operator == "!="), false | (self.operator != "!=")
        return Outcomes(true & column.values, false & column.values, column.nulls)


def _both(one: Outcomes, other: Outcomes) -> Outcomes:
    null = (one.null | other.null) & (one.true | one.null) & (other.true | other.null)
    return Outcomes(one.true & other.true, one.false | other.false, null)


def _either(one: Outcomes, other: Outcomes) -> Outcomes:
    null = (one.null | other.null) & (one.false | one.null) & (other.false | other.null)
    return Outcomes(one.true | other.true, one.false & other.false, null)


def _sampled(share_and_seed: tuple[float, int], origin: Origin | None) -> pa.ChunkedArray:
    share, seed = share_and_seed
    if origin is None:
        raise UserError(f"{KEY}: sampled(…) chooses rows by their place in a file; it cannot be compared with anything")
    numbers = np.arange(origin.num_rows)
    return pa.chunked_array([pa.array(hash_uniform(numbers, make_key(seed, "sampled", origin.group)) < share)])


def _check_pair(operator: str, left: str, left_dtype: pa.DataType, right: str, right_dtype: pa.DataType) -> None:
    dtypes = [dtype for dtype in {left_dtype, right_dtype} if not pa.types.is_null(dtype)]
    try:
        if len(dtypes) == 2 and not all(pa.types.is_integer(dtype) or pa.types.is_floating(dtype) for dtype in dtypes):
            raise pa.ArrowInvalid
        KERNELS[operator](*(_comparable(pa.array([], dtype)) for dtype in (left_dtype, right_dtype)))
    except pa.ArrowException as error:
        raise UserError(
            f"{KEY}: columns '{left}' ({left_dtype}) and '{right}' ({right_dtype}) cannot be compared with each other; "
            f"compare columns of the same type"
        ) from error


def _common_type(dtypes: Sequence[pa.DataType]) -> pa.DataType:
    """Return the type in which to compare two columns of different types that `_check_pair` has accepted."""
    typed = [dtype for dtype in dtypes if not pa.types.is_null(dtype)]
    if len(typed) < 2:  # the other column has no values
        return typed[0]
    # As floats, large ids that differ may become equal; and the kernel refuses large ids if one side is unsigned.
    return pa.decimal128(20, 0) if all(map(pa.types.is_integer, typed)) else pa.float64()


def _bound(column: str, dtype: pa.DataType, operator: str, literal: Any) -> tuple[str, pa.Scalar]:
    """Turn a comparison with a literal into one with a scalar of the column's type; return operator and scalar."""
    given = literal
    if pa.types.is_integer(dtype) and isinstance(literal, float):  # Arrow refuses to compare large ids with a float
        if not math.isfinite(literal) or (operator in ("==", "!=") and not literal.is_integer()):
            raise UserError(
                f"{KEY}: column '{column}' is {dtype}, and {literal} is not an integer; compare it with an integer"
            )
        if not literal.is_integer():
            operator = "<=" if operator in ("<", "<=") else ">="
        literal = math.floor(literal) if operator in ("<", "<=") else math.ceil(literal)
    types, advice = next((types, advice) for fits, types, advice in _LITERALS if fits(dtype))
    try:
        if type(literal) not in types or (pa.types.is_boolean(dtype) and literal not in (0, 1)):
            raise TypeError(dtype)
        scalar = _scalar(dtype, literal)
        KERNELS[operator](_comparable(pa.array([], dtype)), scalar)
        return operator, scalar
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise UserError(
            f"{KEY}: column '{column}' is {dtype}, and cannot be compared with {given!r}; {advice}"
        ) from error


def _scalar(dtype: pa.DataType, literal: Any) -> pa.Scalar:
    if pa.types.is_null(dtype):  # nothing equals the literal; it gets a type since Arrow cannot compare untyped nulls
        return pa.scalar(None, pa.int64())
    if pa.types.is_boolean(dtype):
        return pa.scalar(bool(literal))
    if pa.types.is_decimal(dtype):
        return pa.scalar(Decimal(repr(literal)))
    if pa.types.is_integer(dtype) and dtype.bit_width < 64 and not _fits(dtype, literal):
        return pa.scalar(literal, pa.int64())
    if pa.types.is_timestamp(dtype) and dtype.tz is not None:
        try:
            return pa.scalar(literal).cast(dtype)
        except pa.ArrowInvalid:  # the literal has no zone, and means UTC
            return pa.scalar(literal).cast(pa.timestamp(dtype.unit)).cast(dtype)
    if pa.types.is_temporal(dtype):
        return pa.scalar(literal).cast(dtype)
    if pa.types.is_floating(dtype):  # made a float first: Arrow refuses integers that the type has to round
        return _comparable(pa.scalar(float(literal), dtype))
    return pa.scalar(literal, dtype)


def _comparable(values: Any) -> Any:
    """Return an array or scalar in a type that Arrow's kernels can compare: float16 as float32, others unchanged."""
    return values.cast(pa.float32()) if pa.types.is_float16(values.type) else values


def _unsigned_zeros(floats: pa.Array) -> pa.Array:
    """Return floats with 0 instead of -0: the two are equal, but Arrow's `is_in` tells them apart."""
    return pc.add(floats, pa.scalar(0.0, floats.type))


def _fits(dtype: pa.DataType, literal: int) -> bool:
    limits = np.iinfo(numpy_type(dtype))
    return limits.min <= literal <= limits.max


def _of_values(column: pa.ChunkedArray, test: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
    """Apply `test` to each chunk; if a chunk is dictionary-encoded, once to each distinct value."""
    chunks = column.chunks or [pa.array([], column.type)]
    return pa.chunked_array(
        pc.take(test(chunk.dictionary), chunk.indices)
        if pa.types.is_dictionary(chunk.type)
        else test(_comparable(chunk))
        for chunk in chunks
    )


def _may_hold(operator: str, bounds: Bounds, literal: pa.Scalar) -> np.ndarray:
    """Return for each row group whether the comparison may be true of some value in it, bool [n]."""
    if operator == "==":
        return _may_hold("<=", bounds, literal) & _may_hold(">=", bounds, literal)
    least, most = (
        pc.fill_null(KERNELS[operator](_comparable(end), literal), True) for end in (bounds.least, bounds.most)
    )
    ends = {"<": least, "<=": least, ">": most, ">=": most, "!=": pc.or_(least, most)}
    return ends[operator].to_numpy(zero_copy_only=False)
