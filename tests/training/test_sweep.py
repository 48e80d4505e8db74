"""`recsys sweep`: what may be searched, a study that processes share, trials ended early, and what is told of them."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch import ROOT, environment, run_recsys

from recsys.config import load_config
from recsys.errors import UserError
from recsys.report.writers import JsonLines
from recsys.training.sweep import Sweep, table_bytes
from recsys.training.sweep_report import Tried, pareto, write_report
from recsys.training.sweep_space import OF_TRIALS, Space, open_space

optuna = pytest.importorskip("optuna")
RATE = "optimizer.dense.learning_rate=[0.001]"
CONFIG, SHORT = "configs/dlrm_sample.yaml", ("train.max_steps=8", "train.eval_every_steps=2")


def test_ranges_and_choices(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("a.rate: 1e-4..0.1:log\nb: [[64], [128, 64], null]\n")
    space = Space.parse([f"{tmp_path}/space.yaml", "c=4..64:4", "d=0.0..0.5", "e=1..8:log", "f=0..1:0.25"])
    kinds = optuna.distributions
    assert space.distributions() == {
        "a.rate": kinds.FloatDistribution(1e-4, 0.1, log=True),
        "b": kinds.CategoricalDistribution(["[64]", "[128, 64]", "null"]),
        "c": kinds.IntDistribution(4, 64, step=4),
        "d": kinds.FloatDistribution(0.0, 0.5),
        "e": kinds.IntDistribution(1, 8, log=True),
        "f": kinds.FloatDistribution(0.0, 1.0, step=0.25),
    }
    numbers = Space.parse(["a=1_000..2_000", "b=+100..200:1e1", "c=0..1:1e-1"])
    assert numbers.bounds() == {"a": [1000, 2000, None], "b": [100, 200, 10], "c": [0.0, 1.0, 0.1]}
    assert all(isinstance(end, int) for key in "ab" for end in numbers.bounds()[key][:2])
    assert space.samples()[0] == ["a.rate=0.0001", "b=[64]", "c=4", "d=0.0", "e=1", "f=0.0"]


@pytest.mark.parametrize(("word", "last"), [("a=8..30:8", 24), ("a=0.1..0.8:0.2", 0.7), ("a=1..3:5", 1)])
def test_steps_that_do_not_reach_the_end_stop_before_it(word: str, last: float) -> None:
    space = Space.parse([word])
    assert space.samples()[-1] == [f"a={last}"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Optuna's of such ranges
        assert space.distributions()["a"].high == last


def test_choices_are_read_as_configs_are(tmp_path: Path) -> None:
    """Of plain YAML 1e-3 is a text, and the name of a folder may be a day."""
    (tmp_path / "space.yaml").write_text("data.train: [2026-11-01, 2026-11-02]\n")
    space = Space.parse([f"{tmp_path}/space.yaml", "a=[1e-3, null, true]"])
    assert space.bounds() == {"data.train": ['"2026-11-01"', '"2026-11-02"'], "a": ["0.001", "null", "true"]}
    far = Space.parse(["data.train=[données/😀]"]).samples()[0]
    assert load_config(ROOT / CONFIG, far).data.train == "données/😀"


@pytest.mark.parametrize(
    "word",
    [
        "a=3",
        "a=5..1",
        "a=0..1:log",
        "a=x..y",
        "a=1..9:0",
        "a=1..2:1e-30",
        "a=[]",
        "no/such/file",
        "a=1..inf",
        "a=0..5:inf",
        "a=.5..1" + "0" * 400,
    ],
)
def test_what_is_no_space(word: str) -> None:
    with pytest.raises(UserError, match=r"^--space: "):
        Space.parse([word])


def test_the_best_at_each_size() -> None:
    values = [(100, 0.5), (100, 0.6), (200, 0.6), (300, 0.7), (250, 0.4)]
    tried = [Tried(i, {}, [value - 0.1, value + 0.1], size, 1.0, "") for i, (size, value) in enumerate(values)]
    assert [each.number for each in pareto(tried, higher=True)] == [1, 3]
    assert [each.number for each in pareto(tried, higher=False)] == [0, 4]
    assert tried[0].told() == "0.50000 ± 0.14142"


def test_a_bar_in_a_value_ends_no_cell(tmp_path: Path) -> None:
    tried = [Tried(0, {"data.filter": '"a | b"'}, [], None, None, "write or in place of |")]
    write_report(tmp_path, tried, "auc", higher=True, by_bytes=False, command=["recsys", "train"])
    row = (tmp_path / "sweep.md").read_text().splitlines()[-1]
    assert row == r'| 0 | "a \| b" |  |  |  | write or in place of \| |'


def test_bytes_are_those_that_are_served(tmp_path: Path) -> None:
    config = load_config(ROOT / CONFIG, ["tables.item={quantize: INT8, sharding_type: table_wise}"])
    plain = 1000 * 8 * 4 + 100 * 8 * 4 + 20 * 8 * 4 + 24 * 8 * 4
    assert table_bytes(config, tmp_path) == plain + 1000 * (8 + 8)  # a scale and a bias beside the codes


def sweep(out: Path, *words: str, status: int = 0) -> str:
    return run_recsys("sweep", CONFIG, *SHORT, *words, "--out", out, status=status, timeout=900)


def test_mistakes(tmp_path: Path) -> None:
    for words, said in (
        (("--space", "tables.itm.embedding_dim=[8]"), "itm"),
        (("--space", RATE, "--metric", "recall@3"), "--metric: there is no metric 'recall@3' (known: auc"),
        (("data.valid=null", "--space", RATE), "data.valid"),
        (("seed=3", "--space", RATE), "config key 'seed' is set by the sweep itself (--seeds says"),
    ):
        assert said in sweep(tmp_path, *words, status=1)


def test_a_config_that_is_no_file_is_no_mistake_of_the_space(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^config file '.*' is a folder, not a file"):
        open_space(str(tmp_path), [], [RATE], tmp_path / "out", None)


def opened(out: Path, *space: str, trials: int = 1, by_bytes: bool = False) -> Sweep:
    config = f"{ROOT}/{CONFIG}"
    searched, metric = open_space(config, SHORT, space, out, None)
    return Sweep(config, tuple(SHORT), searched, out, trials, seeds=1, jobs=1, metric=metric, by_bytes=by_bytes)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (["model.name=[dlrm, dlmr]", RATE], "there is no model 'dlmr'; did you mean 'dlrm'?"),
        ([RATE, "model.name=[dlmr, dlrm]"], "there is no model 'dlmr'; did you mean 'dlrm'?"),
        (["tables.user.embedding_dim=-4..8", RATE], "'tables.user.embedding_dim' must be"),
        (["train.epochs=1..2", "data.keep_negatives=0.5..1.5"], "'data.keep_negatives' must be"),
        (["train.epochs=1..2", "data.valid=[data/sample/valid, null]"], "needs data.valid, which is not set"),
        (["tables.user.embedding_dim=8..32", RATE], "embedding_dim=9, which it holds: config key 'tables.user."),
        (["tables.user.embedding_dim=8..64:log", RATE], "embedding_dim=9, which it holds: config key 'tables.user."),
        (["tables.user.embedding_dim=8..32:3", RATE], "embedding_dim=11, which it holds: config key 'tables.user."),
        (["seed=1..3"], "--space: 'seed' is set by the sweep itself (--seeds says"),
        ([RATE, "run.dir=[a, b]"], "--space: 'run.dir' is set by the sweep itself (trials lie under --out)"),
    ],
)
def test_every_value_is_checked_before_the_first_trial(space: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        opened(tmp_path, *space)


def test_the_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match=f"--out: '{tmp_path}' holds a run"):
        opened(tmp_path, RATE)


@pytest.mark.parametrize("by_bytes", [False, True])
def test_a_sweep_by_bytes_goes_on_with_none_by_the_metric_alone(by_bytes: bool, tmp_path: Path) -> None:
    """Optuna would join it, and count no trial, whose values are too few or too many for it: it would never end."""
    opened(tmp_path, RATE, by_bytes=by_bytes)._study()
    opened(tmp_path, RATE, by_bytes=by_bytes)._study()
    with pytest.raises(UserError, match="holds another sweep; use the same options"):
        opened(tmp_path, RATE, by_bytes=not by_bytes)._study()


def test_trials_publish_nothing(tmp_path: Path) -> None:
    """Scorers would follow a folder that each of them begins anew, and of several at a time only one may have it."""
    publish = f"train.publish={{dir: {tmp_path}, every_steps: 1}}"
    assert load_config(ROOT / CONFIG, [publish]).train.publish.dir is not None
    assert load_config(ROOT / CONFIG, [publish, *OF_TRIALS]).train.publish.dir is None
    with pytest.raises(UserError, match=r"--space: 'train\.publish\.dir' is set by the sweep itself \(trials publish"):
        opened(tmp_path, "train.publish.dir=[a, b]")


def test_threads_that_are_set_are_not_shared_out_among_trials(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(f"base: {ROOT}/{CONFIG}\nrun: {{num_threads: 2}}\n")
    for config, words, threads in (
        (f"{ROOT}/{CONFIG}", [], 1),
        (f"{ROOT}/{CONFIG}", ["run.num_threads=2"], 2),
        (f"{tmp_path}/two.yaml", [], 2),
    ):
        searched = Sweep(config, (), Space({}), tmp_path, trials=1, seeds=1, jobs=4096, metric="auc", by_bytes=False)
        changes = searched._changes(tmp_path / "run", words, seed=1)
        assert load_config(config, changes).run.num_threads == threads


def test_values_that_fit_with_some_of_the_others_are_searched(tmp_path: Path) -> None:
    steps, epochs = "train.eval_every_steps=[2, null]", "train.eval_every_epochs=[1, null]"
    assert opened(tmp_path, steps, epochs).space.texts.keys() == {"train.eval_every_steps", "train.eval_every_epochs"}
    opened(tmp_path, "data.keep_negatives=0.5..1.2:0.4")  # of which 0.9 is the last
    with pytest.raises(UserError, match="exclude each other"):
        opened(tmp_path, steps.replace("null", "3"), epochs.replace("null", "2"))


@pytest.mark.slow
def test_processes_share_a_study(tmp_path: Path) -> None:
    words = [
        "--space",
        "tables.item.embedding_dim=[4, 8]",
        "tables.user.embedding_dim=4..16:4",
        "--bytes",
        "--seeds",
        "2",
    ]
    command = [sys.executable, "-m", "recsys", "sweep", CONFIG, *SHORT, "--out", str(tmp_path), "--trials", "3", *words]
    processes = [subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(900) for process in processes] == [0, 0]
    assert sweep(tmp_path, "--trials", "3", *words) == ""  # there is nothing left to do
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert [trial["number"] for trial in found["trials"]] == [0, 1, 2]
    for trial in found["trials"]:
        item, user = (int(trial["settings"][f"tables.{name}.embedding_dim"]) for name in ("item", "user"))
        if item == user == 8:
            assert len(trial["values"]) == 2 and trial["bytes"] == 1000 * 8 * (2 + 4) + 144 * 8 * 4
    table = (tmp_path / "sweep.md").read_text()
    assert "fewer bytes of tables" in table and (tmp_path / "sweep.svg").read_text().startswith("<svg")
    assert not list(tmp_path.glob("trials/*/*/checkpoints"))
    assert "holds another sweep" in sweep(tmp_path, "--space", RATE, "--bytes", status=1)


def test_a_trial_is_not_ended_early_by_its_last_evaluation(tmp_path: Path) -> None:
    """Its value is what is searched for; and where there are no others, nothing ends early."""
    searched, metrics = opened(tmp_path, RATE), tmp_path / "metrics.jsonl"
    records = [{"kind": kind, "step": step, "auc": 0.5} for step in (2, 4) for kind in ("train", "valid")]
    metrics.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    ended: Any = SimpleNamespace(poll=lambda: 0)
    assert list(searched._evaluations(ended, metrics)) == [(2, 0.5)]


def test_an_evaluation_that_is_repeated_with_more_digits_ends_no_sweep(tmp_path: Path) -> None:
    """Early stopping evaluates the best step again, and its line in metrics.jsonl is replaced."""
    searched, metrics = opened(tmp_path, RATE), tmp_path / "metrics.jsonl"
    writer, polls = JsonLines(metrics, 0), iter([None, 0])
    for kind, step in (("train", 2), ("valid", 2), ("train", 4)):
        writer.write({"kind": kind, "time": 1.1, "step": step, "auc": 0.5})
    running: Any = SimpleNamespace(poll=lambda: next(polls))
    evaluations = searched._evaluations(running, metrics)
    assert next(evaluations) == (2, 0.5)
    writer.write({"kind": "valid", "time": 1.11, "step": 2, "auc": 0.5})
    assert not list(evaluations)


@pytest.mark.slow
def test_a_trial_below_the_median_of_the_others_is_ended_early(tmp_path: Path) -> None:
    searched = opened(tmp_path, "optimizer.dense.learning_rate=1e-4..1e-2:log", trials=6)
    params, distributions = {"optimizer.dense.learning_rate": 1e-3}, searched.space.distributions()
    for _ in range(5):  # as if they had been trained
        done = optuna.trial.create_trial(
            params=params, distributions=distributions, value=0.99, intermediate_values={2: 0.98, 4: 0.99}
        )
        searched._study().add_trial(done)
    with pytest.raises(UserError, match="every trial"):  # none of them has values of its seeds
        searched.run()
    *_, last = json.loads((tmp_path / "sweep.json").read_text())["trials"]
    assert (last["number"], last["values"], last["remark"]) == (5, [], "ended early")
    assert "| ended early |" in (tmp_path / "sweep.md").read_text()
