"""What is changed so that a run fits into memory, and what is told when it does not."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import losses_of, run_recsys, run_train

from recsys.config import Config, ShardingChoice, load_config
from recsys.config.choices import ComputeKernel, DataType, Saver
from recsys.config.device import check_device
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.memory import BudgetExceeded, DataFacts, Decoding, Timeline, autofit
from recsys.memory.advice import Explained, advise
from recsys.memory.autofit import Fitter
from recsys.memory.dry_run import _fit, as_json, format_dry_run, rehearse_run
from recsys.memory.levers import LEVERS, Change, _row_wise_state, with_changes
from recsys.runtime.logs import quiet_libraries
from recsys.runtime.machine import topology_of
from recsys.runtime.world import rehearse_world

CONFIG = "configs/dlrm_sample.yaml"
FACTS = DataFacts(
    mean_ids=dict.fromkeys(("user_id", "item_id", "history", "category", "device", "hour"), 1.0),
    id_bytes=4,
    window_bytes=64 << 20,
    decoding=(Decoding(later=32 << 20),) * 8,
    eval_rows={},
    source="made up",
)
HOST = ("topology.host_memory=2GiB",)
# Layers so wide that activations are most of what a step takes.
WIDE = ("model.top_mlp=[1024,1024]", "train.global_batch_size=65536")


def fitted(allowed: tuple[Saver, ...], *options: str) -> tuple[Config, Any]:
    quiet_libraries()
    config = load_config(CONFIG, options)
    topology = topology_of(config)
    with rehearse_world(topology.world_size, topology.local_world_size, topology.device):
        return config, Fitter(config, FACTS, topology).fit(allowed)


def keys(found: Any) -> list[str]:
    return [key for change in found.changes for key in change.settings]


def test_what_fits_is_left_alone() -> None:
    config, found = fitted(tuple(Saver), "memory.budget=100GiB")
    assert found.changes == [] and found.config == config and found.before == found.after and not found.missing


def test_activations_are_split_before_anything_else() -> None:
    _, found = fitted(tuple(Saver), *WIDE, "memory.budget=900MiB")
    assert keys(found) == ["train.micro_batch_size"] and not found.missing
    assert found.after < 0.95 * 900 * 2**20 < found.before
    # The weakest that is enough: twice as many rows are too many.
    rows = found.config.train.micro_batch_size
    _, twice = fitted((), *WIDE, f"train.micro_batch_size={2 * rows}", "memory.budget=100GiB")
    assert twice.after > 0.95 * 900 * 2**20


@pytest.mark.slow
def test_nothing_that_changes_what_is_learned_is_chosen_unasked() -> None:
    big = ("tables.user.num_embeddings=20000000", "optimizer.tables.name=adagrad", "memory.budget=1300MiB")
    config, found = fitted((), *big)
    assert found.missing > 0 and all(change.saver is None for change in found.changes)
    assert found.config.tables == config.tables
    _, allowed = fitted((Saver.row_wise_state, Saver.fp16_tables), *big)
    assert not allowed.missing and allowed.config.tables["user"].data_type.name == "FP16"
    assert allowed.config.optimizer.tables.name.name == "rowwise_adagrad"
    # What the others do without is not changed.
    assert set(keys(allowed)) <= {"optimizer.tables.name", *(f"tables.{name}.data_type" for name in config.tables)}


def test_ranks_share_out_the_dense_optimizer() -> None:
    wide = ("model.top_mlp=[4096,4096]", "train.global_batch_size=64", "topology.world_size=4")
    ranks = ("topology.local_world_size=1", "topology.device=cpu")
    _, found = fitted((), *wide, *ranks, "memory.budget=880MiB")
    assert keys(found) == ["train.dense_sharding"] and not found.missing
    # Of Adam's two numbers for each weight a quarter stays.
    assert found.before - found.after == pytest.approx(8 * 4096**2 * 3 / 4, rel=0.05)
    _, found = fitted((), *wide, *ranks, "memory.budget=880MiB", "optimizer.dense.name=lamb")
    assert "train.dense_sharding" not in keys(found)


@pytest.mark.slow
@pytest.mark.parametrize("budget_mib", [1020, 1080, 1140])
def test_a_budget_is_that_of_each_rank(budget_mib: int) -> None:
    """The fullest has to keep it, whatever the others have left."""
    whole = [f"tables.{name}.sharding_type=table_wise" for name in ("user", "item", "category", "device", "hour")]
    ranks = ("topology.world_size=2", "topology.local_world_size=2", "topology.device=cpu")
    large = ("tables.user.num_embeddings=20000000", *whole, *ranks, f"memory.budget={budget_mib}MiB")
    _, found = fitted((), *large)
    assert found.before > budget_mib << 20 and not found.missing
    assert keys(found) and found.after <= 0.95 * (budget_mib << 20)
    places = rehearse_run(load_config(CONFIG, [*large])).misfits
    assert len(places) == 1 and places[0].startswith("the process of rank ")


def test_a_table_that_a_plan_keeps_whole_is_spread() -> None:
    """A plan sees that the tables fit, and not what else the rank holds; the smaller ones stay where they are."""
    ranks = ("topology.world_size=2", "topology.device=cpu", "memory.budget=1020MiB")
    config, found = fitted((), "tables.user.num_embeddings=20000000", *ranks)
    assert config.tables["user"].sharding_type is ShardingChoice.auto
    assert keys(found) == ["tables.user.sharding_type"] and not found.missing


def test_large_tables_of_gpus_go_to_host_memory() -> None:
    topology = (
        "topology.world_size=8",
        "topology.device=cuda",
        "topology.device_memory=16GiB",
        "topology.host_memory=500GiB",
    )
    _, found = fitted((), "tables.user.num_embeddings=5000000000", *topology)
    assert not found.missing and found.config.tables["user"].compute_kernel is ComputeKernel.fused_uvm_caching
    assert found.config.tables["item"].compute_kernel is ComputeKernel.fused


@pytest.mark.parametrize(("gib", "share"), [(8, 0.4), pytest.param(6, 0.2, marks=pytest.mark.slow), (4, 0.05)])
def test_caches_are_as_large_as_there_is_room_for(gib: int, share: float) -> None:
    """A table of 50 GiB on eight GPUs. What the cache lacks comes over the bus."""
    there = ("topology.device=cuda", f"topology.device_memory={gib}GiB", "topology.host_memory=500GiB")
    _, found = fitted((), "tables.user.num_embeddings=1500000000", "topology.world_size=8", *there)
    assert not found.missing and found.config.tables["user"].compute_kernel is ComputeKernel.fused_uvm_caching
    assert found.config.tables["user"].cache_load_factor == share
    assert found.after <= 0.95 * (gib << 30)


@pytest.mark.parametrize("options", [("tables.user.num_embeddings=800000000", "topology.host_memory=116GiB"), HOST])
def test_what_is_missing_is_told_of_the_place_that_is_short(options: tuple[str, ...]) -> None:
    """A table goes from a GPU that lacks memory to a host that then does; or a host lacks it from the start."""
    quiet_libraries()
    dims = [f"tables.{name}.embedding_dim=32" for name in ("user", "item", "category", "device", "hour")]
    small = [*dims, "train.global_batch_size=32"]
    config = load_config(CONFIG, ["topology.device=cuda", "topology.device_memory=80GiB", *small, *options])
    topology = topology_of(config)
    with rehearse_world(1, 1, topology.device):
        *_, told = _fit(config, FACTS, topology, None)
    assert told.missing
    if options == HOST:
        assert told.advice.count(" MiB of 2,048 MiB of host memory") == 2
        return
    assert [offer.saved > 60 << 30 for offer in told.changes] == [True]  # of the GPU, though the host is short now
    assert " of 81,920 MiB on its GPU, with what memory.fit may change " in told.advice
    assert " of 118,784 MiB of host memory, and " in told.advice


def test_longer_lists_of_smaller_windows_take_more_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is of fewer row groups at once then, which may all be those of the longest lists."""
    config = load_config(CONFIG, ["model.attention={history: item_id}", "train.global_batch_size=4096"])
    longer = replace(FACTS, most_ids={**FACTS.mean_ids, "history": 50.0})
    monkeypatch.setattr(autofit, "data_facts", lambda *_: longer)
    small = with_changes(config, [Change({"data.window_mib": 1}, "")])
    with rehearse_world(1, 1, topology_of(config).device):
        fitter, of_small = Fitter(config, FACTS, topology_of(config)), Fitter(small, longer, topology_of(small))
        assert fitter.fullest(config) < fitter.fullest(small) == of_small.fullest(small)


