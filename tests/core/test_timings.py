"""What a perf dump says: the stages and steps of a run, without what is done once for many runs."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import current_thread, main_thread

import jax
import pytest

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.core import report as module
from ltx2_cli.core.report import PREPARING, Report, Timings
from ltx2_cli.core.run import open_components, run, traced
from ltx2_cli.private_api import COMPILED_EVENT

UNSEEN = Case(Size(1, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))  # of a size that nothing else here compiles


def test_timings_exclude_loading_and_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that these stages alone move."""
    clock = [100.0]
    monkeypatch.setattr(module, "perf_counter", lambda: clock[0])
    timings = Timings(Report(), started=100.0)
    for name, seconds in (("load vae", 32.0), ("compile frames", 64.0), ("decode", 2.0)):
        with timings.activity(name):
            clock[0] += seconds
    with timings.steps(3) as advance:
        clock[0] += 1
        advance(1)
        clock[0] += 8
        advance(2)
    clock[0] += 0.5
    timings.write(tmp_path / "perf.json", {})
    said = json.loads((tmp_path / "perf.json").read_text())
    assert list(said) == ["total_duration_ms", "steps", "denoise_steps_ms"]
    assert said["total_duration_ms"] == 11_500
    assert [tuple(step.values()) for step in said["steps"]] == [("decode", 2000), ("denoise", 9000)]
    assert [tuple(step.values()) for step in said["denoise_steps_ms"]] == [(0, 1000), (1, 4000), (2, 4000)]
    assert [path.name for path in tmp_path.iterdir()] == ["perf.json"]


class Watch(Report):
    """How long stages take that are not to count, and in which of them this thread compiles what."""

    def __init__(self) -> None:
        self.now, self.prepared, self.compiled = "", 0.0, list[tuple[str, str]]()

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        self.now, began = name, time.perf_counter()
        yield
        self.now = ""
        if name.startswith(PREPARING):
            self.prepared += time.perf_counter() - began

    def hear(self, event: str, seconds: float, fun_name: str = "", **details: object) -> None:
        if event == COMPILED_EVENT and current_thread() is main_thread():
            self.compiled.append((fun_name, self.now))


def test_timings_of_a_first_run_exclude_loading_and_compiling(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan, watch, began = plan_of(checkpoint, UNSEEN, 3), Watch(), time.perf_counter()
    timings = Timings(watch)
    jax.monitoring.register_event_duration_secs_listener(watch.hear)
    try:
        for _ in run(plan, open_components(plan), timings):
            pass
    finally:
        jax.monitoring.unregister_event_duration_listener(watch.hear)
    timings.write(tmp_path / "perf.json", {})
    elapsed, said = time.perf_counter() - began, json.loads((tmp_path / "perf.json").read_text())
    assert [step["name"] for step in said["steps"]] == ["encode text", "connect text", "denoise", "decode"]
    assert len(said["denoise_steps_ms"]) == UNSEEN.steps
    assert 0 < said["total_duration_ms"] <= 1000 * (elapsed - watch.prepared)
    assert ("jit(_noise)", "compile noise") in watch.compiled  # all others are compiled beside the loading
    assert {stage for _, stage in watch.compiled} <= {"", "compile noise"}


def test_a_failed_stage_is_not_measured() -> None:
    timings = Timings(Report())
    with pytest.raises(ZeroDivisionError), timings.activity("divide"):
        raise ZeroDivisionError
    assert timings.activities == []


def test_a_trace_is_written_to_the_given_folder(tmp_path: Path) -> None:
    with traced(None):
        pass
    with traced(tmp_path / "trace"):
        jax.block_until_ready(jax.numpy.ones(3) + 1)
    assert list(tmp_path.glob("trace/plugins/profile/*/*.xplane.pb"))
