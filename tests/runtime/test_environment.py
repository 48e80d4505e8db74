"""What allocators are told before a program begins."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launch import ROOT, environment
from launcher import machine

from recsys.runtime.environment import prepare_environment
from recsys.runtime.machine import device_name

SETTING = "glibc.malloc.tcache_count=0:glibc.malloc.hugetlb=1"
PROGRAM = """\
import os, sys
{first}
from recsys.runtime.environment import restart_with_malloc_settings
print("begun", os.getpid(), *sys.argv[1:], flush=True)
restart_with_malloc_settings()
print("runs", os.environ.get("GLIBC_TUNABLES"))
"""


def test_benchmarks_name_the_processor_as_a_calibration_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "processor\t: 0\nmodel name\t: Some Processor: 3.0GHz \nprocessor\t: 1\nmodel name\t: Another\n"
    monkeypatch.setattr(Path, "read_text", lambda path: told)
    monkeypatch.setattr("platform.machine", lambda: "arch")
    assert device_name(torch.device("cpu")) == "Some Processor: 3.0GHz"
    assert machine()["processor"] == "Some Processor: 3.0GHz (arch)"
    monkeypatch.setattr(Path, "read_text", lambda path: "")
    assert (device_name(torch.device("cpu")), machine()["processor"]) == ("arch", "arch")


def run(folder: Path, tunables: str = "", first: str = "") -> list[str]:
    """Return the lines that a program writes, with its process id as `PID`."""
    (folder / "program.py").write_text(PROGRAM.format(first=first))
    command = [sys.executable, str(folder / "program.py"), "a b", "c"]
    variables = {**environment(), "PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": tunables}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        output = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    return output.replace(str(process.pid), "PID").splitlines()


def test_a_program_starts_itself_once_more_in_its_process(tmp_path):
    assert run(tmp_path) == ["begun PID a b c", "begun PID a b c", f"runs {SETTING}"]


def test_other_settings_of_malloc_stay(tmp_path):
    other = "glibc.malloc.mxfast=0"
    assert run(tmp_path, other)[-1] == f"runs {other}:{SETTING}"


def test_of_malloc_s_settings_those_of_the_user_stay(tmp_path):
    chosen = "glibc.malloc.tcache_count=7"
    assert run(tmp_path, chosen)[-1] == f"runs {chosen}:glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("tunables", "first"),
    [("glibc.malloc.tcache_count=7:glibc.malloc.hugetlb=0", ""), ("", "import pyarrow")],
    ids=["chosen", "late"],
)
def test_a_program_goes_on_as_it_is(tmp_path, tunables, first):
    assert run(tmp_path, tunables, first) == ["begun PID a b c", f"runs {tunables}"]


def test_the_allocator_of_gpus_grows_its_blocks_unless_told_otherwise(monkeypatch):
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for given, expected in (({}, "expandable_segments:True"), ({names[0]: "a"}, "a"), ({names[1]: "a"}, None)):
        with monkeypatch.context() as patch:
            for name in names:
                patch.delenv(name, raising=False)
                if name in given:
                    patch.setenv(name, given[name])
            before = dict(os.environ)
            patch.setattr(os, "environ", dict(os.environ))
            prepare_environment()
            assert os.environ.get(names[0]) == expected and before.keys() <= os.environ.keys()


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)],
    ids=["default", "chosen", "by policy"],
)
def test_threads_let_go_of_their_cores_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    unset = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    monkeypatch.setattr(os, "environ", unset | given)
    prepare_environment()
    assert os.environ.get("GOMP_SPINCOUNT") == expected


PRODUCTS = """\
from recsys.runtime.environment import prepare_environment
prepare_environment()
import torch
from recsys.memory.measure import rss
layer, before = torch.nn.Linear(256, 512), 0
for rows in range(2000, 60, -20):
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(rows, 256)).sum().backward()
    before = before or rss()
print(rss() - before)
"""


@pytest.mark.slow
def test_products_of_halves_of_many_shapes_are_not_all_kept() -> None:
    """Here 97 shapes took 200 MiB where all were kept, and take 40; a CPU that has no such products takes less."""
    done = subprocess.run([sys.executable, "-c", PRODUCTS], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert int(done.stdout) < 100 << 20, done.stderr


MEMORY = """\
import resource
from recsys.runtime.environment import give_unused_back, keep_freed_memory, prepare_environment
prepare_environment()
import torch
print(*(torch.empty(rows, 1024).data_ptr() % 4096 for rows in (512, 513, 1000)))
def faults():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(20 << 20, dtype=torch.uint8)
    give_unused_back()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun
def of_a_block():
    faults()
    return min(faults() for _ in range(64))
print(of_a_block())
keep_freed_memory()
print(of_a_block())
"""


def lines_of_memory(**chosen: str) -> list[str]:
    variables = {**environment(), **chosen}
    done = subprocess.run([sys.executable, "-c", MEMORY], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def by_default() -> list[str]:
    return lines_of_memory()


@pytest.mark.slow
def test_blocks_of_two_mib_and_more_begin_at_a_page(by_default: list[str]) -> None:
    assert by_default[0] == "0 0 0"
    assert lines_of_memory(THP_MEM_ALLOC_ENABLE="0")[0] != "0 0 0", "as the user has chosen"


def test_beside_a_gpu_what_is_freed_is_used_again(by_default: list[str]) -> None:
    """Without, each block of 20 MiB is pages that are new, of which the kernel may make huge ones of 2 MiB.

    The least of many blocks is taken: where a small object comes to lie behind a block, the next one of its size, with
    room to begin at a page, lies behind that object in new pages. Of 80 processes, in three more than ten did.
    """
    given_back, kept = map(int, by_default[1:])
    assert given_back >= 10 > kept


def test_imports_are_without_the_collector_of_cycles_and_what_follows_is_with_it() -> None:
    """In a process of its own: what is there is left out for good."""
    program = """\
import gc
from contextlib import suppress
from recsys.errors import UserError
from recsys.runtime.environment import importing
with importing():
    print(gc.isenabled())
    kept = [[] for _ in range(1000)]
print(gc.isenabled(), gc.get_freeze_count() > 1000, len(gc.get_objects()) < 1000)
with suppress(UserError), importing():
    raise UserError("no such file")
print(gc.isenabled())
gc.disable()
with importing():
    pass
print(gc.isenabled())
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True", "True", "True", "True", "False"], done.stdout + done.stderr