FAST = (TableOptimizer.rowwise_adagrad, TableOptimizer.adam)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(each, id=each.name, marks=[] if each in FAST else [pytest.mark.slow]) for each in TableOptimizer],
)
def test_no_change_of_a_gpu_run_is_refused_there(optimizer: TableOptimizer) -> None:
    """Such as to FP16 of tables in host memory that Adam trains, or to host memory of tables in FP16."""
    topology, tried = ("topology.device=cuda", "topology.device_memory=16MiB"), 0
    for kernel, data_type in itertools.product(ComputeKernel, DataType):
        settings = (f"tables.user.compute_kernel={kernel.name}", f"tables.user.data_type={data_type.name}")
        options = [*topology, *settings, "tables.user.init_range=0.1", f"optimizer.tables.name={optimizer.name}"]
        try:
            config = load_config(CONFIG, [*options, "tables.user.num_embeddings=1000000"])
            check_device(config, on_gpu=True)
        except UserError:
            continue
        for lever in LEVERS:
            for change in lever(config, topology_of(config)):
                check_device(with_changes(config, [change]), on_gpu=True)
                tried += 1
    assert tried


@pytest.mark.slow
def test_advice_names_what_is_enough_first() -> None:
    quiet_libraries()
    config = load_config(CONFIG, [*WIDE, "memory.budget=900MiB"])
    topology = topology_of(config)
    with rehearse_world(1, 1, topology.device):
        fitter = Fitter(config, FACTS, topology)
        advice = fitter.advice()
        assert advice and fitter.missing(config)
        for offer in advice:
            saved = fitter.fullest(config) - fitter.fullest(with_changes(config, [offer.change]))
            assert saved == offer.saved > 0 and not offer.missing
            assert not fitter.missing(with_changes(config, [offer.change]))
        assert fitter.holders()[0][0] == "activations"


