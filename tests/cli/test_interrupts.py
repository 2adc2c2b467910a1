"""Real signals: one sentence, exit code 130, no traceback and nothing half written, whenever they come."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forked import Forked, fork
from interrupted import generate, generate_written, step_endlessly
from xla_flags import QUICK

LIMIT = 120  # seconds that the end may take on a machine that is busy

# A signal comes when jaxlib is imported, while a thread is at work that nobody may wait for.
STARTING = """
import os, signal, sys, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=time.sleep, args=(600,)).start()
def interrupt(event, arguments):
    if event == "import" and arguments[0] == "jaxlib":
        print(time.monotonic(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(interrupt)
from ltx2_cli.__main__ import main
main()
"""

# An ffmpeg that has written half of its file and goes on working.
SLOW_FFMPEG = """#!/bin/sh
for last; do :; done
echo half > "${last#file:}"
cat > /dev/null
exec sleep 60
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are a POSIX thing")


def start(folder: Path, program: Callable[..., None], *arguments: object, **environment: str) -> Forked:
    places = {"XLA_FLAGS": QUICK, "XDG_CACHE_HOME": str(folder / "cache")}
    return fork(folder, program, *arguments, environment={**places, **environment})


def wait_for(program: Forked, happened: Callable[[], bool]) -> None:
    while not happened():
        assert program.poll() is None, program.err.read_text()
        time.sleep(0.01)


def has_said(file: Path, text: str) -> Callable[[], bool]:
    """Whether a line that begins so is in a file, which need not exist yet."""
    return lambda: file.exists() and f"\n{text}" in f"\n{file.read_text()}"


def test_a_signal_during_imports_ends_the_program(tmp_path: Path) -> None:
    """The import of a compiled module is not cut short: the process ends."""
    program = subprocess.run(
        [sys.executable, "-c", STARTING, "generate", "--model", "demo", "--prompt", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "XLA_FLAGS": QUICK, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        timeout=LIMIT,
    )
    assert time.monotonic() - float(program.stdout) < LIMIT / 2  # the thread is at work for ten minutes
    assert program.stderr == "interrupted\n"
    assert program.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_signal_during_a_run_ends_it_cleanly(tmp_path: Path) -> None:
    program = start(tmp_path, generate)
    wait_for(program, has_said(program.err, "time: "))  # the networks are found, and begin to be loaded
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(LIMIT)
    assert program.returncode == 130
    assert "interrupted" in stderr.splitlines()
    assert "Traceback" not in stderr
    assert set(os.listdir(tmp_path)) <= {"cache"}


def test_a_signal_during_writing_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "ffmpeg").write_text(SLOW_FFMPEG)
    (tmp_path / "ffmpeg").chmod(0o755)
    program = start(tmp_path, generate_written, IMAGEIO_FFMPEG_EXE=str(tmp_path / "ffmpeg"))
    wait_for(program, lambda: bool(list(tmp_path.glob("out/.partial-*.mp4"))))
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(LIMIT)
    assert stderr.splitlines()[-1] == "interrupted"
    assert program.returncode == 130
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("waits", [False, True], ids=["in the call", "waited for"])
def test_a_second_signal_ends_a_long_step(tmp_path: Path, waits: bool) -> None:
    """The first is answered while the step runs, too."""
    program = start(tmp_path, step_endlessly, waits)
    try:
        wait_for(program, has_said(program.out, "begun\n"))
        program.send_signal(signal.SIGTERM)
        wait_for(program, has_said(program.err, "stopping after this step; once more: at once\n"))
        program.send_signal(signal.SIGHUP)
        assert program.communicate(LIMIT)[1].splitlines()[1] == "interrupted"
    finally:
        program.send_signal(signal.SIGKILL)  # or it would run for ever
    assert program.returncode == 130
