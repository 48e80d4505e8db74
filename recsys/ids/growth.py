"""Growth of a vocabulary from one run to the next: new ids get rows behind the old ones, or rows of evicted ones."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from recsys.ids.index import IndexMapping
from recsys.ids.vocabulary import choose_vocabulary, joined


@dataclass(frozen=True)
class KeptIds:
    """Ids that a vocabulary inherits from the run whose weights are loaded.

    Attributes:
        num_ids: number of ids in that run, which had the first rows.
        evicted: places of those whose rows other ids have now, int64, ascending.
        num_left_out: number of new ids that are frequent enough, but found no free row.
    """

    num_ids: int
    evicted: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    num_left_out: int = 0


@dataclass(frozen=True)
class Grown:
    """A vocabulary that has grown.

    Attributes:
        ids: in the order of rows.
        unseen_runs: number of runs in a row in which data.train lacked each id, int32 [len(ids)].
        kept: the inherited ids among these.
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
    """Add new ids to a vocabulary, the most frequent first; the others keep their places, unless evicted.

    An id that data.train has lacked for `evict_after` runs in a row, this one included, may give its place to a new id:
    the longest unseen first, of equals the first in order. It stays if there are no more new ids.

    Args:
        vocabulary: the ids so far, or None.
        unseen_runs: of the first of these, before this run; 0 for the others.
        counts: of the table's ids in data.train, as returned by `add_up`.
        min_count: rarer new ids get no place.
        max_size: most ids of the new vocabulary.

    Raises:
        UserError: ids are numbers on one side and texts on the other.
    """
    if vocabulary is None:
        ids = choose_vocabulary(counts, min_count, max_size)
        return Grown(ids, np.zeros(len(ids), np.int32), KeptIds(0))
    places = IndexMapping(vocabulary).rows(counts.column("id").combine_chunks())
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
