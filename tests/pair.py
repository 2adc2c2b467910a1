"""Two processes of four CPU devices each, as two hosts."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from xla_flags import QUICK, virtual_devices

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


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, what it said on stdout, and on stderr, without the greeting of the library that connects CPUs."""
    out, err = process.communicate(timeout=LIMIT)
    # its threads write a line and its end apart, so that two ends can follow one another
    lines = [line for line in err.splitlines(keepends=True) if "peer ranks" not in line and line.strip()]
    return process.returncode, out, "".join(lines)
