"""What a perf dump says: the stages and steps of a run, without what is done once for many runs."""

import json
import time
from pathlib import Path

import jax
import pytest

from ltx2_cli.core.report import Silent
from ltx2_cli.core.timings import Timings, traced


def test_stages_and_steps_without_loading_and_compiling(tmp_path: Path) -> None:
    timings = Timings(Silent())
    for name in ("load vae", "compile frames", "decode"):
        with timings.stage(name):
            time.sleep(0.2 if name != "decode" else 0.02)
    with timings.steps(3) as steps:
        time.sleep(0.01)
        steps.advance()
        time.sleep(0.08)
        steps.advance(2)
    timings.write(tmp_path / "perf.json")
    said = json.loads((tmp_path / "perf.json").read_text())
    assert list(said) == ["total_duration_ms", "steps", "denoise_steps_ms"]
    assert [step["name"] for step in said["steps"]] == ["decode", "denoise"]
    decode, denoise = (step["duration_ms"] for step in said["steps"])
    assert decode >= 20
    assert 90 <= denoise <= said["total_duration_ms"] - decode
    assert said["total_duration_ms"] < 400
    assert [step["step"] for step in said["denoise_steps_ms"]] == [0, 1, 2]
    first, *rest = (step["duration_ms"] for step in said["denoise_steps_ms"])
    assert first >= 10
    assert rest[0] == rest[1] >= 40
    assert [path.name for path in tmp_path.iterdir()] == ["perf.json"]


def test_a_failed_stage_is_not_measured() -> None:
    timings = Timings(Silent())
    with pytest.raises(ZeroDivisionError), timings.stage("divide"):
        raise ZeroDivisionError
    assert timings.stages == []


def test_a_trace_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    with traced(None):
        pass
    with traced(tmp_path / "trace"):
        jax.block_until_ready(jax.numpy.ones(3) + 1)
    assert list(tmp_path.glob("trace/plugins/profile/*/*.xplane.pb"))
