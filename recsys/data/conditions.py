"""The tree of a filter: conditions on columns, for rows and for what is known of row groups."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.errors import UserError
from recsys.ids import hash_integers
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
# A test of a column's type, the types of literals that it is compared with, and what to write.
_LITERALS: tuple[tuple[Callable[[pa.DataType], bool], tuple[type, ...], str], ...] = (
    (pa.types.is_boolean, (bool, int), "write True or False"),
    (pa.types.is_integer, (int,), "write an integer of that type, without quotes"),
    (
        lambda kind: pa.types.is_floating(kind) or pa.types.is_decimal(kind),
        (int, float),
        "write a number, without quotes",
    ),
    (pa.types.is_date, (str,), "write a date such as '2026-11-01'"),
    (pa.types.is_timestamp, (str,), "write a time such as '2026-11-01' or '2026-11-01 12:30:00'"),
    (pa.types.is_struct, (), "compare one of its fields, as device.os"),
    (pa.types.is_nested, (), "a list has only 'is None' and 'is not None'"),
    (pa.types.is_null, (bool, int, float, str), "write 'is None'"),
    (lambda kind: pa.types.is_string(kind) or pa.types.is_binary(kind), (str,), "write a value in quotes"),
    (lambda kind: True, (), "write a value in quotes"),
)


class Bounds(NamedTuple):
    """What is known of a column in each of n row groups.

    Attributes:
        least, most: pa.Array [n] of the column's type; bounds of the values that are not null, null where unknown.
        nulls, values: bool [n], whether there may be nulls, and values that are not null.
    """

    least: pa.Array
    most: pa.Array
    nulls: np.ndarray
    values: np.ndarray


class Origin(NamedTuple):
    """Where rows come from: `num_rows` of a row group, from `first` on; `group` tells it from others."""

    group: str
    first: int
    num_rows: int


class Outcomes(NamedTuple):
    """What a condition may be for rows of each of n row groups: true, false, null; each bool [n].

    What is False there is excluded; what is True need not happen.
    """

    true: np.ndarray
    false: np.ndarray
    null: np.ndarray


class Column(str):
    """The name of a column that another is compared with."""


@dataclass(frozen=True)
class Condition:
    """A filter, or a part of one.

    Attributes:
        operator: `and`, `or` and `not` of `parts`; of a column, `is None`, `in` (value: literals), `is true`, or a
            comparison with a literal or a `Column`. `bind` makes Arrow scalars of the literals. `sampled` (value: a
            share and a seed) is of no column.
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
        """Return the condition with literals of the columns' types. Raises UserError if they do not go together."""
        if self.parts:
            return replace(self, parts=tuple(part.bind(schema) for part in self.parts))
        if self.operator == "sampled":
            return self
        kind = schema.field(self.column).type
        if isinstance(self.value, Column):
            _check_pair(self.operator, self.column, kind, self.value, schema.field(self.value).type)
        if self.operator == "is None" or isinstance(self.value, Column):
            return self
        if self.operator == "in":
            return replace(self, value=tuple(_bound(self.column, kind, "==", literal)[1] for literal in self.value))
        if self.operator != "is true":
            operator, scalar = _bound(self.column, kind, self.operator, self.value)
            return replace(self, operator=operator, value=scalar)
        if not (pa.types.is_boolean(kind) or pa.types.is_null(kind)):
            raise UserError(
                f"{KEY}: column '{self.column}' is {kind} and no condition by itself; compare it with a value"
            )
        return replace(self, operator="==", value=pa.scalar(True))

    def mask(self, table: pa.Table, origin: Origin | None = None) -> pa.ChunkedArray:
        """Return the condition for each row, bool with nulls [rows]; columns may be dictionary-encoded."""
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
        if pair[0].type != pair[1].type:  # numbers of two types; the kernel refuses large ones
            pair = [side.cast(pa.float64(), safe=False) for side in pair]
        return KERNELS[self.operator](*pair)

    def _test(self, values: pa.Array) -> pa.Array:
        if self.operator != "in":
            return KERNELS[self.operator](values, self.value)
        # The types of literals for decimals differ, and no one type may hold them all; and -0.0 is 0, but not in [0].
        if pa.types.is_decimal(values.type) or pa.types.is_floating(values.type):
            return reduce(pc.or_kleene, (pc.equal(values, scalar) for scalar in self.value))
        kinds = {scalar.type for scalar in self.value}
        literals = pa.array([scalar.as_py() for scalar in self.value], kinds.pop() if len(kinds) == 1 else pa.int64())
        # The kernel says false for null, and `not in` would take it.
        return pc.if_else(pc.is_valid(values), pc.is_in(values, literals), pa.scalar(None, pa.bool_()))

    def outcomes(self, bounds: Mapping[str, Bounds], n: int) -> Outcomes:
        """Return what the condition may be in each of `n` row groups, of whose columns some bounds are known."""
        parts = self.parts
        if self.operator == "in":
            parts = tuple(Condition("==", column=self.column, value=scalar) for scalar in self.value)
        if parts:
            outcomes = [part.outcomes(bounds, n) for part in parts]
            true, false, null = map(np.stack, zip(*outcomes, strict=True))
            if self.operator == "not":
                return Outcomes(false[0], true[0], null[0])
            if self.operator == "and":
                return Outcomes(np.all(true, 0), np.any(false, 0), np.any(null, 0) & np.all(true | null, 0))
            return Outcomes(np.any(true, 0), np.all(false, 0), np.any(null, 0) & np.all(false | null, 0))
        if self.column not in bounds or isinstance(self.value, Column):  # `sampled` has no column
            anything = np.ones(n, np.bool_)
            return Outcomes(anything, anything, anything if self.operator != "is None" else ~anything)
        known = bounds[self.column]
        if self.operator == "is None":
            return Outcomes(known.nulls, known.values, np.zeros(n, np.bool_))
        true, false = (_may_hold(operator, known, self.value) for operator in (self.operator, _OPPOSITE[self.operator]))
        if pa.types.is_floating(known.least.type):  # NaN, which bounds leave out, is unequal to all and has no order
            true, false = true | (self.operator == "!="), false | (self.operator != "!=")
        return Outcomes(true & known.values, false & known.values, known.nulls)


