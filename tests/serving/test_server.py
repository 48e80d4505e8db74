"""`serve.py`, the example of a server: how it ends, and numbers that JSON tells less of than Arrow."""

import inspect
import runpy
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from launch import ROOT

# What litserve does when it runs, without litserve: it forks, and where it leaves `run` orderly it ends its processes.
_STUB = """
import os, runpy, signal, sys, time, types

class LitServer:
    def __init__(self, api):
        pass

    def run(self, port):
        reads, writes = os.pipe()
        child = os.fork()
        try:
            if child:
                os.read(reads, 1)  # a signal to a child that Python has not yet made one is lost
                print("runs", flush=True)
            else:
                os.write(writes, b"1")
            while True:
                time.sleep(0.05)  # signal.pause would wait for ever for a signal that comes just before it
        finally:
            if child:
                os.kill(child, signal.SIGTERM)
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
sys.modules["litserve"] = types.SimpleNamespace(LitAPI=object, LitServer=LitServer)
sys.modules["fastapi"] = types.SimpleNamespace(HTTPException=Exception)
runpy.run_path("serve.py", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_that_is_told_to_end_leaves_no_process(number: signal.Signals) -> None:
    command, folder = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'){_STUB}"], ROOT / "recsys/serving"
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "runs\n"
        server.send_signal(number)
        said, failed = server.communicate(timeout=60)
    assert said == "143\n" and failed.count("Traceback") == 1, failed  # of the first process, which litserve catches


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's answers, of a model that gives back the rows."""
    monkeypatch.syspath_prepend(ROOT / "recsys/serving")
    monkeypatch.setitem(sys.modules, "litserve", SimpleNamespace(LitAPI=object))
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=Exception))
    api = runpy.run_path(str(ROOT / "recsys/serving/serve.py"))["Scores"]()
    api.scorer = SimpleNamespace(score=pa.table)
    return api


def test_bodies_are_lists_by_column(api: Any) -> None:
    """FastAPI answers others by 422, by the type that stands here; without one litserve answers them by 500."""
    assert inspect.signature(api.decode_request).parameters["request"].annotation == dict[str, list[Any]]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_finite_score_is_a_mistake(value: float, api: Any) -> None:
    assert api.predict({"score": [0.5, 1.0]}) == {"score": [0.5, 1.0]}
    with pytest.raises(Exception) as error:
        api.predict({"score_click": [0.5, 1.0], "score_price": [1.0, value]})
    assert error.value.args == (400, f"row 1 has score_price {value}; a number of it is too large for the model")


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([2**64 - 1, 7, None], pa.uint64()),
        ([[2**63, 7], [], None], pa.list_(pa.uint64())),
        ([7, -1], pa.int64()),
        ([2**63, -1], list),  # no type has both, as none has the next
        ([2**64], list),
        ([7, "a"], list),
        ("text", str),
    ],
)
def test_ids_from_2_63_on_are_scored(values: Any, kind: Any, api: Any) -> None:
    rows: dict[str, Any] = {}
    api.scorer = SimpleNamespace(score=lambda given: rows.update(given) or pa.table({"score": [0.5]}))
    api.predict({"user_id": values})
    found = rows["user_id"]
    assert (found.type if isinstance(found, pa.Array) else type(found)) == kind
    assert (found.to_pylist() if isinstance(found, pa.Array) else found) == values
