"""What the tests of the loader share: a small dataset, and that no thread outlives a test."""

from collections.abc import Iterator

import pytest
from rows import threads, write

from recsys.data.dataset import Dataset


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """101 rows in five row groups of three files."""
    return write(tmp_path_factory.mktemp("data"), [[40, 0, 13], [1], [30, 17]])


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not threads()
