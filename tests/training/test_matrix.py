"""What the table of docs/tables.md says of the CPU: what trains there, what is refused, and what is done instead."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from fbgemm_gpu.tbe.ssd.utils.partially_materialized_tensor import PartiallyMaterializedTensor
from launch import ROOT, losses_of, must_train, run_recsys

from recsys.config import Config, load_config
from recsys.config.choices import ComputeKernel, DataType, DenseOptimizer, FloatType, ShardingChoice
from recsys.config.device import check_device
from recsys.config.schema import PrecisionConfig
from recsys.config.table_optimizers import TableOptimizer
from recsys.errors import UserError
from recsys.memory.dry_run import rehearse_run
from recsys.tables.shard import _sharders
from recsys.tables.spec import vector_type

CONFIG = "configs/dlrm_sample.yaml"
SHORT = ("train.max_steps=2", "data.valid=null", "data.test=null")
WIRES = ("precision.forward_wire", "precision.backward_wire")

TRAINS = {
    "fp16, fp16 sent": ["tables.user.data_type=FP16", f"{WIRES[0]}=FP16", f"{WIRES[1]}=FP16"],
    "fp16 given": ["precision.output_dtype=FP16", "tables.item.sharding_type=data_parallel"],
    "fp16 given by id": ["precision.output_dtype=FP16", "model.attention={history: item_id}"],
    "fp16 given and sent": ["precision.output_dtype=FP16", f"{WIRES[0]}=FP16", f"{WIRES[1]}=BF16"],
    "bf16 sent": [f"{WIRES[0]}=BF16", f"{WIRES[1]}=BF16", "tables.user.sharding_type=row_wise"],
}
TABLES = ("user", "item", "category", "device", "hour")
REFUSED = {
    "fp8": (["tables.user.data_type=FP8"], "'tables.user.data_type': FBGEMM trains FP8 on GPUs only; use FP16"),
    "rounding": (["tables.item.stochastic_rounding=true"], "'tables.item.stochastic_rounding'"),
    "decay": (["optimizer.tables.weight_decay=0.1"], "'optimizer.tables.weight_decay'"),
    "replicated by id": (
        ["model.attention={history: item_id}", "tables.item.sharding_type=data_parallel"],
        "'tables.item.sharding_type': model dlrm looks up feature 'history' id by id, which works with ",
    ),
    "several rows an id": (
        ["model.attention={history: item_id}", "tables.item.num_hashes=2"],
        "'tables.item.mapping' gives an id several rows",
    ),
    "vectors of two widths": (
        ["model.attention={history: user_id}", "tables.user.embedding_dim=4"],
        "'model.attention.history': its table has embedding_dim 8, but that of 'user_id' has 4",
    ),
    "lamb": (["optimizer.tables.name=lamb"], "'optimizer.tables.name': tables are trained on CPU by"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINS)
def test_trains(name: str, tmp_path: Path) -> None:
    run_recsys("train", CONFIG, f"run.dir={tmp_path}", *SHORT, *TRAINS[name], nproc=2)
    model = [option for option in TRAINS[name] if option.startswith("model.")]
    run_recsys("train", CONFIG, f"run.dir={tmp_path}/plain", *SHORT, *model, nproc=2)
    assert abs(losses_of(tmp_path)[0] - losses_of(tmp_path / "plain")[0]) < 1e-3


@pytest.mark.slow
def test_ranks_without_tables(tmp_path: Path) -> None:
    """Such a rank has no vectors to send; what torchrec gives in their place is FP32, whatever the others send."""
    options = ["precision.output_dtype=FP16", *(f"tables.{name}.sharding_type=table_wise" for name in TABLES)]
    losses = []
    for nproc in (6, 1):
        run_dir = tmp_path / str(nproc)
        run_recsys("train", CONFIG, f"run.dir={run_dir}", *SHORT, "train.log_every_steps=1", *options, nproc=nproc)
        losses.append(losses_of(run_dir)[:2])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    options, said = REFUSED[name]
    # The data are not there, and are not missed: what no data would change is told before any are opened.
    words = (f"run.dir={tmp_path}", "data.train=/no/such/place", *SHORT, *options)
    assert said in run_recsys("train", CONFIG, *words, status=1)


def test_another_kernel_is_said_once(tmp_path: Path) -> None:
    kernels = ("tables.user.compute_kernel=fused_uvm_caching", "tables.item.compute_kernel=fused_uvm")
    others = ("precision.tf32=true", "precision.output_dtype=BF16", "optimizer.dense.momentum=0.9")
    done = must_train(CONFIG, f"run.dir={tmp_path}", *SHORT, *kernels, *others, nproc=2)
    instead = json.loads((tmp_path / "result.json").read_text())["instead"]
    assert len(instead) == 4 and "tables.user.compute_kernel=fused_uvm_caching is fused" in instead[0]
    idle = "optimizer.dense.momentum=0.9 changes nothing with optimizer.dense.name=adam"
    assert all(done.stdout.count(text) + done.stderr.count(text) == 1 for text in (*instead, idle))


@pytest.mark.parametrize("wire", WIRES)
def test_vectors_that_are_not_sent_have_no_type_to_be_sent_in(wire: str) -> None:
    """One rank sends none, whatever it is on; what is said of others is said of several."""
    for kind in FloatType:
        config = load_config(ROOT / CONFIG, [f"{wire}={kind.name}"])
        said = [f"{wire}={kind.name} changes nothing on one rank"] * (kind is not FloatType.FP32)
        for on_gpu in (False, True):
            assert check_device(config, on_gpu) == said and not check_device(config, on_gpu, world_size=2)


def goes_through(given: torch.dtype, wires: tuple[FloatType, FloatType]) -> bool:
    """Return whether vectors and their gradients pass FBGEMM's codecs, as torchrec calls them in each exchange."""
    vectors = torch.ones(4, dtype=given)
    (sharder, _) = _sharders(Config(precision=PrecisionConfig(forward_wire=wires[0], backward_wire=wires[1])))
    try:
        for codecs in (sharder.qcomm_codecs_registry or {}).values():
            received = codecs.forward.decode(codecs.forward.encode(vectors))
            codecs.backward.decode(codecs.backward.encode(received.clone()))
    except (AssertionError, RuntimeError):
        return False
    return True


