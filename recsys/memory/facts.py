"""Inputs of a prediction of memory (facts of the data and the dense part), and its result: a rank's bytes by kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from recsys.config import Config
from recsys.config.features import float_columns, has_weighted_ids, id_features
from recsys.ids import index_bytes
from recsys.memory.tensors import Bytes
from recsys.tables.bytes import TableBytes

_ID_BYTES = 8  # of an id that is a number
_COUNTED_BYTES = 16  # of a distinct id, without its text
# Bytes needed while a vocabulary is made, in addition to the counts. Of a distinct text, while texts are merged and
# chosen: 125 to 150 were measured, without two copies of the text. Of a distinct number, while numbers are merged, when
# they need most: its key, sum and count. Of a slot of the hash table in which they are merged, which is at most 3/4
# full; the table that it grows from, with half as many slots, is included, and 20 were measured.
_TEXT_CHOICE_BYTES, _NUMBER_MERGE_BYTES, _MERGE_SLOT_BYTES = 140, 33, 20


@dataclass(frozen=True)
class Decoding:
    """Host memory, in bytes, that a rank needs to decode row groups and make windows of them.

    Attributes:
        first: before there are windows and steps; later: in addition to these.
        eval_first, eval_later: the same for the evaluated dataset that needs most. eval_kept: the part of `eval_later`
            that stays in heaps after an evaluation.
    """

    first: int = 0
    later: int = 0
    eval_first: int = 0
    eval_later: int = 0
    eval_kept: int = 0


@dataclass(frozen=True)
class DataFacts:
    """Facts of the data, measured or assumed.

    Attributes:
        mean_ids: by feature, the table rows looked up for one row of data, on average.
        eval_ids: the same for each kind of batch in an evaluation (rows to score, or users and items); 0 for a feature
            that the batch lacks.
        id_bytes: size of one table row number, as the loader holds it.
        window_bytes, eval_window_bytes: host memory of a rank's windows, for data.train and for the evaluated dataset
            that needs most. decoding: by rank, host memory to decode and make these windows.
        eval_rows: by dataset, the rows of a rank.
        vocabulary_bytes: host memory of the vocabularies, their indices, counts of rows, and items that negatives are
            drawn from.
        counted_ids: number of distinct ids, by table those that its vocabulary is chosen from, and by `counts_of` a
            feature those counted.
        counted_texts: by table, the mean bytes of such an id, if it is a text.
        counted_shown: by table and rank, how many ids the rank counts, with repetitions; assumed to be no fewer than
            the distinct ids if a table is missing.
        source: where the figures come from, in words.
        statistics_bytes: host memory of the counts of ids, once all data have been read.
        num_items: items that an evaluation ranks. listed_items: items of a user's lists, on average.
        most_ids: like `mean_ids`, in the largest of some hundred batches of training; empty if unknown.
        counted_bytes: what a rank decodes at a time to measure vocabularies, means and deviations.
    """

    mean_ids: Mapping[str, float]
    id_bytes: int
    window_bytes: int
    decoding: tuple[Decoding, ...]
    eval_rows: Mapping[str, int]
    source: str
    vocabulary_bytes: int = 0
    counted_ids: Mapping[str, int] = field(default_factory=dict)
    counted_texts: Mapping[str, float] = field(default_factory=dict)
    counted_shown: Mapping[str, Sequence[float]] = field(default_factory=dict)
    statistics_bytes: int = 0
    num_items: int = 0
    listed_items: float = 0
    counted_bytes: int = 0
    eval_ids: tuple[Mapping[str, float], ...] = ()
    most_ids: Mapping[str, float] = field(default_factory=dict)
    eval_window_bytes: int = 0

    def of_large_batches(self) -> "DataFacts":
        """Return the facts with `most_ids` instead of `mean_ids`, if they are known."""
        return replace(self, mean_ids=self.most_ids or self.mean_ids)

    def evaluated_ids(self, batch_rows: int) -> tuple[Mapping[str, float], ...]:
        """Return `eval_ids` for batches of so many rows; a small dataset leaves some of these rows without ids."""
        scored = max((rows for role, rows in self.eval_rows.items() if role != "items"), default=batch_rows)
        sizes = scored, self.eval_rows.get("items", batch_rows)
        return tuple(
            {name: mean * min(1, rows / batch_rows) for name, mean in means.items()}
            for means, rows in zip(self.eval_ids, sizes, strict=False)
        )

    def counting_bytes(self, rank: int, num_ranks: int) -> dict[str, int]:
        """Return by kind the bytes that a rank holds while vocabularies are counted and chosen, or read where a run
        resumes or a file has them; empty if there are none."""
        if not (self.counted_ids or self.counted_bytes):
            return {"vocabularies": self.vocabulary_bytes} if self.vocabulary_bytes else {}
        counted, choosing, chosen, indices = 0.0, 0.0, 0.0, 0.0
        for table, n in self.counted_ids.items():
            text = self.counted_texts.get(table, 0.0)
            seen = [min(n, shown) for shown in self.counted_shown.get(table, [n] * num_ranks)]
            counted += (_COUNTED_BYTES + text) * seen[rank]
            # With several ranks, the counts of all are here as bytes and as tables: numbers thrice and texts once.
            gathered = (3 * _COUNTED_BYTES + text) * sum(seen) if num_ranks > 1 else 0
            own = (_TEXT_CHOICE_BYTES + 2 * text) * n if text else _merge_bytes(n)
            choosing, id_bytes = max(choosing, own + gathered), (text or _ID_BYTES) * n
            # What is chosen from one list of numbers takes less than merging it, and comes later.
            chosen += id_bytes if text or num_ranks > 1 or len(self.counted_ids) > 1 else 0
            indices += index_bytes(n, int(id_bytes * (2 if text else 1)))
        # Ids are chosen once decoding has ended and given its memory back: the larger of the two makes the peak.
        return {
            "id_counts": int(counted + (choosing if choosing >= self.counted_bytes else 0)),
            "loader_decoding": self.counted_bytes if self.counted_bytes > choosing else 0,
            # Their indices are made later, when the rest has been freed.
            "vocabularies": int(chosen + max(0, self.vocabulary_bytes - indices)),
        }

    def batch_bytes(self, config: Config, rows: int, means: Mapping[str, float]) -> int:
        """Return the bytes of a batch whose rows have `means` ids of each feature."""
        weighted = has_weighted_ids(config)
        # Besides ids: the number of ids of each feature, floats (many for a vector), labels and the weight.
        numbers = len(id_features(config)) + len(float_columns(config)) + len(config.labels()) + 1
        return int(rows * (sum(means.values()) * (self.id_bytes + (4 if weighted else 0)) + 4 * numbers))


def _merge_bytes(num_ids: int) -> int:
    """Return the bytes that merging the counts of so many distinct numbers needs besides these."""
    slots = 1 << (4 * num_ids // 3).bit_length()
    return _NUMBER_MERGE_BYTES * num_ids + _MERGE_SLOT_BYTES * slots


@dataclass(frozen=True)
class DenseFacts:
    """The dense part at some number of rows.

    Attributes:
        parameter_bytes, buffer_bytes, gradient_bytes: of one rank. optimizer_bytes: by rank.
        rows: size of a rank's batch, for which the following are.
        step_bytes: peak of activations and temporaries, forward and backward. Pooled gradients are included;
            parameters, their gradients and pooled embeddings are not.
        eval_bytes: the same for a forward pass alone, for each kind of batch in `DataFacts.eval_ids`.
        host_bytes: with a GPU, the most that `train.activation_offload` keeps in page-locked host memory.
        heap_bytes: peak of the activations and temporaries of a step that lie in the heap.
        update_bytes: the most that the optimizer holds at once besides its state.
    """

    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: tuple[int, ...]
    rows: int
    step_bytes: int
    eval_bytes: tuple[int, ...]
    heap_bytes: int
    host_bytes: int = 0
    update_bytes: int = 0


@dataclass(frozen=True)
class RankMemory:
    """The memory of one rank.

    Attributes:
        tables: bytes by table, without caches.
        phases: by phase the bytes of its highest moment, in `device` (the GPU) and `host` memory, by kind. On CPU all
            are in `host`.
    """

    rank: int
    tables: dict[str, TableBytes]
    phases: dict[str, dict[str, Bytes]]

    def peak(self, where: str) -> tuple[int, str]:
        """Return the most bytes that are held on the `device` or the `host`, and in which phase."""
        return max((sum(kinds[where].values()), phase) for phase, kinds in self.phases.items())
