"""What --dry-run says, of machines that are not here."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from launch import ROOT, fork_train, run_recsys

from recsys.config import load_config
from recsys.config.topology import num_bytes
from recsys.errors import UserError
from recsys.memory import trace
from recsys.memory.data_facts import data_facts
from recsys.memory.dry_run import as_json, dry_run, format_dry_run, rehearse_run
from recsys.memory.tensors import storage_bytes
from recsys.memory.trace import LivePeak, rehearse
from recsys.models.two_tower import TwoTower
from recsys.runtime.machine import Topology, topology_of
from recsys.runtime.world import rehearse_world
from recsys.tables.bytes import cache_bytes, shard_bytes
from recsys.tables.spec import Shard

CPU = torch.device("cpu")
GPUS = [
    "topology.world_size=64",
    "topology.local_world_size=8",
    "topology.device=cuda",
    "topology.device_memory=80GiB",
    "topology.host_memory=1TiB",
]


def write(path: Path, num_tables: int, rows: int, **table: Any) -> Path:
    content = {
        "data": {"train": "/no/such/place", "label_column": "label"},
        "features": {
            **{f"f{i}": {"table": f"t{i}"} for i in range(num_tables)},
            "list": {"table": "t0", "max_length": 20},
            "price": {"type": "float"},
        },
        "tables": {f"t{i}": {"num_embeddings": rows, "embedding_dim": 128, **table} for i in range(num_tables)},
        "model": {"name": "dlrm", "bottom_mlp": [64], "top_mlp": [256, 128]},
        "train": {"global_batch_size": 65536},
    }
    path.write_text(yaml.safe_dump(content))
    return path


def test_ten_terabytes_on_64_gpus(tmp_path: Path) -> None:
    """26 tables in host memory, cached on the GPUs: a quarter of 10 TB fits into 8 machines of 1 TiB."""
    path = write(tmp_path / "c.yaml", 26, 750_000_000, compute_kernel="fused_uvm_caching", cache_load_factor=0.05)
    smaller = [f"tables.t{i}.{each}" for i in range(26) for each in ("data_type=FP16", "num_embeddings=375000000")]
    page = run_recsys("dry-run", path, *GPUS, *smaller, f"run.dir={tmp_path}/run")
    assert page.startswith("# Fits: the ") and "global batch of 65,536 rows" in page
    assert "max_length or 1" in page
    found = json.loads((tmp_path / "run" / "memory" / "dry_run.json").read_text())
    weights = sum(b["host_weight"] for rank in found["ranks"] for b in rank["tables"].values())
    assert weights == 26 * 375_000_000 * 128 * 2
    assert found["largest_global_batch_size"] > 65536 and found["data"]["mean_ids"]["list"] == 20


@pytest.mark.slow
def test_ten_terabytes_are_made_to_fit(tmp_path: Path) -> None:
    """Neither GPUs nor hosts are enough alone: memory.fit moves as many tables as must go to the hosts."""
    path = write(tmp_path / "c.yaml", 26, 750_000_000)
    for kernel, where in (("fused", "the GPU of rank 0 (step)"), ("fused_uvm", "the host memory of machine 0")):
        kernels = [f"tables.t{i}.compute_kernel={kernel}" for i in range(26)]
        done = fork_train(str(path), "--dry-run", *GPUS, *kernels)
        assert done.returncode == 1 and done.stdout.startswith(f"# DOES NOT FIT: {where} would take ")
        assert "Traceback" not in done.stderr
    run_recsys("dry-run", path, *GPUS, "memory.fit=true", f"run.dir={tmp_path}/run")
    found = json.loads((tmp_path / "run" / "memory" / "dry_run.json").read_text())
    kernels = {shard["table"]: shard["compute_kernel"] for shard in found["shards"]}
    assert 13 <= sum(kernel == "fused_uvm_caching" for kernel in kernels.values()) < 26
    assert found["fits"] and found["largest_global_batch_size"] >= 65536


@pytest.mark.slow
def test_two_hundred_tables(tmp_path: Path) -> None:
    """With torchrec's own proposers this takes minutes, and past the limit of `run_recsys`."""
    page = run_recsys("dry-run", write(tmp_path / "c.yaml", 200, 20_000_000), *GPUS, "model.interaction=dot")
    assert "t199 " in page or "more" in page


