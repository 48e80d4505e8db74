"""What a signal asks of a run: the first to save and end, a second Ctrl-C to end at once."""

import os
import signal
from itertools import product
from types import SimpleNamespace

import pytest

from recsys.runtime import signals
from recsys.runtime.signals import StopRequests


@pytest.mark.parametrize("first, again", list(product((signal.SIGINT, signal.SIGTERM, signal.SIGUSR2), repeat=2)))
def test_what_comes_at_once_again_is_the_same_request(
    first: signal.Signals, again: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun, ranks get the terminal's Ctrl-C, and a moment later torchrun's own."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: clock.now))
    target = SimpleNamespace(stop_requested=False)
    with StopRequests(target, None).signals():
        os.kill(os.getpid(), first)
        for _ in range(3):
            clock.now += 0.5
            os.kill(os.getpid(), again)
        assert target.stop_requested
        clock.now += 1.0
        if again == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), again)
        else:
            os.kill(os.getpid(), again)


def test_the_first_ctrl_c_of_a_run_that_ends_anyway_interrupts() -> None:
    requests = StopRequests(SimpleNamespace(stop_requested=False), None)
    requests.request()
    with requests.signals(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
