"""What a run says: live on a terminal, one line a stage elsewhere."""

import io
import os
import re
import subprocess
import sys

import pytest

from ltx2_cli.console import Live, Plain, columns, complain, print_out, reporter
from ltx2_cli.core.report import Report, Silent
from ltx2_cli.spec import RunError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def tell(report: Report) -> None:
    report.note("seed: 5")
    with report.stage("encode"):
        pass
    with report.stage("denoise"), report.steps(3) as steps:
        steps.advance()
        steps.advance(2)


def test_a_pipe_gets_a_line_a_stage():
    stream = io.StringIO()
    tell(reporter(stream))
    lines = [re.sub(r"\d+\.\d", "T", line) for line in stream.getvalue().splitlines()]
    assert lines == ["seed: 5", "encode: T s", "3 steps: T s", "denoise: T s"]


def test_a_terminal_gets_the_same_lines_and_colour():
    stream = Terminal()
    tell(reporter(stream))
    said = re.sub(r"\d+\.\d", "T", stream.getvalue())
    assert "\x1b[" in said
    assert all(line in said for line in ("seed: 5", "encode: T s", "3 steps: T s", "denoise: T s"))


def test_a_terminal_shows_how_far_the_steps_are():
    stream = Terminal()
    with reporter(stream).steps(3) as steps:
        steps.advance()
        steps.advance(2)
    assert "3/3" in stream.getvalue()


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colour_gets_plain_lines(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(reporter(Terminal()), Live)
    monkeypatch.setenv(name, value)
    assert isinstance(reporter(Terminal()), Plain)


def test_a_failed_stage_is_not_said_to_be_done():
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError), reporter(stream).stage("divide"):
        raise ZeroDivisionError
    assert stream.getvalue() == ""


def test_silence(capfd: pytest.CaptureFixture[str]):
    tell(Silent())
    assert capfd.readouterr() == ("", "")


def test_an_error_is_not_read_as_markup_nor_wrapped(capfd: pytest.CaptureFixture[str]):
    complain("no [bold]model[/bold]\n" + "x" * 200, "REPO[@REV]")
    assert capfd.readouterr().err == f"error: no [bold]model[/bold]\n       {'x' * 200}\nhint: REPO[@REV]\n"


def test_what_steers_a_terminal_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]):
    stranger = "\x1b[2J\x1b]0;title\x07 \x9b31m\u202eRED ☂ 👩\u200d🚀"
    shown = r"\x1b[2J\x1b]0;title\x07 \x9b31m\u202eRED ☂ " + "👩\u200d🚀"
    assert columns([["prompt", stranger]]) == [f"prompt  {shown}"]
    complain(f"no\n{stranger}", stranger)
    assert capsys.readouterr().err == f"error: no\n       {shown}\nhint: {shown}\n"
    for stream in (io.StringIO(), Terminal()):
        reporter(stream).note(stranger)
        assert shown in stream.getvalue()


def test_results_are_as_they_are_for_a_pipe_and_do_not_steer_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_out("a\x1b[2J\nb")
    assert capsys.readouterr().out == "a\x1b[2J\nb\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_out("a\x1b[2J\nb")
    assert capsys.readouterr().out == "a\\x1b[2J\nb\n"


def test_a_full_stdout_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(RunError, match=r"^stdout cannot be written: No space left on device"):
            print_out("clip.mp4")


def test_a_stdout_that_nobody_reads_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        with pytest.raises(RunError, match=r"^stdout cannot be written: Broken pipe"):
            print_out("clip.mp4")


def test_a_program_without_stderr_refuses_and_works() -> None:
    """Whose number nothing that is opened later may get."""
    command = f"{sys.executable} -m ltx2_cli info /nothing 2>&-; echo $?; {sys.executable} -m ltx2_cli --version 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert done.stdout.split()[:2] == ["2", "ltx2"]


def test_the_middle_of_an_endless_line_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    complain("there is no " + "x" * 100_000 + ".mp4", "")
    err = capsys.readouterr().err
    assert err.startswith("error: there is no xxx")
    assert err.endswith("x.mp4\n")
    assert len(err) < 2000
