"""The tree of a filter: conditions on columns, for rows and for what is known of row groups."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import UserError

KEY = "config key 'data.filter'"
BY_DATASET = "a filter of one data set alone is written as data.filter={train: …}"
_KERNELS: dict[str, Callable[..., Any]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}


@dataclass(frozen=True)
class Bounds:
    """What is known of a column in each of n row groups.

    Attributes:
        least, most: pa.Array [n] of the column's type; bounds of the values that are not null, null where unknown.
        nulls, values: bool [n], whether there may be nulls, and values that are not null.
    """

    least: pa.Array
    most: pa.Array
    nulls: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class Outcomes:
    """What a condition may be for rows of each of n row groups: true, false, null; each bool [n].

    What is False there is excluded; what is True need not happen.
    """

    true: np.ndarray
    false: np.ndarray
    null: np.ndarray


class Condition:
    """A part of a filter. Columns are read from a table, or from {column: Bounds}; a column without is unknown."""

    def columns(self) -> set[str]:
        """Return the names of the columns."""
        raise NotImplementedError

    def bind(self, schema: pa.Schema) -> "Condition":
        """Return the condition with literals of the columns' types. Raises UserError if they do not go together."""
        raise NotImplementedError

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        """Return the condition for each row, bool with nulls [rows]; columns may be dictionary-encoded."""
        raise NotImplementedError

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        """Return what the condition may be in each of `n` row groups."""
        raise NotImplementedError


@dataclass(frozen=True)
class Not(Condition):
    """`not`, which leaves null as it is."""

    part: Condition

    def columns(self) -> set[str]:
        return self.part.columns()

    def bind(self, schema: pa.Schema) -> Condition:
        return Not(self.part.bind(schema))

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return pc.invert(self.part.mask(table))

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        may = self.part.outcomes(bounds, n)
        return Outcomes(may.false, may.true, may.null)


@dataclass(frozen=True)
class Both(Condition):
    """`left and right` after Kleene. `left or right` is `not (not left and not right)`."""

    left: Condition
    right: Condition

    def columns(self) -> set[str]:
        return self.left.columns() | self.right.columns()

    def bind(self, schema: pa.Schema) -> Condition:
        return Both(self.left.bind(schema), self.right.bind(schema))

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return pc.and_kleene(self.left.mask(table), self.right.mask(table))

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        a, b = self.left.outcomes(bounds, n), self.right.outcomes(bounds, n)
        null = (a.null & (b.true | b.null)) | (b.null & (a.true | a.null))
        return Outcomes(a.true & b.true, a.false | b.false, null)


@dataclass(frozen=True)
class Compare(Condition):
    """A column with a literal, which `bind` makes a scalar."""

    column: str
    operator: str
    literal: Any

    def columns(self) -> set[str]:
        return {self.column}

    def bind(self, schema: pa.Schema) -> Condition:
        kind, operator, literal = schema.field(self.column).type, self.operator, self.literal
        if pa.types.is_integer(kind) and isinstance(literal, float):
            operator, literal = _whole(self.column, kind, operator, literal)
        scalar = _scalar(self.column, kind, literal)
        _check_kernel(
            operator,
            pa.array([], kind),
            scalar,
            f"column '{self.column}' is {kind}, and cannot be compared with a value",
        )
        return Compare(self.column, operator, scalar)

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return _of_values(table.column(self.column), lambda values: _KERNELS[self.operator](values, self.literal))

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        if self.column not in bounds:
            return _unknown(n)
        known = bounds[self.column]
        low = {operator: _may_be(operator, known.least, self.literal) for operator in _KERNELS}
        high = {operator: _may_be(operator, known.most, self.literal) for operator in _KERNELS}
        equal, unequal = low["<="] & high[">="], low["!="] | high["!="]
        true, false = {
            "==": (equal, unequal),
            "!=": (unequal, equal),
            "<": (low["<"], high[">="]),
            "<=": (low["<="], high[">"]),
            ">": (high[">"], low["<="]),
            ">=": (high[">="], low["<"]),
        }[self.operator]
        if pa.types.is_floating(known.least.type):  # NaN, which bounds leave out, is unequal to all and has no order
            true, false = true | (self.operator == "!="), false | (self.operator != "!=")
        return Outcomes(true & known.values, false & known.values, known.nulls)


