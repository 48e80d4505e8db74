"""MovieLens-100K out of the RecBole wheel, in RecBole's own two splits.

The wheel carries the data set, so that pip is all the download needs. The splits are those of
``recbole/data/dataset/dataset.py`` (``build``, ``split_by_ratio``) with RecBole's default seed 2020 and
ratio 8:1:1, random order: figures published by RecBole are on exactly these rows.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from recsys.data.prepare import read_marker, replacing, write_parts
from recsys.errors import UserError

MARKER = {"kind": "movielens-100k", "version": 2}
WHEEL = "recbole-1.2.1-py3-none-any.whl"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k."
SHA256 = {
    "inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
SPLITS = ("train", "valid", "test")
HISTORY = 50
LIKED = 4.0
USER_COLUMNS = ("age", "gender", "occupation", "zip_code")
ITEM_COLUMNS = ("release_year", "genres")
DOWNLOAD_SECONDS = 300


class Ratings(NamedTuple):
    """The interactions in file order: arrays of one length, and one row of features for each."""

    user: np.ndarray  # int64
    item: np.ndarray  # int64
    rating: np.ndarray  # float32
    time: np.ndarray  # int64, seconds since 1970


def prepare_movielens_100k(out: Path, cache: Path) -> bool:
    """Write MovieLens-100K below ``out``; False if this version of it is there already.

    Folders ``ctr/{train,valid,test}`` and ``retrieval/{train,valid,test,items}``; data/README.md lists
    the columns. ``cache`` keeps the wheel. Raises UserError if it cannot be had or is not as expected.
    """
    marker = read_marker(out)
    if marker == MARKER:
        return False
    wheel = fetch_wheel(cache)
    ratings, users, items = read_wheel(wheel)
    earlier_version = marker is not None and marker.get("kind") == MARKER["kind"]
    with replacing(out, MARKER, overwrite=earlier_version) as folder:
        _write_ctr(folder / "ctr", ratings, users, items)
        _write_retrieval(folder / "retrieval", ratings, users, items)
    return True


def fetch_wheel(cache: Path) -> Path:
    """Path of the RecBole wheel in ``cache``, downloaded by pip if it is not there yet."""
    path = cache / WHEEL
    if path.exists():
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
        command += ["--timeout", "30", "--only-binary", ":all:", "--dest", folder, "recbole==1.2.1"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            reason = (errors or done.stderr.splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            reason = f"no answer in {DOWNLOAD_SECONDS} s"
        if not (Path(folder) / WHEEL).exists():
            raise UserError(
                "pip could not download recbole==1.2.1, which holds MovieLens-100K; "
                f"put {WHEEL} into {cache} by hand or check the package index (pip says: {reason})"
            )
        (Path(folder) / WHEEL).replace(path)
    return path


def read_wheel(wheel: Path) -> tuple[Ratings, pa.Table, pa.Table]:
    """Ratings, users (user_id and USER_COLUMNS) and items (item_id and ITEM_COLUMNS), file order.

    Every user and item of the ratings has a row in its table, of nulls if the wheel does not know it.
    Raises UserError if a file in the wheel is not byte for byte the one that the splits belong to.
    """
    content = {}
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, digest in SHA256.items():
                content[name] = archive.read(MEMBER + name)
                if hashlib.sha256(content[name]).hexdigest() != digest:
                    raise UserError(f"{wheel}: {MEMBER}{name} is not the known file; delete the wheel")
    except (zipfile.BadZipFile, KeyError) as error:
        raise UserError(f"{wheel} is not the RecBole 1.2.1 wheel ({error}); delete it") from None
    inter = _read_atomic(content["inter"])
    ratings = Ratings(
        inter["user_id"].to_numpy(),
        inter["item_id"].to_numpy(),
        inter["rating"].to_numpy().astype(np.float32),
        inter["timestamp"].to_numpy(),
    )
    users = _complete(_read_atomic(content["user"]), "user_id", ratings.user)
    return ratings, users, _complete(_parse_items(content["item"]), "item_id", ratings.item)


def _read_atomic(content: bytes) -> pa.Table:
    """RecBole's atomic format: tab-separated, header fields ``name:type``, no quoting."""
    table = pa.csv.read_csv(
        pa.BufferReader(content), parse_options=pa.csv.ParseOptions(delimiter="\t", quote_char=False)
    )
    return table.rename_columns([name.split(":")[0] for name in table.column_names])


