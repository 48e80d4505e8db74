"""The run of a retrieval model on one process, which a module's tests compare others with."""

from pathlib import Path

import pytest
from retrieval import Trained, train


@pytest.fixture(scope="module")
def one_process(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run of a module's own fixture `config`."""
    folder = tmp_path_factory.mktemp("one")
    return Trained(folder, *train(config, folder))