def test_layers_are_counted_on_all_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, calls, bmm = load_config(write(tmp_path / "c.yaml", 26, 1000)), [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *tensors: calls.append(tensors) or bmm(*tensors))
    with rehearse_world(1, 1, CPU):
        page = trace.layer_page(config, data_facts(config, None, 1), 65536)
    assert len(calls) == 1  # in blocks of rows, as on CPUs, 200 tables took a third of their dry run
    assert f"| {2 * 65536 * 256 * (128 + 28 * 27 // 2):,} |" in page  # of the first layer behind the pairs


def test_this_machine_without_topology() -> None:
    page = run_recsys("train", "configs/dlrm_sample.yaml", "--dry-run")
    assert page.startswith("# Fits: the host memory of machine 0 would take ") and "this machine's" in page
    assert "on 1 × cpu" in page and "the first" in page and "| top.0 | Linear |" in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["topology.device=cuda"], "'topology.device_memory' is not set, and there is no GPU here"),
        (["topology.host_memory=80Gb per node"], "'topology.host_memory' must be a size above 0"),
        (["topology.world_size=8", "topology.local_world_size=3"], "must divide topology.world_size=8"),
        (["topology.world_sise=8"], "did you mean 'topology.world_size'?"),
    ],
)
def test_mistakes(options: list[str], said: str) -> None:
    assert said in run_recsys("dry-run", "configs/dlrm_sample.yaml", *options, status=1)


@pytest.mark.slow
def test_memory_of_other_machines_is_not_that_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a machine of 2 GiB here: what is not given decides nothing, and the page says how much is needed."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=2 << 30))
    tables = ["tables.t0.sharding_type=table_wise", "tables.t1.sharding_type=table_wise"]
    path = write(tmp_path / "c.yaml", 2, 40_000_000)
    gpus = ["topology.world_size=8", "topology.device=cuda", "topology.device_memory=80GiB"]
    found = rehearse_run(load_config(path, [*gpus, *tables]))
    page = format_dry_run(found)
    first = page.splitlines()[0]
    assert first.startswith("# Fits: the GPU of rank ") and " GiB of 80.0 GiB; the largest global batch" in first
    assert "host memory not given: " in page and "a machine would be needed" in page
    assert as_json(found)["topology"]["host_bytes"] is None and not found.misfits
    assert "- No table is on ranks 2-7; " in page and "| kind | rank 0 | rank 1 | ranks 2-7 |" in page
    assert "| table weight | 19.1 GiB | 19.1 GiB | 0 |" in page
    cpus = format_dry_run(rehearse_run(load_config(path, ["topology.world_size=2"])))
    assert "- Data is decoded by 12 " in page and "data.num_threads" not in cpus
    page = format_dry_run(rehearse_run(load_config(path, [*gpus, *tables, "topology.host_memory=16GiB"])))
    assert page.startswith("# DOES NOT FIT: the host memory of machine 0 would take ") and "no batch fits" in page
    assert "- Too full: the host memory of machine 0\n" in page
    assert cpus.startswith("# Host memory not given: ") and "a machine would be needed" in cpus.splitlines()[0]
    budget = format_dry_run(rehearse_run(load_config(path, ["topology.world_size=2", "memory.budget=1GiB"])))
    assert budget.startswith("# DOES NOT FIT: the process of rank ") and " of 1.00 GiB" in budget
    assert "- Too full: the processes of ranks 0-1\n" in budget
    assert "(this machine's)" not in budget


@pytest.mark.parametrize(
    "change",
    [
        "data.filter=pricee > 1",
        *(
            pytest.param(change, marks=pytest.mark.slow)
            for change in ("data.train=/no/such/place", "data.label_column=device")
        ),
    ],
)
def test_what_keeps_data_from_being_read_is_told(change: str) -> None:
    """The page predicts for data that may be elsewhere, and says what a run would be refused for."""
    page = format_dry_run(rehearse_run(load_config(ROOT / "configs/dlrm_sample.yaml", [change])))
    assert "max_length or 1, since the data cannot be read here (config key 'data." in page


def test_sizes() -> None:
    sizes = {"80GiB": 80 << 30, "1.5 TB": 1_500_000_000_000, "2e3": 2000, 4096: 4096, "1tib": 1 << 40}
    assert {text: num_bytes("key", text) for text in sizes} == sizes
    for wrong in ("GiB", "-1GiB", "3 apples", True, None, 0):
        with pytest.raises(UserError, match="must be a size above 0"):
            num_bytes("key", wrong)
    with pytest.raises(UserError, match=r"'memory\.budget' must be a size above 0"):
        load_config(ROOT / "configs/dlrm_sample.yaml", ["memory.budget=0"])


