"""Delimited files with the habits of public data sets."""

import gzip
import lzma
import zipfile
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recsys.datasets import delimited
from recsys.datasets.delimited import CsvOptions, convert_csv
from recsys.datasets.prepare import prepare
from recsys.errors import UserError

STRAY = 'id\ttitle\tkind\n1\t"Foo\ta\n2\tBar\tb\n3\tBaz\ta\n4\t"Qux" and\tb\n5\tok\ta\n'


def _converted(tmp_path: Path, text: str, **options: object) -> dict[str, list]:
    (tmp_path / "a.tsv").write_text(text)
    convert_csv([tmp_path / "a.tsv"], tmp_path / "out", CsvOptions(**{"delimiter": "\t", **options}), overwrite=True)
    return pq.read_table(tmp_path / "out").to_pydict()


def test_quotes_are_letters_where_fields_stand_in_none(tmp_path: Path) -> None:
    read = _converted(tmp_path, STRAY, quote="")
    assert read["title"] == ['"Foo', "Bar", "Baz", '"Qux" and', "ok"]
    assert _converted(tmp_path, "id\ttitle\n1\t'a\tb'\n", quote="'")["title"] == ["a\tb"]


@pytest.mark.parametrize("text", [STRAY, 'id\ttitle\n1\t"Foo\n2\tBar\n'], ids=["up to the next quote", "to the end"])
def test_a_stray_quote_does_not_hide_rows(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"column 'title' begins with a quote and holds .* whole rows .*--quote ''"):
        _converted(tmp_path, text)
    with pytest.raises(UserError, match=r"Expected 3 columns, got 4.*; add --quote ''"):
        _converted(tmp_path, 'id\ttitle\tkind\n1\t"Foo\ta\n2\tBar\t"b\tc\td\n')


@pytest.mark.parametrize(
    "text",
    [
        'id,title,stars\n1,"Foo,5\n2,Bar,3\n3,"Baz",4\n',
        'id,title,stars\r\n1,Foo,5\r\n2,"Bar,3\r\n3,12",4\r\n',
        'title,stars\n"Foo,5\nBar,3\n12",4\n',
        'id,title\n1,"Foo\n2,Bar\n3,"Baz"\n',
    ],
)
def test_a_stray_quote_between_commas_does_not_hide_rows(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"column 'title' begins with a quote and holds .* whole rows .*--quote ''"):
        _converted(tmp_path, text, delimiter=",")
    assert _converted(tmp_path, text, delimiter=",", quote='"')["title"]


def test_a_quote_that_nothing_closes_in_a_long_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a row goes on over 4 MiB .* after a quote that nothing closes; add --quote"):
        _converted(tmp_path, 'id\ttitle\n1\t"Foo\n' + "2\tBar\n" * 1_500_000)


@pytest.mark.parametrize("line", ["196,242,3", "1,1,5", "ann,tea,2026-11-05 18:30", "ann,tea,-1.5e3"])
def test_values_in_place_of_names_are_told(tmp_path: Path, line: str) -> None:
    with pytest.raises(UserError, match="among the names of its columns, which look like values; if it has no header"):
        _converted(tmp_path, f"{line}\n{line}\n", delimiter=",")
    assert len(_converted(tmp_path, f"{line}\n{line}\n", delimiter=",", columns=["a", "b", "c"])["c"]) == 2
    assert list(_converted(tmp_path, f"user,0,1\n{line}\n", delimiter=",")) == ["user", "0", "1"]  # as pandas writes


def test_a_header_under_other_names_is_told(tmp_path: Path) -> None:
    text = "user,item,stars\nann,tea,5\nbob,tea,3\n"
    with pytest.raises(UserError, match="begins with 'user', 'item', 'stars', words above numbers, as a header does"):
        _converted(tmp_path, text, delimiter=",", columns=["a", "b", "c"])
    for kept, nulls in (("ann,tea,5\nbob,tea,x\n", []), ("ann,tea,NA\nbob,tea,3\n", ["NA"]), ("ann,tea,x\n", [])):
        read = _converted(tmp_path, kept, delimiter=",", columns=["a", "b", "c"], null_values=nulls)
        assert read["a"][0] == "ann"