@pytest.mark.slow
def test_advice_that_is_not_enough_says_so() -> None:
    quiet_libraries()
    config = load_config(CONFIG, ["model.top_mlp=[20000,20000]", "memory.budget=900MiB"])
    topology = topology_of(config)
    with rehearse_world(1, 1, topology.device):
        advice = advise(config, FACTS, topology)
        assert advice.missing > 3 << 30 and not advice.first_is_enough
        assert all(
            offer.missing and "not enough" in line
            for offer, line in zip(advice.offers, advice.lines()[1:-1], strict=True)
        )
        assert "no setting is enough: " in advice.lines()[-1]


def test_a_budget_below_what_a_process_takes_is_told_so() -> None:
    """Neither settings nor more ranks make a process smaller than its libraries."""
    quiet_libraries()
    config = load_config(CONFIG, ["memory.budget=300MiB"])
    topology = topology_of(config)
    with rehearse_world(1, 1, topology.device):
        advice = advise(config, FACTS, topology)
    takes, may_take = advice.process
    assert takes > may_take == int(0.95 * (300 << 20))
    assert "nor are more ranks: a process takes" in advice.lines()[-1]
    larger = replace(advice, process=(takes, takes))
    assert "more ranks, or smaller tables" in larger.lines()[-1]


def test_advice_goes_by_what_this_process_took_at_its_start() -> None:
    """Not by what one takes elsewhere, in which an interpreter and libraries may be larger or smaller."""
    config = load_config("configs/dlrm_sample.yaml", ["memory.budget=900MiB"])
    with rehearse_world(1, 1, torch.device("cpu")) as world:
        timeline = Timeline(world.device)
        timeline.baseline_bytes = 1 << 30
        told = pytest.raises(UserError, match=r"a process takes 1,0[5-9]\d MiB before it holds")
        with told, Explained(config, world, timeline):
            raise BudgetExceeded("this process has used 1,100 MiB")
        timeline.close()


