"""Repositories of the hub: what they hold, and fetching it into the cache of huggingface_hub."""

import json
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

from ltx2_cli.weights.hub import Download
from ltx2_cli.weights.hub_errors import explained, no_file, nothing_wanted

INDEX = ".safetensors.index.json"


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


def fetch(checkpoint: str, wanted: Sequence[str]) -> Path:
    """The file or the folder of `REPO[/FILE][@revision]` in the cache; what the cache lacks is fetched. Where the hub
    gives no answer the cache will do. Raises `SpecError` where it cannot be had."""
    at = read_address(checkpoint)
    with explained(checkpoint):
        try:
            _commit(at)  # where there is no network, a download would try five times, for half a minute
        except (HTTPError, OfflineModeIsEnabled) as error:
            return _from_cache(at, wanted, error)
        if at.file:
            return Path(hf_hub_download(at.repository, at.file, revision=at.revision))
        return Path(snapshot_download(at.repository, revision=at.revision, allow_patterns=[*wanted]))


def fetched(checkpoint: str, wanted: Sequence[str]) -> Path | None:
    """What `fetch` gives where nothing is to be fetched for it; else None. It asks no network."""
    with explained(checkpoint), suppress(LocalEntryNotFoundError):
        return _from_cache(read_address(checkpoint), wanted)
    return None


def listing(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The files that `fetch` would look for; none where the hub gives no answer and the cache has what is needed.
    Raises `SpecError` where `fetch` would."""
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
        commit, silent = _commit(at), partial(tqdm, disable=True)
        return snapshot_download(at.repository, revision=commit, allow_patterns=wanted, dry_run=True, tqdm_class=silent)
    except (HTTPError, OfflineModeIsEnabled, DryRunError) as error:
        _from_cache(at, wanted, error)
        return None


def _commit(at: Address) -> str | None:
    """The commit of a repository's revision, by the hub."""
    return HfApi().model_info(at.repository, revision=at.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha


def _from_cache(at: Address, wanted: Sequence[str], reason: Exception | None = None) -> Path:
    """What `fetch` gives without a network; raises `LocalEntryNotFoundError`, because of `reason`, where that is not
    enough."""
    try:
        if at.file:
            return Path(hf_hub_download(at.repository, at.file, revision=at.revision, local_files_only=True))
        return Path(
            snapshot_download(at.repository, revision=at.revision, allow_patterns=[*wanted], local_files_only=True)
        )
    except LocalEntryNotFoundError as nothing:
        raise nothing from reason


def cached_files(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """What `cached` in `hub` says."""
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
