"""How a run says what it is doing, without knowing who listens; and how long that took."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from ltx2_cli.files import replacing

PREPARING = ("load", "compile")  # how the names begin of stages that a second run would not need
DECODE, WRITE = "decode", "write"  # the stages that end a clip
Advance = Callable[[int], None]  # so many more steps of the current stage are done


class Report:
    """What a run tells: stages, one after the other; steps within a stage; facts worth a line. This one is silent."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """The work inside is one named stage, such as `encode the prompt`. Stages do not nest."""
        yield

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Advance]:
        """The work inside, part of a stage, is `total` equal steps. After them the run does as much as `later` such
        steps, and decodes and writes so many clips."""
        yield lambda steps: None

    def note(self, text: str) -> None:
        """A fact that the user should see once, such as the seed that was chosen."""


@dataclass
class Timings(Report):
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
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Advance]:
        started = last = perf_counter()

        def measure(steps: int) -> None:
            nonlocal last
            self.denoise_steps += [(perf_counter() - last) / steps] * steps
            advance(steps)
            last = perf_counter()

        with self.report.steps(total, later, clips) as advance:
            yield measure
        self.stages.append(("denoise", perf_counter() - started))

    def note(self, text: str) -> None:
        self.report.note(text)

    def record(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What was measured so far, and other facts. Steps that ran in one call of the program share its time
        equally."""
        return {
            "total_duration_ms": 1000 * (perf_counter() - self.started - self.prepared),
            "steps": [{"name": name, "duration_ms": 1000 * seconds} for name, seconds in self.stages],
            "denoise_steps_ms": [
                {"step": step, "duration_ms": 1000 * seconds} for step, seconds in enumerate(self.denoise_steps)
            ],
            **facts,
        }

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the record."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.record(facts), indent=2) + "\n")