def _parse_items(content: bytes) -> pa.Table:
    table = _read_atomic(content)
    # Two of the years are not years ("V", "unkonwn").
    known = pc.match_substring_regex(table["release_year"], r"^\d{4}$")
    year = pc.if_else(known, table["release_year"], None).cast(pa.int64())
    genres = pc.split_pattern(table["class"], " ")
    return pa.table({"item_id": table["item_id"], "release_year": year, "genres": genres})


def _complete(table: pa.Table, key: str, used: np.ndarray) -> pa.Table:
    """The table with a row of nulls for every used id that it lacks, sorted by id."""
    missing = np.setdiff1d(used, table[key].to_numpy())
    extra = pa.table({key: missing})
    return pa.concat_tables([table, extra], promote_options="default").sort_by(key)


def split_random(num_rows: int) -> np.ndarray:
    """int8 per row, an index into SPLITS: shuffle all rows, cut 8:1:1."""
    order = _shuffled(num_rows)
    tenth = num_rows // 10
    split = np.zeros(num_rows, np.int8)
    split[order[-2 * tenth : -tenth]] = 1
    split[order[-tenth:]] = 2
    return split


def split_per_user(user: np.ndarray) -> np.ndarray:
    """int8 per row, an index into SPLITS: shuffle all rows, cut each user's rows 8:1:1.

    RecBole's ``split_by_ratio(group_by=user)``: each held-out part is a tenth, rounded down. (Its rule
    for users of fewer than ten rows has no effect here: everybody in ML-100K has at least twenty.)
    """
    order = _shuffled(len(user))
    order = order[np.argsort(user[order], kind="stable")]
    grouped = user[order]
    first = np.searchsorted(grouped, grouped, side="left")
    last = np.searchsorted(grouped, grouped, side="right")
    tenth = (0.1 * (last - first)).astype(np.int64)
    from_end = last - np.arange(len(user))  # 1 for the last row of a user
    split = np.zeros(len(user), np.int8)
    split[order[from_end <= 2 * tenth]] = 1
    split[order[from_end <= tenth]] = 2
    return split


def _shuffled(num_rows: int) -> np.ndarray:
    import torch  # only torch's generator reproduces RecBole's order

    generator = torch.Generator().manual_seed(2020)
    return torch.randperm(num_rows, generator=generator).numpy()


class _Timeline:
    """Chosen rows sorted by (user, time, file order), to cut lists of items out of."""

    def __init__(self, ratings: Ratings, chosen: np.ndarray):
        rows = np.flatnonzero(chosen)
        self.rows = rows[np.lexsort((ratings.time[rows], ratings.user[rows]))]
        self.items = ratings.item[self.rows]
        self.keys = _time_key(ratings.user[self.rows], ratings.time[self.rows])

    def starts(self, user: np.ndarray) -> np.ndarray:
        """Where each user's rows begin; those of user + 1 begin where they end."""
        return np.searchsorted(self.keys, _time_key(user, np.zeros_like(user)))

    def lists(self, starts: np.ndarray, ends: np.ndarray, without: np.ndarray | None = None) -> pa.ListArray:
        """list<int64> of the items at positions start to end, end excluded, and one position of each left out."""
        lengths = ends - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        if without is not None:
            positions = positions[positions != np.repeat(without, lengths)]
            offsets = np.concatenate([[0], np.cumsum(lengths - ((starts <= without) & (without < ends)))])
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), self.items[positions])

    def history(self, user: np.ndarray, ends: np.ndarray) -> pa.ListArray:
        """The last HISTORY items of each user before position ``ends``."""
        return self.lists(np.maximum(self.starts(user), ends - HISTORY), ends)

    def others(self, user: np.ndarray, positions: np.ndarray) -> pa.ListArray:
        """The last HISTORY items of each user, the one at the row's own position left out."""
        ends = self.starts(user + 1)
        starts = np.where(positions < ends - HISTORY, ends - HISTORY, ends - HISTORY - 1)
        return self.lists(np.maximum(self.starts(user), starts), ends, without=positions)


