"""The measurements that need a machine nobody has at hand run here at a small size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_step_on_a_gpu_is_measured_with_the_embedded_model_anywhere() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_step", "--tiny"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # torch's threads wait busily for each other
    root = Path(__file__).parent.parent
    said = subprocess.run(command, cwd=root, env=alone, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    rows = [line.strip("| ").split(" | ") for line in said.stdout.splitlines()[4:]]
    assert [int(passes) for passes, *_ in rows] == [2, 1]
    for _, ours, share, theirs, ratio in rows:
        assert min(float(ours), float(theirs)) > 0
        assert share.endswith("%")
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.05, abs=0.01)
