"""Facts of the data for predictions of memory: ids in a row, windows, decoding, vocabularies."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from recsys.config import Config, IdMappingType
from recsys.config.features import id_features, rank_rows, sampled_rows, table_of_feature, with_experts
from recsys.data.decode import CACHED_ROW_GROUPS
from recsys.data.facts import counts_of
from recsys.data.inputs import Inputs
from recsys.data.order import most_shares, slice_bounds
from recsys.data.parquet import read_head
from recsys.data.wanted import column_of, columns_of, role_features, with_figures
from recsys.data.window import Ragged
from recsys.ids import index_bytes, is_text, statistics_bytes
from recsys.memory import DataFacts, Decoding
from recsys.memory.sample import SAMPLE_ROWS, Sample, rows_by_bytes, stored_rows
from recsys.runtime.threads import decode_in_processes, decoding_threads, windows_ahead

_NUMBER_BYTES = 8  # of an id, unless it is a text
_ORDER_BYTES = 12  # of a row of a window, while the window is shuffled
_FEW_WINDOWS, _EPOCHS_SEEN = 4, 4  # if all streams have fewer windows, those of so many epochs are looked at


class _Held(NamedTuple):
    """Rows of a dataset that a loader has in windows.

    Attributes:
        rows: the most at once. largest: rows of the largest window. read: rows of all windows that it makes; those of a
            window that is made again in a further epoch count again.
    """

    rows: int
    largest: int
    read: int


def streams_of_a_rank(config: Config, world_size: int) -> int:
    """Return the most streams of data.train that a rank reads."""
    slots = slice_bounds(config.train.global_batch_size, config.data.num_streams)
    return len(most_shares(slots, world_size))


def data_facts(config: Config, inputs: Inputs | None, world_size: int) -> DataFacts:
    """Return the facts from footers and first rows, or from the config if there are no `inputs`."""
    biggest = max(table.num_embeddings for table in config.tables.values())
    if inputs is None:
        mean_ids = {name: float(config.features[name].max_length or 1) for name in id_features(config)}
        windows = 2 * (config.data.window_mib << 20) * streams_of_a_rank(config, world_size)
        id_bytes = 4 if biggest < 1 << 31 else 8
        source, of_counts = "max_length or 1, since the data cannot be read here", _vocabularies(config, None, {}, {})
        counts, evaluated = len(mean_ids) * statistics_bytes(math.inf), _eval_ids(config, {"train": mean_ids})
        decoding = (Decoding(later=windows // 2),) * world_size
        of_batches = _mean_ids(config, mean_ids, world_size)
        return DataFacts(
            of_batches, id_bytes, windows, decoding, {}, source, *of_counts, statistics_bytes=counts, eval_ids=evaluated
        )
    sample = Sample(inputs, "train")
    sizes = {role: -(-dataset.num_rows // world_size) for role, dataset in inputs.datasets.items()}
    train_rows = sizes.pop("train")
    roles = sizes if {"valid", "test"} & sizes.keys() else {}  # a corpus alone is not evaluated
    # Windows of evaluations exist besides those of training, and keep their memory for the next evaluation.
    by_role = {role: _held_rows(inputs, role) for role in ("train", *roles)}
    held = by_role["train"]
    replaced = held.largest if held.rows < held.read or _reaches_second_epoch(inputs) else 0
    samples = {"train": sample} | {role: Sample(inputs, role) for role in roles}
    of_evaluation = max((samples[role].row_bytes * by_role[role].rows for role in roles), default=0)
    distinct = dict(zip(sample.names, sample.distinct_ids(train_rows), strict=True))
    vocabularies, counted, texts = _vocabularies(config, inputs, distinct, sample.text_bytes())
    return DataFacts(
        mean_ids=_mean_ids(config, sample.mean_ids(), world_size),
        most_ids=_most_ids(inputs, sample, held.rows),
        id_bytes=inputs.spec("train").dtype.itemsize,
        window_bytes=int(sample.window_bytes(held.rows, replaced)),
        eval_window_bytes=int(of_evaluation),
        decoding=_decoding_by_rank(inputs, samples, {role: of.largest for role, of in by_role.items()}),
        eval_rows=roles,
        source=sample.source,
        vocabulary_bytes=vocabularies + _drawn_bytes(inputs),
        counted_ids=counted,
        counted_texts=texts,
        counted_shown=_shown(inputs, sample, counted, world_size),
        counted_bytes=_counted_bytes(inputs, sample, counted),
        statistics_bytes=sum(map(statistics_bytes, sample.distinct_ids(min(train_rows, held.read)))),
        num_items=0 if inputs.corpus is None else len(inputs.corpus),
        listed_items=max(samples[role].listed for role in samples),
        eval_ids=_eval_ids(config, {role: rows.mean_ids() for role, rows in samples.items()}),
    )


def _most_ids(inputs: Inputs, sample: Sample, held: int) -> dict[str, float]:
    """Return, like `_mean_ids`, the ids of the largest batches, if windows hold `held` rows at once."""
    config, world_size = inputs.config, inputs.world.world_size
    streams = streams_of_a_rank(config, world_size)
    ahead = windows_ahead(_num_threads(inputs), streams)  # these hold no rows of the current batch
    at_once = max(streams, held / (1 + ahead) / sample.group_rows)
    return _mean_ids(config, sample.most_ids(rank_rows(config, world_size), at_once), world_size)


def _mean_ids(config: Config, means: Mapping[str, float], world_size: int) -> dict[str, float]:
    """Return the mean table rows of each feature in a row of a training batch, including rows of sampled items."""
    needs = config.model.needs()
    drawn = sampled_rows(config, world_size) / rank_rows(config, world_size)
    of_items = with_experts(config, needs.item_features)
    items = {} if needs.items_in_rows else dict.fromkeys(of_items, drawn)
    kept = {} if not needs.items_in_rows else {name: means[name] for name in of_items if name in means}
    return {name: mean * (1 - drawn) for name, mean in means.items()} | kept | items


def of_rank_rows(config: Config, data: DataFacts, world_size: int, rows: int) -> DataFacts:
    """Return the facts for training batches of another size: the larger the share of sampled items in a rank's `rows`,
    the fewer rows have the features of users."""
    needs, drawn = config.model.needs(), sampled_rows(config, world_size)
    before = 1 - drawn / rank_rows(config, world_size)
    share = min(1.0, drawn / rows)
    items = set(with_experts(config, needs.item_features)) if drawn else set()

    def resized(means: Mapping[str, float]) -> dict[str, float]:
        of_items = {name: mean if needs.items_in_rows else share for name, mean in means.items() if name in items}
        return {name: mean * (1 - share) / before for name, mean in means.items()} | of_items

    return replace(data, mean_ids=resized(data.mean_ids), most_ids=resized(data.most_ids))


def _eval_ids(config: Config, means: Mapping[str, Mapping[str, float]]) -> tuple[Mapping[str, float], ...]:
    """Return `DataFacts.eval_ids`; a feature that no dataset has counts as one id a row.

    Args:
        means: by role, the mean table rows of each feature in a row.
    """

    def most(kind: str) -> dict[str, float]:
        roles, names = ("items",) if kind == "items" else ("valid", "test"), role_features(config, kind)
        of_roles = [means[role] for role in roles if role in means] or [means["train"]]
        return {
            name: max(of_role.get(name, 1.0) for of_role in of_roles) if name in names else 0.0
            for name in id_features(config)
        }

    return tuple(map(most, ["valid"] if config.model.needs().item_id is None else ["valid", "items"]))


def _vocabularies(
    config: Config, inputs: Inputs | None, distinct: Mapping[str, float], text_bytes: Mapping[str, float]
) -> tuple[int, dict[str, int], dict[str, float]]:
    """Return the bytes of vocabularies, their indices and counts of rows, and `DataFacts.counted_ids`, `counted_texts`.

    Before the data are counted, a vocabulary is assumed to have as many ids as the table has rows for, and the data to
    have no others.

    Args:
        distinct: approximate number of distinct ids of a feature, if known. text_bytes: mean bytes of an id of each
            feature whose ids are texts.
    """
    corpus = [] if inputs is None or inputs.corpus is None else [inputs.corpus]
    facts = None if inputs is None else inputs.facts
    if facts is not None:
        indices = sum(map(_index_bytes, [*corpus, *facts.vocabularies.values()]))
        texts = {name: ids.nbytes / len(ids) for name, ids in facts.vocabularies.items() if is_text(ids.type) and ids}
        return indices + sum(counts.nbytes for counts in facts.row_counts.values()), facts.num_counted, texts
    tables = {name: table for name, table in config.tables.items() if table.mapping is IdMappingType.vocabulary}
    rows = {name: table.num_embeddings - 1 - table.num_buckets for name, table in tables.items()}
    counted = {name: rows[name] for name, table in tables.items() if table.vocabulary is None}
    texts = {config.features[feature].table or "": size for feature, size in text_bytes.items()}
    # The index of texts has its own copy of them.
    size = sum(index_bytes(n, int(n * (2 * texts.get(name, 0) or _NUMBER_BYTES))) for name, n in rows.items())
    size += sum(map(_index_bytes, corpus))
    if (feature := config.model.needs().log_shares_of) is not None:
        num_rows = table_of_feature(config, feature).num_embeddings
        size += _NUMBER_BYTES * num_rows
        counted[counts_of(feature)] = int(min(num_rows, distinct.get(feature, num_rows)))
    return size, counted, texts


def _shown(inputs: Inputs, sample: Sample, counted: Iterable[str], world_size: int) -> dict[str, list[float]]:
    """Return `DataFacts.counted_shown` for tables whose columns have one id a row."""
    rows, features = inputs.datasets["train"].row_groups.num_rows, inputs.config.features
    of_ranks, shown = [int(rows[rank::world_size].sum()) for rank in range(world_size)], dict[str, list[float]]()
    for key in counted:
        columns = [
            part
            for name, part in zip(sample.names, sample.columns.ids, strict=True)
            if key in (features[name].table, counts_of(name))
        ]
        if not any(isinstance(part, Ragged) for part in columns):
            shown[key] = [num_rows * len(columns) for num_rows in of_ranks]
    return shown


def _drawn_bytes(inputs: Inputs) -> int:
    """Return the bytes of the items that negatives are drawn from, and of their shares."""
    if not inputs.config.model.needs().sampled_items:
        return 0
    items = inputs.datasets["items"]
    head = read_head(items, SAMPLE_ROWS)
    return int((head.nbytes / max(1, head.num_rows) + _NUMBER_BYTES) * items.num_rows)


def _index_bytes(ids: pa.Array) -> int:
    """Return the bytes of a list of ids and of its index, which shares numbers with the list but copies texts."""
    return index_bytes(len(ids), ids.nbytes * (2 if is_text(ids.type) else 1))


def _num_threads(inputs: Inputs) -> int:
    return decoding_threads(inputs.config.data.num_threads, inputs.world.device, inputs.world.local_world_size)


def _held_rows(inputs: Inputs, role: str) -> _Held:
    """Return what a loader's streams hold, in training up to the last step.

    A stream holds the windows of the current batch, several if they are small, and those decoded ahead.
    """
    held, largest, read, loader, train = 0, 0, 0, inputs.loader(role), inputs.config.train
    epochs, of_epoch = train.epochs if role == "train" else 1, loader.window_rows()
    streams = of_epoch
    if epochs > 1 and max(map(len, streams), default=0) < _FEW_WINDOWS:  # other epochs cut them elsewhere
        streams = loader.window_rows(min(epochs, _EPOCHS_SEEN))
    ahead = windows_ahead(_num_threads(inputs), len(streams))
    of_batch = loader.batch_size / max(1, len(streams))
    trained = math.inf if role != "train" or train.max_steps is None else train.max_steps * of_batch
    for rows, first in zip(streams, of_epoch, strict=True):
        if not rows:  # if there are few rows, some streams have none
            continue
        at_once = ahead + max(1, min(len(first), math.ceil(of_batch * len(rows) / sum(rows))))
        following = islice(cycle(rows), min(at_once, epochs * len(rows)) - 1) if epochs > 1 else []
        made = [*rows, *following]
        made = made[: int(np.searchsorted(np.cumsum(made), trained)) + 1 + ahead]  # for as long as there are steps
        held += int(np.convolve(made, np.ones(at_once, int)).max())
        largest, read = max(largest, *made), read + sum(made)
    return _Held(held, largest, read)


def _decoding(inputs: Inputs, role: str, sample: Sample, largest: int) -> list[tuple[int, int, int]]:
    """Return by rank the bytes to decode a dataset's row groups and to make windows of at most `largest` rows: those
    needed before there are windows and steps, those needed in addition to these, and how many of the latter stay."""
    wanted, dataset = _num_threads(inputs), inputs.datasets[role]
    threads, groups = max(1, wanted), dataset.row_groups
    used = rows_by_bytes(groups)
    # Row groups are decoded whole, whatever a filter or data.max_rows leaves out; only a filter shrinks them later.
    stored = stored_rows(dataset)
    # A window being made exists twice, in the order of the files and shuffled, with the order of its rows; a separate
    # process keeps the memory of both, and sends a copy.
    in_processes = role == "train" and decode_in_processes(inputs.config.data.processes, wanted, inputs.world.device)
    of_window = largest * ((2 if in_processes else 1) * sample.row_bytes + _ORDER_BYTES)
    making = threads * of_window
    streams, by_rank = streams_of_a_rank(inputs.config, inputs.world.world_size), []
    loader, follows = inputs.loader(role), role == "train" and _reaches_second_epoch(inputs)
    for numbers in loader.row_groups_by_rank():
        read = np.ceil(np.sort(stored[numbers])[::-1]).astype(int)
        kept_rows = np.sort(used[numbers])[::-1] if dataset.filter else read  # kept ones lack what a filter drops
        is_read_once = len(used) <= CACHED_ROW_GROUPS  # if so, all decoded row groups are kept
        sizes = [
            sample.decoding_bytes(rows) if is_read_once else _decoding_or_making(sample, rows, of_window)
            for rows in read[:threads].tolist()
        ]
        if threads == 1 and loader.kept_row_groups:
            sizes += map(sample.table_bytes, kept_rows[1:CACHED_ROW_GROUPS].tolist())
        # Streams are read one after another, and neighbours often share a row group. But between two epochs, a row
        # group of the first is still there while one of the next is decoded.
        apart = CACHED_ROW_GROUPS if follows and not in_processes else 1
        decoding = sum(sizes[:apart]) + min(1.0, len(numbers) / streams) * sum(sizes[apart:])
        in_heaps = sample.small_share(int(read.max(initial=0)))
        if is_read_once:
            kept = sum(map(sample.table_bytes, kept_rows.tolist())) * (threads if in_processes else 1)
            by_rank.append((int(decoding), int(making + kept), int(in_heaps * (making + kept))))
        else:
            by_rank.append((0, int(making + decoding), int(in_heaps * (making + decoding))))
    return by_rank


def _decoding_or_making(sample: Sample, rows: int, of_window: float) -> float:
    """Return the most bytes that a thread needs for a row group of so many rows, besides those to make a window. When
    it makes a window, the row group is decoded already, and the temporaries of decoding are freed."""
    return max(sample.table_bytes(rows), sample.decoding_bytes(rows) - of_window)


def _reaches_second_epoch(inputs: Inputs) -> bool:
    """Return whether rows of a second epoch are read; this begins before the first epoch has been trained."""
    train = inputs.config.train
    most = math.inf if train.max_steps is None else train.max_steps * train.global_batch_size
    return train.epochs > 1 and most > inputs.datasets["train"].num_rows / 2


def _decoding_by_rank(
    inputs: Inputs, samples: Mapping[str, Sample], largest: Mapping[str, int]
) -> tuple[Decoding, ...]:
    """Return by rank the bytes to decode all datasets.

    Args:
        largest: the rows of the largest window by role, for "train" and the evaluated datasets.
    """
    by_role = {role: _decoding(inputs, role, samples[role], rows) for role, rows in largest.items()}
    evaluated = [sizes for role, sizes in by_role.items() if role != "train"]
    by_rank = []
    for rank, (first, later, _) in enumerate(by_role["train"]):
        of_evaluation = (max((sizes[rank][i] for sizes in evaluated), default=0) for i in range(3))
        by_rank.append(Decoding(first, later, *of_evaluation))
    return tuple(by_rank)


def _counted_bytes(inputs: Inputs, sample: Sample, tables: Collection[str]) -> int:
    """Return the bytes to decode those columns of a row group from which vocabularies and figures are measured."""
    config = inputs.config
    present = [name for name in role_features(config, "train") if name in id_features(config)]
    names = [n for n in present if (config.features[n].table or "") in tables or counts_of(n) in tables]
    counted = [*names, *with_figures(config)]
    columns = dict.fromkeys(column for n in counted for column in (*columns_of(config, n), column_of(config, n)))
    rows = int(inputs.datasets["train"].stored_rows.max())
    return int(sample.decoding_bytes(rows, columns))
