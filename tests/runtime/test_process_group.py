"""Which GPU a rank takes, as launchers show them: all of a machine to each process, or to each its own; how ranks of a
machine find each other."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardMetadata,
)

from recsys.config import Device
from recsys.errors import LostPeerError, UserError
from recsys.runtime import rendezvous
from recsys.runtime.world import _check_own_gpu, _choose_device, as_lost_peer, open_world
from recsys.tables.shard import _check_machines, _place


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let torch find so many GPUs, and note the one that becomes current."""

    def show(num_gpus: int) -> list[int]:
        current: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return show


@pytest.mark.parametrize(
    ("visible", "local_rank", "local_world_size", "index"),
    [(4, 0, 4, 0), (4, 3, 4, 3), (8, 3, 4, 3), (1, 0, 1, 0), (1, 3, 4, 0), (1, 3, 1, 0), (2, 1, 1, 1)],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(
    visible: int, local_rank: int, local_world_size: int, index: int, show: Any
) -> None:
    current = show(visible)
    for device in (Device.auto, Device.cuda):
        assert _choose_device(device, local_rank, local_world_size) == torch.device("cuda", index)
    assert current == [index, index]
    assert _choose_device(Device.cpu, local_rank, local_world_size) == torch.device("cpu")


@pytest.mark.parametrize(("visible", "local_rank", "local_world_size"), [(2, 0, 4), (2, 3, 4), (2, 3, 1), (3, 1, 4)])
def test_more_ranks_than_gpus_are_refused(visible: int, local_rank: int, local_world_size: int, show: Any) -> None:
    current = show(visible)
    with pytest.raises(UserError, match=rf"4 processes .* finds {visible} GPUs; use --nproc_per_node {visible}, or"):
        _choose_device(Device.auto, local_rank, local_world_size)
    assert not current


def test_no_gpu(show: Any) -> None:
    show(0)
    assert _choose_device(Device.auto, 3, 4) == torch.device("cpu")
    with pytest.raises(UserError, match=r"'run.device' is cuda, but torch finds no GPU"):
        _choose_device(Device.cuda, 0, 1)


@pytest.mark.parametrize(
    ("visible", "others", "refused"),
    [
        (1, [("here", "a"), ("here", "b")], False),
        (1, [("here", "a"), ("there", "a")], False),
        (1, [("here", "a"), ("here", "a")], True),
        (1, [("there", "a"), ("there", "a")], True),  # on every rank, or some would wait for the others
        (2, [None, None], False),
    ],
)
def test_ranks_that_see_one_gpu_each_see_different_ones(
    visible: int, others: list[Any], refused: bool, show: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a"))
    world: Any = SimpleNamespace(local_world_size=2, device=torch.device("cuda", 0), gather=lambda mine: others)
    if not refused:
        return _check_own_gpu(world)
    with pytest.raises(UserError, match=r"2 processes .* finds 1 GPU; use --nproc_per_node 1, or run.device=cpu"):
        _check_own_gpu(world)


def test_a_plan_names_the_device_that_the_rank_sees() -> None:
    """Else torch refuses the pieces of rank 3, which lie on its only GPU, cuda:0."""
    pieces = [ShardMetadata([5 * rank, 0], [5, 8], f"rank:{rank}/cuda:{rank}") for rank in range(4)]
    tables = {
        "split": ParameterSharding("row_wise", "fused", sharding_spec=EnumerableShardingSpec(pieces)),
        "everywhere": ParameterSharding("data_parallel", "dense", sharding_spec=None),
    }
    plan = ShardingPlan({"embeddings": EmbeddingModuleShardingPlan(tables)})
    world: Any = SimpleNamespace(rank=3, device=torch.device("cuda", 0))
    _place(plan, world)
    assert [str(piece.placement) for piece in pieces] == [f"rank:{rank}/cuda:{rank % 3}" for rank in range(4)]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set what a launcher says to the only rank of a run, with some changes; a port of 0 is any that is free."""

    def alone(**changes: str | None) -> None:
        said = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in {**said, "MASTER_PORT": "0", **changes}.items():
            monkeypatch.setenv(name, value or "")  # so that it is put back
            monkeypatch.delenv(name) if value is None else None

    return alone


def test_torchrec_hears_of_as_many_ranks_a_machine_as_the_plan(alone: Any) -> None:
    """It reads the variable by itself, and where a launcher of one's own sets none, it would take all for one's."""
    alone(LOCAL_WORLD_SIZE=None)
    assert get_local_size(4) == 4
    with open_world(Device.cpu) as world:
        assert get_local_size(4) == world.local_world_size == 1


def test_a_port_that_is_taken_is_told_in_a_sentence(alone: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        alone(MASTER_PORT=str(taken.getsockname()[1]))
        said = r"^ranks do not find each other by MASTER_ADDR=127.0.0.1 and .*=\d+ \(address already in use\); "
        with pytest.raises(UserError, match=said), open_world(Device.cpu):
            pass


def test_ranks_that_do_not_come_are_told_in_a_sentence(
    alone: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rendezvous, "_TELL_AFTER_S", 0.2)
    alone(WORLD_SIZE="2")
    said = r"^ranks do not find each other by .* \(Timed out .* 1/2 clients joined\); .* start all 2 of them"
    with pytest.raises(UserError, match=said), open_world(Device.cpu, timeout_s=1):
        pass
    assert [record.message for record in caplog.records] == ["rank 0 waits for all 2 ranks to start; see their output"]


def test_a_rank_that_ends_before_it_is_connected_is_told_in_a_sentence(alone: Any) -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alone(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(kept.port))
    said = r"^another rank ended or did not answer, .* \(wait timeout after 1000ms, keys: "
    with pytest.raises(LostPeerError, match=said), open_world(Device.cpu, timeout_s=1):
        pass


@pytest.mark.parametrize(("kind", "refused"), [("row_wise", False), ("table_row_wise", True), ("grid_shard", True)])
def test_machines_with_unequal_ranks_do_not_share_a_table(kind: str, refused: bool) -> None:
    """torchrec's ranks would each wait for a group of their own."""
    plan = ShardingPlan({"embeddings": EmbeddingModuleShardingPlan({"user": ParameterSharding(kind, "fused")})})
    equal: Any = SimpleNamespace(local_world_size=2, gather=lambda mine: [mine] * 4)
    unequal: Any = SimpleNamespace(local_world_size=2, gather=lambda mine: [mine, mine, 1])
    _check_machines(plan, equal)
    if not refused:
        return _check_machines(plan, unequal)
    with pytest.raises(
        UserError, match=rf"table 'user' is split as {kind}, .* machines have 1 and 2 of them; start as"
    ):
        _check_machines(plan, unequal)


def test_a_rank_that_only_works_long_is_told_with_the_key_that_others_wait_by() -> None:
    errors = ("[/w/gloo/x.cc:78] Timed out waiting 3000ms for recv operation to complete", "Connection closed by peer")
    refused = "Gloo connectFullMesh failed with [/w/gloo/p.cc:152] timed out connecting: SO_ERROR: Connection refused"
    slow, gone, unconnected = (str(as_lost_peer(RuntimeError(text))) for text in (*errors, refused))
    assert slow.endswith("complete); run.stuck_after_s sets how long ranks wait for one that works alone")
    assert gone.endswith("(Connection closed by peer)")
    assert unconnected.endswith("see its own error (timed out connecting: SO_ERROR: Connection refused)")


def test_a_thread_that_one_rank_does_not_get_is_a_sentence_on_all() -> None:
    def start() -> None:
        raise RuntimeError("can't start new thread")

    with open_world(Device.cpu, 1) as world, pytest.raises(UserError, match="starts no further thread or process"):
        world.agree(start)
