"""What a config gives by reference, such as a password of the environment in an address, is written nowhere."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from launch import ROOT, run_train

from recsys.config import config_text, load_config
from recsys.data.sources import find_files
from recsys.errors import UserError

SAMPLE = ROOT / "configs" / "dlrm_sample.yaml"
SECRET = "hunter2"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECSYS_TEST_KEY", f"me:{SECRET}")
    monkeypatch.setenv("RECSYS_TEST_EPOCHS", "3")


@pytest.mark.parametrize(
    "override",
    [
        "data.train=s3://${oc.env:RECSYS_TEST_KEY}@bucket/x",
        "data.train=['a', 's3://${oc.env:RECSYS_TEST_KEY}@bucket/x']",
        "data.train=${oc.decode:'[a, ${oc.env:RECSYS_TEST_KEY}]'}",
        "data.filter={train: 'a == \"${oc.env:RECSYS_TEST_KEY}\"'}",
        "features.price.column=${oc.env:RECSYS_TEST_KEY}",
    ],
)
def test_a_reference_stays_one(override: str, tmp_path: Path) -> None:
    config = load_config(SAMPLE, [override, "data.valid=${data.train}", "train.epochs=${oc.env:RECSYS_TEST_EPOCHS}"])
    assert SECRET in str(config) and config.train.epochs == 3
    (tmp_path / "config.yaml").write_text(config_text(config))
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text and "valid: ${data.train}" in text and "epochs: ${oc.env:RECSYS_TEST_EPOCHS}" in text
    assert load_config(tmp_path / "config.yaml") == config
    assert load_config(tmp_path / "config.yaml", ["train.epochs=7"]).train.epochs == 7


def test_what_has_changed_since_is_written_as_it_is(tmp_path: Path) -> None:
    config = load_config(SAMPLE, ["train.epochs=${oc.env:RECSYS_TEST_EPOCHS}", "train.max_steps=${train.epochs}"])
    (tmp_path / "config.yaml").write_text(config_text(replace(config, train=replace(config.train, epochs=5))))
    assert "epochs: 5" in (tmp_path / "config.yaml").read_text()


def test_what_is_missing_or_wrong_is_one_sentence_without_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^config key 'train.epochs' must be a whole number, and what it refers to is"):
        load_config(SAMPLE, ["train.epochs=${oc.env:RECSYS_TEST_KEY}"])
    monkeypatch.delenv("RECSYS_TEST_KEY")
    with pytest.raises(UserError, match=r"'run.name': the environment variable RECSYS_TEST_KEY is not set; set it, or"):
        load_config(SAMPLE, ["run.name=${oc.env:RECSYS_TEST_KEY}"])


@pytest.mark.parametrize(
    "paths",
    [
        f"s3://me:{SECRET}/x@bucket/a",
        [f"s3://me:{SECRET}@bucket/a", "b"],
        f"s4://me:{SECRET}@bucket/a",
        f"s3://bucket?secret_key={SECRET}&scheme=x&x=/a",
        f"hdfs://me:{SECRET}@no.such.host/a",
    ],
)
def test_messages_hold_no_password(paths: str | list[str]) -> None:
    with pytest.raises(UserError) as caught:
        find_files("data.train", paths)
    assert SECRET not in str(caught.value) and re.search("'data.train'|file system of", str(caught.value))


@pytest.mark.slow
def test_no_file_of_a_run_holds_the_secret(tmp_path: Path) -> None:
    train = f"file://${{oc.env:RECSYS_TEST_KEY}}@localhost{ROOT}/data/sample/train"
    run_dir = tmp_path / "run"
    hours = "data.filter=hour >= ${oc.env:RECSYS_TEST_EPOCHS}"
    options = (f"run.dir={run_dir}", f"data.train={train}", hours, "train.max_steps=3", "data.test=null")
    done = run_train(str(SAMPLE), *options)
    assert done.returncode == 0, done.stderr[-2000:]
    # What a filter was is part of what was trained.
    assert json.loads((run_dir / "result.json").read_text())["data"]["filter"] == "hour >= 3"
    assert hours.removeprefix("data.filter=") in (run_dir / "config.yaml").read_text()
    written = [path for path in run_dir.glob("**/*") if path.is_file()]
    assert run_dir / "checkpoints/step-000000003/config.yaml" in written
    assert not [path for path in written if SECRET.encode() in path.read_bytes()]
    assert SECRET not in done.stdout + done.stderr
    assert load_config(run_dir / "config.yaml").data.train == train.replace("${oc.env:RECSYS_TEST_KEY}", f"me:{SECRET}")
