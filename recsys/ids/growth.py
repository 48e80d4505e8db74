"""How a vocabulary grows from one run to the next: new ids behind the old ones, or in rows that these leave."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from recsys.ids.index import IndexMapping
from recsys.ids.vocabulary import choose_vocabulary, joined


@dataclass(frozen=True)
class KeptIds:
    """What a vocabulary has of the run whose weights are taken.

    Attributes:
        num_ids: how many ids were there, which have its first rows.
        evicted: places of those of them whose rows other ids have now, int64, ascending.
        num_left_out: how many new ids are frequent enough, and have no row since there was no room.
    """

    num_ids: int
    evicted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_left_out: int = 0


@dataclass(frozen=True)
class Grown:
    """A vocabulary that has grown.

    Attributes:
        ids: in the order of rows.
        unseen_runs: of each, in how many runs in a row data.train has not shown it, int32 [len(ids)].
        kept: the ids among these that were there before.
    """

    ids: pa.Array
    unseen_runs: np.ndarray
    kept: KeptIds


def grow(
    vocabulary: pa.Array | None,
    unseen_runs: np.ndarray,
    counts: pa.Table,
    min_count: int,
    max_size: int,
    evict_after: int | None,
) -> Grown:
    """Return a vocabulary with new ids, the most frequent first; the others keep their places, unless evicted.

    An id that data.train lacks for `evict_after` runs in a row, this one included, may give its place to a new id: the
    one longest unseen first, among equals the first. It stays if there are no more new ids.

    Args:
        vocabulary: the ids so far, if there are any.
        unseen_runs: of the first of these, before this run; 0 of the others.
        counts: of ids in data.train, as `add_up` returns them; those of other tables left out.
        min_count: new ids that are rarer get no place.
        max_size: the most ids of the whole.

    Raises:
        UserError: ids are numbers on one side and texts on the other.
    """
    if vocabulary is None:
        ids = choose_vocabulary(counts, min_count, max_size)
        return Grown(ids, np.zeros(len(ids), np.int32), KeptIds(0))
    ids = counts.column("id").combine_chunks()
    places = np.empty(len(ids), np.int64)
    IndexMapping(vocabulary).map(ids, places)
    unseen = np.zeros(len(vocabulary), np.int32)
    unseen[: len(unseen_runs)] = unseen_runs
    unseen += 1
    unseen[places[places >= 0]] = 0
    stale = np.flatnonzero(unseen >= (np.inf if evict_after is None else evict_after))
    new = choose_vocabulary(counts.filter(pa.array(places < 0)), min_count, len(counts))
    num_places = len(stale) + max(0, max_size - len(vocabulary))
    num_left_out = max(0, len(new) - num_places)
    new = new.slice(0, num_places)
    evicted = np.sort(stale[np.argsort(-unseen[stale], kind="stable")][: len(new)])
    unseen[evicted] = 0
    unseen = np.concatenate([unseen, np.zeros(len(new) - len(evicted), np.int32)])
    order = np.arange(len(vocabulary) + len(new))
    order[evicted] = len(vocabulary) + np.arange(len(evicted))
    order = np.delete(order, len(vocabulary) + np.arange(len(evicted)))
    return Grown(joined(vocabulary, new).take(pa.array(order)), unseen, KeptIds(len(vocabulary), evicted, num_left_out))
