"""Progress reports of a run, independent of their display, and measured times."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from ltx2_cli.artifacts.files import replacing

LOAD, COMPILE = PREPARING = ("load", "compile")  # begin the names of activities that a second run would not need
DENOISE, DECODE, WRITE = "denoise", "decode", "write"  # the steps of a stage, and the activities that end a clip
Advance = Callable[[int], None]  # report finished steps of the current activity


class Report:
    """Receiver of a run's progress: activities, steps within one, and notes. This one is silent."""

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """The body is one named activity, such as `encode text`. Activities do not nest."""
        yield

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        """The body runs `total` equal steps, which have a `name` if they are some of several, such as `stage 2`. After
        them the run has work of `later` such steps, and decodes and writes `clips` clips."""
        yield lambda steps: None

    def moved(self, size: int) -> None:
        """So many bytes were read or downloaded in the current activity."""

    def part(self, text: str) -> None:
        """The current part of a longer work, such as `clip 3 of 6`."""

    def note(self, text: str) -> None:
        """A fact for the user, such as the chosen seed."""

    def defer(self, text: str) -> None:
        """A fact about the reading of the request, such as the chosen size: printed before the first note, or never if
        the request is refused."""

    def flush(self) -> None:
        """Print the deferred facts: the request is not refused."""


@dataclass
class Timings(Report):
    """A `Report` that measures the activities that it passes on, for a JSON file with the keys of sglang's benchmark
    reports. Stages end when the devices are done. Loading and compiling, which a server does once, are in no figure."""

    report: Report
    started: float = field(default_factory=perf_counter)
    preparations: list[tuple[str, float]] = field(default_factory=list)  # activities and their seconds
    activities: list[tuple[str, float]] = field(default_factory=list)
    denoise_steps: list[float] = field(default_factory=list)

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        started = perf_counter()
        with self.report.activity(name):
            yield
        seconds = perf_counter() - started
        (self.preparations if name.startswith(PREPARING) else self.activities).append((name, seconds))

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        started = last = perf_counter()

        def measure(steps: int) -> None:
            nonlocal last
            self.denoise_steps += [(perf_counter() - last) / steps] * steps
            advance(steps)
            last = perf_counter()

        with self.report.steps(total, later, clips, name) as advance:
            yield measure
        self.activities.append((DENOISE, perf_counter() - started))

    def moved(self, size: int) -> None:
        self.report.moved(size)

    def note(self, text: str) -> None:
        self.report.note(text)

    @property
    def prepared(self) -> float:
        """Seconds of loading and compiling."""
        return sum(seconds for _, seconds in self.preparations)

    def seconds(self) -> dict[str, float]:
        """The seconds of all activities by name, including loading and compiling."""
        totals = dict[str, float]()
        for name, seconds in (*self.preparations, *self.activities):
            totals[name] = totals.get(name, 0.0) + seconds
        return totals

    def record(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """The measurements so far, with these facts. Steps of one call of the program have equal parts of its time."""
        return {
            "total_duration_ms": 1000 * (perf_counter() - self.started - self.prepared),
            "steps": [{"name": name, "duration_ms": 1000 * seconds} for name, seconds in self.activities],
            "denoise_steps_ms": [
                {"step": step, "duration_ms": 1000 * seconds} for step, seconds in enumerate(self.denoise_steps)
            ],
            **facts,
        }

    def write(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the record."""
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(self.record(facts), indent=2) + "\n")