def _sampled(share_and_seed: tuple[float, int], origin: Origin | None) -> pa.ChunkedArray:
    share, seed = share_and_seed
    if origin is None:
        raise UserError(f"{KEY}: sampled(…) chooses rows of a file, and says nothing of their values")
    numbers = np.arange(origin.first, origin.first + origin.num_rows)
    hashes = hash_integers(numbers, make_key(seed, "sampled", origin.group))
    return pa.chunked_array([pa.array((hashes >> np.uint64(11)) * 2.0**-53 < share)])


def _check_pair(operator: str, left: str, left_kind: pa.DataType, right: str, right_kind: pa.DataType) -> None:
    kinds = [kind for kind in {left_kind, right_kind} if not pa.types.is_null(kind)]
    try:
        if len(kinds) == 2 and not all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds):
            raise pa.ArrowInvalid
        KERNELS[operator](*(_comparable(pa.array([], kind)) for kind in (left_kind, right_kind)))
    except pa.ArrowException as error:
        raise UserError(
            f"{KEY}: columns '{left}' ({left_kind}) and '{right}' ({right_kind}) cannot be compared with each other; "
            f"compare columns of one type"
        ) from error


def _bound(column: str, kind: pa.DataType, operator: str, literal: Any) -> tuple[str, pa.Scalar]:
    """Return a comparison with a literal as one with a scalar of the column's type."""
    given = literal
    if pa.types.is_integer(kind) and isinstance(literal, float):  # Arrow refuses to compare large ids with it
        if not math.isfinite(literal) or (operator in ("==", "!=") and not literal.is_integer()):
            raise UserError(
                f"{KEY}: column '{column}' is {kind}, and {literal} is no integer; compare it with an integer"
            )
        if not literal.is_integer():
            operator = "<=" if operator in ("<", "<=") else ">="
        literal = math.floor(literal) if operator in ("<", "<=") else math.ceil(literal)
    types, advice = next((types, advice) for fits, types, advice in _LITERALS if fits(kind))
    try:
        if type(literal) not in types or (pa.types.is_boolean(kind) and literal not in (0, 1)):
            raise TypeError(kind)
        scalar = _scalar(kind, literal)
        KERNELS[operator](_comparable(pa.array([], kind)), scalar)
        return operator, scalar
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise UserError(
            f"{KEY}: column '{column}' is {kind}, and cannot be compared with {given!r}; {advice}"
        ) from error


def _scalar(kind: pa.DataType, literal: Any) -> pa.Scalar:
    if pa.types.is_null(kind):  # equal to nothing, whatever the literal; Arrow compares no null with an untyped one
        return pa.scalar(None, pa.int64())
    if pa.types.is_boolean(kind):
        return pa.scalar(bool(literal))
    if pa.types.is_decimal(kind):
        return pa.scalar(Decimal(repr(literal)))
    if pa.types.is_integer(kind) and kind.bit_width < 64 and not _fits(kind, literal):
        return pa.scalar(literal, pa.int64())
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        try:
            return pa.scalar(literal).cast(kind)
        except pa.ArrowInvalid:  # no zone is written: UTC
            return pa.scalar(literal).cast(pa.timestamp(kind.unit)).cast(kind)
    if pa.types.is_temporal(kind):
        return pa.scalar(literal).cast(kind)
    if pa.types.is_floating(kind):  # of an integer Arrow refuses those that the type has to round
        return _comparable(pa.scalar(float(literal), kind))
    return pa.scalar(literal, kind)


def _comparable(values: Any) -> Any:
    """Return an array or scalar in a type that Arrow's kernels compare: halves as float32, others as they are."""
    return values.cast(pa.float32()) if pa.types.is_float16(values.type) else values


def _fits(kind: pa.DataType, literal: int) -> bool:
    limits = np.iinfo(kind.to_pandas_dtype())
    return limits.min <= literal <= limits.max


def _of_values(column: pa.ChunkedArray, test: Callable[[pa.Array], pa.Array]) -> pa.ChunkedArray:
    """Apply `test` to each chunk; of a dictionary-encoded one to each distinct value once."""
    chunks = column.chunks or [pa.array([], column.type)]
    return pa.chunked_array(
        pc.take(test(chunk.dictionary), chunk.indices)
        if pa.types.is_dictionary(chunk.type)
        else test(_comparable(chunk))
        for chunk in chunks
    )


def _may_hold(operator: str, known: Bounds, literal: pa.Scalar) -> np.ndarray:
    """Return in which row groups some value may compare so."""
    if operator == "==":
        return _may_hold("<=", known, literal) & _may_hold(">=", known, literal)
    least, most = (
        pc.fill_null(KERNELS[operator](_comparable(end), literal), True) for end in (known.least, known.most)
    )
    ends = {"<": least, "<=": least, ">": most, ">=": most, "!=": pc.or_(least, most)}
    return ends[operator].to_numpy(zero_copy_only=False)
