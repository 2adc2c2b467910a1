"""Two processes of four CPU devices each, as two hosts."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from forked import Forked, fork
from host_slices import read
from xla_flags import QUICK, virtual_devices

FOUR_DEVICES = {"XLA_FLAGS": f"{QUICK} {virtual_devices(4)}"}
LIMIT = 300  # seconds that anything here may take on a machine that is busy


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """One process of Python with these arguments, in `folder`."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **FOUR_DEVICES},
    )


def start_programs(folder: Path, *commands: Sequence[str]) -> list[Forked]:
    """`ltx2` commands, one after the other, on two hosts that begin where it is imported."""
    return [fork(folder, run_commands, commands, told, environment=FOUR_DEVICES) for told in meeting()]


def start_readers(folder: Path) -> list[Forked]:
    """`host_slices.read` on two hosts."""
    return [fork(folder, read, told, environment=FOUR_DEVICES) for told in meeting()]


def meeting() -> list[list[str]]:
    """The options by which each of two processes meets the other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    told = ["--coordinator-address", address, "--num-processes", "2", "--process-id"]
    return [[*told, str(number)] for number in range(2)]


def run_commands(commands: Sequence[Sequence[str]], told: list[str]) -> None:
    """In a process of its own: each command as `ltx2` would, with the options by which the hosts meet.

    The process ends as its last command does. Before that, hosts stay connected, and a line `exit CODE` on stdout and
    on stderr ends what a command wrote. `signal NAME HOST PHASE STEP` has a host send itself a signal when the run of
    the next command has done that step; `shared FOLDER` says whether a folder is, to whose name each host adds its
    number; a host adds the arguments of `only HOST ARGUMENT...` to the next command. No host may compare an array with
    the other hosts' on its way to the devices.
    """
    from jax.experimental import multihost_utils

    from ltx2_cli.__main__ import main
    from ltx2_cli.parallel.hosts import is_shared

    multihost_utils.assert_equal = refuse
    output, stdout = os.dup(1), sys.stdout
    added: list[str] = []
    undo = [lambda: None]
    for command in commands:
        name, *arguments = command
        if name == "signal":
            number, host, *moment = arguments
            if host == told[-1]:
                undo.append(signal_at(signal.Signals[number], moment))
        elif name == "only":
            added = arguments[1:] if arguments[0] == told[-1] else []
        elif name == "shared":
            if is_shared(Path(arguments[0] + told[-1])) and told[-1] == "0":
                os.write(1, b"shared\n")
        else:
            sys.argv = ["ltx2", *command, *added, *told]
            if command is commands[-1]:
                main()
            code = exit_code_of(main)
            multihost_utils.process_allgather(
                np.int32(code)
            )  # the first host may be writing what the next command reads
            os.dup2(output, 1)  # the program keeps stdout for itself
            sys.stdout = stdout
            for number in (1, 2):
                os.write(number, b"exit %d\n" % code)
            undo.pop()()
            undo, added = [lambda: None], []


def exit_code_of(main: Callable[[], None]) -> int:
    """That of one command, which neither ends the process nor its connection."""
    import jax

    left: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        connected = jax.distributed.is_initialized
        patch.setattr(jax.distributed, "is_initialized", lambda: connected() and not left)
        patch.setattr(jax.distributed, "shutdown", lambda: left.append(True))
        patch.setattr(os, "_exit", sys.exit)
        try:
            main()
        except SystemExit as end:
            return end.code or 0
    raise AssertionError("the command did not end")


def signal_at(number: signal.Signals, moment: Sequence[str]) -> Callable[[], None]:
    """Have this process send itself a signal when a run has done a step of a phase; gives what ends that."""
    from ltx2_cli.core.run_saver import RunSaver
    from ltx2_cli.core.state import RunState

    measure = RunSaver._measure

    def measure_and_signal(saver: RunSaver, progress: RunState) -> None:
        measure(saver, progress)
        if [str(progress.phase), str(progress.step)] == moment:
            os.kill(os.getpid(), number)
            while not saver.stop.requested:
                pass  # a thread hears the signal

    def undo() -> None:
        RunSaver._measure = measure

    RunSaver._measure = measure_and_signal
    return undo


def refuse(*arguments: object) -> None:
    raise AssertionError(f"an array is compared across hosts: {arguments}")


def ended(process: subprocess.Popen[str] | Forked) -> tuple[int, str, str]:
    """Its exit code, what it said on stdout, and on stderr, without the greeting of the library that connects CPUs."""
    out, err = process.communicate(timeout=LIMIT)
    # its threads write a line and its end apart, so that two ends can follow one another
    lines = [line for line in err.splitlines(keepends=True) if "peer ranks" not in line and line.strip()]
    return process.returncode, out, "".join(lines)


def ended_commands(process: Forked) -> list[tuple[int, str, str]]:
    """Of each command of `start_programs`: its exit code, and what it said on stdout and stderr."""
    code, *texts = ended(process)
    out, err = (re.split(r"^exit (.+)\n", text, flags=re.MULTILINE) for text in texts)
    assert out[1::2] == err[1::2]
    codes = [*map(int, out[1::2]), code]
    return list(zip(codes, out[::2], err[::2], strict=True))
