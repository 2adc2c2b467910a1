"""What a run says: live on a terminal, a few lines elsewhere."""

import io
import os
import re
import subprocess
import sys

import pytest

from ltx2_cli import console
from ltx2_cli.console import Live, Plain, columns, print_error, print_made, print_out, reporter
from ltx2_cli.core.report import Report, Timings
from ltx2_cli.errors import RunError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def tell(report: Report) -> None:
    report.note("seed: 5")
    with report.activity("encode"):
        pass
    with report.activity("denoise"), report.steps(3) as advance:
        advance(1)
        advance(2)


LINES = ["seed: 5", "encode: T s", "3 steps: T s", "denoise: T s"]


def timeless(text: str) -> str:
    return re.sub(r"\d+\.\d", "T", text)


@pytest.mark.parametrize(("verbose", "lines"), [(True, LINES), (False, [LINES[0], LINES[2]])])
def test_a_pipe_gets_one_line_per_stage_with_verbose(verbose: bool, lines: list[str]):
    stream = io.StringIO()
    tell(reporter(verbose, stream))
    assert timeless(stream.getvalue()).splitlines() == lines


@pytest.mark.parametrize("verbose", [True, False])
def test_a_terminal_gets_the_same_lines_in_colour(verbose: bool):
    stream = Terminal()
    tell(reporter(verbose, stream))
    shown = timeless(stream.getvalue())
    assert "\x1b[32m" in shown
    assert [line in shown for line in LINES] == [True, verbose, True, verbose]


@pytest.mark.parametrize("colour", [True, False])
def test_a_terminal_shows_progress_without_colour_too(colour: bool, monkeypatch: pytest.MonkeyPatch):
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    with reporter(stream=stream).steps(3) as advance:
        advance(1)
        advance(2)
    assert re.search(r"3 of 3 steps, \S+ m?s each, about 0:00 until decoding", stream.getvalue())
    assert ("\x1b[32m" in stream.getvalue()) == colour


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch):
    assert isinstance(reporter(stream=Terminal()), Live)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(reporter(stream=Terminal()), Plain)


def test_a_log_estimates_the_time_of_the_run(monkeypatch: pytest.MonkeyPatch):
    """40 steps of 10 s, 5 such steps in a second stage, then two clips: of the first run there was one, of 8 s."""
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    report = Plain(stream)
    for seconds in (6.0, 2.0):
        with report.activity("decode" if seconds == 6 else "write"):
            clock[0] += seconds
    with report.steps(40, later=5, clips=2) as advance:
        for _ in range(40):
            clock[0] += 10
            advance(1)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "4 of 40 steps, 10.0 s each, about 7:06 left"  # 36 and 5 steps of 10 s, two clips of 8 s
    assert lines[8] == "36 of 40 steps, 10.0 s each, about 1:46 left"
    assert lines[9:] == ["40 steps: 400.0 s"]


def test_a_log_of_fast_steps_reports_every_half_minute(monkeypatch: pytest.MonkeyPatch):
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    with Plain(stream).steps(100) as advance:
        for _ in range(100):
            clock[0] += 1
            advance(1)
    assert stream.getvalue().splitlines() == [
        "30 of 100 steps, 1.0 s each, about 1:10 until decoding",
        "60 of 100 steps, 1.0 s each, about 0:40 until decoding",
        "90 of 100 steps, 1.0 s each, about 0:10 until decoding",
        "100 steps: 100.0 s",
    ]


def test_one_step_is_singular():
    stream = io.StringIO()
    with Plain(stream).steps(1) as advance:
        advance(1)
    assert timeless(stream.getvalue()) == "1 step: T s\n"


def test_cached_programs_are_not_reported_as_compiled(monkeypatch: pytest.MonkeyPatch):
    clock, stream = [0.0], io.StringIO()
    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    for seconds in (0.04, 3.0):
        with Plain(stream, verbose=True).activity("compile noise"):
            clock[0] += seconds
    assert stream.getvalue() == "compile noise: 3.0 s\n"


