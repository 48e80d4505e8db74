"""A delta that cannot be written leaves nothing behind."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from days import CONFIG, write_day

from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
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
