"""How a run says what it is doing, without knowing who listens; and how long that took."""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Protocol

from ltx2_cli.files import replacing

PREPARING = ("load", "compile")  # how the names begin of stages that a second run would not need
DECODE, WRITE = "decode", "write"  # the stages that end a clip


class Steps(Protocol):
    """Equal steps of the current stage."""

    def advance(self, steps: int = 1) -> None:
        """Say that `steps` more are done."""


class Report(Protocol):
    """What a run tells: stages, one after the other; steps within a stage; facts worth a line."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """The work inside is one named stage, such as `encode the prompt`. Stages do not nest."""

    def steps(self, total: int, later: float = 0, clips: int = 0) -> AbstractContextManager[Steps]:
        """The work inside, part of a stage, is `total` equal steps. After them the run does as much as `later` such
        steps, and decodes and writes so many clips."""

    def note(self, text: str) -> None:
        """A fact that the user should see once, such as the seed that was chosen."""


class Silent:
    """A `Report` and its `Steps` for callers that want none."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Steps]:
        yield self

    def note(self, text: str) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass


@dataclass
class Timings:
    """A `Report` that measures what it passes on, for a JSON file with the keys of sglang's benchmark reports. Stages
    end when the devices are done. Loading and compiling, which a server does once, are in no figure."""

    report: Report
    started: float = field(default_factory=perf_counter)
    prepared: float = 0  # seconds
    stages: list[tuple[str, float]] = field(default_factory=list)
    denoise_steps: list[float] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = perf_counter()
        with self.report.stage(name):
            yield
        seconds = perf_counter() - started
        if name.startswith(PREPARING):
            self.prepared += seconds
        else:
            self.stages.append((name, seconds))

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Steps]:
        started = perf_counter()
        with self.report.steps(total, later, clips) as steps:
            yield _Stopwatch(steps, self.denoise_steps)
        self.stages.append(("denoise", perf_counter() - started))

    def note(self, text: str) -> None:
        self.report.note(text)

    def write(self, path: Path) -> None:
        """Write what was measured so far. Steps that ran in one call of the program share its time equally."""
        milliseconds = {
            "total_duration_ms": 1000 * (perf_counter() - self.started - self.prepared),
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