def test_a_run_and_its_dry_run_have_one_plan(tmp_path: Path) -> None:
    options = ("configs/dlrm_sample.yaml", "data.valid=null", "data.test=null", f"run.dir={tmp_path}")
    run_recsys("train", *options, "train.max_steps=2", nproc=2)
    found = rehearse_run(load_config(options[0], [*options[1:], "topology.world_size=2", "topology.device=cpu"]))
    plan = json.loads((tmp_path / "plan.json").read_text())["shards"]
    assert [json.loads(json.dumps(asdict(shard))) for shard in found.shards] == plan


def test_kernels_lay_tables_out_as_fbgemm_does(tmp_path: Path) -> None:
    """Formulas of split_table_batched_embeddings_ops_training.py, by hand."""
    path = write(tmp_path / "c.yaml", 2, 1000)
    config = load_config(path, ["tables.t0.data_type=FP8", "tables.t1.data_type=FP16"])
    fp8 = shard_bytes(config, "t0", 1000, 128, "fused")
    assert fp8.device_weight == 1000 * 128 and fp8.device_optimizer == 1000 * 4  # no scale; FP32 state by row
    uvm = shard_bytes(config, "t1", 1000, 128, "fused_uvm_caching")
    assert (uvm.host_weight, uvm.device_weight) == (1000 * 128 * 2, 0)
    assert (uvm.host_optimizer, uvm.device_optimizer) == (0, 1000 * 4)  # state by row stays on the device
    adam = load_config(path, ["optimizer.tables.name=adam"])
    uvm = shard_bytes(adam, "t1", 1000, 128, "fused_uvm")
    assert uvm.host_optimizer == 2 * 1000 * 128 * 4 and uvm.device_optimizer == 0
    half = load_config(path, ["optimizer.tables.name=partial_rowwise_adam", "optimizer.tables.state_dtype=BF16"])
    assert shard_bytes(half, "t1", 1000, 128, "fused").device_optimizer == 1000 * 128 * 2 + 1000 * 4
    shards = [Shard("t1", 0, (0, 0), (1000, 128), "table_wise", "fused_uvm_caching")]
    cache = cache_bytes(config, shards)
    # 0.2 * 1000 rows in sets of 32: 7 sets, 224 slots.
    assert cache.device_cache == 224 * 128 * 2
    assert cache.device_metadata == 224 * (8 + 8) + 1000 * 4


def test_tables_that_are_looked_up_id_by_id_have_caches_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", 3, 1000, compute_kernel="fused_uvm_caching")
    config = load_config(path, ["model.attention={list: f0}", "tables.t0.embedding_dim=16"])
    assert config.unpooled_tables() == {"t0"}
    pieces = [Shard(f"t{i}", 0, (0, 0), (1000, 128 if i else 16), "table_wise", "fused_uvm_caching") for i in range(3)]
    # In sets of 32 slots, 0.2 * 1000 rows take 7 and 0.2 * 2000 take 13; those of t1 and t2 are 128 wide.
    assert cache_bytes(config, pieces).device_cache == 224 * 16 * 4 + 416 * 128 * 4


def test_micro_batches_and_checkpointing_take_less(tmp_path: Path) -> None:
    path, sizes = write(tmp_path / "c.yaml", 8, 1000), {}
    for name, options in {
        "whole": [],
        "micro": ["train.micro_batch_size=2048"],
        "checkpointing": ["train.activation_checkpointing=true"],
        "half": ["train.global_batch_size=8192"],
    }.items():
        layers = "model.top_mlp=[512, 512, 512, 512]"  # fewer keep less than what dot products take beside them
        config = load_config(path, ["train.global_batch_size=16384", layers, *options])
        with rehearse_world(1, 1, torch.device("cpu")):
            facts = rehearse(config, data_facts(config, None, 1), config.train.global_batch_size, CPU)
        sizes[name] = facts.step_bytes
    assert sizes["micro"] < sizes["checkpointing"] < sizes["whole"]
    assert abs(sizes["half"] / sizes["whole"] - 0.5) < 0.02


