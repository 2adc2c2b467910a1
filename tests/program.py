"""The program within a test, in this process."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from ltx2_cli.__main__ import main
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.state import RunState

CACHE, FOLDER = "jax_enable_compilation_cache", "jax_compilation_cache_dir"
KEPT = (CACHE, FOLDER, "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")


@contextmanager
def cache_restored() -> Iterator[None]:
    """Where jax keeps compiled programs is afterwards as it was before."""
    before = {name: getattr(jax.config, name) for name in KEPT}
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


def run_program(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run `ltx2` and give its exit code."""
    monkeypatch.setattr(sys, "argv", ["ltx2", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(os, "_exit", sys.exit)  # this process goes on
    with cache_restored(), pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@contextmanager
def signal_at(place: tuple[int, int, int], number: signal.Signals = signal.SIGTERM) -> Iterator[None]:
    """This process gets the signal while a run is told of this phase, batch and step."""
    measure = RunSaver._measure

    def send(saver: RunSaver, progress: RunState) -> None:
        measure(saver, progress)
        if (progress.phase, progress.batch, progress.step) == place:
            os.kill(os.getpid(), number)
            while not saver.stop.requested:
                pass  # a thread hears the signal

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunSaver, "_measure", send)
        yield