@dataclass(frozen=True)
class In(Condition):
    """A column in a list of literals."""

    column: str
    literals: tuple[Any, ...]

    def columns(self) -> set[str]:
        return {self.column}

    def bind(self, schema: pa.Schema) -> Condition:
        bound = [Compare(self.column, "==", literal).bind(schema) for literal in self.literals]
        return In(self.column, tuple(each.literal for each in bound if isinstance(each, Compare)))

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        wanted = pa.array([scalar.as_py() for scalar in self.literals], self.literals[0].type)
        # The kernel says false for null, and `not in` would take it.
        return _of_values(
            table.column(self.column),
            lambda values: pc.if_else(
                pc.is_valid(values), pc.is_in(values, value_set=wanted), pa.scalar(None, pa.bool_())
            ),
        )

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        each = [Compare(self.column, "==", literal).outcomes(bounds, n) for literal in self.literals]
        true = np.logical_or.reduce([may.true for may in each])
        return Outcomes(true, np.logical_and.reduce([may.false for may in each]), each[0].null)


@dataclass(frozen=True)
class IsNull(Condition):
    """A column `is None`."""

    column: str

    def columns(self) -> set[str]:
        return {self.column}

    def bind(self, schema: pa.Schema) -> Condition:
        return self

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        return pc.is_null(table.column(self.column))

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        if self.column not in bounds:
            return replace(_unknown(n), null=np.zeros(n, np.bool_))
        known = bounds[self.column]
        return Outcomes(known.nulls, known.values, np.zeros(n, np.bool_))


@dataclass(frozen=True)
class IsTrue(Condition):
    """A bool column by itself."""

    column: str

    def columns(self) -> set[str]:
        return {self.column}

    def bind(self, schema: pa.Schema) -> Condition:
        kind = schema.field(self.column).type
        if not pa.types.is_boolean(kind):
            raise UserError(
                f"{KEY}: column '{self.column}' is {kind} and no condition by itself; compare it with a value"
            )
        return Compare(self.column, "==", True).bind(schema)


@dataclass(frozen=True)
class CompareColumns(Condition):
    """Two columns of a row with each other."""

    left: str
    operator: str
    right: str

    def columns(self) -> set[str]:
        return {self.left, self.right}

    def bind(self, schema: pa.Schema) -> Condition:
        left, right = (schema.field(name).type for name in (self.left, self.right))
        problem = f"columns '{self.left}' ({left}) and '{self.right}' ({right}) cannot be compared with each other"
        if left != right and not (_is_number(left) and _is_number(right)):
            raise UserError(f"{KEY}: {problem}; compare columns of one type")
        _check_kernel(self.operator, pa.array([], left), pa.array([], right), problem)
        return self

    def mask(self, table: pa.Table) -> pa.ChunkedArray:
        pair = [_of_values(table.column(name), lambda values: values) for name in (self.left, self.right)]
        if pair[0].type != pair[1].type:  # numbers of two types; the kernel refuses large ones
            pair = [column.cast(pa.float64(), safe=False) for column in pair]
        return _KERNELS[self.operator](*pair)

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        return _unknown(n)


