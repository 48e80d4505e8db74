"""Footers and counts of a filter, cached in a file so that a resumed run need not read and count again."""

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.data.dataset import Dataset
from recsys.data.footers import FileKey, Footer
from recsys.runtime.logs import logger
from recsys.runtime.parquet import write_table

_VERSION = 6
_FACTS = {
    "layout": pa.int64(),
    "digest": pa.int64(),
    "num_rows": pa.list_(pa.int64()),
    "num_bytes": pa.list_(pa.int64()),
    "matching": pa.list_(pa.int64()),
}
_SCHEMA = pa.schema({"name": pa.string(), "size": pa.int64(), "time": pa.int64(), **_FACTS})


@dataclass(frozen=True)
class CachedFooters:
    """Footers that an earlier run has read.

    Attributes:
        footers: (name, size, time) of a file → its footer. layouts: see `FooterParser.layouts`.
        filter_schema, schema: like those of a `Dataset`.
    """

    footers: Mapping[FileKey, Footer] = field(default_factory=dict)
    layouts: Sequence[pa.Schema] = ()
    filter_schema: pa.Schema = field(default_factory=lambda: pa.schema([]))
    schema: pa.Schema = field(default_factory=lambda: pa.schema([]))


def load_footers(path: Path, columns: Sequence[str], text: str | None) -> CachedFooters:
    """Return what `save_footers` wrote for the same columns and filter; empty if there is no such file.

    A damaged file is treated like a missing one, since all of it can be read from the data again.

    Args:
        columns: the needed ones, followed by those of them that may be missing. Both must be the same, because footers
            are not checked for columns that may be missing.
    """
    try:
        table = pq.read_table(path, page_checksum_verification=True)
        header = json.loads((table.schema.metadata or {})[b"footers"])
        if header["made_for"] != [_VERSION, list(columns), text]:
            return CachedFooters()
        layouts = list(map(_decoded, header["layouts"]))
        footers = {}
        for row in table.to_pylist():
            key = (row.pop("name"), row.pop("size"), row.pop("time"))
            if 0 <= row["layout"] < len(layouts) and (row["matching"] is not None or text is None):
                footers[key] = Footer(**row)
        return CachedFooters(footers, layouts, _decoded(header["filter_schema"]), _decoded(header["schema"]))
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("'%s' is damaged; the footers of the data are read again", path)
        return CachedFooters()


def kept_schema(path: Path) -> pa.Schema:
    """Return the columns of the files whose footers `save_footers` wrote, and partition keys that were read; empty if
    there is no such file."""
    try:
        header = json.loads((pq.read_schema(path).metadata or {})[b"footers"])
        layouts = [_decoded(text).remove_metadata() for text in header["layouts"]]
        of_files = pa.unify_schemas(layouts, promote_options="permissive")
        keys = (field for field in _decoded(header["schema"]) if field.name not in of_files.names)
        return pa.schema([*of_files, *keys])
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return pa.schema([])


def save_footers(path: Path, columns: Sequence[str], text: str | None, known: CachedFooters) -> None:
    """Write footers for `load_footers`, atomically; an error, such as a full disk, only causes a warning."""
    header = {
        "made_for": [_VERSION, list(columns), text],
        "layouts": list(map(_encoded, known.layouts)),
        "filter_schema": _encoded(known.filter_schema),
        "schema": _encoded(known.schema),
    }
    rows = [
        {"name": name, "size": size, "time": time, **{fact: getattr(footer, fact) for fact in _FACTS}}
        for (name, size, time), footer in known.footers.items()
    ]
    table = pa.Table.from_pylist(rows, _SCHEMA.with_metadata({"footers": json.dumps(header)}))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_table(path, table)
    except OSError as error:
        logger.warning("'%s' cannot be written (%s); a resumed run reads the footers again", path, error)


def changed_files(path: Path, dataset: Dataset, all_rows: bool = True) -> str:
    """Return, for a message, how the files differ from those in a file of `save_footers`; empty if nothing is known.

    Args:
        all_rows: whether the dataset is not cut by `data.max_rows`, which may leave out files.
    """
    try:
        files = pq.read_table(path, columns=["name", "num_rows", "matching", "digest"]).to_pylist()
    except (pa.ArrowException, OSError):
        return ""
    before = {
        file["name"]: (sum(file["num_rows"]), file["digest"])
        for file in files
        if sum(file["num_rows"] if file["matching"] is None else file["matching"])
    }
    totals = np.bincount(dataset.row_groups.file, weights=dataset.stored_rows, minlength=dataset.num_files)
    facts = zip(totals.astype(np.int64).tolist(), dataset.file_digests.tolist(), strict=True)
    now = dict(zip(dataset.row_groups.paths, facts, strict=True))
    folders, rewritten = "", "was rewritten"
    if not before.keys() & now.keys():
        old, new = map(_folder_of, (before, now))
        if old != new:
            folders, rewritten = f"they lie in '{new}', and lay in '{old}'; ", "is another there"
        before, now = (
            {dataset.own_name(name): fact for name, fact in files_by_name.items()} for files_by_name in (before, now)
        )
    changes = [f"'{name}' is gone" for name in before if name not in now and all_rows]
    changes += [f"'{name}' is new" for name in now if name not in before]
    in_both = [(name, *before[name], *now[name]) for name in now if name in before]
    others = [(name, old, new) for name, old, before_digest, new, digest in in_both if digest != before_digest]
    is_whole = all_rows and dataset.filter is None  # else rows of row groups that are left out are not counted
    changes += [f"'{name}' has {new:,} rows, and had {old:,}" for name, old, new in others if is_whole and new != old]
    changes += [f"'{name}' {rewritten}" for name, old, new in others if not is_whole or new == old]
    more = f" and {len(changes) - 3} more" if len(changes) > 3 else ""
    return f" ({folders}{'; '.join(changes[:3])}{more})" if changes else ""


def _folder_of(paths: Iterable[str]) -> str:
    """Return the deepest folder that all files are in or below."""
    folders = [path.rpartition("/")[0] + "/" for path in paths]
    # Cut at a slash, so that no name is halved; `commonpath` would turn s3:// into s3:/.
    return os.path.commonprefix(folders).rpartition("/")[0]  # noqa: RUF071


def _encoded(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def _decoded(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
