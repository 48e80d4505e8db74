"""Routes of ids to experts: by the vocabularies of the experts, or by a hash."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
import pyarrow as pa

from recsys.ids.hashing import hash_column
from recsys.ids.index import VocabularyMapping

ROUTE_SEED = 2**32 - 1  # gives a different hash from that of rows, so that expert and row are independent


@dataclass(frozen=True)
class HashRoute:
    """Route to `active` of the experts for each id, by hash; `place` is the place of this route's expert.

    The hash of an id, modulo the number of combinations of experts, selects one of them, all equally often.
    """

    num_experts: int
    active: int
    place: int

    @cached_property
    def _has(self) -> np.ndarray:
        return np.array([self.place in choice for choice in combinations(range(self.num_experts), self.active)])

    def chosen(self, ids: pa.Array) -> np.ndarray:
        """Return for each id whether the expert is looked up, bool [ids]; `ids` has no nulls."""
        return self._has[hash_column(ids, ROUTE_SEED) % np.uint64(len(self._has))]


class FrequencyRoute:
    """Route to the first expert whose vocabulary has an id, and to the last expert if none has it.

    Args:
        before: the vocabularies of the experts before this one. own: that of this expert; None: it is the last.
    """

    def __init__(self, before: Sequence[VocabularyMapping], own: VocabularyMapping | None) -> None:
        self._before, self._own = before, own

    def chosen(self, ids: pa.Array) -> np.ndarray:
        """Return for each id whether the expert is looked up, bool [ids]; `ids` has no nulls."""
        chosen = np.ones(len(ids), bool) if self._own is None else self._own.has(ids)
        for mapping in self._before:
            chosen &= ~mapping.has(ids)
        return chosen


Route = HashRoute | FrequencyRoute
