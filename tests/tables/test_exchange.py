"""What ranks of CPUs send each other in a step: as torchrec's collection and all-reduce do, to the last bit."""

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import load_tables
from launch import losses_of, must_train

from recsys.config import Device
from recsys.runtime.world import open_world
from recsys.step import exchange
from recsys.tables import lookup, shard

ROWS = 470  # the last batch of an epoch has fill
# Three tables on up to four ranks, where one has none and another looks up two features.
CONFIG = """\
data: {{train: {data}, label_column: label, shuffle: false}}
features:
  user: {{table: user, nulls: empty}}
  item: {{table: item, nulls: empty}}
  other: {{table: item, nulls: empty}}
  place: {{table: place, nulls: empty}}
tables:
  user: {{num_embeddings: 50, embedding_dim: 8, sharding_type: table_wise, data_type: {dtype}}}
  item: {{num_embeddings: 40, embedding_dim: 8, sharding_type: table_wise, data_type: {dtype}}}
  place: {{num_embeddings: 30, embedding_dim: 8, sharding_type: table_wise, data_type: {dtype}}}
model: {{name: fm}}
train: {{global_batch_size: 48, epochs: 2, log_every_steps: 1}}
run: {{num_threads: 1}}
"""


def write(folder: Path, kind: str) -> Path:
    """Write a config and data whose rows have an id of each feature, or some have none, or the last one a list."""
    dice = random.Random(0)

    def drawn(row: int, feature: str) -> int | list[int] | None:
        if "gaps" in kind and dice.random() < 0.3:
            return None
        if kind == "lists" and feature == "other":
            return [dice.randrange(500) for _ in range(3 if row == ROWS - 1 else 1)]
        return dice.randrange(500)

    columns = {name: [drawn(row, name) for row in range(ROWS)] for name in ("user", "item", "other", "place")}
    labels = [float(dice.random() < 0.5) for _ in range(ROWS)]
    pq.write_table(pa.table({**columns, "label": labels}), folder / "data.parquet")
    path = folder / "config.yaml"
    path.write_text(CONFIG.format(data=folder / "data.parquet", dtype="FP16" if "half" in kind else "FP32"))
    return path


def by_torchrec() -> None:
    """Leave the exchange of ids and vectors to torchrec's collection, and sums to all-reduce."""
    shard.local_lookups = lambda *_: (None, [])
    lookup.ExchangingLookup._exchanged = None  # type: ignore[assignment, method-assign]  # a call would end the run
    exchange._SMALL = 0


def counted() -> None:
    """Write how many batches were exchanged in one message, and how many left to the collection."""
    found, exchanged = [0, 0], lookup.ExchangingLookup._exchanged

    def counting(self: lookup.ExchangingLookup, ids: object) -> object:
        received = exchanged(self, ids)  # type: ignore[arg-type]
        found[received is None] += 1
        (run_dir,) = (each.removeprefix("run.dir=") for each in sys.argv if each.startswith("run.dir="))
        Path(run_dir, f"exchanges-{os.environ['RANK']}").write_text(json.dumps(found))
        return received

    lookup.ExchangingLookup._exchanged = counting  # type: ignore[assignment, method-assign]


def train(
    config: Path, run: str, nproc: int, before: Callable[[], None]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of all steps, and all that is saved at the end."""
    run_dir = config.parent / run
    must_train(str(config), f"run.dir={run_dir}", nproc=nproc, before=before)
    return losses_of(run_dir), load_tables(run_dir, "")


# Of each kind of data: how many batches of 20 go in one message, and how many show that there are lists.
@pytest.mark.parametrize(
    ("kind", "exchanges"),
    [
        *(pytest.param(kind, [20, 0], marks=pytest.mark.slow) for kind in ("whole", "half", "gaps", "gaps in half")),
        ("lists", [9, 1]),
    ],
)
@pytest.mark.parametrize("nproc", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_the_same_as_torchrec(kind: str, exchanges: list[int], nproc: int, tmp_path: Path) -> None:
    config = write(tmp_path, kind)
    losses, state = train(config, "ours", nproc, counted)
    expected, by_collection = train(config, "torchrec", nproc, by_torchrec)
    for rank in range(nproc):
        assert json.loads((tmp_path / "ours" / f"exchanges-{rank}").read_text()) == exchanges
    assert len(losses) == 20
    apart = 0 if nproc == 2 else 1e-6  # all-reduce adds in an order of its own
    torch.testing.assert_close(losses, expected, rtol=0, atol=apart)
    assert state.keys() == by_collection.keys()
    for name, value in state.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, by_collection[name], rtol=0, atol=apart)


def test_joined_gradients_add_up_and_are_of_each_type() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, dtype=torch.float64))]
    with open_world(Device.cpu, 1):
        joined = exchange.JoinedGradients(parameters)
        for _ in range(2):  # what the first steps leave is forgotten
            joined.clear()
            for factor in (1, 2):
                (factor * parameters[0].sum() + 10 * factor * parameters[1].sum()).backward()
            for each in joined.send():
                each.wait()
            assert [each.grad.unique().tolist() for each in parameters if each.grad is not None] == [[3.0], [30.0]]
            assert [each.grad.dtype for each in parameters if each.grad is not None] == [torch.float32, torch.float64]
