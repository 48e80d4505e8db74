"""The verdict on ranks that make no progress, and what torchrun's store may hold from an earlier start."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch.distributed as dist
from launch import forking

from recsys.config import Device
from recsys.errors import LostPeerError, StuckError
from recsys.runtime import rendezvous
from recsys.runtime import watchdog as watchdog_module
from recsys.runtime.rendezvous import agree_on_prefix
from recsys.runtime.watchdog import Beat, Watchdog
from recsys.runtime.world import open_world

LIMIT_S = 100.0


@pytest.fixture
def watchdog(tmp_path: Path) -> Iterator[Watchdog]:
    """That of rank 0 of three, which has made no progress for longer than it may, in the backward pass of step 7."""
    with open_world(Device.cpu, 1) as world:
        watchdog = Watchdog(replace(world, world_size=3), LIMIT_S)
        watchdog.keep_stacks(tmp_path / "rank_0.log")
        watchdog._store.set_timeout(timedelta(seconds=1))
        watchdog.enter("backward", 7)
        watchdog._mark -= LIMIT_S + 1
        yield watchdog


def tell(
    watchdog: Watchdog, rank: int, num_collectives: int, age_s: float | None = LIMIT_S + 50, **values: object
) -> None:
    """What rank `rank` tells next; `num_collectives` is relative to rank 0."""
    number = watchdog._seen.get(rank, (0, 0.0))[0] + 1
    beat = Beat(number, "forward of step 7", age_s, watchdog._world.num_collectives + num_collectives, "there")
    watchdog._store.set(f"watchdog/{rank}", json.dumps(asdict(beat) | values))


def judge(watchdog: Watchdog, later_s: float = 0.0) -> Exception | None:
    watchdog._tell()
    return watchdog._judge(time.monotonic() + later_s)


def test_the_rank_that_has_begun_the_fewest_collectives_is_named(watchdog: Watchdog) -> None:
    tell(watchdog, 1, 0)
    tell(watchdog, 2, -1)
    error = judge(watchdog)
    assert isinstance(error, LostPeerError) and "rank 2 on there is stuck in forward of step 7" in str(error)
    assert "rank 0 waits for it in backward of step 7" in str(error)


def test_a_rank_names_itself(watchdog: Watchdog) -> None:
    tell(watchdog, 1, 3)
    tell(watchdog, 2, 0, finished=True)
    error = judge(watchdog)
    assert isinstance(error, StuckError) and "is stuck in backward of step 7" in str(error)
    assert "'run.stuck_after_s' allows 100" in str(error) and "rank_0.log" in str(error)


def test_a_slow_rank_is_waited_for(watchdog: Watchdog) -> None:
    tell(watchdog, 1, 0)
    tell(watchdog, 2, -1, age_s=LIMIT_S / 2)
    assert judge(watchdog) is None
    tell(watchdog, 2, -1, age_s=LIMIT_S + 1)  # it ends by itself now, and says more
    assert judge(watchdog) is None


def test_a_rank_that_does_not_answer_is_named_first(watchdog: Watchdog) -> None:
    for rank in (1, 2):
        tell(watchdog, rank, 0 if rank == 1 else -1, age_s=1.0)
    assert judge(watchdog) is None
    tell(watchdog, 2, -1, age_s=1.0)
    error = judge(watchdog, later_s=LIMIT_S / 2 + 1)
    assert isinstance(error, LostPeerError) and "rank 1 on there is stuck: it has not answered for 51 s" in str(error)
    assert "rank 2" not in str(error)


@pytest.mark.parametrize("phase", ["start", "end"])
def test_a_rank_that_does_not_answer_is_named_where_no_progress_is_told(phase: str, watchdog: Watchdog) -> None:
    watchdog.rest()
    for rank in (1, 2):
        tell(watchdog, rank, 0, age_s=None, finished=phase == "end" and rank == 2)
    assert judge(watchdog, later_s=11.0) is None and judge(watchdog, later_s=LIMIT_S) is None
    if phase == "start":
        tell(watchdog, 2, -9, age_s=None)
    error = judge(watchdog, later_s=LIMIT_S + 15)
    assert isinstance(error, LostPeerError) and "rank 1 on there is stuck: it has not answered for 104 s" in str(error)
    assert "rank 2" not in str(error)


def test_a_finished_rank_need_not_answer(watchdog: Watchdog) -> None:
    for rank in (1, 2):
        tell(watchdog, rank, 0, finished=True)
    assert isinstance(judge(watchdog), StuckError)
    assert isinstance(judge(watchdog, later_s=LIMIT_S), StuckError)


def test_the_failure_of_another_rank_ends_one_that_waits(watchdog: Watchdog) -> None:
    watchdog._world.store.compare_set("failure", "", "rank 2: ValueError: no")
    error = judge(watchdog)
    assert isinstance(error, LostPeerError) and str(error) == "another rank ended: rank 2: ValueError: no"
    watchdog.enter("forward", 8)
    assert judge(watchdog) is None


def test_progress_and_rest_are_not_stuck(watchdog: Watchdog) -> None:
    watchdog.enter("forward")
    assert judge(watchdog) is None
    watchdog._mark -= LIMIT_S + 1
    watchdog.rest()
    assert judge(watchdog) is None


def keep_store(pipe: Connection) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_store_that_does_not_answer_is_told(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine that is frozen: an answer never comes, and its connections are not closed."""
    with forking() as context:
        mine, theirs = context.Pipe()
        keeper = context.Process(target=keep_store, args=(theirs,))
        keeper.start()
    errors: list[Exception] = []
    told = threading.Event()

    def end(error: Exception) -> None:
        errors.append(error)
        told.set()

    monkeypatch.setattr(watchdog_module, "end_run", end)
    with open_world(Device.cpu, 1) as world:
        store = dist.TCPStore("127.0.0.1", mine.recv(), is_master=False)
        store.set("failure", "")
        watched = Watchdog(replace(world, store=store), 2.0)
        with pytest.raises(KeyboardInterrupt), watched as watchdog:  # a run that fails tells the store nothing more
            watchdog.enter("forward", 7)
            os.kill(keeper.pid or 0, number)
            in_time = told.wait(6.0)
            keeper.kill()
            raise KeyboardInterrupt
    keeper.join()
    assert in_time and isinstance(errors[0], LostPeerError)
    assert "keeps the ranks' store has not answered" in str(errors[0])
    assert "rank 0 waits in forward of step 7" in str(errors[0])