@pytest.mark.parametrize(
    "wires", [*product(FloatType, FloatType)], ids=lambda wires: "-".join(wire.name for wire in wires)
)
@pytest.mark.parametrize("given", FloatType)
def test_wires_that_vectors_do_not_go_through_are_refused(given: FloatType, wires: tuple[FloatType, FloatType]) -> None:
    options = [f"{key}={wire.name}" for key, wire in zip(WIRES, wires, strict=True)]
    config = load_config(ROOT / CONFIG, [f"precision.output_dtype={given.name}", *options])
    for on_gpu in (False, True):
        check_device(config, on_gpu)
        if goes_through(vector_type(config, on_gpu), wires):
            check_device(config, on_gpu, world_size=2)
            continue
        found = f"found {wires[0].name} and backward_wire={wires[1].name}; set it to {given.name}, or both to FP32"
        with pytest.raises(UserError, match=f"'{WIRES[0]}': .*output_dtype={given.name} .*{found}"):
            check_device(config, on_gpu, world_size=2)


def test_a_dry_run_refuses_such_wires_for_several_ranks() -> None:
    config = load_config(ROOT / CONFIG, ["precision.output_dtype=FP16", f"{WIRES[0]}=BF16", "topology.world_size=2"])
    with pytest.raises(UserError, match=f"'{WIRES[0]}': .* as FP16, or with both wires FP32, found BF16"):
        rehearse_run(config)


def test_the_table_names_every_choice() -> None:
    page = (ROOT / "docs" / "tables.md").read_text()
    table = page[page.index("## What trains where") : page.index("Some settings do not go together")]
    for kind in (ComputeKernel, DataType, DenseOptimizer, TableOptimizer):
        assert all(member.name in table for member in kind), kind
    assert len([choice for choice in ShardingChoice if choice is not ShardingChoice.auto]) == 7


def test_tables_on_disk_are_refused() -> None:
    """FBGEMM's cannot take initial weights or a checkpoint's: what stands for them ignores what is copied into it."""
    assert not hasattr(PartiallyMaterializedTensor, "__getitem__")
    with pytest.raises(UserError, match=r"compute_kernel' must be one of fused, fused_uvm, fused_uvm_caching, found"):
        load_config(ROOT / CONFIG, ["tables.user.compute_kernel=key_value"])
