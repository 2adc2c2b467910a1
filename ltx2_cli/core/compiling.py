"""When programs are compiled: once for all runs, beside the loading of weights, or not at all; and how many were."""

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from ltx2_cli.core.programs import Program
from ltx2_cli.core.report import Report
from ltx2_cli.distributed import is_shared
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.private_api import COMPILED_EVENT, READ_EVENT, compilation_refused, discard_unreadable_programs
from ltx2_cli.request.profiles import user_cache
from ltx2_cli.request.spec import NO_CACHE

CompileFutures = Mapping[
    str, list[tuple[str, Future[None]]]
]  # by network: the names of its programs, and when each is compiled


KEPT_NOWHERE = "compiled programs are kept nowhere: "
# What jax warns of each program, and what is warned of here: the reason.
TROUBLE = re.compile(rf"(?:Error \w+ persistent compilation cache entry for '.*?': |{KEPT_NOWHERE})(.*)", re.DOTALL)


class NotCompiledError(RunError):
    """A program that is not in the cache, where none may be compiled."""


UNDIAGNOSABLE = (
    NotCompiledError,
    jax.errors.JaxRuntimeError,
)  # why a fault may not be looked into: no program, no memory


def enable_compilation_cache(folder: str | None) -> None:
    """Keep what this process compiles in `folder`, and read from there what an earlier one compiled.

    None is the folder that jax was given, such as by JAX_COMPILATION_CACHE_DIR, else the user's own, with a warning
    where that cannot be written; `off` is no folder. Where jax was told to keep none, none is kept. Raises `UsageError`
    for a folder that was asked for and cannot be written.
    """
    settings: Any = jax.config  # its options are attributes without types
    if not settings.jax_enable_compilation_cache:
        return
    for threshold, least in (("min_compile_time_secs", 0), ("min_entry_size_bytes", -1)):  # also what is compiled soon
        jax.config.update(f"jax_persistent_cache_{threshold}", least)
    discard_unreadable_programs()
    given = settings.jax_compilation_cache_dir
    if folder is None and given:
        if "://" not in given and (reason := _unwritable(Path(given))):
            warnings.warn(f"{KEPT_NOWHERE}{given}: {reason}", stacklevel=2)
        return
    place = None if folder == NO_CACHE else Path(folder).expanduser() if folder else user_cache() / "programs"
    if place is not None and (reason := _unwritable(place)):
        if folder is not None:
            raise UsageError(
                f"compiled programs cannot be kept in {place}: {reason}",
                f"--compile-cache FOLDER, or --compile-cache {NO_CACHE}",
            )
        warnings.warn(f"{KEPT_NOWHERE}{place}: {reason}", stacklevel=2)
        place = None
    jax.config.update("jax_compilation_cache_dir", None if place is None else str(place))
    reset_cache()  # it may have been opened elsewhere


def _unwritable(place: Path) -> str:
    """Why no file can be written into a folder, which is made; empty if it can."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        return "" if os.access(place, os.W_OK) else "permission denied"
    except FileExistsError:
        return "it is no folder"
    except OSError as error:
        return error.strerror or str(error)


def agree_on_programs(report: Report) -> None:
    """On several hosts with GPUs, keep no programs where each host has a folder of its own.

    jax writes on the first host alone, and hosts that compile tune a program together: who found it in its folder would
    be waited for in vain.
    """
    settings: Any = jax.config
    if jax.process_count() == 1 or jax.default_backend() != "gpu" or not settings.jax_enable_compilation_cache:
        return
    folder = settings.jax_compilation_cache_dir
    if folder and not is_shared(Path(folder)):
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()
        report.note(
            f"compiled programs are not kept: each host has its own {folder}; --compile-cache FOLDER names one that"
            " all share"
        )


@contextmanager
def compile_in_background(programs: Iterable[Program]) -> Iterator[CompileFutures]:
    """While the body runs, its programs are compiled beside it, in their order, by one thread.

    What goes wrong there is raised to who waits for that program. At the end, those that wait are forgotten.
    """
    pool, ahead = ThreadPoolExecutor(1, "compile"), defaultdict(list)
    try:
        for program in programs:
            if program.network is not None:
                ahead[program.network].append((program.name, pool.submit(_compile, program)))
        yield ahead
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _compile(program: Program) -> None:
    program.lower().compile()  # jax remembers it: the call that follows finds it compiled


@dataclass(frozen=True)
class CompileStats:
    """Programs that were compiled, and those that were read from the cache, in seconds each; and why some could not be
    kept there, or read."""

    compiled: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        number = len(self.compiled) - len(self.read)
        programs = "1 program" if number == 1 else f"{number or 'no'} programs"
        seconds = f" in {sum(self.compiled) - sum(self.read):.1f} s" if number else ""
        trouble = f"; the cache failed: {self.troubles[0]}; --compile-cache FOLDER" if self.troubles else ""
        return f"compiled {programs}{seconds}, {len(self.read)} from the cache{trouble}"


@contextmanager
def count_compilations() -> Iterator[CompileStats]:
    """How many programs XLA compiles in the body, on all threads; what Python would warn of their cache is kept for the
    count."""
    count, show = CompileStats(), warnings.showwarning

    def hear(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if trouble := TROUBLE.match(str(message)):
            count.troubles.append(trouble[1])
        else:
            show(message, category, filename, lineno, file, line)

    def listen(event: str, duration_secs: float, **details: str | int) -> None:  # jax may name details
        if event == COMPILED_EVENT:
            count.compiled.append(duration_secs)
        elif event == READ_EVENT:
            count.read.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = hear
            yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def forbid_compilation(programs: Iterable[Program]) -> Iterator[None]:
    """Nothing is compiled in the body. Raises `NotCompiledError`, before it begins, with all programs of these that
    neither this process nor the cache has; and in it, for any other program."""
    with compilation_refused(lambda name: _refuse([name])):
        if missing := [program.name for program in programs if not _is_compiled(program)]:
            _refuse(missing)
        yield


def _is_compiled(program: Program) -> bool:
    try:
        _compile(program)
    except NotCompiledError:
        return False
    return True


def _refuse(names: list[str]) -> NoReturn:
    raise NotCompiledError(
        f"not compiled yet: {', '.join(names)}", "leave out --no-compile, or compile first: the same with --warmup"
    )
