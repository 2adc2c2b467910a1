"""One tiny checkpoint with random weights, and the reference pipeline it came from, for all tests of the core."""

from collections.abc import Iterator

import jax
import pytest

from clips import Checkpoint
from tiny import tiny_pipeline


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    return Checkpoint(folder, tiny_pipeline(folder))


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one for each program that XLA compiles, or that is read from what this session has compiled."""
    seen: list[str] = []

    def listen(event: str, seconds: float, **details: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
