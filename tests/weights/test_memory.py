"""What loading costs the host, at the size of a real network's layers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MEASURE = "import sys; sys.path.insert(0, {root!r}); from benchmarks import loading; from pathlib import Path; "


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts it")
def test_two_gigabytes_are_loaded_within_500_megabytes_of_memory_beside_them(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"

    def run(code: str) -> str:
        command = [sys.executable, "-c", MEASURE.format(root=str(ROOT)) + code, str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    run("loading.write_checkpoint(loading.denoiser(), Path(sys.argv[1]))")
    said = json.loads(run("loading.main(Path(sys.argv[1]))"))
    path.unlink()
    assert said["weights"] > 2e9
    assert said["beyond"] < 500e6
