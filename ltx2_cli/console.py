"""What the user sees on stderr: stages with their times, steps with what is left of them, errors with a way out."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from ltx2_cli.core.report import DECODE, WRITE, Report, Steps
from ltx2_cli.spec import RunError

LONGEST_LINE = 2000  # characters of an error
SECONDS = 30.0  # between two lines of a log that say how far a run is
STEERING = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def reporter(verbose: bool = False, stream: TextIO | None = None) -> Report:
    """The report for `stream` (stderr): live on a terminal, lines elsewhere. `verbose`: with every stage and its time.

    rich leaves out colours where NO_COLOR says so.
    """
    stream = stream or sys.stderr
    live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Live(Console(file=stream, highlight=False), verbose) if live else Plain(stream, verbose)


def complain(sentences: str, hint: str, label: str = "error: ") -> None:
    """An error on stderr: what is wrong, a line each, and what to do instead. What the user asked for has no label."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for name, style, text in ((label, "bold red", sentences), ("hint: ", "bold cyan", hint)):
        lines = [_shortened(visible(line)) for line in text.split("\n") if text]
        if lines:
            console.print(Text.assemble((name, style), ("\n" + " " * len(name)).join(lines)))


def _shortened(line: str) -> str:
    """A line without its middle, where nobody would read that."""
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} … {line[-LONGEST_LINE // 4 :]}"


def visible(text: str) -> str:
    """`text` with characters that steer a terminal, end a line or turn its writing round, as escapes; tabs stay."""
    return STEERING.sub(lambda match: repr(match[0])[1:-1], text)


def print_out(text: str) -> None:
    """Print results on stdout, as they are for a pipe; they do not steer a terminal. Raises `RunError` where stdout
    takes no more."""
    try:
        print("\n".join(map(visible, text.split("\n"))) if sys.stdout.isatty() else text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries again at its end
        raise RunError(f"stdout cannot be written: {error.strerror}", "the files that were made are whole") from error


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines of a table, alike on a terminal and in a pipe; the columns in `right` are set flush right."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    flush = [">" if number in right else "<" for number in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, flush, widths, strict=True)).rstrip()
        for row in rows
    ]


@dataclass
class _Work:
    """How long a run still takes, by what was measured of it."""

    total: int  # steps of the stage at work
    later: float  # what is denoised after it, in such steps
    clips: int  # to be decoded and written
    clip_seconds: float | None  # to decode and write one; None: none was yet
    began: float
    done: int = 0

    def said(self) -> str:
        """The steps that are done, and about what time is left."""
        seconds = (monotonic() - self.began) / self.done * (self.total - self.done + self.later)
        end = " until decoding" if self.clip_seconds is None else " left"
        left = clock(seconds + self.clips * (self.clip_seconds or 0))
        return f"{self.done} of {counted_steps(self.total)}, about {left}{end}"


@dataclass
class _Measured:
    """Seconds that stages took, by name."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.seconds.setdefault(name, []).append(seconds)

    def of_clip(self) -> float | None:
        """Seconds in which a clip is decoded and written, on average; None where none was."""
        written = len(self.seconds.get(WRITE, []))
        return sum(sum(self.seconds.get(name, [])) for name in (DECODE, WRITE)) / written if written else None


@dataclass(frozen=True)
class Plain:
    """A `Report` for logs and pipes: a line now and then while steps are made, and when they are done."""

    stream: TextIO
    verbose: bool = False
    measured: _Measured = field(default_factory=_Measured)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = monotonic()
        yield
        seconds = monotonic() - began
        self.measured.add(name, seconds)
        if self.verbose and _is_told(name, seconds):
            self.note(f"{name}: {seconds:.1f} s")

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Steps]:
        work = _Work(total, later, clips, self.measured.of_clip(), monotonic())
        yield _Lines(self, work, work.began)
        self.note(f"{counted_steps(total)}: {monotonic() - work.began:.1f} s")

    def note(self, text: str) -> None:
        print(visible(text), file=self.stream, flush=True)


@dataclass
class _Lines:
    """Steps of a log: a line when a tenth of them is done, but not before `SECONDS` have passed since the last."""

    report: Plain
    work: _Work
    told: float  # when the last line was written
    steps_told: int = 0

    def advance(self, steps: int = 1) -> None:
        work, now = self.work, monotonic()
        work.done += steps
        due = now - self.told >= SECONDS and work.done - self.steps_told >= work.total / 10
        if due and work.done < work.total:
            self.report.note(work.said())
            self.told, self.steps_told = now, work.done


@dataclass(frozen=True)
class Live:
    """A `Report` for terminals: a line that moves while a stage runs, and what is left of the run."""

    console: Console
    verbose: bool = False
    measured: _Measured = field(default_factory=_Measured)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = monotonic()
        with _line(self.console, SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as line:
            line.add_task(name, total=None)
            yield
        seconds = monotonic() - began
        self.measured.add(name, seconds)
        if self.verbose and _is_told(name, seconds):
            self._tick(f"{name}: {seconds:.1f} s")

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Steps]:
        work = _Work(total, later, clips, self.measured.of_clip(), monotonic())
        with _line(self.console, SpinnerColumn(), BarColumn(), TextColumn("{task.description}")) as line:
            yield _Bar(line, line.add_task(f"0 of {counted_steps(total)}", total=total), work)
        self._tick(f"{counted_steps(total)}: {monotonic() - work.began:.1f} s")

    def note(self, text: str) -> None:
        self.console.print(Text(f"  {visible(text)}"))

    def _tick(self, text: str) -> None:
        self.console.print(Text.assemble(("✓ ", "green"), text))


@dataclass(frozen=True)
class _Bar:
    line: Progress
    task: TaskID
    work: _Work

    def advance(self, steps: int = 1) -> None:
        self.work.done += steps
        self.line.update(self.task, advance=steps, description=self.work.said())


def _line(console: Console, *columns: ProgressColumn) -> Progress:
    """A line that is gone when it is done. stdout is left alone: it carries the results."""
    return Progress(*columns, console=console, transient=True, redirect_stdout=False)


def _is_told(name: str, seconds: float) -> bool:
    """Whether a stage is worth a line: a program that is read from the cache takes no time to compile."""
    return seconds >= 0.1 or not name.startswith("compile")


def counted_steps(number: int) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} step{'s' * (number != 1)}"


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