def _of_values(column: pa.ChunkedArray, test: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
    """Apply `test` to each chunk; of a dictionary-encoded one to each distinct value once."""
    chunks = column.chunks or [pa.array([], column.type)]
    return pa.chunked_array(
        pc.take(test(_without_view(chunk.dictionary)), chunk.indices)
        if pa.types.is_dictionary(chunk.type)
        else test(_without_view(chunk))
        for chunk in chunks
    )


def _without_view(array: pa.Array) -> pa.Array:
    if pa.types.is_string_view(array.type):  # for which there are no kernels
        return array.cast(pa.string())
    return array.cast(pa.binary()) if pa.types.is_binary_view(array.type) else array


def _may_be(operator: str, ends: pa.Array, literal: pa.Scalar) -> np.ndarray:
    return pc.fill_null(_KERNELS[operator](ends, literal), True).to_numpy(zero_copy_only=False)


def _unknown(n: int) -> Outcomes:
    return Outcomes(*(np.ones(n, np.bool_) for _ in range(3)))


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _check_kernel(operator: str, left: pa.Array, right: pa.Array | pa.Scalar, problem: str) -> None:
    try:
        _KERNELS[operator](left, right)
    except pa.ArrowException as error:
        raise UserError(f"{KEY}: {problem}; compare other columns") from error


def _whole(column: str, kind: pa.DataType, operator: str, literal: float) -> tuple[str, int]:
    """Return a comparison with an integer in place of one with a float: Arrow refuses to compare large ids with it."""
    if not math.isfinite(literal) or (operator in ("==", "!=") and not literal.is_integer()):
        raise UserError(f"{KEY}: column '{column}' is {kind}, and {literal} is no integer; compare it with an integer")
    if literal.is_integer():
        return operator, int(literal)
    return ("<=", math.floor(literal)) if operator in ("<", "<=") else (">=", math.ceil(literal))


def _scalar(column: str, kind: pa.DataType, literal: Any) -> pa.Scalar:
    """Return a literal in a column's type; of a narrow integer column, an integer that it cannot hold as int64."""
    try:
        return _converted(kind, literal)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise UserError(
            f"{KEY}: column '{column}' is {kind}, and cannot be compared with {literal!r}; {_advice(kind)}"
        ) from error


def _converted(kind: pa.DataType, literal: Any) -> pa.Scalar:
    given = type(literal)
    if pa.types.is_null(kind):
        return pa.scalar(literal)
    if pa.types.is_boolean(kind) and (given is bool or literal in (0, 1)):
        return pa.scalar(bool(literal))
    if pa.types.is_integer(kind) and given is int:
        try:
            return pa.scalar(literal, kind)
        except (pa.ArrowException, OverflowError):
            if kind.bit_width == 64:
                raise
            return pa.scalar(literal, pa.int64())
    if pa.types.is_floating(kind) and given in (int, float):
        return pa.scalar(float(literal), kind)
    if pa.types.is_decimal(kind) and given in (int, float):
        return pa.scalar(Decimal(repr(literal)))
    if pa.types.is_string(kind) and given is str:
        return pa.scalar(literal, kind)
    if pa.types.is_binary(kind) and given is str:
        return pa.scalar(literal.encode(), kind)
    if (pa.types.is_date(kind) or pa.types.is_timestamp(kind)) and given is str:
        return _time(kind, literal)
    raise TypeError(kind)


def _time(kind: pa.DataType, literal: str) -> pa.Scalar:
    text = pa.scalar(literal)
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        return text.cast(kind)
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:  # no zone is written: UTC
        return text.cast(pa.timestamp(kind.unit)).cast(kind)


def _advice(kind: pa.DataType) -> str:
    if pa.types.is_boolean(kind):
        return "write True or False"
    if pa.types.is_integer(kind):
        return "write an integer of that type, without quotes"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "write a number, without quotes"
    if pa.types.is_date(kind):
        return "write a date such as '2026-11-01'"
    if pa.types.is_timestamp(kind):
        return "write a time such as '2026-11-01' or '2026-11-01 12:30:00'"
    if pa.types.is_nested(kind):
        return "a list has only 'is None' and 'is not None'"
    return "write a value in quotes"
