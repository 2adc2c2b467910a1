"""Ctrl-C, as real signals: one sentence, exit code 130, no traceback and nothing half written, whenever it comes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ltx2_cli.cli.interrupts import postponed, stopping
from ltx2_cli.core.stop import StopRequest
from xla_flags import QUICK

SENTENCE = "error: interrupted\n"
HINT = "hint: finished files stay, the unfinished one is gone\n"

# Ctrl-C comes when argv[1] is imported, and again at the very end; stdout says which imports were finished.
PROGRAM = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
moment = sys.argv.pop(1)
def interrupt(event, arguments):
    if event == "import" and arguments[0] == moment:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
from ltx2_cli.__main__ import main
"""
RUN = """
def end():
    os.kill(os.getpid(), signal.SIGINT)
    print([name for name in ("profiles", "core.timings") if f"ltx2_cli.{name}" in sys.modules], flush=True)
def at_once(code, leave=os._exit):
    end()
    leave(code)
os._exit = at_once
try:
    main()
finally:
    end()
"""
BUSY = """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
"""

# In place of a run, one that only writes its video.
WRITER = """
from pathlib import Path
import numpy as np
from ltx2_cli.core import run
from ltx2_cli.media import Media, write_mp4
def write(plan, components, report, *more):
    write_mp4(Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((9, 2), np.float32), 24.0, 24000), Path("out/a.mp4"))
    yield Path("out/a.mp4"), []
run.write = write
"""

# An ffmpeg that has written half of its file and goes on working.
SLOW_FFMPEG = """#!/bin/sh
for last; do :; done
echo half > "${last#file:}"
cat > /dev/null
exec sleep 60
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are a POSIX thing")


def start(folder: Path, program: str, moment: str = "", **environment: str) -> subprocess.Popen[str]:
    environment = {
        "XLA_FLAGS": QUICK,
        "XDG_CACHE_HOME": str(folder / "cache"),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, moment, "generate", "--model", "demo", "--prompt", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("moment", "said", "imported"),
    [
        ("typer", SENTENCE, "[]\n"),
        ("numpy", SENTENCE + HINT, "['profiles']\n"),
        ("jaxlib", SENTENCE + HINT, "['profiles', 'core.timings']\n"),
    ],
)
def test_while_it_starts(moment: str, said: str, imported: str, tmp_path: Path) -> None:
    """The import of compiled modules is not cut short."""
    program = start(tmp_path, PROGRAM + RUN, moment)
    assert program.communicate() == (imported, said)
    assert program.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_while_it_runs(tmp_path: Path) -> None:
    program = start(tmp_path, PROGRAM + RUN)
    assert program.stderr
    while "does not know" not in program.stderr.readline():  # the networks are found, and begin to be loaded
        assert program.poll() is None
    program.send_signal(signal.SIGINT)
    stderr = program.communicate()[1]
    assert program.returncode == 130
    assert stderr.endswith(SENTENCE + HINT)
    assert "Traceback" not in stderr
    assert set(os.listdir(tmp_path)) <= {"cache"}


def test_a_thread_at_work_is_not_waited_for(tmp_path: Path) -> None:
    """As one that compiles is."""
    program = start(tmp_path, PROGRAM + BUSY + RUN, "numpy")
    assert program.communicate(timeout=120) == ("['profiles']\n", SENTENCE + HINT)
    assert program.returncode == 130


def test_while_it_writes(tmp_path: Path) -> None:
    (tmp_path / "ffmpeg").write_text(SLOW_FFMPEG)
    (tmp_path / "ffmpeg").chmod(0o755)
    program = start(tmp_path, PROGRAM + WRITER + RUN, IMAGEIO_FFMPEG_EXE=str(tmp_path / "ffmpeg"))
    while not list(tmp_path.glob("out/.partial-*.mp4")):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGINT)
    stderr = program.communicate()[1]
    assert stderr.splitlines(keepends=True)[1:] == [SENTENCE, HINT]  # the first line says the seed
    assert program.returncode == 130
    assert not (tmp_path / "out").exists()


# A run whose step never ends, within one call into C++, and that listens.
ENDLESS = """
import os, sys
import jax
from ltx2_cli.cli.interrupts import stopping
from ltx2_cli.core.stop import StopRequest
endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0.5, x)).lower(1.0).compile()
with stopping(StopRequest(listening=True)):
    print("begun", flush=True)
    endless(1.0).block_until_ready()
"""


def test_a_second_signal_ends_a_step_that_takes_long(tmp_path: Path) -> None:
    """The first is answered while the step runs, too."""
    program = start(tmp_path, ENDLESS)
    assert program.stdout
    assert program.stderr
    assert program.stdout.readline() == "begun\n"
    program.send_signal(signal.SIGTERM)
    assert program.stderr.readline() == "\n"
    assert program.stderr.readline() == "stopping after this step; once more: at once\n"
    program.send_signal(signal.SIGHUP)
    assert program.communicate(timeout=60)[1].splitlines(keepends=True)[0] == SENTENCE
    assert program.returncode == 130


def test_what_nohup_ignores_stays_ignored() -> None:
    request, usual = StopRequest(listening=True), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping(request):
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)
    assert not request.requested


def test_a_postponed_interrupt_comes_at_the_end() -> None:
    done = []

    def body() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("the body")

    with pytest.raises(KeyboardInterrupt), postponed():
        body()
    assert done == ["the body"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with postponed():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, usual)
