"""Files beside the compiled programs, which are made again where they are lost, damaged or of another version."""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from ltx2_cli.artifacts.files import file_state

LIBRARIES = ("ltx2", "jax", "jaxlib", "transformers", "tokenizers", "torch", "torchax")


def cached_file(folder: str, facts: Iterable[object], suffix: str) -> Path | None:
    """The file of all these facts, the versions of the libraries and the code of this program in a folder of the cache.
    None where nothing is kept: without a cache of programs, and on several hosts, which would have to agree on what
    each of them has. Raises `OSError` for facts that cannot be read."""
    settings: Any = jax.config  # its options are attributes without types
    cache = settings.jax_compilation_cache_dir
    if not settings.jax_enable_compilation_cache or not cache or "://" in cache or jax.process_count() > 1:
        return None
    return Path(cache) / folder / f"{sha256(repr([*facts, _program()]).encode()).hexdigest()}{suffix}"


def delete_oldest(latest: Path, most_bytes: int) -> None:
    """Delete the files of the same kind in the folder of `latest` that were used before the last `most_bytes`."""
    with suppress(OSError):
        total, alike = 0, latest.parent.glob(f"*{latest.suffix}")
        for file in sorted(alike, key=lambda file: file.stat().st_mtime, reverse=True):
            total += file.stat().st_size
            if total > most_bytes:
                file.unlink()


@lru_cache(maxsize=1)
def _program() -> tuple[object, ...]:
    """The versions of the libraries, and the state of each file of this package: who changes one sees what it does."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return *map(metadata.version, LIBRARIES), *map(file_state, files)
