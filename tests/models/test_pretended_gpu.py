"""Steps and evaluations of every model as on a GPU: what CPUs learn, and few waits of the host."""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import test_sasrec
import test_simplex
import test_ultragcn
import torch
from launch import ROOT
from pretend_gpu import GPU, OnGpu, move, on_gpu, pretended_gpu
from retrieval import CONFIG, write_retrieval

from recsys.config import Config, load_config
from recsys.data.inputs import Inputs, open_inputs
from recsys.data.pool import Fence
from recsys.models.items import ItemVectors
from recsys.runtime.world import World
from recsys.step.pipeline import GatedOptimizer, PlainPipeline
from recsys.training import build, evaluation
from recsys.training.learning import learn_facts

NUM_STEPS = 3
ATTENTION = ("model.attention={history: item_id}", "model.attention_mlp=[4]")
DROPOUT = ("model.dropout=0.1", "model.embedding_dropout=0.1")
TWO_LABELS = ("data.label_column=null", "data.labels={a: label, b: {column: label, weight: 2}}")
MICRO = "train.micro_batch_size=20"
RANKERS = {
    "dlrm": (*ATTENTION, *DROPOUT, "optimizer.dense.clip_norm=1", "train.check_every_step=false"),
    "dcn": (*ATTENTION, *DROPOUT, MICRO),
    "deepfm": (*DROPOUT, "tables.user.l2=0.1", "tables.hour.sharding_type=data_parallel"),
    "esmm": (*TWO_LABELS, *ATTENTION, "optimizer.dense.name=adamw"),
    "final_mlp": (*DROPOUT, "model.gate_1=[user_id]", "optimizer.dense.name=sgd"),
    "fm": (
        "tables.user_2={num_embeddings: 50, embedding_dim: 8}",
        "tables.user.experts={others: [user_2], by: hash, active: 2, gate: features}",
    ),
    "logistic_regression": ("tables.item.quantize=INT8", "precision.output_dtype=FP16"),
    "mmoe": (*TWO_LABELS, "model.dropout=0.1", "model.dots=true", MICRO),
    "ple": (*TWO_LABELS, "data.labels.b.nulls=unknown", "train.check_every_step=false"),
    "wukong": (*ATTENTION, *DROPOUT),
}
RETRIEVAL = {
    "two_tower": (CONFIG, ("model.sampled_negatives=20", "train.micro_batch_size=5")),
    "simplex": (test_simplex.CONFIG, ("model.loss=contrastive",)),
    "ultragcn": (test_ultragcn.CONFIG, ("model.neighbours=null", "features.neighbours=null", "model.drawn_l2=0.1")),
    "sasrec": (test_sasrec.CONFIG, ("model.loss=gbce", "model.num_items=60")),
}
# All other models wait for nothing but the sums of a step, which are read from page-locked memory.
WAITS = {"sasrec": {"_to_copy jagged.py:host_lengths": 1.0}}


def config_of(model: str, folder: Path) -> Config:
    path = folder / f"{model}.yaml"
    if model in RETRIEVAL:
        write_retrieval(folder)
        content, options = RETRIEVAL[model]
        lists = "valid" if "column: seen" in content else "train"  # users with all their items, or rows for each
        path.write_text(content.replace("DIR/train", f"DIR/{lists}").replace("DIR", str(folder)))
    else:
        before, _, rest = (ROOT / "configs/dlrm_sample.yaml").read_text().partition("model:\n")
        path.write_text(f"{before}model:\n  name: {model}\ntrain:\n{rest.partition('train:')[2]}")
        options = RANKERS[model]
    size = 12 if model in RETRIEVAL else 50
    return load_config(path, [f"train.global_batch_size={size}", "run.num_threads=1", *options])


class Gpu:
    """The dense half of a step on the GPU; tables stay in host memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waits: Counter[str] = Counter()
        shard_model = build.shard_model
        patch.setattr(build, "is_in_halves", lambda *_: False)
        patch.setattr(build, "shard_model", lambda *arguments: self._moved(shard_model(*arguments)))
        patch.setattr(Fence, "record", lambda _: None)
        patch.setattr(
            evaluation, "ItemVectors", lambda *given: ItemVectors(*given[:-1], replace(given[-1], device=GPU))
        )

    def _moved(self, model: Any) -> Any:
        dense = model.module.dense
        move(dense)
        vars(dense).pop("_dense_parameters", None)  # those before the move
        dense.late_exchange = True
        forward, open_gate = dense.forward, dense.gate.open
        dense.forward = lambda pooled, by_id, batch: forward(on_gpu(pooled), [*map(on_gpu, by_id)], on_gpu(batch))
        dense.gate.open = lambda *given: open_gate(*(g.values if isinstance(g, OnGpu) else g for g in given))
        return model


def trained(inputs: Inputs, gpu: Gpu | None) -> tuple[list[float], Mapping[str, float]]:
    """Train some steps, and return their losses and the metrics of data.valid."""
    built = build.build_model(inputs)
    dense, losses = built.step.dense, []
    for table in dense.replicated.tables if gpu is not None else ():
        table.weights, table.state, dense.replicated._num_parts = OnGpu(table.weights), [*map(OnGpu, table.state)], 1
    pipeline = PlainPipeline(built.model, GatedOptimizer(built.dense_optimizer, dense), inputs.world.device)
    with closing(inputs.loader("train").batches()) as loaded:
        batches = iter(list(islice(loaded, NUM_STEPS)))
    for number in range(NUM_STEPS):
        built.table_updates.begin(1.0, lambda _, number=number: number)
        with nullcontext() if gpu is None else pretended_gpu(gpu.waits if number else None):  # some waits are done once
            output = pipeline.progress(batches)
            output.read()
        losses.append(output.loss)
    with nullcontext() if gpu is None else pretended_gpu():
        return losses, evaluation.evaluator_of(inputs, built.model, "valid", pipeline=pipeline).compute(inputs.world)


@pytest.mark.parametrize("model", [*RANKERS, *RETRIEVAL])
def test_a_gpu_learns_what_a_cpu_learns_and_its_host_does_not_wait(
    model: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = learn_facts(open_inputs(config_of(model, tmp_path), world), tmp_path)
    losses, metrics = trained(inputs, None)
    gpu = Gpu(monkeypatch)
    losses_there, metrics_there = trained(inputs, gpu)
    torch.testing.assert_close(losses_there, losses, rtol=0, atol=1e-5)
    torch.testing.assert_close(metrics_there, metrics, rtol=0, atol=1e-4)
    assert {place: count / (NUM_STEPS - 1) for place, count in gpu.waits.items()} == WAITS.get(model, {})


def test_a_pretended_gpu_finds_what_a_real_one_would_refuse_or_wait_for() -> None:
    waits: Counter[str] = Counter()
    with pretended_gpu(waits):
        there, here = torch.arange(3.0, device="cuda"), torch.ones(3)
        assert there.is_cuda and (there + 1).device == GPU and there.new_zeros(2).is_cuda
        with pytest.raises(RuntimeError, match=r"has tensors on the GPU and in host memory, in test_pretended_gpu\.py"):
            there + here
        assert not waits
        assert there[there > 0].tolist() == [1, 2] and there.sum().item() == 3
        assert here.to(GPU).is_cuda and here.pin_memory().to(GPU, non_blocking=True).is_cuda
        assert torch.tensor([1, 2], device=GPU).is_cuda and not there.cpu().is_cuda
    assert sum(waits.values()) == 6  # a mask, a list, a number, a copy to the GPU, a list to it, and a copy from it
