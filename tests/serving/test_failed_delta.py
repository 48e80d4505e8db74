"""A publication that cannot be written leaves nothing behind, and training goes on."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from days import CONFIG, write_day

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.errors import UserError
from recsys.runtime.world import open_world
from recsys.serving import publish
from recsys.serving.publish import Publisher
from recsys.training.build import build_model


@pytest.mark.parametrize("file", ["user.bin", "item.bin", "dense.bin"])
def test_a_full_disk_keeps_no_part_of_a_delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """It would take the room that the next publication, a base, and its checkpoint need."""
    (tmp_path / "c.yaml").write_text(CONFIG.replace("mapping: vocabulary, num_buckets: 4, min_count: 8", ""))
    published = tmp_path / "published"
    keys = [f"data.train={write_day(tmp_path / 'd', range(9), 1)}", f"train.publish.dir={published}"]
    config = load_config(tmp_path / "c.yaml", [*keys, "train.publish.every_steps=1"])
    write = publish.Files.write

    def full(files: Any, name: str, *arguments: Any) -> str:
        written = write(files, name, *arguments)
        if name.endswith(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return written

    monkeypatch.setattr(publish, "check_packages", lambda: None)
    monkeypatch.setattr(publish.Files, "write", full)
    with open_world(Device.cpu) as world:
        inputs = open_inputs(config, world)
        with Publisher(inputs, build_model(inputs)) as publisher:
            vectors = {"vectors": {"encoding": "fp32"}}
            publisher._base = {"tables": dict.fromkeys(config.tables, vectors), "files": {}}
            publisher.publish(1, lambda: tmp_path)
            assert publisher._base is None
            assert [path.name for path in published.iterdir()] == [".lock"]


def test_where_no_checkpoint_can_be_written_others_are_tried_ever_more_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each base that fails may have cost a whole export."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    published = tmp_path / "published"
    keys = [f"data.train={write_day(tmp_path / 'd', range(9), 1)}", f"train.publish.dir={published}"]
    config = load_config(tmp_path / "c.yaml", [*keys, "train.publish.every_steps=10"])
    monkeypatch.setattr(publish, "check_packages", lambda: None)
    problem = UserError(
        "a checkpoint needs 2 bytes, and 'run' has 1 free; make room there and continue with run.resume"
    )
    with open_world(Device.cpu) as world:
        inputs, tried = open_inputs(config, world), []
        with Publisher(inputs, build_model(inputs)) as publisher:
            for step in range(1, 301):
                if publisher.asks(step):
                    tried.append(step)
                    publisher.publish(step, lambda: problem)
            assert tried == [10, 20, 40, 80, 160]
            told = "(a checkpoint needs 2 bytes, and 'run' has 1 free); training continues, and publishes all rows next"
            lines = [line for line in caplog.messages if "is not published" in line]
            assert lines[0].endswith(told) and lines[4].endswith("after leaving out 15")
            monkeypatch.setattr(publish, "run_command", lambda *words, **options: None)
            (base := published / "base-000000001").mkdir()
            (base / "manifest.json").write_text('{"sha256": "", "files": {}}')
            monkeypatch.setattr(publish, "next_number", lambda *arguments: 1)
            publisher.publish(300, lambda: tmp_path)
            assert publisher._failures == 0 and publisher._base is not None
