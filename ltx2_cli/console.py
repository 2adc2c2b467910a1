"""Output for the user on stderr: activities with their times, steps with the time left, errors with hints."""

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import isfinite, isnan
from textwrap import wrap
from threading import Event, Thread
from time import monotonic
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ltx2_cli.core.report import DECODE, WRITE, Advance, Report
from ltx2_cli.errors import RunError
from ltx2_cli.request.validation import STEERING
from ltx2_cli.units import duration, quantity

LONGEST_LINE = 2000  # characters of an error
MOST_LINES = 3  # of an error and its hint
LOG_SECONDS = 30.0  # between two lines of a log that say how far a run is


def reporter(verbose: bool = False, stream: TextIO | None = None) -> Report:
    """The report for `stream` (stderr): live on a terminal, lines elsewhere. `verbose`: every activity with its time.
    rich leaves out colours where NO_COLOR says so."""
    stream = stream or sys.stderr
    live = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Live(stream, verbose) if live else Plain(stream, verbose)


def print_error(sentences: str, hint: str, label: str = "error: ") -> None:
    """Print an error on stderr: a line for each sentence, the last line with all remaining ones, and the hint. An end
    that the user asked for has no label."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    wrong, cures = sentences.split("\n"), hint.split("\n") if hint else []
    whole = max(MOST_LINES - len(cures), 1) - 1  # lines of one sentence
    wrong[whole:] = ["; ".join(wrong[whole:])] if wrong[whole:] else []
    for name, style, text in ((label, "bold red", wrong), ("hint: ", "bold cyan", cures)):
        lines = list(map(visible, text))
        for number, line in enumerate(lines):
            if len(line) > LONGEST_LINE:  # nobody would read the middle
                lines[number] = f"{line[: LONGEST_LINE // 2]} … {line[-LONGEST_LINE // 4 :]}"
        if lines:
            console.print(Text.assemble((name, style), ("\n" + " " * len(name)).join(lines)))


def visible(text: str) -> str:
    """`text` with characters that steer a terminal, end a line or turn its writing round, as escapes; tabs stay."""
    return STEERING.sub(lambda match: repr(match[0])[1:-1], text)


def print_out(text: str) -> None:
    """Print results on stdout, alike on a terminal and in a pipe, without control characters. A reader that stops, such
    as `head`, is no error. Raises `RunError` if stdout cannot be written."""
    _print("\n".join(map(visible, text.split("\n"))), hint="")


def print_json(values: Any) -> None:
    """Print plain values as JSON, as `print_out`; numbers that JSON lacks are texts, as YAML spells them."""
    text = json.dumps(_spelled(values), indent=2, allow_nan=False)
    print_out(text.replace("\x7f", "\\u007f"))  # the only character of ASCII that JSON leaves as it is


def print_made(text: str) -> None:
    """Print the paths of finished files, unchanged in a pipe; a closed reader is an error too."""
    shown = sys.stdout is not None and sys.stdout.isatty()
    _print("\n".join(map(visible, text.split("\n"))) if shown else text, hint="the files that were made are whole")


def _spelled(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return ".nan" if isnan(value) else f"{'-' * (value < 0)}.inf"  # as in YAML
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    return [_spelled(item) for item in value] if isinstance(value, list | tuple) else value


def _print(text: str, hint: str) -> None:
    if sys.stdout is None:
        raise RunError("stdout cannot be written: it is closed", hint)
    try:
        print(text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries again at its end
        if hint or not isinstance(error, BrokenPipeError):
            raise RunError(f"stdout cannot be written: {error.strerror}", hint) from error


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as lines of a table, alike on a terminal and in a pipe; the columns in `right` are set flush right."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = [f"{'>' if number in right else '<'}{width}" for number, width in enumerate(widths)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]


def fitted_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows as `columns`. Where a terminal is too narrow for those, two lines a row: the first cell, then the others."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    lines = columns(rows, right)
    if max(map(len, lines)) <= width:
        return lines
    cells = columns([row[1:] for row in rows], [number - 1 for number in right])
    if max(map(len, cells)) > width - 2:
        cells = ["\n  ".join(wrap(" ".join(map(visible, row[1:])), width - 2)) for row in rows]
    return [line for row, rest in zip(rows, cells, strict=True) for line in (visible(row[0]), f"  {rest}")]


@dataclass
class _Work:
    """The steps of a stage or window, and the remaining time of the run from measured steps."""

    name: str  # of the steps, with a colon; empty for the only ones
    total: int  # steps of the stage
    later: float  # later denoising, in such steps
    clips: int  # to be decoded and written
    clip_seconds: float | None  # to decode and write one; None: none was yet
    show: Callable[["_Work"], None]
    began: float
    done: int = 0
    logged: tuple[float, int] = (0, 0)  # seconds since the beginning, and steps that were done, of the last line

    def advance(self, steps: int) -> None:
        self.done += steps
        self.show(self)

    def progress(self) -> str:
        """The finished steps, the time of one, and the approximate remaining time."""
        step = (monotonic() - self.began) / self.done
        end = " until decoding" if self.clip_seconds is None else " left"
        left = clock(step * (self.total - self.done + self.later) + self.clips * (self.clip_seconds or 0))
        return f"{self.name}{self.done} of {counted_steps(self.total)}, {duration(step)} each, about {left}{end}"


@dataclass
class Plain(Report):
    """A `Report` for logs and pipes: a line now and then, and when steps are done."""

    stream: TextIO
    verbose: bool = False
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # of each activity of a name
    bytes: int = 0  # that were moved in the current activity
    deferred: list[str] = field(default_factory=list)  # notes that are not printed yet
    heading: str = ""  # of the line that moves
    pause: float = LOG_SECONDS  # at least, between two lines that say how far a run is
    stepping: bool = False  # steps say how far they are themselves

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        began, self.bytes = monotonic(), 0
        with self._line(name):
            yield
        seconds = monotonic() - began
        self.seconds[name].append(seconds)
        rate = f", {quantity(self.bytes)} at {quantity(self.bytes / seconds)}/s" if self.bytes and seconds else ""
        worked = seconds >= 0.1 or not name.startswith("compile")  # a program from the cache takes less
        if (self.verbose and worked) or (rate and seconds >= self.pause):
            self._end(f"{name}: {seconds:.1f} s{rate}")

    def moved(self, size: int) -> None:
        self.bytes += size

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0, name: str = "") -> Iterator[Advance]:
        name = f"{name}: " if name else ""
        written = len(self.seconds[WRITE])
        clip_seconds = sum(self.seconds[DECODE] + self.seconds[WRITE]) / written if written else None
        with self._line(f"{name}0 of {counted_steps(total)}", total) as show:
            work, self.stepping = _Work(name, total, later, clips, clip_seconds, show, monotonic()), True
            try:
                yield work.advance
            finally:
                self.stepping = False
        self._end(f"{name}{counted_steps(total)}: {monotonic() - work.began:.1f} s")

    def part(self, text: str) -> None:
        self.heading = f"{text}: " if text else ""

    def note(self, text: str) -> None:
        self.flush()
        self._print(text)

    def defer(self, text: str) -> None:
        self.deferred.append(text)

    def flush(self) -> None:
        while self.deferred:
            self._print(self.deferred.pop(0))

    def _print(self, text: str) -> None:
        print(visible(text), file=self.stream, flush=True)

    @contextmanager
    def _line(self, text: str, total: int | None = None) -> Iterator[Callable[[_Work], None]]:
        """A line while an activity or its steps run. Yields the callback of their progress. A long one, such as a
        compilation, prints now and then that it continues."""
        ended, began = Event(), monotonic()

        def tell_on() -> None:
            while not ended.wait(self.pause):
                if not self.stepping:
                    self._print(f"{text}: {clock(monotonic() - began)} so far")

        if total is None:
            Thread(target=tell_on, daemon=True).start()
        try:
            yield self._log
        finally:
            ended.set()

    def _log(self, work: _Work) -> None:
        """A line when a tenth of the steps is done, but not before the pause since the last is over."""
        seconds, (last, done) = monotonic() - work.began, work.logged
        if seconds - last >= self.pause and work.total > work.done >= done + work.total / 10:
            self.note(work.progress())
            work.logged = seconds, work.done

    def _end(self, text: str) -> None:
        """An activity or its steps are done."""
        self.note(text)


class Live(Plain):
    """A `Report` for terminals: a moving line while an activity runs, and the remaining time of the run."""

    @cached_property
    def _console(self) -> Console:
        return Console(file=self.stream, highlight=False)

    def _print(self, text: str) -> None:
        self._console.print(Text(f"  {visible(text)}"))

    @contextmanager
    def _line(self, text: str, total: int | None = None) -> Iterator[Callable[[_Work], None]]:
        """The line is gone when it is done. stdout is left alone: it carries the results."""
        label = TextColumn("{task.description}")
        parts = [label, TimeElapsedColumn()] if total is None else [BarColumn(), label]
        with Progress(SpinnerColumn(), *parts, console=self._console, transient=True, redirect_stdout=False) as line:
            task = line.add_task(f"{self.heading}{text}", total=total)
            shown = partial(line.update, task)
            yield lambda work: shown(completed=work.done, description=f"{self.heading}{work.progress()}")

    def _end(self, text: str) -> None:
        self.flush()
        self._console.print(Text.assemble(("✓ ", "green"), text))


def counted_steps(number: int) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} step{'s' * (number != 1)}"


def clock(seconds: float) -> str:
    """`0:07`, `12:30`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
