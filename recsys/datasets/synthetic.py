"""Synthetic logs with power-law ids and a planted teacher, so that the best possible AUC is known.

The label of a row is drawn with the probability that the teacher gives its features, so no model can beat the AUC and
log loss of the teacher on the same rows, which ``teacher.json`` states. With several labels, each is drawn only for
rows that have the one before. Ids, their hidden factors and their replacement over days are functions of (seed, field,
rank) by hash; everything else of a chunk of rows comes from a counter-based generator seeded with (seed, split, chunk).
So the same options give the same rows on every machine, whatever the number of files or the size of row groups, at
constant memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recsys.datasets.writer import SPLITS, check_bounds, option, read_marker, replacing, write_parts
from recsys.ids import hash_integers, hash_uniform

VERSION = 1
CHUNK_ROWS = 65536
UNSEEN_GENERATION = 1 << 20  # ids that are not in train

DEVICES = ("mobile", "desktop", "tablet", "tv")
NUM_CATEGORIES = 20
MAX_HISTORY = 16
NUM_FACTORS = 8
NULL_SHARE = 0.05
NUM_CAT, NUM_INT = 26, 13


@dataclass
class SyntheticOptions:
    """Options of the generator; the help of each field describes it."""

    rows: int = option(1_000_000, "training rows", least=1)
    valid_rows: int = option(100_000, "validation rows", least=1)
    test_rows: int = option(100_000, "test rows", least=1)
    users: int = option(20_000, "user ids alive on a day (user-item shape)", least=1, most=2**40)
    items: int = option(
        10_000, "item ids alive on a day; in the criteo shape, the size of the largest field", least=1, most=2**40
    )
    alpha: float = option(0.9, "popularity of an id is rank ** -alpha", least=0, most=5)
    unseen: float = option(0.0, "share of the ids in valid and test that are not in train", least=0, most=1)
    drift: float = option(0.0, "share of the ids replaced by new ones every day", least=0, most=1)
    days: int = option(7, "days of training data; valid is the next day, test the one after", least=1)
    shape: str = option("user-item", "what a row is", choices=("user-item", "views", "criteo"))
    correlation: float = option(0.5, "correlation of what drives clicks and purchases (views shape)", least=-1, most=1)
    files: int = option(4, "files per split", least=1)
    row_group_rows: int = option(65536, "rows per row group", least=1)
    seed: int = option(0, "the same seed gives the same rows", least=0)


def write_synthetic(out: Path, options: SyntheticOptions, overwrite: bool = False) -> bool:
    """Write ``out/{train,valid,test}/part-*.parquet`` and ``out/teacher.json``; False if they are there.

    data/README.md lists the columns of each shape. Raises UserError for an option out of range, and for
    a folder that holds something else.
    """
    check_bounds(options)
    marker = {"kind": "synthetic", "version": VERSION, "options": asdict(options)}
    if read_marker(out) == marker:
        return False
    make_chunk: MakeChunk = SHAPES[options.shape](options).chunk
    teacher: dict[str, Any] = {"options": asdict(options)}
    with replacing(out, marker, overwrite) as folder:
        for split, rows in enumerate((options.rows, options.valid_rows, options.test_rows)):
            ceilings: dict[str, Ceiling] = {}
            tables = _tables(options, split, rows, make_chunk, ceilings)
            write_parts(tables, folder / SPLITS[split], options.row_group_rows, -(-rows // options.files))
            best = {name: ceiling.result() for name, ceiling in ceilings.items()}
            teacher[SPLITS[split]] = best.get("label", best)
        (folder / "teacher.json").write_text(json.dumps(teacher, indent=2) + "\n")
    return True


def _tables(
    options: SyntheticOptions, split: int, rows: int, make_chunk: MakeChunk, ceilings: dict[str, Ceiling]
) -> Iterator[pa.Table]:
    """The chunks of one split, with drawn labels, which are counted in ``ceilings`` by name."""
    for chunk, first in enumerate(range(0, rows, CHUNK_ROWS)):
        count = min(CHUNK_ROWS, rows - first)
        drawn = Rows(options, split, chunk, _days(options, split, first, count, rows))
        columns, logits = make_chunk(drawn)
        labels, possible, total = {}, np.ones(count, bool), np.full(count, np.inf)
        for name, logit in logits.items():
            possible = possible & (drawn.rng.random(count) < 1 / (1 + np.exp(-logit)))
            # 1 / p - 1 of a product of probabilities: see recsys.models.esmm
            total = -np.logaddexp(np.logaddexp(-total, -logit), -(total + logit))
            labels[name] = possible.astype(np.int8)
            ceilings.setdefault(name, Ceiling()).add(total, labels[name])
        yield pa.table({**labels, "day": drawn.day, **columns})


def _days(options: SyntheticOptions, split: int, first: int, count: int, rows: int) -> np.ndarray:
    """int32: training rows are spread evenly over the days; valid and test are the two days after."""
    if split:
        return np.full(count, options.days - 1 + split, np.int32)
    return ((first + np.arange(count)) * options.days // rows).astype(np.int32)


class Rows:
    """The randomness of one chunk: its generator, its split, and the ``day`` (int32) of each row."""

    def __init__(self, options: SyntheticOptions, split: int, chunk: int, day: np.ndarray):
        self.rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([options.seed, split, chunk])))
        self.held_out = split > 0
        self.day = day

    def nulls(self) -> np.ndarray:
        """bool per row, true with probability NULL_SHARE."""
        return self.rng.random(len(self.day)) < NULL_SHARE


class IdField:
    """A field of ids: draws keys (int64, a hidden numbering), and gives the raw ids and factors of keys."""

    def __init__(self, options: SyntheticOptions, field: int, size: int):
        self.alpha, self.unseen, self.drift = options.alpha, options.unseen, options.drift
        self.size = size
        self.seed = (options.seed << 16) + (field << 8)

    def draw(self, rows: Rows, day: np.ndarray) -> np.ndarray:
        """Keys for ``day``, int64 [rows]: a rank by the power law, and the generation of ids that has it that day."""
        rank = self._rank(rows.rng.random(len(day)))
        if self.drift:
            generation = np.floor(day * self.drift + hash_uniform(rank, self.seed)).astype(np.int64)
        else:
            generation = np.zeros(len(day), np.int64)
        if rows.held_out and self.unseen:
            generation[rows.rng.random(len(day)) < self.unseen] = UNSEEN_GENERATION
        return rank + self.size * generation

    def _rank(self, uniform: np.ndarray) -> np.ndarray:
        """Inverse of the continuous power law on [1, size + 1), rounded down, from 0."""
        power = 1 - self.alpha
        if abs(power) < 1e-9:
            x = (self.size + 1.0) ** uniform
        else:
            x = (1 + uniform * ((self.size + 1.0) ** power - 1)) ** (1 / power)
        return np.clip(x.astype(np.int64) - 1, 0, self.size - 1)

    def ids(self, keys: np.ndarray) -> np.ndarray:
        """Raw ids, int64 scattered over [0, 2**63): neither dense nor in order of popularity."""
        return (hash_integers(keys, self.seed + 1) >> np.uint64(1)).view(np.int64)

    def factor(self, keys: np.ndarray, index: int) -> np.ndarray:
        """Hidden factor ``index`` of each key, float64: mean 0, variance 1, uniform (the same on every machine)."""
        return 12**0.5 * (hash_uniform(keys, self.seed + 2 + index) - 0.5)


def affinity(users: IdField, user: np.ndarray, items: IdField, item: np.ndarray) -> np.ndarray:
    """Part of a logit, float64 [rows], from keys of user and item: a term for each alone, and one for both together."""
    logit = 0.5 * users.factor(user, 0) + 0.7 * items.factor(item, 0)
    for index in range(1, NUM_FACTORS + 1):
        logit += users.factor(user, index) * items.factor(item, index) / NUM_FACTORS**0.5
    return logit


class UserItemShape:
    """Users, items, context and a history of items that suit the user."""

    def __init__(self, options: SyntheticOptions):
        self.user = IdField(options, 0, options.users)
        self.item = IdField(options, 1, options.items)
        self.category = IdField(options, 2, NUM_CATEGORIES)
        self.device = IdField(options, 3, len(DEVICES))
        self.hour = IdField(options, 4, 24)

    def chunk(self, rows: Rows) -> tuple[dict[str, pa.Array], dict[str, np.ndarray]]:
        """The columns of a chunk and the teacher's logit of each row, float64, by label."""
        rng, count = rows.rng, len(rows.day)
        user, item = self.user.draw(rows, rows.day), self.item.draw(rows, rows.day)
        category = (hash_uniform(item, self.category.seed) * NUM_CATEGORIES).astype(np.int64)
        device, hour = rng.integers(0, len(DEVICES), count), rng.integers(0, 24, count)
        price = (20 * np.exp(0.7 * rng.standard_normal(count))).astype(np.float32)
        no_device, no_price = rows.nulls(), rows.nulls()
        logit = -1.0 + affinity(self.user, user, self.item, item) + 0.5 * self.category.factor(category, 0)
        logit += np.where(no_device, 0, 0.4 * self.device.factor(device, 0)) + 0.3 * self.hour.factor(hour, 0)
        logit -= np.where(no_price, 0, 0.6 * np.log(price / 20.0))
        columns = {
            "user_id": pa.array(self.user.ids(user)),
            "item_id": pa.array(self.item.ids(item)),
            "category": pa.array([f"cat_{i:02d}" for i in range(NUM_CATEGORIES)]).take(pa.array(category)),
            "device": pa.array(DEVICES).take(pa.array(device, mask=no_device)),
            "hour": pa.array(hour, pa.int8()),
            "price": pa.array(price, mask=no_price),
            "weight": pa.array(rng.choice(np.array([0.5, 1, 2], np.float32), count)),
            "history": self._history(rows, user),
        }
        return columns, self._logits(user, item, logit)

    def _logits(self, user: np.ndarray, item: np.ndarray, logit: np.ndarray) -> dict[str, np.ndarray]:
        return {"label": logit}

    def _history(self, rows: Rows, user: np.ndarray) -> pa.ListArray:
        """list<int64> of 0 to MAX_HISTORY items: of two drawn, the one closer to the first taste of the user."""
        lengths = rows.rng.integers(0, MAX_HISTORY + 1, len(user))
        taste = np.repeat(self.user.factor(user, 1), lengths)
        day = np.repeat(rows.day, lengths)
        one, two = self.item.draw(rows, day), self.item.draw(rows, day)
        better = self.item.factor(two, 1) * taste > self.item.factor(one, 1) * taste
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        items = self.item.ids(np.where(better, two, one))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), items)


