"""Programs that take long to trace, kept as they were traced: the text encoder's, whose libraries take seconds to
import."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import lru_cache, wraps
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import jax
from jax.export import Exported, deserialize, export

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.core.cache_folder import cached_file, delete_oldest
from ltx2_cli.core.programs import Program
from ltx2_cli.errors import RunError
from ltx2_cli.parallel.jit import PROGRAMS, jitted_once

MOST_TRACED_BYTES = 2**28  # of the folder: a hundred programs
DIGEST_BYTES = sha256().digest_size  # at the beginning of a file, of what follows


class ExportedFunction:
    """A function of `jitted`, called as it was traced, which a file has or is given: the first process and later ones
    compile the same program."""

    def __init__(self, function: Any, out_shardings: Any, path: Path):
        self.function, self.out_shardings, self.path = function, out_shardings, path
        self.damaged = False  # the file, which was deleted
        self._called: Any = None

    def is_known(self) -> bool:
        """Whether it need not be traced."""
        if self._called is None:
            with suppress(OSError):
                content = self.path.read_bytes()
                digest, traced = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
                self.damaged = sha256(traced).digest() != digest
                if self.damaged:
                    self.path.unlink()
                    return False
                self._called = self._call(deserialize(bytearray(traced)))
                os.utime(self.path)  # the oldest use is deleted first
        return self._called is not None

    def __call__(self, *arguments: Any) -> Any:
        return self._traced(arguments)(*arguments)

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """As that of a function of `jax.jit`."""
        lowered: jax.stages.Lowered = self._traced(arguments).lower(*arguments)
        return lowered

    def eval_shape(self, *arguments: Any) -> Any:
        """As that of a function of `jax.jit`."""
        return self._traced(arguments).eval_shape(*arguments)

    def _traced(self, arguments: tuple[Any, ...]) -> Any:
        if not self.is_known():
            exported = self._export(arguments)
            self._called = self._call(exported)
            with suppress(RunError, OSError):  # then the next process traces it again
                self.path.parent.mkdir(exist_ok=True)
                with replacing(self.path) as temporary:
                    traced = exported.serialize()
                    temporary.write_bytes(sha256(traced).digest() + traced)
                delete_oldest(self.path, MOST_TRACED_BYTES)
        return self._called

    def _export(self, arguments: tuple[Any, ...]) -> Exported:
        """The function of the arguments' leaves: classes of trees would have to be registered."""
        leaves, tree = jax.tree.flatten(arguments)

        @wraps(self.function)
        def of_leaves(*leaves: Any) -> Any:  # options of compilers are refused inside another `jax.jit`
            return self.function.__wrapped__(*jax.tree.unflatten(tree, leaves))

        device = next(iter(jax.tree.leaves(self.out_shardings)[0].device_set))
        platform = {"gpu": "cuda"}.get(device.platform, device.platform)
        return export(jitted_once(of_leaves, self.out_shardings), platforms=[platform])(*leaves)

    def _call(self, exported: Exported) -> Any:
        @wraps(self.function)
        def call(*arguments: Any) -> Any:
            return exported.call(*jax.tree.leaves(arguments))

        return jitted_once(call, self.out_shardings)


def exported_function(program: Program, out_shardings: Any, facts: Iterable[object]) -> ExportedFunction | None:
    """The function of a program, which besides its arguments depends on these facts; None where nothing is kept."""
    path = cached_file("traced", chain(facts, _signature(program, out_shardings)), ".bin")
    return None if path is None else _exported_function(program.function, out_shardings, path)


_exported_function = lru_cache(PROGRAMS)(ExportedFunction)


def _signature(program: Program, out_shardings: Any) -> Iterator[object]:
    """The name of a program, its arguments and where its results lie."""
    yield from (program.name, repr(out_shardings))
    for path, leaf in jax.tree_util.tree_leaves_with_path(program.arguments()):
        yield jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype), repr(leaf.sharding)
