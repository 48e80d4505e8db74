"""The columns of a batch: which become ids, numbers and labels, and how."""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from recsys.config import Keep, NullPolicy
from recsys.data.conditions import Condition
from recsys.data.fields import advice
from recsys.data.filters import written
from recsys.data.order import Window
from recsys.ids import IdMapping, IdStatistics, Route, is_number, is_text
from recsys.runtime.counter_random import at_least, make_key


@dataclass(frozen=True)
class Hidden:
    """The rows of a column of ids that are null, whatever the column holds; all rows if none is read.

    Attributes:
        share: of the rows. key: of the stream of random numbers that draws them.
    """

    share: float
    key: int

    def rows(self, window: Window) -> np.ndarray:
        """Return which rows of a window, before it is shuffled, are hidden, bool [rows]; drawn by epoch and place."""
        parts = [
            ~at_least(
                self.share,
                make_key(self.key, window.epoch, segment.number),
                np.arange(segment.start, segment.stop),
                np.zeros(1, np.int64),
            )
            for segment in window.segments
        ]
        return np.concatenate(parts)[:, 0]


@dataclass(frozen=True)
class IdColumn:
    """How a column of ids, or of lists of ids, becomes table rows.

    Attributes:
        name: of the feature, for messages.
        column: name in the data; None: no row has an id, or with `hidden` all have a null.
        mapping: maps ids to table rows.
        null: what a null id becomes. A null list counts as an empty one.
        max_length: longer lists are cut to this many ids, nulls included.
        keep: which end of a longer list is kept.
        weights: column with a number for each id.
        boundaries: ascending; the column holds numbers, and the id of x is how many boundaries are <= x. NaN is null.
        statistics: counts the ids that are mapped, and the nulls.
        route: for an expert that serves only some ids: chooses these; the others have no row.
        hidden: rows that have a null; `convert_ids` does not read it.
        file_of_floats: for messages: a file whose floats make floats of the integers in others, where large ids change.
    """

    name: str
    column: str | None
    mapping: IdMapping
    null: NullPolicy = NullPolicy.reserved
    max_length: int | None = None
    keep: Keep = Keep.last
    weights: str | None = None
    boundaries: tuple[float, ...] | None = None
    statistics: IdStatistics | None = None
    route: Route | None = None
    hidden: Hidden | None = None
    file_of_floats: str | None = None

    @property
    def title(self) -> str:
        """What messages call the column."""
        floats = "" if self.file_of_floats is None else f", with floats in {self.file_of_floats}"
        return f"column '{self.column}' (feature '{self.name}'{floats})"


@dataclass(frozen=True)
class Transform:
    """Transform of a float, in float64 and in this order: `clip` (least, greatest), log(1 + x), (x - mean) / std.

    An end of clip that is None cuts nothing. A std of 0 divides by 1, so that a constant column becomes 0. For vectors,
    each of their numbers has its own mean and std.
    """

    clip: tuple[float | None, float | None] | None = None
    log1p: bool = False
    mean: float | tuple[float, ...] | None = None
    std: float | tuple[float, ...] | None = None