def test_loading_says_how_fast_it_was(monkeypatch: pytest.MonkeyPatch):
    """Long loading to everybody."""
    clock, quiet, verbose = [0.0], io.StringIO(), io.StringIO()
    monkeypatch.setattr(console, "monotonic", lambda: clock[0])
    for stream in (quiet, verbose):
        report = Plain(stream, stream is verbose)
        for seconds, size in ((2.0, 3), (40.0, 38)):
            with Timings(report).activity("load transformer"):
                clock[0] += seconds
                Timings(report).moved(size * 10**9)
        with report.activity("decode"):
            clock[0] += 40
    assert quiet.getvalue() == "load transformer: 40.0 s, 38.0 GB at 0.9 GB/s\n"
    assert verbose.getvalue().splitlines() == [
        "load transformer: 2.0 s, 3.0 GB at 1.5 GB/s",
        quiet.getvalue().strip(),
        "decode: 40.0 s",
    ]


@pytest.mark.parametrize(("seconds", "text"), [(7.4, "0:07"), (750, "12:30"), (3723, "1:02:03")])
def test_durations_are_formatted(seconds: float, text: str):
    assert console.clock(seconds) == text


def test_a_failed_stage_is_not_reported_as_done():
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError), reporter(True, stream).activity("divide"):
        raise ZeroDivisionError
    assert stream.getvalue() == ""


def test_quiet_prints_nothing(capfd: pytest.CaptureFixture[str]):
    tell(Report())
    assert capfd.readouterr() == ("", "")


def test_errors_are_neither_markup_nor_wrapped(capfd: pytest.CaptureFixture[str]):
    print_error("no [bold]model[/bold]\n" + "x" * 200, "REPO[@REV]")
    assert capfd.readouterr().err == f"error: no [bold]model[/bold]\n       {'x' * 200}\nhint: REPO[@REV]\n"


def test_an_error_has_at_most_three_lines(capsys: pytest.CaptureFixture[str]):
    for hint, shown in (("", "a\n       b\n       c; d\n"), ("x", "a\n       b; c; d\nhint: x\n")):
        print_error("a\nb\nc\nd", hint)
        assert capsys.readouterr().err == f"error: {shown}"
    print_error("a\nb", "x\ny")
    assert capsys.readouterr().err == "error: a; b\nhint: x\n      y\n"


def test_control_characters_are_shown_escaped(capsys: pytest.CaptureFixture[str]):
    stranger = "\x1b[2J\x1b]0;title\x07 \x9b31m\u202eRED ☂ 👩\u200d🚀"
    shown = r"\x1b[2J\x1b]0;title\x07 \x9b31m\u202eRED ☂ " + "👩\u200d🚀"
    assert columns([["prompt", stranger]]) == [f"prompt  {shown}"]
    print_error(f"no\n{stranger}", stranger)
    assert capsys.readouterr().err == f"error: no\n       {shown}\nhint: {shown}\n"
    for stream in (io.StringIO(), Terminal()):
        reporter(stream=stream).note(stranger)
        assert shown in stream.getvalue()


def test_paths_are_exact_for_a_pipe_and_all_else_is_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_made("a\x1b[2J\nb")
    assert capsys.readouterr().out == "a\x1b[2J\nb\n"
    print_out("a\x1b[2J\nb")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_made("a\x1b[2J\nb")
    assert capsys.readouterr().out == 2 * "a\\x1b[2J\nb\n"


def test_a_full_stdout_is_an_error_of_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(RunError, match=r"^stdout cannot be written: No space left on device"):
            print_out("clip.mp4")


def test_a_closed_stdout_is_an_error_of_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(RunError, match=r"^stdout cannot be written: Broken pipe") as caught:
            print_made("clip.mp4")
    assert caught.value.hint == "the files that were made are whole"


def test_a_reader_that_wants_no_more_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        print_out("height: 512")
        print_out("width: 768")
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(RunError, match="stdout cannot be written: it is closed"):
        print_out("height: 512")


def test_the_program_works_without_stderr() -> None:
    """Whose number nothing that is opened later may get."""
    command = f"{sys.executable} -m ltx2_cli info /nothing 2>&-; echo $?; {sys.executable} -m ltx2_cli --version 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[:2] == ["2", "ltx2"]


def test_long_lines_are_shortened_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("there is no " + "x" * 100_000 + ".mp4", "")
    err = capsys.readouterr().err
    assert err.startswith("error: there is no xxx")
    assert err.endswith("x.mp4\n")
    assert len(err) < 2000


def test_a_log_says_that_a_long_stage_goes_on() -> None:
    """Once a pause; the test ends when two lines are there."""
    stream = io.StringIO()
    with Plain(stream, pause=0.001).activity("compile denoise"):
        while stream.getvalue().count("compile denoise: 0:00 so far\n") < 2:
            pass