def test_ranks_agree_on_a_prefix_whatever_an_earlier_start_left() -> None:
    store, world_size = dist.HashStore(), 4
    timeout = timedelta(seconds=20)
    used: set[str] = set()
    for attempt in range(3):
        prefixes: dict[int, str] = {}

        def start(rank: int, prefixes: dict[int, str] = prefixes) -> None:
            prefixes[rank] = agree_on_prefix(store.clone(), rank, world_size, timeout)  # type: ignore[attr-defined]

        threads = [threading.Thread(target=start, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads[attempt:] + threads[:attempt]:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join(20)
        assert len(prefixes) == world_size and len(set(prefixes.values())) == 1
        assert not used & set(prefixes.values())
        used |= set(prefixes.values())
        store.set("start/2", f"of a rank that was ended at once, {attempt}")


def test_no_rank_connects_to_others_before_all_have_started() -> None:
    """It would wait for five minutes, while rank 0 waits for ten for one whose machine is slow."""
    store = dist.HashStore()

    def start(rank: int) -> threading.Thread:
        arguments = store.clone(), rank, 3, timedelta(seconds=20)  # type: ignore[attr-defined]
        thread = threading.Thread(target=agree_on_prefix, args=arguments, daemon=True)
        thread.start()
        return thread

    early = [start(rank) for rank in (0, 1)]
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in early)
    for thread in [*early, start(2)]:
        thread.join(20)
        assert not thread.is_alive()


def test_ranks_that_wait_for_others_to_start_say_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the others have ended in a mistake before, which the machines of these tell, or do not come at all."""
    monkeypatch.setattr(rendezvous, "_TELL_AFTER_S", 0.2)
    for rank, said in (
        (0, "waits for ranks to start (see their output): 1, 2, 3"),
        (1, "waits for rank 0 to start"),
    ):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))
        with pytest.raises((LostPeerError, dist.DistStoreError)):
            agree_on_prefix(store, rank, 4, timedelta(seconds=1))
        assert f"rank {rank} {said}" in caplog.text and len(caplog.records) == 1
        caplog.clear()


def test_a_rank_that_is_not_connected_ends_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = []
    monkeypatch.setattr(rendezvous, "end_run", errors.append)
    monkeypatch.setattr(rendezvous, "_TELL_AFTER_S", 0.1)
    for takes_s in (0.0, 0.2, 1.5):
        with rendezvous.told_if_slow(lambda: "rank 1 waits", 1.0):
            time.sleep(takes_s)
    time.sleep(1.0)
    assert [str(error) for error in errors] == ["rank 1 waits; not all came in 1 s"]
