"""Two processes of four CPU devices each, as two hosts."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from xla_flags import QUICK, virtual_devices

# Runs the commands in argv[1], lists of arguments in JSON, one after the other as `ltx2` would each; what comes behind
# them on the command line is added to each. `shared` says whether a folder is, to whose name each host adds its number.
# `--signal NAME PHASE STEP` has the process send itself that signal when its run has done that step. No host may
# compare an array with the other hosts' on its way to the devices.
PROGRAM = """
import gc, json, os, signal, sys
gc.set_threshold(100_000, 20, 20)  # as conftest.py
from jax.experimental import multihost_utils
from ltx2_cli.__main__ import main
from ltx2_cli.core.journal import Journal
from ltx2_cli.hosts import is_shared
from pathlib import Path

commands, common = json.loads(sys.argv[1]), sys.argv[2:]
if "--signal" in common:
    first = common.index("--signal")
    _, name, *moment = common[first : first + 4]
    del common[first : first + 4]
    measure = Journal._measure

    def measure_and_signal(journal, progress):
        measure(journal, progress)
        if [str(progress.phase), str(progress.step)] == moment:
            os.kill(os.getpid(), signal.Signals[name])
            while not journal.stop.requested:
                pass  # a thread hears the signal

    Journal._measure = measure_and_signal

def refuse(*arguments):
    raise AssertionError(f"an array is compared across hosts: {arguments}")

multihost_utils.assert_equal = refuse
results, stdout = os.dup(1), sys.stdout
for command in commands:
    if command[0] == "shared":
        if is_shared(Path(command[1] + common[-1])) and common[-1] == "0":
            os.write(results, b"shared\\n")
        continue
    os.dup2(results, 1)
    sys.stdout, sys.argv = stdout, ["ltx2", *command, *common]
    try:
        main()
    except SystemExit as ended:
        if ended.code:
            raise
"""
LIMIT = 300  # seconds that anything here may take on a machine that is busy


def start(folder: Path, *arguments: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    """One process of Python with these arguments, in `folder`."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "XLA_FLAGS": f"{QUICK} {virtual_devices(4)}", **environment},
    )


def start_pair(
    folder: Path, *arguments: str, first: Sequence[str] = (), second: Sequence[str] = ()
) -> list[subprocess.Popen[str]]:
    """The same command twice, each with what is its own, as two hosts that meet; they keep what they compile where this
    session does."""
    cache = {
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    with socket.socket() as free:
        free.bind(("localhost", 0))
        told = ["--coordinator-address", f"localhost:{free.getsockname()[1]}", "--num-processes", "2", "--process-id"]
    return [start(folder, *arguments, *own, *told, str(i), **cache) for i, own in enumerate((first, second))]


def start_programs(
    folder: Path, *commands: Sequence[str], first: Sequence[str] = (), second: Sequence[str] = ()
) -> list[subprocess.Popen[str]]:
    """`ltx2` commands, one after the other, on two hosts."""
    return start_pair(folder, "-c", PROGRAM, json.dumps(commands), first=first, second=second)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, what it said on stdout, and on stderr, without the greeting of the library that connects CPUs."""
    out, err = process.communicate(timeout=LIMIT)
    # its threads write a line and its end apart, so that two ends can follow one another
    lines = [line for line in err.splitlines(keepends=True) if "peer ranks" not in line and line.strip()]
    return process.returncode, out, "".join(lines)
