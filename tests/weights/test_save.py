"""Networks to disk: whole, or not at all and said in a sentence."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ltx2_cli.models.arch import VocoderArch
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.spec import RunError
from ltx2_cli.weights.declare import Scope, random_weights
from ltx2_cli.weights.save import save


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file grows beyond `room` bytes."""
    found = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, found[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, found)


def test_a_network_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    network = random_weights(Vocoder(Scope("float32"), VocoderArch(hidden_channels=32)), seed=0)
    with full_disk(1000), pytest.raises(RunError, match=r"cannot write .*vocoder.safetensors: .") as caught:
        save(network, tmp_path / "vocoder.safetensors")
    assert caught.value.hint
    assert os.listdir(tmp_path) == []