def _time_key(user: np.ndarray, time: np.ndarray) -> np.ndarray:
    return (user << 32) | time


def _features(table: pa.Table, key: str, ids: np.ndarray, names: tuple[str, ...]) -> dict[str, pa.Array]:
    """Columns of a table sorted by ``key``, one row for each id."""
    rows = np.searchsorted(table[key].to_numpy(), ids)
    taken = table.select(names).take(pa.array(rows))
    return {name: taken[name] for name in names}


def _write_files(table: pa.Table, folder: Path, files: int) -> None:
    """Files of four row groups each: small, but many enough that every rank has its own to read."""
    rows_per_file = -(-table.num_rows // files)
    write_parts([table], folder, row_group_rows=-(-rows_per_file // 4), rows_per_file=rows_per_file)


def _write_ctr(folder: Path, ratings: Ratings, users: pa.Table, items: pa.Table) -> None:
    split = split_random(len(ratings.user))
    liked = ratings.rating >= LIKED
    timeline = _Timeline(ratings, liked & (split == 0))
    # side="left": a like of the same second does not count as known beforehand.
    ends = np.searchsorted(timeline.keys, _time_key(ratings.user, ratings.time), side="left")
    table = pa.table(
        {
            "user_id": ratings.user,
            "item_id": ratings.item,
            "timestamp": ratings.time,
            "rating": ratings.rating,
            "label": liked.astype(np.int8),
            **_features(users, "user_id", ratings.user, USER_COLUMNS),
            **_features(items, "item_id", ratings.item, ITEM_COLUMNS),
            "history": timeline.history(ratings.user, ends),
        }
    )
    for index, name in enumerate(SPLITS):
        rows = table.filter(pa.array(split == index))
        _write_files(rows, folder / name, files=2 if index else 4)


def _write_retrieval(folder: Path, ratings: Ratings, users: pa.Table, items: pa.Table) -> None:
    """Train rows know the user's other items, whether they came before or after.

    The held-out items are a random tenth of each user's, not the latest, and a query's history is cut from all of
    train. From rows with only what came before them a two-tower model learns which item comes next in a session:
    its recall@10 on test is 0.15 then, and falls with the epochs, instead of 0.25.
    """
    split = split_per_user(ratings.user)
    train = _Timeline(ratings, split == 0)
    rows = np.flatnonzero(split == 0)
    position = np.empty(len(split), np.int64)
    position[train.rows] = np.arange(len(train.rows))
    user, item = ratings.user[rows], ratings.item[rows]
    table = pa.table(
        {
            "user_id": user,
            "item_id": item,
            "timestamp": ratings.time[rows],
            **_features(users, "user_id", user, USER_COLUMNS),
            **_features(items, "item_id", item, ITEM_COLUMNS),
            "history": train.others(user, position[rows]),
        }
    )
    _write_files(table, folder / "train", files=4)
    for index in (1, 2):
        queries = _queries(ratings, users, train, split, index)
        _write_files(queries, folder / SPLITS[index], files=2)
    _write_files(items.select(("item_id", *ITEM_COLUMNS)), folder / "items", files=2)


def _queries(ratings: Ratings, users: pa.Table, train: _Timeline, split: np.ndarray, index: int) -> pa.Table:
    """One row for each user with an interaction held out in split ``index``.

    ``seen`` follows RecBole's full-sort evaluation (``Sampler.get_used_ids``): the items of all earlier
    splits, so the test masks those of valid too.
    """
    user = np.unique(ratings.user[split == index])
    held_out, earlier = _Timeline(ratings, split == index), _Timeline(ratings, split < index)
    return pa.table(
        {
            "user_id": user,
            **_features(users, "user_id", user, USER_COLUMNS),
            "history": train.history(user, train.starts(user + 1)),
            "targets": held_out.lists(held_out.starts(user), held_out.starts(user + 1)),
            "seen": earlier.lists(earlier.starts(user), earlier.starts(user + 1)),
        }
    )
