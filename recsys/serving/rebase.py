"""A base, written from the last one and the deltas after it in a process without torch.

    python -m recsys.serving.rebase OUT

OUT is the next name in the folder of `train.publish`. Files that no delta changes are linked from the last base;
`dense.pt2`, the program of torch, which contains its weights, is only in exports.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

from recsys.runtime.files import replace_file, sync
from recsys.runtime.launch import end_with_parent
from recsys.serving.score import MANIFEST, PROGRAM, ExportError, Scorer, checksum, read_manifest, sha256

ASIDE = ".tmp"  # suffix of a publication that is being written
WEIGHTS = "dense.bin"
_ROWS_AT_ONCE = 1 << 16


def number_of(publication: Path) -> int:
    """Return the number of a publication by its name, or 0 if it is none."""
    name = re.fullmatch(r"(?:base|delta)-(\d+)", publication.name)
    return int(name[1]) if name else 0


def rebase(out: Path) -> None:
    """Write the newest base and the deltas between it and `out` as one base, after verifying all of their files.

    Raises:
        ExportError: a file is corrupt, or a delta is missing. OSError: a file cannot be written.
    """
    base = max(out.parent.glob("base-*"), key=number_of, default=out.parent / "base-000000000")
    deltas = [out.parent / f"delta-{number:09d}" for number in range(number_of(base) + 1, number_of(out))]
    manifest = read_manifest(base, verify=True)
    changes, last = list[dict[str, Any]](), manifest["sha256"]
    for delta in deltas:
        changes.append(read_manifest(delta, verify=True))
        if changes[-1]["follows"] != last:
            raise ExportError(f"'{delta}' does not follow the publication before it; it is a copy of another")
        last = changes[-1]["sha256"]
    manifest["made"] |= {"step": changes[-1]["step"], "checkpoint": f"step-{changes[-1]['step']:09d}"}
    aside = out.with_name(out.name + ASIDE)
    try:
        _write(_Base(aside, manifest), base, deltas)
        aside.rename(out)
        sync(out.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write(new: "_Base", base: Path, deltas: list[Path]) -> None:
    manifest, folder = new.manifest, new.folder
    files = {name: table["vectors"] for name, table in manifest["tables"].items()}
    items = manifest.pop("items", None)  # until their vectors are written
    changed = {MANIFEST, WEIGHTS, PROGRAM, *(entry["file"] for entry in files.values())}
    changed |= {items["vectors"]["file"]} if items else set()
    new.link(base, changed)
    shutil.copyfile(deltas[-1] / WEIGHTS, folder / WEIGHTS)
    for name, entry in files.items():
        shutil.copyfile(base / entry["file"], folder / entry["file"])
        _overwrite(folder / entry["file"], entry, [delta / f"tables/{name}.bin" for delta in deltas])
    for name in (WEIGHTS, *(entry["file"] for entry in files.values())):
        new.add(name)
    manifest["beside"].pop(PROGRAM, None)
    if items:
        del manifest["files"][items["vectors"]["file"]]
        new.write_manifest()
        with (folder / items["vectors"]["file"]).open("wb") as file:
            for vectors in Scorer(folder).vectors_of_items(folder / items["rows"]):
                file.write(vectors)
        new.add(items["vectors"]["file"])
        manifest["items"] = items
    new.write_manifest()
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync(path)


class _Base:
    """A base that is being written: its folder, and its manifest."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest

    def link(self, base: Path, changed: set[str]) -> None:
        """Link the files of another base, except those that have changed."""
        for path in sorted(base.rglob("*")):
            name = path.relative_to(base)
            (self.folder / name).parent.mkdir(exist_ok=True)
            if path.is_file() and str(name) not in changed:
                try:
                    os.link(path, self.folder / name)
                except OSError:  # a file system without links
                    shutil.copyfile(path, self.folder / name)

    def add(self, name: str) -> None:
        """Sync a file, and add its size and checksum to the manifest."""
        path, entry = self.folder / name, self.manifest["files"].get(name, {"always_verified": False})
        sync(path)
        self.manifest["files"][name] = {**entry, "bytes": path.stat().st_size, "sha256": sha256(path)}

    def write_manifest(self) -> None:
        """Write the manifest with the files so far."""
        self.manifest["sha256"] = checksum(self.manifest)
        text = json.dumps(self.manifest, indent=1, ensure_ascii=False)
        replace_file(self.folder / MANIFEST, text + "\n")


def _overwrite(path: Path, entry: dict[str, Any], changes: list[Path]) -> None:
    """Overwrite rows of a table by those of deltas, which are records of number and bytes; later deltas win."""
    rows = np.memmap(path, np.uint8, "r+", shape=(entry["rows"], entry["stride"]))
    record = np.dtype([("row", "<i8"), ("bytes", np.uint8, entry["stride"])])
    for change in changes:
        with change.open("rb") as file:
            while len(records := np.fromfile(file, record, _ROWS_AT_ONCE)):
                rows[records["row"]] = records["bytes"]
    rows.flush()


def main() -> int:
    """Write the base that the command line names; return the exit status, which is 1, with a sentence, if it fails."""
    end_with_parent()
    try:
        rebase(Path(sys.argv[1]))
    except (ExportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
