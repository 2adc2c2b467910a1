"""What the user sees on stderr: stages with their times, steps with what is left of them, errors with a way out."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ltx2_cli.core.report import Report, Steps
from ltx2_cli.spec import RunError

LONGEST_LINE = 2000  # characters of an error
STEERING = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def reporter(stream: TextIO | None = None) -> Report:
    """The report for `stream` (stderr): live on a terminal, plain lines where there is none or nobody wants colour."""
    stream = stream or sys.stderr
    live = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Live(Console(file=stream, highlight=False)) if live else Plain(stream)


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


@dataclass(frozen=True)
class Plain:
    """A `Report` for logs and pipes: a line when a stage is done."""

    stream: TextIO

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = monotonic()
        yield
        self.note(_done(name, began))

    @contextmanager
    def steps(self, total: int) -> Iterator[Steps]:
        began = monotonic()
        yield self
        self.note(_done(f"{total} steps", began))

    def note(self, text: str) -> None:
        print(visible(text), file=self.stream, flush=True)

    def advance(self, steps: int = 1) -> None:
        pass


@dataclass(frozen=True)
class Live:
    """A `Report` for terminals: a line that moves while a stage runs and stays with its time when it is done."""

    console: Console

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = monotonic()
        with _line(self.console, SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()) as line:
            line.add_task(name, total=None)
            yield
        self._tick(_done(name, began))

    @contextmanager
    def steps(self, total: int) -> Iterator[Steps]:
        began = monotonic()
        left = (TextColumn("left:"), TimeRemainingColumn())
        with _line(self.console, SpinnerColumn(), MofNCompleteColumn(), BarColumn(), *left) as line:
            yield _Bar(line, line.add_task("", total=total))
        self._tick(_done(f"{total} steps", began))

    def note(self, text: str) -> None:
        self.console.print(Text(f"  {visible(text)}"))

    def _tick(self, text: str) -> None:
        self.console.print(Text.assemble(("✓ ", "green"), text))


@dataclass(frozen=True)
class _Bar:
    line: Progress
    task: TaskID

    def advance(self, steps: int = 1) -> None:
        self.line.advance(self.task, steps)


def _line(console: Console, *columns: ProgressColumn) -> Progress:
    """A line that is gone when it is done. stdout is left alone: it carries the results."""
    return Progress(*columns, console=console, transient=True, redirect_stdout=False)


def _done(name: str, began: float) -> str:
    return f"{name}: {monotonic() - began:.1f} s"
