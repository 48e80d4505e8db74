"""The inputs of a prediction of memory, facts of data and dense part, and its result, a rank's bytes by kind."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from recsys.config import Config
from recsys.config.features import float_columns, has_weighted_ids, id_features
from recsys.ids import index_bytes
from recsys.memory.tensors import Bytes
from recsys.tables.bytes import TableBytes

_ID_BYTES = 8  # that is a number
_COUNTED_BYTES = 16  # of a distinct id, beside its text
# Of each while those of a table are merged and chosen: of numbers 60 to 115 were measured, of texts 125 to 150 beside
# two copies.
_NUMBER_CHOICE_BYTES, _TEXT_CHOICE_BYTES = 75, 140


@dataclass(frozen=True)
class Decoding:
    """Host memory of a rank for row groups that are decoded and windows that are made of them, in bytes.

    Attributes:
        first: before there are windows and steps; later: beside these.
        eval_first, eval_later: the same of the data set to evaluate that takes most. eval_kept: of `eval_later`, what
            stays after an evaluation, in heaps.
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
        eval_ids: the same for each kind of batch of an evaluation, which has rows to score, or users and items; 0 for a
            feature that the batch lacks.
        id_bytes: of one table row number, as the loader holds it.
        window_bytes, eval_window_bytes: host memory of a rank's windows, of data.train and of the data set to evaluate
            that takes most. decoding: by rank, that of what becomes windows.
        eval_rows: of a rank, by dataset.
        vocabulary_bytes: host memory of the vocabularies, of what finds ids in them, of counts of rows, and of items
            that negatives are drawn from.
        counted_ids: by table, distinct ids that its vocabulary is chosen from; by `counts_of` a feature, those counted.
        counted_texts: by table, the mean bytes of such an id, if it is a text.
        counted_shown: by table and rank, the ids that the rank counts, each as often as it comes; of a table that is
            not there, more than are distinct.
        source: where the figures come from, in words.
        statistics_bytes: host memory of the counts of ids, once the data have been seen.
        num_items: items that an evaluation ranks. listed_items: items of a user's lists, on average.
        most_ids: as `mean_ids`, in the largest of some hundred batches of training; empty: unknown.
        counted_bytes: of what is decoded for vocabularies, means and deviations, by a rank at once.
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
        """Return the facts with `most_ids` in place of `mean_ids`, if they are known."""
        return replace(self, mean_ids=self.most_ids or self.mean_ids)

    def evaluated_ids(self, batch_rows: int) -> tuple[Mapping[str, float], ...]:
        """Return `eval_ids` of a row of a batch of so many rows, of which a small data set leaves some without ids."""
        scored = max((rows for role, rows in self.eval_rows.items() if role != "items"), default=batch_rows)
        sizes = scored, self.eval_rows.get("items", batch_rows)
        return tuple(
            {name: mean * min(1, rows / batch_rows) for name, mean in means.items()}
            for means, rows in zip(self.eval_ids, sizes, strict=False)
        )

    def counting_bytes(self, rank: int, num_ranks: int) -> dict[str, int]:
        """Return by kind what a rank holds while vocabularies are counted and chosen; empty if none is."""
        if not (self.counted_ids or self.counted_bytes):
            return {}
        counted, choosing, chosen, indices = 0.0, 0.0, 0.0, 0.0
        for table, n in self.counted_ids.items():
            text = self.counted_texts.get(table, 0.0)
            seen = [min(n, shown) for shown in self.counted_shown.get(table, [n] * num_ranks)]
            counted += (_COUNTED_BYTES + text) * seen[rank]
            # Of several ranks, what all have seen is there as bytes and as tables, numbers thrice and texts once.
            gathered = (3 * _COUNTED_BYTES + text) * sum(seen) if num_ranks > 1 else 0
            choosing = max(choosing, (_TEXT_CHOICE_BYTES + 2 * text if text else _NUMBER_CHOICE_BYTES) * n + gathered)
            id_bytes = (text or _ID_BYTES) * n
            chosen, indices = chosen + id_bytes, indices + index_bytes(n, int(id_bytes * (2 if text else 1)))
        # Ids are chosen once decoding has ended and given its memory back: the larger of the two makes the peak.
        return {
            "id_counts": int(counted + choosing * (choosing >= self.counted_bytes)),
            "loader_decoding": self.counted_bytes if self.counted_bytes > choosing else 0,
            # What finds ids is made of them afterwards, when nothing else is there.
            "vocabularies": int(chosen + max(0, self.vocabulary_bytes - indices)),
        }

    def batch_bytes(self, config: Config, rows: int, means: Mapping[str, float]) -> int:
        """Return the bytes of a batch whose rows have `means` ids of each feature."""
        weighted = has_weighted_ids(config)
        # Beside ids: how many there are of each feature, floats, of which a vector has many, labels and the weight.
        numbers = len(id_features(config)) + len(float_columns(config)) + len(config.labels()) + 1
        return int(rows * (sum(means.values()) * (self.id_bytes + 4 * weighted) + 4 * numbers))


@dataclass(frozen=True)
class DenseFacts:
    """The dense part at some number of rows.

    Attributes:
        parameter_bytes, buffer_bytes, gradient_bytes: of one rank. optimizer_bytes: by rank.
        rows: of a rank's batch, for which the following are.
        step_bytes: the most that activations and temporaries take at once, forward and backward, above parameters,
            gradients and pooled embeddings; pooled gradients are among them.
        eval_bytes: the same of a forward pass alone, of each kind of batch in `DataFacts.eval_ids`.
        host_bytes: of a GPU: the most that `train.activation_offload` keeps in page-locked host memory.
        heap_bytes: the most that those of a step which lie in the heap take at once.
        update_bytes: the most that the optimizer takes at once, beside its state.
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
        phases: by phase the bytes of its highest moment, by kind: `device` of a GPU, `host` of the machine. On CPU all
            are in `host`.
    """

    rank: int
    tables: dict[str, TableBytes]
    phases: dict[str, dict[str, Bytes]]

    def peak(self, where: str) -> tuple[int, str]:
        """Return the most bytes, on the `device` or the `host`, and the phase."""
        return max((sum(kinds[where].values()), phase) for phase, kinds in self.phases.items())
