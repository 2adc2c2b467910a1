"""Every test runs on the CPU, offline, with eight virtual devices.

Most of their time would be XLA's: it compiles nothing twice in a session, and leaves out what makes code fast. What
XLA_FLAGS says comes last: --xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true is nearly as for users.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from xla_flags import QUICK, virtual_devices

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # in other processes: nothing is left behind
os.environ["OMP_NUM_THREADS"] = "1"  # torch's threads wait busily for each other
os.environ["XLA_FLAGS"] = " ".join([QUICK, os.environ.get("XLA_FLAGS", ""), virtual_devices(8)])

sys.path.append(str(Path(sys.prefix) / "gpu-compiler"))  # as `make compilers` installs it

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

# A shell that runs the tests in the background, or nohup, has them ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

LONGEST = ("test_hosts.py", "test_shown.py", "test_kernels.py", "test_courses.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first: at the end no process waits for another."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """What is imported by now stays: to look for garbage in all of torch and jax takes half a second each time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> None:
    """Keeps what is compiled, for all processes of this session: a count of compilations counts what is read from
    there too."""
    own = tmp_path_factory.getbasetemp()
    common = own if worker_id == "master" else own.parent
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(common / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    reset_cache()  # it was found unused
