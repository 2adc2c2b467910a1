"""Every test runs on the CPU, offline, with eight virtual devices.

Most of their time would be XLA's: it leaves out what makes code fast. What XLA_FLAGS says comes last:
--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true is nearly as for users.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from ltx2_cli.parallel.devices import find_gpu_compiler
from xla_flags import QUICK, virtual_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
# Nothing is left behind; and to write a program takes as long as to compile it, where hardly one is read again.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
if "PYTEST_XDIST_WORKER" not in os.environ:  # those have it from here
    os.environ.setdefault("HF_HOME", str(Path.home() / ".cache/huggingface"))
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="ltx2-cache-")
os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads wait busily for each other
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # shorter programs to lower
os.environ["XLA_FLAGS"] = " ".join([QUICK, os.environ.get("XLA_FLAGS", ""), virtual_devices(8)])

# Bytecode is kept, also of tests as pytest rewrites them: for the other processes, and those that tests start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

find_gpu_compiler()

# A shell that runs the tests in the background, or nohup, has them ignored; libtpu has it where nobody handles SIGHUP.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, lambda number, frame: sys.exit(128 + number))

FIRST = [
    f"test_{name}.py"
    for name in (
        *("hosts", "kernels", "shown", "courses", "fused_attention"),  # the longest
        *("compiling", "programs", "private_api", "context_cache"),  # which forget what is compiled and others need
        "timings",  # a trace has all programs that the process has compiled
        *("condition_table", "run", "resume", "command", "batch", "two_stage", "precision", "sharded", "attention"),
        *("vocoder", "pipeline", "gemma", "transformer", "wheel", "benchmarks", "memory", "properties"),
        *("decode_video_tiles", "interrupts", "checkpoint", "plan"),
    )
]


def pytest_xdist_auto_num_workers() -> int:
    """One more than cores, up to four: a test that waits for a process leaves its core to another."""
    return min(4, (os.cpu_count() or 1) + 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come early: at the end no process waits for another."""
    order = {name: number for number, name in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


def pytest_sessionfinish() -> None:
    """A worker that has reported everything ends at once: to look for garbage and to take jax apart takes it 10 s."""
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        atexit.register(os._exit, 0)  # before what jax has registered


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to look for garbage in all of torch and jax takes half a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(100_000, 20, 20)
