"""A group of one rank, which is what most checkpoints of these tests are saved and loaded by."""

from collections.abc import Iterator

import pytest

from recsys.config import Device
from recsys.runtime.world import World, open_world


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(Device.cpu) as opened:
        yield opened
