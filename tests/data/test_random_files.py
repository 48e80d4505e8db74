"""Rows are the same batches however they were written: in any types that mean the same, any encodings and pages.

RANDOM_SEEDS=100-300 pytest -m slow tests/data/test_random_files.py    # others than the first few
"""

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import random_files
import yaml
from random_promises import base

from recsys.config import Device, load_config
from recsys.data.batch import Batch
from recsys.data.inputs import open_inputs
from recsys.runtime.world import World, open_world
from recsys.training.learning import learn_facts

first, _, last = os.environ.get("RANDOM_SEEDS", "0-9").partition("-")
SEEDS = range(int(first), int(last or first) + 1)


def arrays(batch: Batch) -> dict[str, np.ndarray]:
    """Return all that a batch holds, by name."""
    held: dict[str, Any] = {name: getattr(batch, name) for name in ("floats", "labels", "weights", "known_labels")}
    for name, lists in (("ids", batch.ids), ("lists", batch.lists)):
        if lists is not None:
            held |= {name: lists.values(), f"{name}' lengths": lists.lengths(), f"{name}' weights": lists._weights}
    return {name: tensor.numpy() for name, tensor in held.items() if tensor is not None}


def batches(config: Path, folder: Path, world: World) -> list[tuple[str, dict[str, np.ndarray]]]:
    """Return the batches of all data sets, by role, and so what is learned of them before."""
    folder.mkdir()
    inputs = learn_facts(open_inputs(load_config(config), world), folder, None)
    return [(role, arrays(batch)) for role in inputs.datasets for batch in inputs.loader(role).batches(num_epochs=1)]


@pytest.mark.slow
def test_ways_to_write_rows(tmp_path: Path) -> None:
    with open_world(Device.cpu) as world:
        for seed in SEEDS:
            folder, dice = tmp_path / f"{seed}", random.Random(seed)
            folder.mkdir()
            config = base(folder, seed, dice)
            config["data"] |= {"num_threads": 0, "shuffle": dice.random() < 0.8}
            if dice.random() < 0.3:
                config["data"]["filter"] = {"train": "extra > 0.3 or extra is None"}
            (folder / "config.yaml").write_text(yaml.dump(config, allow_unicode=True))
            ours = batches(folder / "config.yaml", folder / "ours", world)
            for part in ("train", "test"):
                (folder / part).rename(folder / f"{part} before")
                random_files.rewrite(folder / f"{part} before", folder / part, dice)
            theirs = batches(folder / "config.yaml", folder / "theirs", world)
            assert len(ours) == len(theirs), seed
            for (role, batch), (_, other) in zip(ours, theirs, strict=True):
                assert batch.keys() == other.keys(), (seed, role)
                for name, values in batch.items():  # a mean may be another in its last digit
                    close = {"rtol": 1e-5, "atol": 1e-6} if name == "floats" else {"rtol": 0}
                    np.testing.assert_allclose(other[name], values, **close, err_msg=f"{seed} {role} {name}")
