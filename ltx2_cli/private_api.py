"""Private names of libraries, which have no public equivalent: no other module uses any. pyproject.toml bounds their
versions from above, and tests/test_private_api.py says which version broke it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import jax
from jax._src import compilation_cache, compiler, distributed

# Events of jax.monitoring, whose names jax does not promise: how many programs were compiled, or read from the cache.
# The first is recorded for both, for a program from the cache after the second.
COMPILED_EVENT = "/jax/core/compile/backend_compile_duration"
READ_EVENT = "/jax/compilation_cache/cache_retrieval_time_sec"

_read_program = compilation_cache.get_executable_and_time


def discard_unreadable_programs() -> None:
    """From now on, delete unreadable files in jax's cache of compiled programs; jax warns and compiles the program.
    Without it, jax compiles a program whose file is truncated in every run, and never writes it again."""
    vars(compilation_cache)["get_executable_and_time"] = _read_or_discard  # whatever its further parameters


def _read_or_discard(cache_key: str, *arguments: Any) -> Any:
    try:
        return _read_program(cache_key, *arguments)
    except Exception:  # of the decompressor or of XLA; it goes on to jax
        settings: Any = jax.config
        with suppress(OSError):
            (Path(settings.jax_compilation_cache_dir) / f"{cache_key}-cache").unlink(missing_ok=True)
        raise


@contextmanager
def compilation_refused(refuse: Callable[[str], NoReturn]) -> Iterator[None]:
    """In the body, call `refuse` with a program's name instead of compiling it. jax has no public hook for this."""
    compile_program = compiler.backend_compile_and_load

    def refuse_program(backend: object, module: Any, *arguments: object) -> NoReturn:
        refuse(str(module.operation.attributes["sym_name"]).strip('"'))

    compiler.backend_compile_and_load = refuse_program
    try:
        yield
    finally:
        compiler.backend_compile_and_load = compile_program


def coordination_client() -> Any:
    """The client of jax's coordination service, which exchanges short texts without the devices; None on one host."""
    return distributed.global_state.client
