"""The page of a run and the comparison of several: whole, self-contained, and with the figures of the run's files."""

import errno
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import reduce
from html.parser import HTMLParser
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from launch import ROOT, records_of, run_recsys

from recsys.__main__ import main
from recsys.errors import UserError
from recsys.report.charts import Axis, line_chart, stacked_bars
from recsys.report.compare import compare, compare_page, differing_keys, names_of
from recsys.report.html import Html, table
from recsys.report.page import report_page, write_report
from recsys.report.record import Record, open_record
from recsys.report.text import number, size

CONFIG = "configs/dlrm_sample.yaml"
_VOID = ("meta", "link", "path", "rect", "circle", "polyline", "polygon", "br", "wbr")


class Page(HTMLParser):
    """Headings, attributes and text of a page; fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        assert not self.open and len(self.ids) == len(set(self.ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[name] for name in ("src", "href") if name in given]
        assert tag not in ("script", "img", "iframe")
        # A path or circle may be closed in the tag itself.
        if tag not in _VOID or (tag in ("path", "circle", "rect") and not self.get_starttag_text().endswith("/>")):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in _VOID

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two ranks, one that failed, and one that looks as if it had been killed."""
    folder = tmp_path_factory.mktemp("runs")
    often = ("train.epochs=1", "train.log_every_steps=2", "train.eval_every_steps=8")
    printed = run_recsys("train", CONFIG, f"run.dir={folder}/two", *often, nproc=2)
    assert f"{folder}/two/report.html" in printed
    bad = ("optimizer.dense.learning_rate=1e30", "optimizer.dense.name=sgd", "train.log_every_steps=1")
    run_recsys("train", CONFIG, f"run.dir={folder}/failed", *bad, status=1)
    killed = folder / "killed"
    killed.mkdir()
    for name in ("config.yaml", "plan.json", "metrics.jsonl"):
        (killed / name).write_bytes((folder / "two" / name).read_bytes())
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # cut, as a kill leaves it
    return folder


def test_the_page_of_a_run(runs: Path) -> None:
    text = (runs / "two" / "report.html").read_text()
    page = Page(text)
    sections = ["Results", "Learning", "Speed", "Memory", "Plan", "Ids", "Checkpoints", "Warnings", "Setting"]
    assert page.headings == ["dlrm_sample", *sections]
    assert all(address.startswith(("#", "data:")) for address in page.addresses) and "@import" not in text
    # A tip at each point of a curve has the figure that metrics.jsonl has.
    tips = re.findall(r"<title>([\d.]+), step ([\d,]+)</title>", text)
    for record in records_of(runs / "two"):
        assert (number(record["loss"]), number(record["step"])) in tips
    result = json.loads((runs / "two" / "result.json").read_text())
    assert result["git_commit"] in text and f"{result['metrics']['valid']['auc']:.4f}" in text
    assert re.search(r"Distinct ids over step\. \w+: from [\d,]+ to", text)
    assert "rank 1 predicted" in text and "Rank 1, resident memory" in text and "out of vocabulary" in text
    assert "configs" not in page.headings and "global_batch_size: 256" in text


def test_the_page_of_a_run_that_failed_says_why(runs: Path) -> None:
    text = (runs / "failed" / "report.html").read_text()
    assert "status bad'>failed</span>" in text and "is not finite" in text.partition("<nav")[0]
    assert {"Memory", "Plan", "Warnings", "Setting"} <= {*Page(text).headings}
    assert Record(runs / "failed").status == "failed"  # as its files tell later


def test_the_page_of_a_killed_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "killed")]) == 0
    assert capsys.readouterr().out == f"{runs}/killed/report.html\n"
    text = (runs / "killed" / "report.html").read_text()
    page = Page(text)
    assert ">killed</span>" in text and {"Learning", "Ids"} <= {*page.headings} and "Memory" not in page.headings
    assert "numbers" in text  # the plan, whose bytes are not known yet
    (runs / "killed" / ".lock").touch()
    assert Record(runs / "killed").status == "running"
    (runs / "killed" / ".lock").unlink()


def test_a_killed_run_is_known_at_once_on_its_own_machine(runs: Path) -> None:
    code = "import sys, time; from pathlib import Path; from recsys.runtime.run_lock import RunLock; "
    code += "lock = RunLock(); lock.take(Path(sys.argv[1])); print('taken', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, str(runs / "killed")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"taken\n"
        assert Record(runs / "killed").status == "running"
        holder.kill()
    assert Record(runs / "killed").status == "killed" and (runs / "killed" / ".lock").exists()
    (runs / "killed" / ".lock").unlink()


