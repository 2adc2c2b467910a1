"""The compiled programs of a run, and when they are compiled: beside the loading of weights, or not at all."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Sharding

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.core.report import Report
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.parallel.devices import machine_memory
from ltx2_cli.parallel.hosts import is_shared
from ltx2_cli.private_api import COMPILED_EVENT, READ_EVENT, compilation_refused, discard_unreadable_programs
from ltx2_cli.request.profiles import program_cache
from ltx2_cli.request.spec import NO_CACHE
from ltx2_cli.request.spelling import typed

KEPT_NOWHERE = "compiled programs are kept nowhere: "
# What jax warns of each program, and what is warned of here: the reason.
TROUBLE = re.compile(rf"(?:Error \w+ persistent compilation cache entry for '.*?': |{KEPT_NOWHERE})(.*)", re.DOTALL)
CORES, MEMORY = 4, 10e9  # of the host, for each program: libtpu used 8.9 GB for the audio of LTX-2.3
_LOWERING = Lock()  # to trace is work of Python, of which one thread does as much as several


def compiling_threads(platform: str) -> int:
    """The number of programs that this host compiles at once for a platform. GPUs tune a program by its time on the
    device, which another one would lengthen; hosts compile in one order."""
    if platform == "gpu" or jax.process_count() > 1:
        return 1
    return max(1, min((os.cpu_count() or 1) // CORES, int(machine_memory() // MEMORY)))


@dataclass(frozen=True)
class Program:
    """One compiled program, described before there is a weight or a device. The abstract arguments have the shapes,
    dtypes and shardings of a run's, so that the run compiles nothing more."""

    name: str
    networks: tuple[str, ...]  # whose weights it takes, in the order of their loading
    function: Any  # of `jitted`
    arguments: Callable[[], tuple[Any, ...]]  # abstract
    stage: int = 0  # the index of the plan's stage to which it belongs

    @property
    def network(self) -> str | None:
        """The last of its networks to be loaded; None: it takes no weights."""
        return self.networks[-1] if self.networks else None

    def __call__(self, *arguments: Any) -> Any:
        """Run it."""
        return self.function(*arguments)

    def lower(self) -> jax.stages.Lowered:
        """The program before XLA compiles it."""
        return self.function.lower(*self.arguments())

    def compile(self) -> None:
        """Compile it. jax remembers it: the call that follows finds it compiled."""
        with _LOWERING:
            lowered = self.lower()
        lowered.compile()

    def outputs(self) -> Any:
        """The results, abstract, laid out as the function lays them out."""
        return self.function.eval_shape(*self.arguments())


def as_abstract(arrays: Any, sharding: Sharding) -> Any:
    """Any tree of arrays without their values, laid out as `sharding` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), arrays)


class NotCompiledError(RunError):
    """A program is not in the cache, and none may be compiled."""


UNDIAGNOSABLE = (NotCompiledError, jax.errors.JaxRuntimeError)  # no program or no memory to look into a fault


def enable_compilation_cache(folder: str | None) -> None:
    """Keep the compiled programs of this process in `folder`, and read those of earlier processes from it.

    None: the folder that jax was given, else the user's own, with a warning where that cannot be written; `off`: none.
    Where jax was told to keep none, none is kept. Raises `UsageError` for a given folder that cannot be written.
    """
    settings: Any = jax.config  # its options are attributes without types
    if not settings.jax_enable_compilation_cache:
        return
    for threshold, least in (("min_compile_time_secs", 0), ("min_entry_size_bytes", -1)):  # also what is compiled soon
        jax.config.update(f"jax_persistent_cache_{threshold}", least)
    discard_unreadable_programs()
    place = folder or settings.jax_compilation_cache_dir or str(program_cache())
    if "://" in place and folder is None:
        return
    path = None if place == NO_CACHE else user_path(place)
    if path is not None and (reason := _unwritable(path)):
        if folder is not None:
            hint = f"{typed('compile_cache', 'FOLDER')}, or {typed('compile_cache', NO_CACHE)}"
            raise UsageError(f"compiled programs cannot be kept in {path}: {reason}", hint)
        warnings.warn(f"{KEPT_NOWHERE}{path}: {reason}", stacklevel=2)
        path = None
    jax.config.update("jax_compilation_cache_dir", path and str(path))
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
    """On several hosts with GPUs, use no cache unless all hosts share its folder: jax writes only on the first host,
    and hosts tune a program together, so hosts that compile would wait forever for the one that reads."""
    settings: Any = jax.config
    if jax.process_count() == 1 or jax.default_backend() != "gpu" or not settings.jax_enable_compilation_cache:
        return
    folder = settings.jax_compilation_cache_dir
    if folder and not is_shared(Path(folder)):
        jax.config.update("jax_enable_compilation_cache", False)
        reset_cache()
        report.note(
            f"compiled programs are not kept: each host has its own {folder};"
            f" {typed('compile_cache', 'FOLDER')} names one that all share"
        )


@dataclass(frozen=True)
class CompileStats:
    """Seconds of each program that was compiled, or read from the cache; and why some could not be kept or read."""

    compiled: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)

    @property
    def compiled_fresh(self) -> int:
        """Programs that no cache had."""
        return len(self.compiled) - len(self.read)

    def __str__(self) -> str:
        number = self.compiled_fresh
        programs = "1 program" if number == 1 else f"{number or 'no'} programs"
        seconds = f" in {sum(self.compiled) - sum(self.read):.1f} s" if number else ""
        trouble = f"; the cache failed: {self.troubles[0]}; {typed('compile_cache', 'FOLDER')}" if self.troubles else ""
        return f"compiled {programs}{seconds}, {len(self.read)} from the cache{trouble}"


@contextmanager
def count_compilations() -> Iterator[CompileStats]:
    """Count the programs that XLA compiles in the body, on all threads. Warnings of jax's cache become part of the
    count."""
    stats, show = CompileStats(), warnings.showwarning

    def on_warning(message: Warning | str, *details: Any, **options: Any) -> None:
        if trouble := TROUBLE.match(str(message)):
            stats.troubles.append(trouble[1])
        else:
            show(message, *details, **options)

    def on_event(event: str, duration_secs: float, **details: str | int) -> None:  # jax may name details
        if event in (COMPILED_EVENT, READ_EVENT):
            (stats.compiled if event == COMPILED_EVENT else stats.read).append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(on_event)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = on_warning
            yield stats
    finally:
        jax.monitoring.unregister_event_duration_listener(on_event)


@contextmanager
def forbid_compilation(programs: Iterable[Program]) -> Iterator[None]:
    """Nothing is compiled in the body. Raises `NotCompiledError` with all of `programs` that neither this process nor
    the cache has; and in the body, for any other program."""
    with compilation_refused(lambda name: _refuse([name])):
        missing = []
        for program in programs:
            try:
                program.compile()
            except NotCompiledError:
                missing.append(program.name)
        if missing:
            _refuse(missing)
        yield


def _refuse(names: list[str]) -> NoReturn:
    hint = "leave out --no-compile, or compile first: the same with --warmup"
    raise NotCompiledError(f"not compiled yet: {', '.join(names)}", hint)
