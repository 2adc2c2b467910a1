"""How long the stages of a run take, written as JSON with the keys of sglang's benchmark reports."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import jax

from ltx2_cli.core.report import PREPARING, Report, Steps
from ltx2_cli.files import replacing


@contextmanager
def traced(folder: Path | None) -> Iterator[None]:
    """While the body runs, write what host and devices do into `folder`, for xprof; nothing if None."""
    with nullcontext() if folder is None else jax.profiler.trace(str(folder)):
        yield


@dataclass
class Timings:
    """A `Report` that measures what it passes on. A stage ends when the devices are done, so that nothing is added.

    Loading weights and compiling are what a server does once: they are in no figure.
    """

    report: Report
    began: float = field(default_factory=perf_counter)
    prepared: float = 0  # seconds
    stages: list[tuple[str, float]] = field(default_factory=list)
    denoise_steps: list[float] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = perf_counter()
        with self.report.stage(name):
            yield
        seconds = perf_counter() - began
        if name.startswith(PREPARING):
            self.prepared += seconds
        else:
            self.stages.append((name, seconds))

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Steps]:
        began = perf_counter()
        with self.report.steps(total, later, clips) as steps:
            yield _Stopwatch(steps, self.denoise_steps)
        self.stages.append(("denoise", perf_counter() - began))

    def note(self, text: str) -> None:
        self.report.note(text)

    def write(self, path: Path) -> None:
        """Write what was measured so far. Steps that ran in one call of the program share its time equally."""
        milliseconds = {
            "total_duration_ms": 1000 * (perf_counter() - self.began - self.prepared),
            "steps": [{"name": name, "duration_ms": 1000 * seconds} for name, seconds in self.stages],
            "denoise_steps_ms": [
                {"step": step, "duration_ms": 1000 * seconds} for step, seconds in enumerate(self.denoise_steps)
            ],
        }
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(milliseconds, indent=2) + "\n")


class _Stopwatch:
    def __init__(self, steps: Steps, measured: list[float]):
        self.steps, self.measured, self.last = steps, measured, perf_counter()

    def advance(self, steps: int = 1) -> None:
        now = perf_counter()
        self.measured += [(now - self.last) / steps] * steps
        self.steps.advance(steps)
        self.last = perf_counter()