def test_a_wrong_delimiter_and_a_rule_without_shares_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has one column, 'user,item'; if ',' divides it, add --delimiter ','"):
        _converted(tmp_path, "user,item\n1,2\n", delimiter=";")
    with pytest.raises(UserError, match=r"--split-by 'time:item' has nothing to split; add shares"):
        _converted(tmp_path, "user,item\n1,2\n", delimiter=",", split_by="time:item")
    with pytest.raises(UserError, match=r"is a folder; name the files in it, as .*/\*\.csv does"):
        convert_csv([tmp_path], tmp_path / "out", CsvOptions())


def test_quoted_texts_of_several_lines_are_read(tmp_path: Path) -> None:
    assert _converted(tmp_path, 'id\ttext\n1\t"a, b\nc"\n')["text"] == ["a, b\nc"]
    assert _converted(tmp_path, 'id\ttext\n1\t"a\tb\nc"\n', quote='"')["text"] == ["a\tb\nc"]
    assert _converted(tmp_path, 'id,text\n1,"a, b\nc"\n', delimiter=",")["text"] == ["a, b\nc"]
    assert _converted(tmp_path, 'id,text,n\n1,"a,5\nc",1\n', delimiter=",")["text"] == ["a,5\nc"]
    assert _converted(tmp_path, 'text,n\n"a,5\nc, 6",1\n', delimiter=",")["text"] == ["a,5\nc, 6"]


@pytest.mark.parametrize("sign", ["::", "¦"])
def test_signs_that_are_not_one_ascii_character_are_told_what_to_do(tmp_path: Path, sign: str) -> None:
    with pytest.raises(UserError, match=rf"one ASCII character, got '{sign}'; put one .* as by sed 's/{sign}/\\t/g'"):
        _converted(tmp_path, sign.join(["1", "2", "5"]) + "\n", delimiter=sign)
    with pytest.raises(UserError, match=f"--quote must be one ASCII character, or '' for none, got '{sign}'"):
        _converted(tmp_path, "a\tb\n1\t2\n", quote=sign)


def test_whole_numbers_beyond_int64_are_not_rounded(tmp_path: Path) -> None:
    ids = ["10000169349117863715", "10000169349117863716", "", "7"]
    text = "id,ctr,sum,count\n" + "".join(f"{id},{number}.5,{number}e19,+{number}\n" for number, id in enumerate(ids))
    read = _converted(tmp_path, text, delimiter=",")
    assert read["id"] == [*ids[:2], None, "7"]
    assert read["ctr"] == [0.5, 1.5, 2.5, 3.5] and read["sum"] == [0, 1e19, 2e19, 3e19]
    assert set(read["count"]) == {0, 1, 2, 3}
    assert _converted(tmp_path, text, delimiter=",", types={"id": "float64"})["id"][3] == 7.0


@pytest.mark.parametrize(
    "text",
    [
        '{"user": "A1", "stars": 5}\n{"user": "A2", "stars": 1}\n',
        '[{"user": 1}]\n',
        '[{"user": 1}]',
        '[\n  {"user": 1,\n   "stars": 5}]\n',
    ],
)
def test_json_is_no_delimited_text(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match=r"a\.tsv holds JSON, .* pyarrow\.json\.read_json"):
        _converted(tmp_path, text, delimiter=",")


def test_times_of_digits_alone_are_times_where_they_are_named(tmp_path: Path) -> None:
    text, options = "user,hour\n14,14102100\n15,14102123\n", {"delimiter": ",", "time_format": "%y%m%d%H"}
    with pytest.raises(UserError, match=r"'%y%m%d%H' fits no column of .*a\.tsv; .* by --types NAME=timestamp"):
        _converted(tmp_path, text, **options)
    read = _converted(tmp_path, text, **options, types={"hour": "timestamp"})
    assert read == {"user": [14, 15], "hour": [datetime(2014, 10, 21, 0), datetime(2014, 10, 21, 23)]}