@dataclass(frozen=True)
class FloatColumn:
    """How a column of numbers, or of vectors, becomes float32.

    Attributes:
        name: of the feature, for messages.
        column: name in the data; None: every value is `fill`.
        dim: length of a row's vector; None: a row has one number.
        fill: raw value for nulls, transformed like any other; None: nulls are refused. For vectors it may be one value
            for each number; it replaces null vectors and nulls in vectors.
        binary: only 0 and 1 are accepted. probability: only 0 to 1 are accepted.
        condition: used instead of a column, which is then None: 1 where it is true, null where it is null.
        may_be_unknown: for a label: null is not an error, and batches say which labels are known.
        finite: NaN and infinity are refused, also as results of the transform.
        transform: applied to the raw values.
    """

    name: str
    column: str | None
    fill: float | tuple[float, ...] | None = 0.0
    binary: bool = False
    finite: bool = True
    transform: Transform | None = None
    may_be_unknown: bool = False
    condition: Condition | None = None
    probability: bool = False
    dim: int | None = None

    @property
    def title(self) -> str:
        """What messages call the column or condition."""
        return f"column '{self.column}' ({self.name})" if self.condition is None else f"the condition of {self.name}"

    @property
    def without_nulls(self) -> str:
        """Advice, for messages, if it holds a null and must not."""
        if not self.name.startswith("data."):  # a feature, the scores of a teacher, or weights in lists
            return "drop such rows"
        known = " and ".join(f"{written(column)} is not None" for column in sorted(self.columns()))
        unknown = f", or set {self.name}.nulls=unknown" if self.name.startswith("data.labels.") else ""
        return f'leave such rows out by data.filter="{known}"{unknown}'

    def remedy(self, values: pa.Array) -> str:
        """Return advice, for messages, if it holds these values instead of numbers."""
        dtype = values.type
        is_feature = "." not in self.name and " " not in self.name
        if is_feature and pa.types.is_list(dtype) and is_number(dtype.value_type):
            dims = pc.unique(pc.list_value_length(values).drop_null()).to_pylist()
            if len(dims) == 1 and dims != [0]:
                return f"; write one number a row, or for vectors of {dims[0]} set features.{self.name}.dim={dims[0]}"
        if pa.types.is_nested(dtype):
            inside = advice(self.column, dtype) or ", each position of a list as a column of its own"
            return f"; write one number a row{inside}"
        if self.binary and self.column is not None and is_text(dtype):
            # The last value in order, as yes of no and yes, or true of false and true; if it can be put in quotes.
            last = (pc.max(values.cast(pa.large_binary())).as_py() or b"").decode(errors="replace")
            word = last if re.fullmatch(r"[\w .,:/+-]{1,40}", last) else "yes"
            condition = f"{written(self.column)} == '{word}'"
            return f"; {self.advised(condition)}"
        return "; write it as numbers" + ("" if self.fill is None else ", or for ids use a feature of type id")

    def advised(self, condition: str) -> str:
        """Return advice, for messages, to use a condition instead of a label's column."""
        also = " data.label_column=null" if self.name == "data.label_column" else ""  # it excludes data.labels
        # YAML needs no quotes, which a shell would remove, around a condition without special signs.
        plain = re.fullmatch(r"[\w .=<>()'/+-]+", condition)
        label = f"data.labels={{NAME: {condition if plain else json.dumps(condition, ensure_ascii=False)}}}"
        label = shlex.quote(label) if set(label) & set('"$`\\!') else f'"{label}"'
        return f"name a condition in its place, such as {label}{also}"

    def columns(self) -> set[str]:
        """Return the columns to read."""
        if self.condition is not None:
            return self.condition.columns()
        return set() if self.column is None else {self.column}


@dataclass(frozen=True)
class BatchSpec:
    """The columns of a batch. If the data have no weights, rows have weight 1; labels that the data lack are 0.

    Attributes:
        negative_weight: the weight of rows without a positive binary label is multiplied by this.
    """

    ids: Sequence[IdColumn]
    floats: Sequence[FloatColumn]  # those of vectors last
    labels: Sequence[FloatColumn] = ()
    weight: FloatColumn | None = None
    lists: Sequence[IdColumn] = ()
    negative_weight: float = 1.0

    def columns(self) -> list[str]:
        """Return the names of the columns to read, each once."""
        weight = [self.weight] if self.weight else []
        numbers = [name for part in (*self.floats, *self.labels, *weight) for name in sorted(part.columns())]
        ids = [name for part in (*self.ids, *self.lists) for name in (part.column, part.weights)]
        return list(dict.fromkeys(name for name in (*ids, *numbers) if name is not None))

    def uncounted(self) -> "BatchSpec":
        """Return the same spec without statistics of ids."""
        return replace(self, ids=[replace(part, statistics=None) for part in self.ids])

    @cached_property
    def has_unknown_labels(self) -> bool:
        """Whether a label may be null, so that batches say for each label which rows have it."""
        return any(part.may_be_unknown for part in self.labels)

    @cached_property
    def widths(self) -> list[int]:
        """How many rows each part of `Columns.floats` has: single floats, labels, which labels are known, the weight.

        The third part is missing if all labels are known.
        """
        known = [len(self.labels)] if self.has_unknown_labels else []
        return [len(self.single_floats), len(self.labels), *known, 1]

    @cached_property
    def single_floats(self) -> list[FloatColumn]:
        """The floats with one number per row."""
        return [part for part in self.floats if part.dim is None]

    @cached_property
    def vectors(self) -> list[tuple[slice, FloatColumn]]:
        """The floats with a vector per row, each with its columns among those of all vectors."""
        parts = [part for part in self.floats if part.dim is not None]
        ends = accumulate((part.dim or 0 for part in parts), initial=0)
        return [(slice(*bounds), part) for bounds, part in zip(pairwise(ends), parts, strict=True)]

    @cached_property
    def vector_dim(self) -> int:
        """Total length of a row's vectors."""
        return sum(part.dim or 0 for part in self.floats)

    @cached_property
    def weighted(self) -> bool:
        """Whether any id has a weight."""
        return any(part.weights is not None for part in self.ids)

    @cached_property
    def dtype(self) -> np.dtype:
        """The integer type of table rows in windows and batches: the narrowest that holds all of them."""
        rows = max((part.mapping.num_rows for part in (*self.ids, *self.lists)), default=0)
        return np.dtype(np.int32 if rows <= np.iinfo(np.int32).max else np.int64)
