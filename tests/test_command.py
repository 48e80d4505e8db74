"""`recsys` and `python -m recsys`: what is a command, how mistakes are told, and what it imports."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import ROOT, fork_train, run_recsys

from recsys.__main__ import main
from recsys.runtime.arguments import as_names, names, with_data
from recsys.serving import score

SAMPLE = "configs/dlrm_sample.yaml"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ([], 2, "required: COMMAND; recsys --help tells the rest"),
        (["trian"], 2, "'trian' (choose from"),
        (["train"], 2, "required: CONFIG; changes are written key=value, and recsys train --help"),
        (["predict"], 2, "required: RUN, DATA, OUT; changes are written key=value, and recsys predict --help"),
        (["train", SAMPLE, "--epochs=3"], 2, "--epochs=3; changes are written key=value, and recsys train --help"),
        (["dry-run", SAMPLE, "--debug"], 2, "unrecognized arguments: --debug"),
        (["evaluate", "nowhere"], 1, "'nowhere' does not exist"),
        (["prepare", "csv"], 2, "required: INPUT, --out; recsys prepare csv --help tells the rest"),
        (["tables", "export", "a"], 2, "required: TABLE, OUT.parquet; recsys tables export --help tells the rest"),
        (
            ["tables", "export", "configs", "item", "x"],
            1,
            "RUN_OR_CHECKPOINT: 'configs' holds no checkpoint; name a run",
        ),
        (["evaluate", "a", "data.test=b", "c"], 1, "is named twice, by 'data.test=b' and by 'c'; name all of it as"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_in_one_line(arguments: list[str], status: int, said: str) -> None:
    done = fork_train(*arguments, program="recsys")
    assert done.returncode == status and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def imports_none(done: subprocess.CompletedProcess[str], *names: str) -> bool:
    """Return whether what was run with `-X importtime` imported none of these."""
    return not any(f"| {' ' * depth}{name}\n" in done.stderr for name in names for depth in range(40))


@pytest.mark.parametrize("script", ["train.py --help", "-m recsys --help", "-m recsys dry-run --help"])
def test_help_takes_no_library(script: str) -> None:
    done = run("-X", "importtime", *script.split())
    assert done.returncode == 0 and "usage: " in done.stdout
    assert imports_none(done, "torch", "numpy")


def test_a_partition_of_the_current_folder_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day=5").mkdir()
    changes = ["day=6", "data.filter=x > 1", f"topology={'x' * 300}"]
    assert with_data(["day=5", *changes, "logs/day=7"]) == [*changes, 'data.test=["day=5", "logs/day=7"]']


_OF_RUNS = ["evaluate {}", "predict {} a b", "recommend {} a b", "embeddings {} item b", "export {} b"]
_SLOW = [pytest.param(words, marks=pytest.mark.slow) for words in (*_OF_RUNS[1:], "compare {}")]


@pytest.mark.parametrize("words", [_OF_RUNS[0], "compress {} b --max-loss 1%", "report {}", *_SLOW])
def test_a_run_that_is_not_there_is_told_at_once(words: str) -> None:
    """Without torch, whose import takes seconds; also where it is a folder or a file of something else."""
    for no_run in ("nowhere", "configs", SAMPLE):
        done = run("-X", "importtime", "-m", "recsys", *words.format(no_run).split())
        assert done.returncode == 1 and f"'{no_run}' " in done.stderr and "; name a " in done.stderr
        assert imports_none(done, "torch"), no_run


_NO_SPACE = ("a=5..1", "seed=1..3", "nowhere.yaml")
_OF_SWEEP = f"sweep {SAMPLE} --out nowhere"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("tables export nowhere item x", 1),
        ("tables export configs item x", 1),
        ("sweep nowhere.yaml --space train.epochs=1..2 --out nowhere", 1),
        *((f"{_OF_SWEEP} --space {space}", 1) for space in _NO_SPACE),
        (f"{_OF_SWEEP} --space train.epochs=1..2 seed=2", 1),
        ("calibrate nowhere/x.json", 1),
        (f"calibrate {SAMPLE}", 1),
        ("tables export a b c --epocs 3", 2),
        (f"{_OF_SWEEP} --space a=1..2 --epocs 3", 2),
        ("calibrate a --epocs 3", 2),
    ],
)
def test_a_mistake_of_the_words_is_told_before_libraries_are_imported(words: str, status: int) -> None:
    if words.startswith("sweep"):
        pytest.importorskip("optuna")
    done = run("-X", "importtime", "-m", "recsys", *words.split())
    assert done.returncode == status and "error: " in done.stderr and not (ROOT / "nowhere").exists()
    assert imports_none(done, "torch")


@pytest.mark.parametrize(
    "columns",
    [["a"], ["a,b"], ["a,b", "c"], ['"'], ['a "b"', "c"], ['a,"b",', ","], ['""', '","'], ["a\nb", " c "], []],
)
def test_names_with_commas_are_in_quotes(columns: list[str]) -> None:
    assert names(as_names(columns)) == score.names(as_names(columns)) == columns
    assert names("a,b,,c") == ["a", "b", "c"] and names('say "hi",b') == ['say "hi"', "b"]


def test_the_version() -> None:
    done = run("-m", "recsys", "--version")
    assert done.returncode == 0 and re.fullmatch(r"recsys \d+\.\d+\.\d+\n", done.stdout), done.stdout + done.stderr


def test_a_dry_run(tmp_path: Path) -> None:
    assert run_recsys("dry-run", SAMPLE, f"run.dir={tmp_path}").startswith("# Fits")
    assert json.loads((tmp_path / "memory" / "dry_run.json").read_text())


def test_prepare_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["--rows", "90", "--valid-rows", "30", "--test-rows", "30", "--users", "9", "--items", "9"]
    assert main(["prepare", "synthetic", "--out", str(tmp_path / "data"), *rows]) == 0
    assert "train" in capsys.readouterr().out and (tmp_path / "data" / "train").is_dir()


@pytest.mark.slow
def test_torchrun_takes_the_module_too(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc_per_node", "2"]
    done = run(*launcher, "-m", "recsys", "train", SAMPLE, f"run.dir={tmp_path}/run", "train.max_steps=3")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 3
    done = run("-m", "recsys", "evaluate", f"{tmp_path}/run")
    assert done.returncode == 0 and '"auc"' in done.stdout.splitlines()[-1], done.stderr


def test_help_says_on_which_side_of_a_bound_an_id_is(capsys: pytest.CaptureFixture[str]) -> None:
    """As `evaluate` counts them: N occurrences are N or more."""
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    assert "in data.train: fewer than N times, and N times or more" in " ".join(capsys.readouterr().out.split())
