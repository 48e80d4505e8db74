"""`serve.py`, the example of a server: how it ends, and scores that JSON has no number for."""

import runpy
import signal
import subprocess
import sys
from types import SimpleNamespace

import pyarrow as pa
import pytest
from launch import ROOT

# What litserve does when it runs, without litserve: processes of its own end where it leaves `run` orderly.
_STUB = """
import runpy, signal, sys, time, types

class LitServer:
    def __init__(self, api):
        pass

    def run(self, port):
        try:
            print("runs", flush=True)
            while True:
                time.sleep(0.05)  # signal.pause would wait for ever for a signal that comes just before it
        finally:
            print("its processes have ended", flush=True)

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
        assert server.communicate(timeout=60)[0] == "its processes have ended\n"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_finite_score_is_a_mistake(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "recsys/serving")
    monkeypatch.setitem(sys.modules, "litserve", SimpleNamespace(LitAPI=object))
    monkeypatch.setitem(sys.modules, "fastapi", SimpleNamespace(HTTPException=Exception))
    api = runpy.run_path(str(ROOT / "recsys/serving/serve.py"))["Scores"]()
    api.scorer = SimpleNamespace(score=pa.table)
    assert api.predict({"score": [0.5, 1.0]}) == {"score": [0.5, 1.0]}
    with pytest.raises(Exception) as error:
        api.predict({"score_click": [0.5, 1.0], "score_price": [1.0, value]})
    assert error.value.args == (400, f"row 1 has score_price {value}; a number of it is too large for the model")
