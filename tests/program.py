"""The program within a test, in this process."""

import signal
import sys

import pytest

from ltx2_cli.cli import main


def run_program(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `ltx2` and give its exit code. It ends deaf to Ctrl-C, which pytest does not want to be."""
    usual = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["ltx2", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGINT, usual)
    return ended.value.code
