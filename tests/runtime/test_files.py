"""Files that the user names to be written: what cannot be one is refused before any work."""

import errno
import os
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.errors import UserError
from recsys.runtime.files import make_folder, prepare_output, replace_file, replacing
from recsys.runtime.parquet import ROW_GROUP_ROWS, write_parquet


def test_the_folder_of_an_output_is_made(tmp_path: Path) -> None:
    prepare_output(tmp_path / "a" / "b" / "page.html")
    prepare_output(tmp_path / "a" / "page.html")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "b"]


def test_what_can_be_no_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^--out: '{tmp_path}' is a folder; name a file$"):
        prepare_output(tmp_path, "--out")
    os.mkfifo(tmp_path / "pipe")
    for device in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match=f"^OUT: '{device}' is a device, a pipe .*, which would be replaced; name"):
            prepare_output(device)
    for path in ("file/page.html", "file/deeper/page.html"):
        with pytest.raises(
            UserError, match=f"^OUT: '{(tmp_path / path).parent}' cannot be made .*; name another folder$"
        ):
            prepare_output(tmp_path / path)
    with pytest.raises(UserError, match=f"^--out: '{tmp_path}/file' cannot be made .*File exists"):
        make_folder(tmp_path / "file", "--out")


def test_processes_of_one_number_replace_a_file_side_by_side(tmp_path: Path) -> None:
    """Those of containers often have one; so do those of several machines now and then."""
    page = tmp_path / "page.html"
    with replacing(page) as one:
        one.write_text("one")
        with replacing(page) as other:
            other.write_text("other")
        assert page.read_text() == "other"
    assert page.read_text() == "one" and list(tmp_path.iterdir()) == [page]


def test_a_file_system_that_syncs_no_folders_takes_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or refuses_files:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fsync", fsync)
    refuses_files = False
    replace_file(tmp_path / "page.html", "page")
    refuses_files = True
    with pytest.raises(OSError, match="Invalid argument"):
        replace_file(tmp_path / "page.html", "other")
    assert (tmp_path / "page.html").read_text() == "page"


def test_a_dictionary_of_vectors_has_room_for_all_of_fp16_and_no_more(tmp_path: Path) -> None:
    """Numbers are looked up in it until it is full: with 1 MiB, vectors in FP32 took twice as long to write."""
    numbers = np.random.default_rng(0).random(ROW_GROUP_ROWS * 8, np.float32)
    halves = numbers.astype(np.float16).astype(np.float32)
    for values, most in ((numbers, numbers.nbytes), (halves, numbers.nbytes // 2)):
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(values), 8)
        write_parquet(tmp_path / "a.parquet", [pa.table({"vector": vectors})])
        column = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(0)
        assert column.data_page_offset - column.dictionary_page_offset < 1 << 18
        assert column.total_compressed_size < most
