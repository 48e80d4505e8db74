"""`serve.py`, the example of a server: how it ends."""

import signal
import subprocess
import sys

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
