"""MovieLens-100K from the RecBole wheel, in the two splits of RecBole.

The wheel contains the data set, so pip is all that the download needs. The splits are those of
``recbole/data/dataset/dataset.py`` (``build``, ``split_by_ratio``) with RecBole's default seed 2020 and ratio 8:1:1,
random order: figures published by RecBole are on exactly these rows.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from recsys.datasets.retrieval import Log, Timeline, columns_of, split_random, time_key, write_files, write_retrieval
from recsys.datasets.writer import SPLITS, read_marker, replacing
from recsys.errors import UserError

MARKER = {"kind": "movielens-100k", "version": 2}
WHEEL = "recbole-1.2.1-py3-none-any.whl"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k."
SHA256 = {
    "inter": "4edb74e2a81178c2ba9ff381495f754f996c4aea351b1272ca36b43da0935eff",
    "item": "51d7cdf777ce5c0f5b32c1d947a4a81fe07d75e78abbe761e0cd4d0756064532",
    "user": "4f670007d9cfbeb9807e757209af1555b9bcc186bde25e767f67cb67c6dd5972",
}
LIKED = 4.0
RATING_COLUMNS = ("user_id", "item_id", "timestamp", "rating")
USER_COLUMNS = ("age", "gender", "occupation", "zip_code")
DOWNLOAD_SECONDS = 300


def prepare_movielens_100k(out: Path, cache: Path) -> bool:
    """Write MovieLens-100K below ``out``; return False if this version is there already.

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
        log = _log(ratings, users, items)
        _write_ctr(folder / "ctr", ratings, log)
        write_retrieval(folder / "retrieval", log, split_random(log.user), last=False)
    return True


def fetch_wheel(cache: Path) -> Path:
    """Path of the RecBole wheel in ``cache``, downloaded by pip if missing. Raises UserError if pip fails."""
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


def read_wheel(wheel: Path) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Ratings in file order; users (user_id and USER_COLUMNS) and items (item_id, release_year, genres), sorted by id.

    Ratings have user_id, item_id, timestamp (int64, seconds since 1970) and rating (float32). Every user and item with
    a rating has a row in its table, with nulls if the wheel does not describe it. Raises UserError if a file in the
    wheel is not byte for byte the one that the splits belong to.
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
    ratings = _read_atomic(content["inter"]).select(RATING_COLUMNS)
    ratings = ratings.set_column(3, "rating", ratings["rating"].cast(pa.float32()))
    users = _complete(_read_atomic(content["user"]).select(["user_id", *USER_COLUMNS]), ratings)
    return ratings, users, _complete(_parse_items(content["item"]), ratings)


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


def _complete(table: pa.Table, ratings: pa.Table) -> pa.Table:
    """The table, with a row of nulls for each id of the ratings that it lacks, sorted by id, its first column."""
    ids = ratings.select(table.column_names[:1])
    missing = pc.invert(pc.is_in(ids.column(0), table.column(0)))
    extra = ids.filter(missing).group_by(ids.column_names).aggregate([])
    return pa.concat_tables([table, extra], promote_options="default").sort_by(ids.column_names[0])


def _log(ratings: pa.Table, users: pa.Table, items: pa.Table) -> Log:
    return Log(
        np.searchsorted(users["user_id"].to_numpy(), ratings["user_id"].to_numpy()),
        np.searchsorted(items["item_id"].to_numpy(), ratings["item_id"].to_numpy()),
        ratings["timestamp"].to_numpy(),
        ratings.select(["timestamp"]),
        users,
        items,
    )


def _write_ctr(folder: Path, ratings: pa.Table, log: Log) -> None:
    split = split_random(np.zeros(len(log.user), np.int64))
    liked = ratings["rating"].to_numpy() >= LIKED
    timeline = Timeline(log, liked & (split == 0))
    # side="left": a like of the same second does not count as known beforehand.
    ends = np.searchsorted(timeline.keys, time_key(log.user, log.time), side="left")
    columns = columns_of(ratings) | {"label": pa.array(liked.astype(np.int8))}
    columns |= columns_of(log.users.take(pa.array(log.user))) | columns_of(log.items.take(pa.array(log.item)))
    table = pa.table(columns | {"history": timeline.history(log.user, ends)})
    for index, name in enumerate(SPLITS):
        rows = table.filter(pa.array(split == index))
        write_files([rows], len(rows), folder / name, files=2 if index else 4)
