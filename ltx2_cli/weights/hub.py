"""A checkpoint by its name: a path here, or a repository that is fetched into the cache of huggingface_hub.

That library is imported only where a repository is asked for.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ltx2_cli.spec import SpecError
from ltx2_cli.units import natural

EMBEDDED, INSIDE = "embedded", Path(__file__).parents[1] / "demo"  # the checkpoint in this package, and where it is
ELSEWHERE = "make room there, or set HF_HOME to a folder on another disk"


@dataclass(frozen=True)
class Download:
    """One file of a repository: its name there, its bytes, and whether the cache has it."""

    repository: str
    name: str
    size: int
    cached: bool


def path_of(checkpoint: str) -> Path:
    """Where `checkpoint` is, if it is no repository's."""
    return INSIDE if checkpoint == EMBEDDED else Path(checkpoint).expanduser()


def locate(checkpoint: str, wanted: Sequence[str]) -> Path:
    """The folder or the single file that `checkpoint` is, or that a repository id, with an optional `/FILE` and an
    optional `@revision`, names: fetched into the cache of huggingface_hub, whose environment variables and token
    apply; of a folder, as far as the patterns in `wanted` go. Raises `SpecError` where it cannot be had."""
    path = path_of(checkpoint)
    if path.exists():
        return path
    from ltx2_cli.weights.repositories import fetch

    return fetch(checkpoint, wanted)


def here(checkpoint: str, wanted: Sequence[str]) -> Path | None:
    """What `locate` gives where nothing is to be fetched for it; else None. It asks no network."""
    path = path_of(checkpoint)
    if path.exists():
        return path
    from ltx2_cli.weights.repositories import fetched

    return fetched(checkpoint, wanted)


def downloads(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The files that `locate` would look for, by the hub; nothing for a path, and nothing where the hub cannot be
    asked but the cache will do. Nothing is written. Raises `SpecError` where `locate` would."""
    if path_of(checkpoint).exists():
        return []
    from ltx2_cli.weights.repositories import listing

    return listing(checkpoint, wanted)


def cached(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """What the cache alone says of a repository's wanted files: those of the listing that was kept when it was last
    fetched; where none was, those that are here and, of size 0, the shards that an index among them names."""
    from ltx2_cli.weights.repositories import cached_files

    return cached_files(checkpoint, wanted)


def check_room(missing: Sequence[Download]) -> None:
    """Raise `SpecError` if the disk that holds the cache has no room for what is to be downloaded."""
    if not missing:
        return
    needed, cache = sum(file.size for file in missing), Path(cache_folder())
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise SpecError(f"{natural(needed)} are to be downloaded, and {cache} has room for {natural(free)}", ELSEWHERE)


def cache_folder() -> str:
    """The folder that repositories are fetched into."""
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE
