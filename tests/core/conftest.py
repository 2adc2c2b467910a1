"""One tiny checkpoint with random weights, and the reference pipeline it came from, for all tests of the core."""

import pytest

from clips import Checkpoint
from tiny import tiny_pipeline


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    return Checkpoint(folder, tiny_pipeline(folder))
