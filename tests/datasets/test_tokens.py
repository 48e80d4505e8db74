"""Texts as lists of words."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.datasets.delimited import CsvOptions, convert_csv
from recsys.errors import UserError


def test_texts_become_lists_of_words(tmp_path: Path) -> None:
    rows = ["1;Der Fänger im Roggen (1951)", "2;The LORD of the Rings: it's a Trilogy!", "3;", "4;...", "5;1984"]
    (tmp_path / "a.csv").write_text("\n".join(["id;title", *rows]) + "\n")
    convert_csv([tmp_path / "a.csv"], tmp_path / "out", CsvOptions(delimiter=";", tokens=["title"]))
    table = pq.read_table(tmp_path / "out")
    words = [["der", "fänger", "im", "roggen", "1951"], ["lord", "rings", "trilogy"], [], [], ["1984"]]
    assert table["title"].to_pylist() == words and table.schema.field("title").type == pa.list_(pa.string())
    with pytest.raises(UserError, match="titel"):
        convert_csv([tmp_path / "a.csv"], tmp_path / "none", CsvOptions(delimiter=";", tokens=["titel"]))