def test_numbers_with_a_decimal_comma(tmp_path: Path) -> None:
    text = "user;price\n1;1,50\n2;-3\n"
    assert _converted(tmp_path, text, delimiter=";")["price"] == ["1,50", "-3"]
    assert _converted(tmp_path, text, delimiter=";", decimal_point=",") == {"user": [1, 2], "price": [1.5, -3.0]}
    with pytest.raises(UserError, match="invalid value '1,50'; --decimal-point , reads such numbers"):
        _converted(tmp_path, text, delimiter=";", types={"price": "float32"})


def test_archives_are_told_to_be_unpacked(tmp_path: Path) -> None:
    text, out = b"user,item\n1,2\n", tmp_path / "out"
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr("a.csv", text)
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(text))
    for name in ("a.csv", "a.tar.gz", "a.tgz"):
        (tmp_path / name).write_bytes(gzip.compress(text))
    (tmp_path / "empty.csv").touch()
    for name, said in {
        "a.zip": "is a zip archive, which is not read; unpack it",
        "a.csv.xz": "is compressed by xz, which is not read",
        "a.tar.gz": "is a tar archive",
        "a.tgz": "is a tar archive",
        "a.csv": r"is compressed by gzip, .* let it end in \.gz",
        "empty.csv": "Empty CSV file; leave it out",
    }.items():
        with pytest.raises(UserError, match=f"{name}:? {said}"):
            convert_csv([tmp_path / name], out, CsvOptions())


def test_texts_that_are_no_times_name_the_option_that_reads_them(tmp_path: Path) -> None:
    text, split = "user,then\n1,11/05/2026 6:30 PM\n2,11/06/2026 7:30 AM\n", {"split": (0.5, 0.5)}
    with pytest.raises(UserError, match=r"'then' is string; .*; --time-format FORMAT reads"):
        _converted(tmp_path, text, delimiter=",", split_by="time:then", **split)
    with pytest.raises(UserError, match=r"invalid value '11/05/2026 6:30 PM'; --time-format FORMAT reads"):
        _converted(tmp_path, text, delimiter=",", types={"then": "timestamp"})
    with pytest.raises(UserError, match=r"invalid value '1762300000'; .* seconds since 1970 need no type"):
        _converted(tmp_path, "user,then\n1,1762300000\n", delimiter=",", types={"then": "timestamp"})


@pytest.mark.parametrize("zone", ["", "Z"])
def test_times_of_whole_seconds_may_have_fractions_later(tmp_path: Path, monkeypatch, zone: str) -> None:
    monkeypatch.setattr(delimited, "BLOCK_BYTES", 64)
    whole, moment = "2026-11-01T10:00:00", datetime(2026, 11, 1, 10, tzinfo=timezone.utc if zone else None)
    times = _converted(tmp_path, "a,then\n" + f"1,{whole}{zone}\n" * 4 + f"2,{whole}.25{zone}\n", delimiter=",")["then"]
    assert times == [*[moment] * 4, moment + timedelta(seconds=0.25)]
    with pytest.raises(UserError, match=r"zone offset in '.*'; write all times of a column with a zone offset or none"):
        _converted(tmp_path, "a,then\n" + f"1,{whole}{zone}\n" * 4 + f"2,{whole}{'' if zone else 'Z'}\n", delimiter=",")


def test_names_of_columns_that_the_header_has_are_left_out(tmp_path: Path) -> None:
    text = "user,item\n1,2\n3,4\n"
    with pytest.raises(UserError, match=r"a\.tsv begins with the names that --columns gives.*; leave --columns out"):
        _converted(tmp_path, text, delimiter=",", columns=["user", "item"])
    assert _converted(tmp_path, "1,2\n3,4\n", delimiter=",", columns=["user", "item"])["user"] == [1, 3]
    prepare(["csv", str(tmp_path / "a.tsv"), "--columns", '"user, no",item', "--out", str(tmp_path / "by command")])
    assert pq.read_table(tmp_path / "by command").column_names == ["user, no", "item"]