class ViewsShape(UserItemShape):
    """The same rows as views: some are clicked, and some of these bought, with tastes that resemble each other."""

    def __init__(self, options: SyntheticOptions):
        super().__init__(options)
        self.correlation = options.correlation
        self.buyer, self.goods = IdField(options, 5, options.users), IdField(options, 6, options.items)

    def _logits(self, user: np.ndarray, item: np.ndarray, logit: np.ndarray) -> dict[str, np.ndarray]:
        shared, own = affinity(self.user, user, self.item, item), affinity(self.buyer, user, self.goods, item)
        return {"click": logit, "buy": -1.0 + self.correlation * shared + (1 - self.correlation**2) ** 0.5 * own}


class CriteoShape:
    """26 one-hot fields of 4 to ``items`` ids and 13 counts, with nulls, as in the click logs of Criteo."""

    def __init__(self, options: SyntheticOptions):
        sizes = np.geomspace(min(4, options.items), options.items, NUM_CAT).round().astype(np.int64)
        self.cats = [IdField(options, field, int(size)) for field, size in enumerate(sizes)]
        self.ints = IdField(options, NUM_CAT, NUM_INT)

    def chunk(self, rows: Rows) -> tuple[dict[str, pa.Array], dict[str, np.ndarray]]:
        """The columns of a chunk and the teacher's logit of each row, float64, by label."""
        columns, logit = {}, np.full(len(rows.day), -1.0)
        weights = self.ints.factor(np.arange(NUM_INT), 0)
        for index in range(NUM_INT):
            count = np.floor(np.exp(1.0 + 1.5 * rows.rng.standard_normal(len(rows.day)))).astype(np.float32)
            null = rows.nulls()
            columns[f"int_{index}"] = pa.array(count, mask=null)
            logit += np.where(null, 0, 0.1 * weights[index] * (np.log1p(count) - 1))
        previous, previous_null = np.zeros(0), np.zeros(0)
        for index, cat in enumerate(self.cats):
            keys, null = cat.draw(rows, rows.day), rows.nulls()
            columns[f"cat_{index}"] = pa.array(cat.ids(keys), mask=null)
            logit += np.where(null, 0, 0.2 * cat.factor(keys, 0))
            if index % 2:  # fields act in pairs, so crosses help
                before = self.cats[index - 1]
                pair = 0.25 * sum(before.factor(previous, k) * cat.factor(keys, k) for k in (1, 2))
                logit += np.where(null | previous_null, 0, pair)
            previous, previous_null = keys, null
        return columns, {"label": logit}


