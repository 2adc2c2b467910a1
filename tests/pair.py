"""Two processes of four CPU devices each, as two hosts."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from forked import Forked, fork
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


def start_pair(folder: Path, *arguments: str) -> list[subprocess.Popen[str]]:
    """The same command twice, as two hosts that meet."""
    return [start(folder, *arguments, *told) for told in meeting()]


def start_programs(
    folder: Path, *commands: Sequence[str], first: Sequence[str] = (), second: Sequence[str] = ()
) -> list[Forked]:
    """`ltx2` commands, one after the other, on two hosts that begin where it is imported, and keep what they compile
    beside `folder`; each host's last arguments are added to every command."""
    kept = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(folder.parent / "programs"),
    }
    return [
        fork(folder, run_commands, commands, [*own, *told], environment=FOUR_DEVICES, **kept)
        for own, told in zip((first, second), meeting(), strict=True)
    ]


def meeting() -> list[list[str]]:
    """The options by which each of two processes meets the other."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    told = ["--coordinator-address", address, "--num-processes", "2", "--process-id"]
    return [[*told, str(number)] for number in range(2)]


def run_commands(commands: Sequence[Sequence[str]], common: list[str]) -> None:
    """In a process of its own: each command as `ltx2` would, with the arguments that all have in common.

    `shared` says whether a folder is, to whose name each host adds its number. `--signal NAME PHASE STEP` has the
    process send itself that signal when its run has done that step. No host may compare an array with the other hosts'
    on its way to the devices.
    """
    from jax.experimental import multihost_utils

    from ltx2_cli.__main__ import main
    from ltx2_cli.distributed import is_shared

    if "--signal" in common:
        place = common.index("--signal")
        _, name, *moment = common[place : place + 4]
        del common[place : place + 4]
        signal_at(signal.Signals[name], moment)
    multihost_utils.assert_equal = refuse
    results, stdout = os.dup(1), sys.stdout
    for command in commands:
        if command[0] == "shared":
            if is_shared(Path(command[1] + common[-1])) and common[-1] == "0":
                os.write(results, b"shared\n")
            continue
        os.dup2(results, 1)
        sys.stdout, sys.argv = stdout, ["ltx2", *command, *common]
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise


def signal_at(number: signal.Signals, moment: Sequence[str]) -> None:
    """Have this process send itself a signal when a run has done a step of a phase."""
    from ltx2_cli.core.run_state import RunState
    from ltx2_cli.core.saved_run import RunCheckpointer

    measure = RunCheckpointer._measure

    def measure_and_signal(checkpointer: RunCheckpointer, progress: RunState) -> None:
        measure(checkpointer, progress)
        if [str(progress.phase), str(progress.step)] == moment:
            os.kill(os.getpid(), number)
            while not checkpointer.stop.requested:
                pass  # a thread hears the signal

    RunCheckpointer._measure = measure_and_signal


def refuse(*arguments: object) -> None:
    raise AssertionError(f"an array is compared across hosts: {arguments}")


def ended(process: subprocess.Popen[str] | Forked) -> tuple[int, str, str]:
    """Its exit code, what it said on stdout, and on stderr, without the greeting of the library that connects CPUs."""
    out, err = process.communicate(timeout=LIMIT)
    # its threads write a line and its end apart, so that two ends can follow one another
    lines = [line for line in err.splitlines(keepends=True) if "peer ranks" not in line and line.strip()]
    return process.returncode, out, "".join(lines)
