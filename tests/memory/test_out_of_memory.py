"""Memory that runs out, wherever and in whatever library, ends a run with what holds it and what helps."""

import json
import mmap
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from launch import ROOT, run_recsys

from recsys.errors import UserError, is_out_of_memory

SAMPLE = str(ROOT / "configs" / "dlrm_sample.yaml")


@pytest.mark.parametrize(
    "action",
    [
        lambda: torch.empty(1 << 58),
        lambda: torch.empty(1 << 40, 1 << 40),
        lambda: np.empty(1 << 58),
        lambda: np.empty((1 << 40, 1 << 40)),
        lambda: pa.allocate_buffer(1 << 60),
        lambda: mmap.mmap(-1, 1 << 60),
        lambda: mmap.mmap(-1, 1 << 70),
        lambda: bytearray(1 << 60),
    ],
)
def test_what_libraries_say(action: Callable[[], object]) -> None:
    with pytest.raises(Exception) as caught:
        action()
    assert is_out_of_memory(caught.value)
    try:
        raise UserError("it cannot be read") from caught.value
    except UserError as error:
        assert is_out_of_memory(error)


def test_other_errors_are_none_of_it() -> None:
    assert not is_out_of_memory(UserError("config key 'x': there is no column 'out of memory'"))
    assert not is_out_of_memory(ValueError("not a size")) and not is_out_of_memory(OSError(28, "No space left"))


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (48 << 30, 48 << 30))


def _fail_at(target: str) -> None:
    mock.patch(target, side_effect=pa.ArrowMemoryError("malloc of size 4096 failed")).start()


def told(where: str, *options: object, **how: Any) -> str:
    """Train until memory has run out; return what is told."""
    said = run_recsys("train", SAMPLE, *options, status=1, **how)
    first = said.index("error: memory has run out")
    assert said[first:].startswith(f"error: memory has run out in {where}")
    assert "the largest holders, by the prediction: " in said
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "override, where",
    [("model.top_mlp=[200000,200000]", "init"), ("train.global_batch_size=2000000000", "step")],
)
def test_settings_that_ask_for_too_much(override: str, where: str, tmp_path: Path) -> None:
    said = told(f"{where}, step 0: ", override, f"run.dir={tmp_path / 'run'}", before=_limit)
    assert "no setting is enough: " in said
    report = json.loads((tmp_path / "run" / "memory" / "rank_0.json").read_text())["out_of_memory"]
    assert report["missing_bytes"] > 100 << 30 and report["holders"] and not report["first_is_enough"]


@pytest.mark.parametrize(
    "target, where",
    [
        ("recsys.data.loader.collate", "step"),
        pytest.param("recsys.data.footers.read_footer", "reading the data", marks=pytest.mark.slow),
        pytest.param("recsys.training.run.learn_facts", "vocabularies", marks=pytest.mark.slow),
        pytest.param("recsys.training.trainer.start_training", "load", marks=pytest.mark.slow),
        pytest.param("recsys.checkpoint.save.write_tensors", "save", marks=pytest.mark.slow),
        pytest.param("recsys.training.trainer.evaluate_dataset", "evaluation", marks=pytest.mark.slow),
    ],
)
def test_every_phase(target: str, where: str, tmp_path: Path) -> None:
    options = (f"run.dir={tmp_path / 'run'}", "train.max_steps=2", "data.max_bad_rows=10000", "data.max_bad_files=2")
    told(where, *options, nproc=2, before=partial(_fail_at, target))


@pytest.mark.slow
def test_a_budget_that_the_libraries_take_leaves_its_page(tmp_path: Path) -> None:
    """The tables are not there yet, so that their sizes are not either."""
    said = told("init", f"run.dir={tmp_path / 'run'}", "memory.budget=100MiB")
    assert "nor are more ranks: a process takes" in said and "was not written" not in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "out of memory</span> at step 0" in page and "memory.budget allows 100" in page


def test_a_run_that_is_predicted_not_to_fit_says_so_before_its_first_step(tmp_path: Path) -> None:
    """The system kills what takes more than there is, and then nobody has a word left."""
    settings = "train.max_steps=1", "data.valid=null", "data.test=null", "topology.host_memory=100MiB"
    run_recsys("train", SAMPLE, f"run.dir={tmp_path / 'run'}", *settings)
    before, step, _ = (tmp_path / "run" / "logs" / "rank_0.log").read_text().partition("step 1/1")
    assert step and "the run is predicted not to fit: the host memory of machine 0 would take" in before