@pytest.mark.parametrize("machine", [(), ("topology.device=cuda", "topology.device_memory=1GiB")])
@pytest.mark.parametrize(
    "options",
    [
        ("optimizer.tables.name=adagrad", "tables.user.sharding_type=column_wise"),
        ("data.num_streams=100", "train.eval_batch_size=1000"),
        ("optimizer.tables.name=adagrad", "tables.item.sparsity.l1=0.001", "tables.user.optimizer.name=adagrad"),
        ("optimizer.tables.name=adam", "tables.item.sharding_type=data_parallel", "tables.user.optimizer.name=adagrad"),
    ],
)
def test_every_change_is_one_that_a_config_may_have(options: tuple[str, ...], machine: tuple[str, ...]) -> None:
    """Advice is typed in as overrides, and what memory.fit has chosen is read again from RUN/config.yaml."""
    config = load_config(CONFIG, [*options, *machine])
    topology = topology_of(config)
    changes = [list(lever(config, topology))[-1:] for lever in LEVERS]
    assert len([change for last in changes for change in last]) >= 6
    for change in (change for last in changes for change in last):
        assert load_config(CONFIG, [*options, *machine, *str(change).split()]) == with_changes(config, [change])


@pytest.mark.parametrize("of_item", ["sharding_type=data_parallel", "sparsity.l1=0.001"])
def test_row_wise_state_is_for_the_tables_that_may_have_it(of_item: str) -> None:
    options = ("optimizer.tables.name=adam", f"tables.item.{of_item}", "tables.user.optimizer.name=adam")
    config = load_config(CONFIG, [*options, "topology.device=cuda", "topology.device_memory=1GiB"])
    (change,) = _row_wise_state(config, topology_of(config))
    assert str(change) == "tables.user.optimizer.name=partial_rowwise_adam"


@pytest.mark.slow
def test_advice_covers_what_a_rank_was_seen_to_take() -> None:
    quiet_libraries()
    config = load_config(CONFIG, [*WIDE, "memory.budget=2GiB"])
    topology = topology_of(config)
    with rehearse_world(1, 1, topology.device):
        plain, seen = advise(config, FACTS, topology), advise(config, FACTS, topology, seen_bytes=2100 << 20)
    assert not plain.missing and "by the prediction everything fits" in plain.lines()[-1]
    assert seen.missing > 50 << 20 and seen.first_is_enough and seen.offers[0].saved >= seen.missing


@pytest.mark.slow
def test_a_dry_run_fits_too() -> None:
    found = rehearse_run(load_config(CONFIG, [*WIDE, "memory.budget=900MiB"]))
    assert found.misfits and "- memory.fit=true looks for settings that fit\n" in format_dry_run(found)
    found = rehearse_run(load_config(CONFIG, [*WIDE, "memory.budget=900MiB", "memory.fit=true"]))
    assert not found.misfits and found.config.train.micro_batch_size is not None
    told, page = as_json(found), format_dry_run(found)
    assert told["missing_bytes"] == 0 and f"memory.fit: {told['changes'][0]['settings']} saves " in page


def test_a_dry_run_that_nothing_fits_says_what_would_be_enough() -> None:
    """And that what memory.fit has found is not: it looked as if it were."""
    quiet_libraries()
    options = ["tables.user.num_embeddings=20000000", "optimizer.tables.name=adagrad", "memory.budget=1500MiB"]
    config = load_config(CONFIG, [*options, "train.global_batch_size=64"])
    with rehearse_world(1, 1, topology_of(config).device):
        *_, found = _fit(config, FACTS, topology_of(config), None)
        *changes, told = found.sentences()
        assert found.missing > 0 and len(changes) == len(found.changes) > 0
        for line, offer in zip(changes, found.changes, strict=True):
            assert line.startswith(f"memory.fit: {offer.change} saves ") and "which is not enough (" in line
            assert offer.saved >= 0
        assert "missing over all ranks; memory.allow=[row_wise_state] would be enough: otherwise" in told
        config = replace(config, memory=replace(config.memory, allow=tuple(found.allow)))
        *_, found = _fit(config, FACTS, topology_of(config), None)
        (line,) = found.sentences()
    assert not found.missing and found.allow == [] and line.endswith("; what is learned changes)")
    assert found.changes[0].saved == pytest.approx(20_000_000 * 7 * 4, rel=0.01)


