"""Runs that begin with the weights of the previous day's run."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from recsys.checkpoint import Checkpoints, Source, TrainState, load_tensors
from recsys.config import Config, load_config
from recsys.config.meaning import meaning
from recsys.data.inputs import Inputs, open_inputs
from recsys.data.order import Position
from recsys.runtime.world import World
from recsys.training.build import build_model
from recsys.training.learning import facts_entries, learn_facts

GROW = "train.init.grow_vocabularies=true"
CONFIG = """\
data: {label_column: label, num_threads: 0}
features:
  user: {table: user}
  item: {table: item}
  price: {type: float, standardise: true}
tables:
  user: {num_embeddings: 60, embedding_dim: 8, mapping: vocabulary, num_buckets: 4, min_count: 8}
  item: {num_embeddings: 100, embedding_dim: 8}
model: {name: dlrm, bottom_mlp: [16], top_mlp: [32]}
train: {global_batch_size: 64, max_steps: 3}
run: {num_threads: 1}
"""


def write_day(folder: Path, users: Any, seed: int) -> Path:
    """Write 600 rows, in which users occur about equally often."""
    folder.mkdir(parents=True, exist_ok=True)
    generator, n = np.random.default_rng(seed), 600
    columns = {
        "user": generator.choice(users, n),
        "item": generator.integers(0, 30, n),
        "price": 100 * generator.random(n),
        "label": generator.integers(0, 2, n),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=100)
    return folder


class Day:
    """A run in this process: the facts measured on its data, and a checkpoint of its first state."""

    def __init__(self, folder: Path, world: World, *options: str, source: "Day | None" = None) -> None:
        self.folder, self.world = folder, world
        folder.mkdir(exist_ok=True)
        (folder / "given.yaml").write_text(CONFIG)
        started = (f"train.init_from={source.folder}",) if source else ()
        config = load_config(folder / "given.yaml", [*started, *options])
        found = source.source(config) if source else None
        self.inputs: Inputs = learn_facts(open_inputs(config, world), folder, found)
        self.config: Config = self.inputs.config
        self.built = build_model(self.inputs)
        self.fresh = self.tensors()
        if found:
            kept = self.inputs.facts.kept
            path, marker = found.path, found.marker
            self.loaded = load_tensors(path, marker, self.built.tensors, world, self.config, kept)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value.shards[0].tensor.clone() for name, value in self.built.tensors.to_load().items()}

    def save(self) -> "Day":
        """Save it with different numbers in every row."""
        for number, local in enumerate(self.built.tensors.to_load().values()):
            tensor = local.shards[0].tensor
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)))
        checkpoints = Checkpoints(
            self.folder / "checkpoints",
            self.world,
            1,
            meaning=meaning(self.config),
            facts=facts_entries(self.inputs.facts, self.folder),
        )
        checkpoints.save(self.built.tensors, TrainState(Position(), step=1))
        return self

    def source(self, config: Config) -> Source:
        found = Checkpoints(self.folder / "checkpoints", self.world, 1).newest_valid()
        assert found is not None
        return Source(*found, config.train.init)

    @property
    def ids(self) -> list[Any]:
        return self.inputs.facts.vocabularies["user"].to_pylist()
