"""What loading costs the host, at the size of a real network's layers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import loading
from loras import write_header
from ltx2_cli.weights.declare import declared

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts it")
def test_two_gigabytes_are_loaded_within_500_megabytes_of_memory_beside_them(tmp_path: Path) -> None:
    path = write_header(tmp_path / "model.safetensors", declared(loading.denoiser()))
    command = [sys.executable, "-m", "benchmarks.loading", str(path)]
    said = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert said["weights"] > 2e9
    assert said["beyond"] < 500e6
