"""A process has one group of ranks: what a module's tests open by the Python API is closed behind them."""

from collections.abc import Iterator

import pytest

from recsys.serving import api


@pytest.fixture(scope="module", autouse=True)
def leave_the_group() -> Iterator[None]:
    yield
    api._open.close()
    api._worlds.clear()
