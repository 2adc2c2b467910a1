"""The measurements that need a machine nobody has at hand run here at a small size."""

import math

import pytest

from benchmarks.gpu_step import lines


def test_the_gpu_benchmark_runs_with_the_embedded_model_anywhere() -> None:
    rows = [line.strip("| ").split(" | ") for line in [*lines(tiny=True, room=math.inf)][4:]]
    assert [int(passes) for passes, *_ in rows] == [2, 1]
    for _, ours, share, theirs, ratio in rows:
        assert min(float(ours), float(theirs)) > 0
        assert share.endswith("%")
        assert float(ratio) == pytest.approx(float(ours) / float(theirs), rel=0.05, abs=0.01)