MakeChunk = Callable[[Rows], tuple[dict[str, pa.Array], dict[str, np.ndarray]]]
SHAPES: dict[str, Callable[[SyntheticOptions], UserItemShape | CriteoShape]] = {
    "user-item": UserItemShape,
    "views": ViewsShape,
    "criteo": CriteoShape,
}


class Ceiling:
    """AUC and log loss of the true probabilities on the drawn labels, unweighted, at constant memory."""

    BINS = 1 << 20  # of probability; pairs within one bin count half, which moves AUC by less than 1e-5

    def __init__(self) -> None:
        self.counts = np.zeros((2, self.BINS), np.int64)
        self.loss = 0.0

    def add(self, logit: np.ndarray, label: np.ndarray) -> None:
        """Add rows: logit float64, label 0 or 1."""
        self.loss += float(np.sum(np.logaddexp(0, logit) - label * logit))
        bins = np.minimum(self.BINS / (1 + np.exp(-logit)), self.BINS - 1).astype(np.int64)
        for value in (0, 1):
            self.counts[value] += np.bincount(bins[label == value], minlength=self.BINS)

    def result(self) -> dict[str, float | int | None]:
        """rows, base_rate, auc (None if all labels are equal) and log_loss in nats."""
        # The metric of models would import torch, without which data can be prepared too.
        negative, positive = self.counts
        pairs, rows = int(negative.sum()) * int(positive.sum()), int(self.counts.sum())
        ordered = float(positive @ (np.cumsum(negative) - negative / 2))
        return {
            "rows": rows,
            "base_rate": round(int(self.counts[1].sum()) / rows, 6),
            "auc": round(ordered / pairs, 6) if pairs else None,
            "log_loss": round(self.loss / rows, 6),
        }
