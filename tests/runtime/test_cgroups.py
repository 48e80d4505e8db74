"""Limits of cgroups: of memory and of cores, of both versions, in the groups above too."""

import os
from pathlib import Path
from typing import Any

import pytest

from recsys.runtime import cgroups

GROUPS = {
    "none": ("0::/a/b\n", {}, (None, 8)),
    "v2": (
        "0::/a/b\n",
        {"a/b/memory.max": "4096", "memory.max": "max", "a/b/cpu.max": "max 100000", "a/cpu.max": "150000 100000"},
        (4096, 2),
    ),
    "container": ("0::/../../x\n", {"memory.max": "8192\n", "cpu.max": "50000 100000\n"}, (8192, 1)),
    "v1": (
        "3:cpu,cpuacct:/a\n2:memory:/a\n1:name=systemd:/\n",
        {
            "cpu/a/cpu.cfs_quota_us": "300000\n",
            "cpu/a/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/a/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.limit_in_bytes": "12288\n",
        },
        (12288, 3),
    ),
    "more cores than there are": ("0::/\n", {"cpu.max": "9900000 100000"}, (None, 8)),
}


@pytest.mark.parametrize("case", GROUPS)
def test_limits(tmp_path: Path, monkeypatch: Any, case: str) -> None:
    own, files, limits = GROUPS[case]
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "root")
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert (cgroups.cgroup_bytes(), cgroups.num_cores()) == limits
