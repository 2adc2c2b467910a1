"""Processes that begin where all of ltx2 is imported: that takes them longer than a tiny clip does."""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import mkdtemp

CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["ltx2_cli.cli", "ltx2_cli.core.run", "ltx2_cli.models.gemma_torch"])


@dataclass(frozen=True)
class Forked:
    """Such a process, as `subprocess.Popen` has it, and the files that it writes its output to."""

    process: BaseProcess
    out: Path
    err: Path

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        """Like that of `subprocess.Popen`, nothing where the process has ended."""
        assert self.process.pid
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):  # it ended since
                os.kill(self.process.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.process.exitcode is not None
        return self.out.read_text(), self.err.read_text()


def fork(
    folder: Path,
    function: Callable[..., None],
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Forked:
    """Call a module's function in a process of its own, in `folder`; `settings` are jax's."""
    output = Path(mkdtemp())
    files = output / "out", output / "err"
    wanted = {**os.environ, **(environment or {})}
    process = CONTEXT.Process(target=_begin, args=(folder, files, wanted, settings, function, arguments), daemon=True)
    process.start()
    return Forked(process, *files)


def run_main(*arguments: str) -> None:
    """`ltx2`, as it is called."""
    from ltx2_cli.__main__ import main

    sys.argv = ["ltx2", *arguments]
    main()


def _begin(
    folder: Path,
    files: tuple[Path, Path],
    environment: Mapping[str, str],
    settings: Mapping[str, object],
    function: Callable[..., None],
    arguments: tuple[object, ...],
) -> None:
    import jax

    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # as conftest.py
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for name, value in settings.items():
        jax.config.update(name, value)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