@pytest.mark.slow
def test_few_pieces_of_a_softmax_show_the_peak_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    two_towers = ["data.label_column=null", "data.train=nowhere", "model.logq_correction=false"]
    config = load_config("configs/two_tower_movielens.yaml", two_towers)
    calls = 0

    class Counted(LivePeak):
        def __torch_dispatch__(self, *arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            return super().__torch_dispatch__(*arguments, **options)

    monkeypatch.setattr(trace, "LivePeak", Counted)
    traced = {}
    with rehearse_world(8, 8, CPU):
        data = data_facts(config, None, 8)
        for rows in (512, 8192):
            calls = 0
            few = rehearse(config, data, rows, CPU)
            traced[rows] = calls
            on_gpu = rehearse(config, data, rows, torch.device("cuda"))
            assert on_gpu.step_bytes >= few.step_bytes + (
                100 << 20 if rows == 8192 else 0
            )  # it makes more scores at once
        with monkeypatch.context() as patch:
            patch.setattr(TwoTower, "rehearse", lambda *_: None)
            calls = 0
            assert rehearse(config, data, rows, CPU).step_bytes == few.step_bytes
    assert traced[8192] == traced[512] < calls / 4
    with rehearse_world(1, 1, CPU):
        config = replace(config, train=replace(config.train, micro_batch_size=64))
        few = rehearse(config, data, 64 * 32, CPU)
        with monkeypatch.context() as patch:
            patch.setattr(trace, "_MOST_TRACED", 64)
            assert 1 <= few.step_bytes / rehearse(config, data, 64 * 32, CPU).step_bytes < 1.2


def test_a_prediction_leaves_no_fake_tensors_behind() -> None:
    config = load_config("configs/dlrm_sample.yaml", ["topology.device=cpu"])
    rehearse_run(config)
    from recsys.models import DenseInputs
    from recsys.models.dlrm import DLRM

    model = DLRM(config.model, DenseInputs({"a": 8, "b": 8}, [], config.labels()))
    model({"a": torch.ones(2, 8), "b": torch.ones(2, 8)}, torch.empty(2, 0)).sum().backward()


def test_more_ranks_share_out_the_tables(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", 4, 100_000, sharding_type="row_wise")
    config = load_config(path, ["topology.world_size=4", "topology.device=cpu"])
    found = rehearse_run(config)
    assert {rank.phases["step"]["host"]["table_weight"] for rank in found.prediction.ranks} == {4 * 25_000 * 128 * 4}


def test_replicas_are_made_alike_in_copies(tmp_path: Path) -> None:
    path, found = write(tmp_path / "c.yaml", 2, 50_000, sharding_type="data_parallel"), {}
    for name in ("sgd", "adagrad"):
        config = load_config(path, ["topology.world_size=2", "topology.device=cpu", f"optimizer.tables.name={name}"])
        found[name] = rehearse_run(config).prediction.ranks[1].phases["init"]["host"]
    weights = 2 * 50_000 * 128 * 4
    assert found["sgd"]["collective_copies"] == found["sgd"]["table_weight"] == weights
    assert "collective_copies" not in found["adagrad"]  # its state, made after them, takes as much


def test_copies_for_the_background_hold_the_dense_part_too() -> None:
    options = ["topology.world_size=2", "topology.device=cpu", "train.async_checkpoints=true"]
    options += ["model.top_mlp=[2048,2048]"]
    saves = [], ["train.checkpoint_every_steps=10"], ["train.early_stop.metric=auc", "train.eval_every_epochs=1"]
    for on_the_way in saves:
        found = rehearse_run(load_config("configs/dlrm_sample.yaml", [*options, *on_the_way]))
        for rank in found.prediction.ranks:
            host = rank.phases["save"]["host"]
            kinds = ("table_weight", "table_optimizer", "dense_parameter", "dense_optimizer")
            copies = sum(host.get(kind, 0) for kind in kinds)
            assert copies > 48 << 20
            # While one is written, training goes on, and an evaluation, such as that at the end.
            assert all(rank.phases[phase]["host"]["save_copies"] == copies for phase in ("save", "evaluation"))
            assert rank.phases["step"]["host"].get("save_copies", 0) == (copies if on_the_way else 0)


@pytest.mark.slow
def test_the_largest_batch_of_rows_beside_items_that_are_drawn_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small batch most rows are items, which have no history; of a large one hardly any are."""
    options = ("features.history.max_length=40", "memory.budget=4GiB")
    largest = rehearse_run(load_config("configs/simplex_movielens.yaml", options)).largest_batch
    assert largest
    monkeypatch.setattr("recsys.memory.dry_run.largest_batch", lambda *_: 0)  # which takes a while
    for rows, fits in ((largest, True), (int(1.05 * largest), False)):
        of_rows = load_config("configs/simplex_movielens.yaml", [*options, f"train.global_batch_size={rows}"])
        assert bool(rehearse_run(of_rows).misfits) != fits, rows


@pytest.mark.slow
def test_the_largest_batch_of_towers_is_found_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their loss compares the rows of large batches piece by piece, so that what few rows take foretells too little."""
    steps = []

    def counted(*arguments: Any) -> Any:
        steps.append(arguments)
        return rehearse(*arguments)

    monkeypatch.setattr(trace, "rehearse", counted)
    options = ["topology.device=cuda", "topology.device_memory=80GiB"]
    largest = rehearse_run(load_config("configs/two_tower_sample.yaml", options)).largest_batch
    assert largest and len(steps) <= 20
    monkeypatch.undo()
    monkeypatch.setattr("recsys.memory.dry_run.largest_batch", lambda *_: 0)
    for rows, fits in ((largest, True), (int(1.05 * largest), False)):
        of_rows = load_config("configs/two_tower_sample.yaml", [*options, f"train.global_batch_size={rows}"])
        assert bool(rehearse_run(of_rows).misfits) != fits, rows


def test_publishing_marks_rows_and_gathers_them(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", 2, 100_000)
    options = ["topology.device=cpu", f"train.publish={{dir: {tmp_path}/published, every_steps: 10}}"]
    for ranks, copies in ((1, 4), (2, 6)):
        config = load_config(path, [*options, f"topology.world_size={ranks}"])
        first, *others = [rank.phases["save"]["host"] for rank in rehearse_run(config).prediction.ranks]
        assert sum(host["touched_rows"] for host in (first, *others)) == 2 * 100_000
        assert first["published_rows"] == copies * 8 << 20 and "published_rows" not in (others or [{}])[0]


def test_gpus_have_the_optimizers_that_this_machine_lacks() -> None:
    options = ["topology.device=cuda", "topology.device_memory=80GiB", "optimizer.tables.name=adam"]
    in_fp32 = ["optimizer.tables.weight_decay=0.1", "tables.item.data_type=FP32"]  # as FBGEMM has Adam with decay
    options += ["optimizer.dense.momentum=0.9"]
    found = rehearse_run(load_config("configs/dlrm_sample.yaml", [*options, *in_fp32]))
    assert not found.misfits
    assert found.instead == ["optimizer.dense.momentum=0.9 changes nothing with optimizer.dense.name=adam"]


def test_live_peak_counts_what_lives_at_once() -> None:
    x = torch.ones(1000)
    with LivePeak([x]) as live:
        y = x * 2  # 4,000 bytes
        z = y.view(10, 100)  # the same memory
        del y
        w = z + 1  # 8,000 together
        del z
        w.add_(1)
    assert (live.peak, live.live) == (8000, 4000)
    assert storage_bytes([w, w[:10]]) == 4000


def test_topology_of_this_machine() -> None:
    topology = topology_of(load_config("configs/dlrm_sample.yaml", ["run.device=cpu"]))
    assert isinstance(topology, Topology) and (topology.world_size, topology.device_bytes) == (1, 0)
    assert topology.host_bytes > 1 << 30
    facts = data_facts(load_config("configs/dlrm_sample.yaml"), None, 1)
    assert facts.mean_ids["history"] == 10


def test_steps_before_the_first_evaluation_hold_nothing_of_one() -> None:
    """Without train.eval_every_* there is one at the end; from the second on, blocks of the first are kept."""
    found = {}
    for key, value in (("valid", "null"), ("epochs", "5"), ("eval_every_steps", "5"), ("eval_every_epochs", "1")):
        room = "data" if key == "valid" else "train"
        config = load_config(
            ROOT / "configs/dlrm_sample.yaml", ["topology.device=cpu", "data.test=null", f"{room}.{key}={value}"]
        )
        (rank,) = rehearse_run(config).prediction.ranks
        found[key] = {phase: sum(kinds["host"].values()) for phase, kinds in rank.phases.items()}
    assert found["epochs"]["step"] == found["valid"]["step"] and found["epochs"]["save"] == found["valid"]["save"]
    for phase in ("step", "save"):
        assert found["eval_every_steps"][phase] == found["eval_every_epochs"][phase] > found["epochs"][phase]
    assert len({found[key]["evaluation"] for key in found if key != "valid"}) == 1


def test_a_page_that_cannot_be_written_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    config = load_config(ROOT / "configs/dlrm_sample.yaml", [f"run.dir={tmp_path}/file/run"])
    monkeypatch.setattr("recsys.memory.dry_run.rehearse_run", lambda *_: None)
    monkeypatch.setattr("recsys.memory.dry_run.format_dry_run", lambda _: "")
    with pytest.raises(UserError, match=r"'run\.dir': cannot write to '.*' \(Not a directory\); name another folder"):
        dry_run(config)