# Tables are what takes most here, which predictions know to the byte.
LARGE = ("tables.user.embedding_dim=32", "optimizer.tables.name=adagrad")
SHORT = ("train.max_steps=3", "train.log_every_steps=1", "data.valid=null", "data.test=null")


@pytest.mark.slow
def test_tables_that_are_too_large_are_told_with_what_helps(tmp_path: Path) -> None:
    rows = 6_000_000
    options = (f"tables.user.num_embeddings={rows}", *LARGE, *SHORT, "memory.budget=1450MiB")
    told = run_recsys("train", CONFIG, f"run.dir={tmp_path}/short", *options, status=1)
    assert "the tables fit under no plan" in told and f"table user {rows * 32 * 8 / 2**20:,.0f} MiB" in told
    report = json.loads((tmp_path / "short/memory/rank_0.json").read_text())
    assert report["identity"]["status"] == "out of memory"
    assert "table user" in [holder["name"] for holder in report["out_of_memory"]["holders"][:2]]
    run_recsys("train", CONFIG, f"run.dir={tmp_path}/again", *options, *first_advice(told))


@pytest.mark.slow
def test_activations_that_are_too_large_are_told_with_what_helps(tmp_path: Path) -> None:
    options = ("model.top_mlp=[1024,1024]", "train.global_batch_size=65536", *SHORT, "memory.budget=1100MiB")
    done = run_train(CONFIG, f"run.dir={tmp_path}/short", *options)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "memory has run out in step, step 1: this process has used" in done.stderr
    report = json.loads((tmp_path / "short/memory/rank_0.json").read_text())
    assert report["identity"]["status"] == "out of memory" and report["phases"]["step"]["measured_bytes"] > 0
    assert report["out_of_memory"]["holders"][0]["name"] == "activations"
    assert "train.micro_batch_size" in report["out_of_memory"]["advice"][0]["settings"]
    run_recsys("train", CONFIG, f"run.dir={tmp_path}/again", *options, *first_advice(done.stderr))


def first_advice(text: str) -> list[str]:
    """Return the settings of the first advice, which must be enough."""
    advice = next(line for line in text.splitlines() if line.strip().startswith("1. "))
    assert "which is enough" in advice and ("what is learned changes" in advice) == (
        "data_type" in advice or "optimizer.tables" in advice
    )
    return advice.split(" saves ")[0].split("1. ")[1].split()


@pytest.mark.slow
def test_a_run_that_fits_itself_learns_the_same(tmp_path: Path) -> None:
    losses = {}
    for name, options in (
        ("plain", ()),
        ("fitted", ("memory.budget=700MiB", "memory.fit=true")),
    ):
        run_dir = tmp_path / name
        wide = ("model.top_mlp=[1024,1024]", "train.global_batch_size=16384", "train.epochs=40")
        run_recsys("train", CONFIG, f"run.dir={run_dir}", *wide, *SHORT, *options)
        losses[name] = losses_of(run_dir)
        result = json.loads((run_dir / "result.json").read_text())
        assert bool(result["fitted"]) == (name == "fitted")
        assert ("micro_batch_size: null" in (run_dir / "config.yaml").read_text()) == (name == "plain")
    assert losses["fitted"] == pytest.approx(losses["plain"], abs=1e-5)


@pytest.mark.slow
def test_a_run_that_nothing_fits_says_so(tmp_path: Path) -> None:
    options = ("tables.user.num_embeddings=4000000", *LARGE, *SHORT, "memory.budget=600MiB", "memory.fit=true")
    told = run_recsys("train", CONFIG, f"run.dir={tmp_path}", *options, status=1)
    assert "config key 'memory.fit'" in told and "are missing" in told
