"""The loss scale of FP16 over several runs, and beside steps that a smaller one would not mend."""

from pathlib import Path
from types import SimpleNamespace

from recsys.checkpoint import Checkpoints, Source
from recsys.config import Device, load_config
from recsys.data.inputs import open_inputs
from recsys.runtime.world import open_world
from recsys.step.output import StepOutput
from recsys.training.build import build_model
from recsys.training.learning import learn_facts
from recsys.training.resume import start_training
from recsys.training.step_counts import StepCounts

CONFIG = "configs/dlrm_sample.yaml"


def test_a_run_that_goes_on_in_another_type_leaves_the_scale_behind(tmp_path: Path) -> None:
    """In the same type it goes on with the scale that it had come to, whatever the config begins with."""
    scales: list[list[float]] = []
    fp16 = ("precision.autocast=fp16", "precision.loss_scale_growth_steps=2")
    with open_world(Device.cpu) as world:
        for options in (
            ["precision.loss_scale=64"],
            [*fp16, "precision.loss_scale=512"],
            [*fp16, "precision.loss_scale=64"],
            [],
            [*fp16, "precision.loss_scale=128"],
        ):
            config = load_config(CONFIG, options)
            inputs = learn_facts(open_inputs(config, world), tmp_path)
            built, checkpoints = build_model(inputs), Checkpoints(tmp_path / "checkpoints", world, 1)
            found = checkpoints.newest_valid()
            state = start_training(inputs, built, Source(*found, None) if found else None, tmp_path)
            scale = built.step.dense.loss_scale
            scales.append([scale.value])
            counts = StepCounts(config, state, SimpleNamespace(step=lambda *_: None), scale, tmp_path, 0)
            for _ in range(3):
                scale.good()
                state.step += 1
                counts.add(state.step, 0, StepOutput(None, ()), 0.0)
            counts.read()
            scales[-1].append(scale.value)
            assert state.loss_scale == (scale.value if fp16[0] in options else None)
            checkpoints.save(built.tensors, state)
    assert scales == [[1, 1], [512, 1024], [1024, 4096], [1, 1], [128, 256]]