def test_names_are_no_html(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text('run: {name: "</style><script>x\'"}\n')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank_0.log").write_text("2026-01-01 00:00:00,000 WARNING recsys: <b>bold\n  and more\n")
    text = report_page(Record(tmp_path))
    Page(text)
    assert "<b>bold" not in text and "&lt;b&gt;bold\n  and more" in text and "<script" not in text


def test_an_error_that_comes_again_after_a_stop_is_the_last(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text("train: {max_steps: 1}\n")
    error = "00:00:00,000 ERROR recsys: error: no room"
    (tmp_path / "logs" / "rank_0.log").write_text(f"2026-01-01 {error}\n2026-01-02 00:00:00,000 WARNING recsys: a\n")
    report = tmp_path / "memory" / "rank_0.json"
    report.write_text(json.dumps({"identity": {"status": "stopped"}}))
    os.utime(report, (at := time.mktime((2026, 1, 2, 0, 0, 0, 0, 0, -1)), at))
    assert not Record(tmp_path)._failed_since()
    with open(tmp_path / "logs" / "rank_0.log", "a") as log:
        log.write(f"2026-01-03 {error}\n")
    assert Record(tmp_path).log[-1] == ("2026-01-03 00:00:00", "ERROR", "no room")
    assert Record(tmp_path)._failed_since()


def test_runs_compared(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "both.html"
    assert main(["compare", str(runs / "two"), str(runs / "failed"), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^optimizer.dense.learning_rate +0.001 +1e\+30$", said, re.MULTILINE)
    assert re.search(r"^status +done +failed$", said, re.MULTILINE) and re.search(
        r"^samples/s +[\d,]+ +–$", said, re.MULTILINE
    )
    assert said.endswith(f"\n{out}\n")
    text = out.read_text()
    assert Page(text).headings == ["2 runs compared", "Results", "Curves", "Config"]
    assert text.count("<polyline class='c0'") >= 2
    assert "features.hour" not in said


@pytest.mark.parametrize("problem", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_page_that_cannot_be_written_is_told_of_out(
    problem: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a run in another's folder, or on a disk that is mounted to read, or full."""
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")

    def refuse(path: Path, content: str) -> None:
        raise OSError(problem, os.strerror(problem), str(path))

    monkeypatch.setattr("recsys.runtime.files.replace_file", refuse)
    for write, page in ((write_report, tmp_path / "report.html"), (compare, tmp_path / "both.html")):
        folder: Any = tmp_path if write is write_report else [tmp_path, tmp_path]
        with pytest.raises(UserError) as told:
            write(folder, page)
        assert str(told.value) == f"'{page}' cannot be written ({os.strerror(problem)}); name another file by --out"


def test_a_section_that_a_run_lacks_is_one_row(tmp_path: Path) -> None:
    both_features = (
        ("a", "{x: {table: t, type: id}, y: {type: id}, z: {}}"),
        ("b/a", "{y: {type: float}, z: {table: t}}"),
    )
    for name, features in both_features:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text(f"features: {features}\nrun: {{dir: {name}}}\n")
    both = [Record(tmp_path / "a"), Record(tmp_path / "b/a")]
    assert differing_keys(both) == [
        ["features.x.*", "there", "–"],
        ["features.y.type", "id", "float"],
        ["features.z.*", "–", "there"],
    ]
    assert names_of(both) == [f"{tmp_path.name}/a", "b/a"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "recsys", "report", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith(f"error: '{tmp_path}' holds no run")


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_checkpoint_is_refused(command: str, runs: Path) -> None:
    [checkpoint] = (runs / "two" / "checkpoints").glob("step-*")
    before = sorted(checkpoint.iterdir())
    with pytest.raises(UserError, match=rf"^'{checkpoint}' is a checkpoint, .*; name '{runs}/two'$"):
        open_record(checkpoint)
    done = subprocess.run([sys.executable, "-m", "recsys", command, str(checkpoint)], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and sorted(checkpoint.iterdir()) == before


def test_a_run_whose_first_rank_was_killed(runs: Path, tmp_path: Path) -> None:
    copytree(runs / "two", tmp_path / "a")
    (tmp_path / "a" / "memory" / "rank_0.json").unlink()
    report = json.loads((tmp_path / "a" / "memory" / "rank_1.json").read_text())
    report["identity"]["status"] = "failed"
    with (tmp_path / "a" / "logs" / "rank_1.log").open("a") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')},000 ERROR recsys: another rank ended\n")
    for at in (0, 100):  # the report was written with the error, or long after it, by a start that went on
        (tmp_path / "a" / "memory" / "rank_1.json").write_text(json.dumps(report))
        os.utime(tmp_path / "a" / "memory" / "rank_1.json", (time.time() + at,) * 2)
        assert open_record(tmp_path / "a").status == "failed"
        Page(report_page(open_record(tmp_path / "a")))


@pytest.mark.parametrize("name", ["result.json", "plan.json", "memory/rank_1.json"])
def test_a_damaged_file_is_named(name: str, runs: Path, tmp_path: Path) -> None:
    copytree(runs / "two", tmp_path / "a")
    for content in ((runs / "two" / name).read_bytes()[:-9], b"", b"\0" * 99, b'{"a": "\xff"}', b"null", b"[3]"):
        (tmp_path / "a" / name).write_bytes(content)
        with pytest.raises(UserError, match=f"{name}' is damaged"):
            report_page(open_record(tmp_path / "a"))
    (tmp_path / "a" / name).unlink()
    Page(report_page(open_record(tmp_path / "a")))


WRONG: list[Any] = [None, "text", True, -1, 2.5, math.nan, [], ["a"], [[1, 2]], {}, {"a": None}, "missing"]


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value in JSON, of lists to the first values."""
    yield above
    for key in value if isinstance(value, dict) else range(min(3, len(value))) if isinstance(value, list) else ():
        yield from places(value[key], (*above, key))


@pytest.mark.parametrize(
    "name", ["result.json", "plan.json", "memory/rank_1.json", "metrics.jsonl", "compression.json"]
)
def test_values_of_a_wrong_type_are_named(name: str, runs: Path, tmp_path: Path) -> None:
    """Wherever one stands: the page takes it, or says in which file it is, what it is and what it must be."""
    dice, num_refused = random.Random(0), 0
    copytree(runs / "two", run := tmp_path / "a")
    if name in ("metrics.jsonl", "compression.json"):
        (run / "result.json").unlink()  # whose figures are shown in their place
    if name == "compression.json":
        (run / "metrics.jsonl").unlink()
        (run / name).write_text('{"data": "valid", "stages": [{"metrics": {"auc": 0.5}, "test": null}]}')
    text = (run / name).read_text()
    last = text.splitlines()[-1] if name == "metrics.jsonl" else text
    everywhere = list(places(json.loads(last)))
    for place in dice.sample(everywhere, min(len(everywhere), 40)):
        content, wrong = {"all": json.loads(last)}, dice.choice(WRONG)
        *above, key = "all", *place
        holder = reduce(lambda value, name: value[name], above, content)
        holder[key] = wrong
        if wrong == "missing" and isinstance(holder, dict):
            del holder[key]
        (run / name).write_text(text.replace(last, json.dumps(content.get("all"))))
        try:
            Page(report_page(open_record(run)))
        except UserError as error:
            num_refused += 1
            assert re.search(rf"/{name}' is damaged \(.+ (lacks .+|is .+, but must be .+)\); remove it", str(error))
    assert num_refused or name == "metrics.jsonl"  # whose lines are left out


def test_lines_of_metrics_that_are_none_are_left_out(runs: Path, tmp_path: Path) -> None:
    copytree(runs / "two", tmp_path / "a")
    (tmp_path / "a" / "result.json").unlink()  # whose figures are shown in their place
    whole = (runs / "two" / "metrics.jsonl").read_bytes()
    lines = (b"3", b"null", b"[1]", b"{}", b'{"kind": 3, "step": 1}', b'{"kind": "train"}', b'"\xff"', b"\0\0")
    (tmp_path / "a" / "metrics.jsonl").write_bytes(b"\n".join([*lines, whole, *lines]))
    record = open_record(tmp_path / "a")
    assert record.curves("train") == open_record(runs / "two").curves("train")
    Page(report_page(record))


@pytest.mark.parametrize("content", [b"a: [1", b"a: \0", b"{a: 1}}", b"- a", b"!!python/object:x.Y {}"])
def test_a_damaged_config_is_named_with_where_a_copy_is(content: bytes, runs: Path, tmp_path: Path) -> None:
    copytree(runs / "two", tmp_path / "a")
    (tmp_path / "a" / "config.yaml").write_bytes(content)
    with pytest.raises(UserError, match=r"a/config.yaml' is damaged \(.*checkpoints/step-N/config.yaml$") as told:
        report_page(open_record(tmp_path / "a"))
    assert "\n" not in str(told.value)
    [copy] = (tmp_path / "a" / "checkpoints").glob("step-*/config.yaml")
    (tmp_path / "a" / "config.yaml").write_bytes(copy.read_bytes())
    Page(report_page(open_record(tmp_path / "a")))


def test_charts_of_titles_alike(runs: Path, tmp_path: Path) -> None:
    copytree(runs / "killed", tmp_path / "a")
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        for step in (100, 200):
            figures = {"Buy.auc": step, "buy.auc": 2 * step, "a-b.auc": step, "a_b.auc": -step}
            for kind in ("valid", "test"):
                file.write(json.dumps({"kind": kind, "time": 0, "step": step, **figures}) + "\n")
    run = open_record(tmp_path / "a")
    for text in (report_page(run), compare_page([run, open_record(runs / "two")])):
        Page(text)
        for name in ("Buy.auc", "buy.auc"):
            assert f"aria-label='{name} over step. " in text


def test_checkpoints_that_are_aside_are_none_of_the_run(runs: Path) -> None:
    [checkpoint] = (runs / "two" / "checkpoints").glob("step-*")
    aside = checkpoint.with_name("step-000009999.refused")
    aside.mkdir()
    (aside / "checkpoint.json").touch()
    assert checkpoint.name.endswith(str(Record(runs / "two").step)) and report_page(Record(runs / "two"))
    (aside / "checkpoint.json").unlink()
    aside.rmdir()


def test_bytes_of_any_size() -> None:
    sizes = {0: "0", 0.5: "0.50 bytes", 3: "3 bytes", 12.5: "12.5 bytes", 1023: "1,023 bytes", 1536: "1.50 KiB"}
    assert {num_bytes: size(num_bytes) for num_bytes in sizes} == sizes and size(-2048) == "-2.00 KiB"
    axis = Axis("Memory", show=size, base=1024, least=0)
    for most, ticks in ((0, ["0", "1 bytes"]), (3, ["0", "1 bytes", "2 bytes", "3 bytes"])):
        drawn = line_chart(axis, {"a": [(1, 0), (2, most)]})
        assert re.findall(r"text-anchor=end>([^<]*)<", drawn) == [*ticks, "step"]
    drawn = line_chart(Axis("Colliding ids", show=lambda value: f"{value:.0%}"), {"a": [(1, 0.0), (2, 0.0)]})
    assert re.findall(r"text-anchor=end>([^<]*)<", drawn) == ["0%", "25%", "50%", "75%", "100%", "step"]


def test_a_curve_has_round_ticks_gaps_and_a_band() -> None:
    drawn = line_chart(Axis("Loss"), {"loss": [(0, 0.31), (1, 0.42), (2, None), (3, 0.39), (4, 0.52)]})
    assert re.findall(r"text-anchor=end>([^<]*)<", drawn) == ["0.3", "0.4", "0.5", "0.6", "step"]
    assert drawn.count("<polyline") == 2 and "<polygon" not in drawn
    assert "from 0.3100 to 0.5200, least 0.3100 at 0, most 0.5200 at 4." in drawn
    drawn = line_chart(Axis("Loss"), {"loss": [(0, 0.31), (1, 9.2e29)]})  # no digits beyond the left margin
    assert re.findall(r"text-anchor=end>([^<]*)<", drawn) == ["0", "2.5e+29", "5e+29", "7.5e+29", "1e+30", "step"]
    assert "to 9.2e+29, least 0.3100 at 0, most 9.2e+29 at 1." in drawn
    many = [(step, float(step % 2)) for step in range(10_000)]
    drawn = line_chart(Axis("Loss"), {"loss": many})
    assert drawn.count("<polygon") == 1 and drawn.count("class=tip") < 300
    assert line_chart(Axis("Loss"), {"loss": [(0, None)]}) == "" and line_chart(Axis("One"), {"a": [(3, 7.0)]})


@pytest.mark.parametrize("value", [1.0, 0.5, -3.0, 1e-9, 1e12])
def test_a_curve_whose_values_differ_by_rounding(value: float) -> None:
    near = value
    for _ in range(20):
        near = math.nextafter(near, 0)
        drawn = line_chart(Axis("AUC"), {"auc": [(1, near), (2, value)]})
        assert len(re.findall("class=grid", drawn)) >= 2 and "nan" not in drawn


def test_bars_and_tables() -> None:
    bars = stacked_bars({"a": {"x": 3.0, "y": 1.0}, "b": {"y": 2.0}}, str)
    assert re.findall(r"width:([\d.]+)%", bars) == ["75.00", "25.00", "50.00"]
    rows = [["a", "1.5 MiB", "word", Html("<i>1</i>")], ["b", "–", "2", Html("")]]
    assert re.findall(r"scope=col class=(.)", table("T", "wxyz", rows)) == ["t", "n", "t", "n"]
    assert "class=n" not in table("T", "wxyz", rows, numbers=False)
    assert ">click.<wbr>log_<wbr>loss<" in table("T", "yz", [["click.log_loss", "0.5"]])  # a phone may be narrower
