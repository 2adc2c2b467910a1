"""What loading costs the host, at the size of a real network's layers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loading
from loras import write_header
from ltx2_cli.weights.declare import declared
from ltx2_cli.weights.load import CHUNK_BYTES, READ_AHEAD

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts it")
def test_host_memory_beside_two_gigabytes_of_weights_is_bounded(tmp_path: Path) -> None:
    """In chunks by what `load` says of itself; its largest tensors have the size of a chunk."""
    path = write_header(tmp_path / "model.safetensors", declared(loading.denoiser()))
    command = [sys.executable, "-m", "benchmarks.loading", str(path)]
    said = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert said["weights"] > 2e9
    assert said["beyond"]["cpu"] < 500e6
    assert said["beyond"]["chunks"] < READ_AHEAD + 4 * CHUNK_BYTES
