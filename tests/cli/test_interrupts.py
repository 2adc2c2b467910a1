"""Real signals: one sentence, exit code 130, no traceback and nothing half written, whenever they come."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from xla_flags import QUICK

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

# Ctrl-C comes again at the very end.
PROGRAM = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from ltx2_cli.__main__ import main
def at_once(code, leave=os._exit):
    os.kill(os.getpid(), signal.SIGINT)
    leave(code)
os._exit = at_once
"""
RUN = "main()"

# In place of a run, one that only writes its video.
WRITER = """
from pathlib import Path
import numpy as np
from ltx2_cli.core import write as module
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
def write(plan, components, report, *more):
    write_mp4(Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((9, 2), np.float32), 24.0, 24000), Path("out/a.mp4"))
    yield Path("out/a.mp4"), []
module.write = write
"""

# An ffmpeg that has written half of its file and goes on working.
SLOW_FFMPEG = """#!/bin/sh
for last; do :; done
echo half > "${last#file:}"
cat > /dev/null
exec sleep 60
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are a POSIX thing")


def start(folder: Path, program: str, **environment: str) -> subprocess.Popen[str]:
    environment = {
        "XLA_FLAGS": QUICK,
        "XDG_CACHE_HOME": str(folder / "cache"),
        **environment,
    }
    return subprocess.Popen(
        [sys.executable, "-c", program, "generate", "--model", "demo", "--prompt", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
    )


def test_a_signal_during_imports_ends_the_program(tmp_path: Path) -> None:
    """The import of a compiled module is not cut short: the process ends."""
    program = start(tmp_path, STARTING)
    stdout, stderr = program.communicate(timeout=120)
    assert time.monotonic() - float(stdout) < 1
    assert stderr == "interrupted\n"
    assert program.returncode == 130
    assert list(tmp_path.iterdir()) == []


def test_a_signal_during_a_run_ends_it_cleanly(tmp_path: Path) -> None:
    program = start(tmp_path, PROGRAM + RUN)
    assert program.stderr
    while not program.stderr.readline().startswith("time: "):  # the networks are found, and begin to be loaded
        assert program.poll() is None
    program.send_signal(signal.SIGINT)
    stderr = program.communicate()[1]
    assert program.returncode == 130
    assert "interrupted" in stderr.splitlines()
    assert "Traceback" not in stderr
    assert set(os.listdir(tmp_path)) <= {"cache"}


def test_a_signal_during_writing_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "ffmpeg").write_text(SLOW_FFMPEG)
    (tmp_path / "ffmpeg").chmod(0o755)
    program = start(tmp_path, PROGRAM + WRITER + RUN, IMAGEIO_FFMPEG_EXE=str(tmp_path / "ffmpeg"))
    while not list(tmp_path.glob("out/.partial-*.mp4")):
        assert program.poll() is None
        time.sleep(0.01)
    program.send_signal(signal.SIGINT)
    stderr = program.communicate()[1]
    assert stderr.splitlines()[-1] == "interrupted"
    assert program.returncode == 130
    assert not (tmp_path / "out").exists()


# A run whose step never ends, and that listens: within one call into C++, or in a wait for what runs in another thread.
ENDLESS = """
import sys
from threading import Timer
import jax
import jax.numpy as jnp
from ltx2_cli.cli import app
from ltx2_cli.__main__ import main
from ltx2_cli.interrupts import StopRequest, stop_on_signal
endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: x * 0.5, x)).lower(1.0).compile()
slow = jax.jit(lambda x: jnp.sum(x @ x) * 0 + 1).lower(jnp.ones((1500, 1500))).compile()
def run():
    with stop_on_signal(StopRequest(listening=True)):
        Timer(0.5, print, ["begun"], {"flush": True}).start()  # by then the call has begun
        endless(%s).block_until_ready()
app.main = run
main()
"""


@pytest.mark.parametrize("argument", ["1.0", "slow(jnp.ones((1500, 1500)))"], ids=["in the call", "waited for"])
def test_a_second_signal_ends_a_long_step(tmp_path: Path, argument: str) -> None:
    """The first is answered while the step runs, too."""
    program = start(tmp_path, ENDLESS % argument)
    assert program.stdout
    assert program.stderr
    assert program.stdout.readline() == "begun\n"
    program.send_signal(signal.SIGTERM)
    assert program.stderr.readline() == "stopping after this step; once more: at once\n"
    program.send_signal(signal.SIGHUP)
    try:
        assert program.communicate(timeout=60)[1].splitlines()[0] == "interrupted"
    finally:
        program.kill()  # or it would run for ever
    assert program.returncode == 130
