"""The hub: a checkpoint that is not a path here is fetched into the cache of huggingface_hub."""

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path

from huggingface_hub import DryRunFileInfo, HfApi, constants, get_cached_repo_tree, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    DryRunError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import filter_repo_objects, tqdm

from ltx2_cli.spec import SpecError
from ltx2_cli.weights.hub_errors import ELSEWHERE, explained, no_file, nothing_wanted

INDEX = ".safetensors.index.json"
EMBEDDED, INSIDE = "embedded", Path(__file__).parents[1] / "demo"  # the checkpoint in this package, and where it is


@dataclass(frozen=True)
class Download:
    """One file of a repository: its name there, its bytes, and whether the cache has it."""

    repository: str
    name: str
    size: int
    cached: bool


@dataclass(frozen=True)
class Address:
    """What `REPO[/FILE][@revision]` names."""

    repository: str
    file: str
    revision: str | None


def read_address(checkpoint: str) -> Address:
    """The parts of `REPO[/FILE][@revision]`."""
    name, _, revision = checkpoint.partition("@")
    parts = name.split("/")
    return Address("/".join(parts[:2]), "/".join(parts[2:]), revision or None)


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
    at = read_address(checkpoint)
    with explained(checkpoint):
        if at.file:
            return Path(hf_hub_download(at.repository, at.file, revision=at.revision))
        return Path(snapshot_download(at.repository, revision=at.revision, allow_patterns=[*wanted]))


def here(checkpoint: str, wanted: Sequence[str]) -> Path | None:
    """What `locate` gives where nothing is to be fetched for it; else None. It asks no network."""
    path = path_of(checkpoint)
    if path.exists():
        return path
    with explained(checkpoint), suppress(LocalEntryNotFoundError):
        return _from_cache(read_address(checkpoint), [*wanted])
    return None


def downloads(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The files that `locate` would look for, by the hub; nothing for a path, and nothing where the hub cannot be
    asked but the cache will do. Nothing is written. Raises `SpecError` where `locate` would."""
    if path_of(checkpoint).exists():
        return []
    at = read_address(checkpoint)
    with explained(checkpoint):
        found = _ask(at, [escape(at.file)] if at.file else [*wanted])
    if found == []:
        raise no_file(at.repository, at.file) if at.file else nothing_wanted(at.repository)
    return [Download(at.repository, file.filename, file.file_size or 0, not file.will_download) for file in found or []]


def _ask(at: Address, wanted: list[str]) -> list[DryRunFileInfo] | None:
    """The wanted files by the hub; None where it gives no answer and the cache has what is needed."""
    try:
        # A branch would be noted in the cache as what it is now, and the older files there no longer found offline.
        commit = HfApi().model_info(at.repository, revision=at.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
        silent = partial(tqdm, disable=True)
        return snapshot_download(at.repository, revision=commit, allow_patterns=wanted, dry_run=True, tqdm_class=silent)
    except (HTTPError, OfflineModeIsEnabled, DryRunError) as error:
        try:
            _from_cache(at, wanted)
        except LocalEntryNotFoundError as nothing:
            raise nothing from error
        return None


def _from_cache(at: Address, wanted: list[str]) -> Path:
    """What `locate` gives without a network; raises `LocalEntryNotFoundError` where that is not enough."""
    if at.file:
        return Path(hf_hub_download(at.repository, at.file, revision=at.revision, local_files_only=True))
    return Path(snapshot_download(at.repository, revision=at.revision, allow_patterns=wanted, local_files_only=True))


def cached(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """What the cache alone says of a repository's wanted files: those of the listing that was kept when it was last
    fetched; where none was, those that are here and, of size 0, the shards that an index among them names."""
    at = read_address(checkpoint)
    folder = _snapshot(at)
    if folder is None:
        return []
    present = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    try:
        listed = {file.path: file.size for file in get_cached_repo_tree(at.repository, revision=at.revision)}
    except CachedRepoTreeNotFoundError:
        listed = dict.fromkeys(_shards(folder, present), 0) | present
    names = filter_repo_objects(listed, allow_patterns=[*wanted])
    return [Download(at.repository, name, listed[name], name in present) for name in names]


def _snapshot(at: Address) -> Path | None:
    """The folder of a repository in the cache, be it complete or not."""
    try:
        return Path(snapshot_download(at.repository, revision=at.revision, local_files_only=True))
    except IncompleteSnapshotError as partly:
        return Path(partly.snapshot_path)
    except LocalEntryNotFoundError:
        return None


def _shards(folder: Path, names: Iterable[str]) -> Iterator[str]:
    """The files that the indices among `names` name; a damaged one names none, and a run will say so."""
    for index in (name for name in names if name.endswith(INDEX)):
        with suppress(ValueError, KeyError, TypeError, AttributeError):
            beside = index.rpartition("/")[0]
            yield from (
                f"{beside}/{shard}".lstrip("/")
                for shard in json.loads((folder / index).read_bytes())["weight_map"].values()
            )


def check_room(missing: Sequence[Download]) -> None:
    """Raise `SpecError` if the disk that holds the cache has no room for what is to be downloaded."""
    needed, cache = sum(file.size for file in missing), Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise SpecError(
            f"{gigabytes(needed)} are to be downloaded, and {cache} has room for {gigabytes(free)}", ELSEWHERE
        )


def gigabytes(size: int) -> str:
    """Bytes as people say them: `92.1 GB`, `0.3 GB`, and below a tenth of that `12 MB`."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
