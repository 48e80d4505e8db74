"""Checkpoints of a tiny model: all elements of a checkpoint's tensors are the same number."""

from pathlib import Path
from typing import Any

import torch

from recsys.checkpoint import Checkpoints, Tensors, TrainState, load_tensors
from recsys.data.order import Position
from recsys.runtime.world import World


def tensors(value: float) -> Tensors:
    """Return a table and a dense part full of one number, with an optimizer that has taken a step."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    table, state = torch.full((50, 4), float(value)), torch.full((50,), float(value))
    return Tensors(lambda: {"t": table}, lambda: {"t/momentum1": state}, model, optimizer)


def state(step: int, **settings: Any) -> TrainState:
    return TrainState(Position(rows_before=step), step=step, **settings)


def checkpoints(folder: Path, world: World, **settings: Any) -> Checkpoints:
    folder.mkdir(exist_ok=True)
    return Checkpoints(folder, world, **{"keep": 3, **settings})


def loaded(folder: Path, world: World) -> float:
    """Load the newest valid checkpoint; return the number that it is full of."""
    found = checkpoints(folder, world).newest_valid()
    assert found is not None
    into = tensors(-1.0)
    load_tensors(*found, into, world)
    values = [into.tables()["t"], into.table_optimizer()["t/momentum1"], *into.dense.parameters()]
    assert len({v.item() for value in values for v in (value.min(), value.max())}) == 1
    return float(values[0][0, 0])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
