"""A checkpoint by its name: a path here, or a repository of the hub, which is fetched into huggingface_hub's cache.

What takes long to import of that library is imported where a repository is asked for.
"""

import errno
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from urllib.parse import quote

import huggingface_hub as hf
from huggingface_hub import constants, errors

from ltx2_cli.errors import UsageError
from ltx2_cli.units import quantity

EMBEDDED, DEMO_FOLDER = "embedded", Path(__file__).parents[1] / "demo"  # the checkpoint in this package
ELSEWHERE = "make room there, or set HF_HOME to a folder on another disk"
INDEX = ".safetensors.index.json"
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
TOKENS = "https://huggingface.co/settings/tokens"
LOG_IN = f"set HF_TOKEN or run `hf auth login` with a token from {TOKENS}"
AGAIN = "try again, or name a folder or a file on this machine"


@dataclass(frozen=True)
class Download:
    """One file of a repository: its name there, its bytes, and whether the cache has it."""

    repository: str
    name: str
    size: int
    cached: bool


class _Address:
    """The parts of `REPO[/FILE][@revision]`."""

    def __init__(self, checkpoint: str):
        name, _, revision = checkpoint.partition("@")
        parts = name.split("/")
        self.repository, self.file, self.revision = "/".join(parts[:2]), "/".join(parts[2:]), revision or None


def as_path(checkpoint: str) -> Path:
    """`checkpoint` as a path, which exists unless it is a repository."""
    return DEMO_FOLDER if checkpoint == EMBEDDED else Path(checkpoint).expanduser()


def locate(checkpoint: str, wanted: Sequence[str]) -> Path:
    """The folder or file at the path `checkpoint`, or of the repository `REPO[/FILE][@revision]`.

    Of a repository, the files that match `wanted` are fetched unless the cache has them; the cache will do where the
    hub does not answer. Raises `UsageError` where it cannot be had.
    """
    path, at = as_path(checkpoint), _Address(checkpoint)
    if path.exists():
        return path
    with _hub_errors(checkpoint):
        try:
            _commit(at)  # where there is no network, a download would try five times, for half a minute
        except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
            return _fetch(at, wanted, local_only=True, reason=error)
        return _fetch(at, wanted)


def local_path(checkpoint: str, wanted: Sequence[str]) -> Path | None:
    """What `locate` returns if nothing is to be fetched, else None. The hub is not asked."""
    path = as_path(checkpoint)
    if path.exists():
        return path
    with _hub_errors(checkpoint), suppress(errors.LocalEntryNotFoundError):
        return _fetch(_Address(checkpoint), wanted, local_only=True)
    return None


def list_downloads(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The files that `locate` would look for, as the hub lists them; empty for a path, and where the hub does not
    answer but the cache will do. Nothing is written. Raises `UsageError` where `locate` would."""
    if as_path(checkpoint).exists():
        return []
    from huggingface_hub.utils import tqdm

    at, silent = _Address(checkpoint), partial(tqdm, disable=True)
    patterns = [escape(at.file)] if at.file else [*wanted]
    with _hub_errors(checkpoint):
        try:
            # A branch would be noted in the cache as what it is now, and the older files there no longer found offline.
            which = {"revision": _commit(at), "allow_patterns": patterns}
            files = hf.snapshot_download(at.repository, **which, dry_run=True, tqdm_class=silent)
        except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.DryRunError) as error:
            _fetch(at, patterns, local_only=True, reason=error)
            return []
    if not files and at.file:
        raise _no_file(at)
    if not files:
        hint = f"of a single file name it too: {at.repository}/FILE; `ltx2 models` lists what is known"
        raise UsageError(f"{at.repository} holds no file that is needed of it", hint)
    return [Download(at.repository, file.filename, file.file_size or 0, not file.will_download) for file in files]


def _commit(at: _Address) -> str | None:
    """The commit of a repository's revision, by the hub."""
    return hf.HfApi().model_info(at.repository, revision=at.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha


def _fetch(at: _Address, wanted: Sequence[str], local_only: bool = False, reason: BaseException | None = None) -> Path:
    """The file or folder in the cache; `local_only` asks no network, and raises `LocalEntryNotFoundError`, because of
    `reason`, where the cache is not enough."""
    options = {"revision": at.revision, "local_files_only": local_only}
    try:
        if at.file:
            return Path(hf.hf_hub_download(at.repository, at.file, **options))
        return Path(hf.snapshot_download(at.repository, allow_patterns=[*wanted], **options))
    except errors.LocalEntryNotFoundError as absent:
        raise absent from reason or absent.__cause__


def cached_files(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The wanted files of a repository, by the cache alone: those of the listing kept when it was last fetched, else
    those in the cache and, with size 0, the shards that an index among them names."""
    from huggingface_hub.utils import filter_repo_objects

    at = _Address(checkpoint)
    try:
        folder = Path(hf.snapshot_download(at.repository, revision=at.revision, local_files_only=True))
    except errors.IncompleteSnapshotError as incomplete:
        folder = Path(incomplete.snapshot_path)
    except errors.LocalEntryNotFoundError:
        return []
    present = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    try:
        listed = {file.path: file.size for file in hf.get_cached_repo_tree(at.repository, revision=at.revision)}
    except errors.CachedRepoTreeNotFoundError:
        listed = dict.fromkeys(_shards(folder), 0) | present
    names = filter_repo_objects(listed, allow_patterns=[*wanted])
    return [Download(at.repository, name, listed[name], name in present) for name in names]


def _shards(folder: Path) -> Iterator[str]:
    """The files that the indices in a folder name; a damaged index names none, and a run refuses it."""
    for index in folder.rglob(f"*{INDEX}"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            files = json.loads(index.read_bytes())["weight_map"].values()
            yield from ((index.parent / file).relative_to(folder).as_posix() for file in files)


def check_disk_space(missing: Sequence[Download]) -> None:
    """Raise `UsageError` if the disk that holds the cache has no room for what is to be downloaded."""
    if not missing:
        return
    needed, cache = sum(file.size for file in missing), Path(cache_folder())
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UsageError(
            f"{quantity(needed)} are to be downloaded, and {cache} has room for {quantity(free)}", ELSEWHERE
        )


def cache_folder() -> str:
    """The folder that repositories are fetched into."""
    return constants.HF_HUB_CACHE


@contextmanager
def _hub_errors(checkpoint: str) -> Iterator[None]:
    """Raise `UsageError` for all that huggingface_hub raises in the body about `checkpoint`."""
    try:
        yield
    except (errors.HTTPError, OSError, errors.HFValidationError, RuntimeError) as error:  # the last of its Rust part
        answer: BaseException | None = error
        while answer is not None and not isinstance(answer, errors.HfHubHTTPError):
            answer = answer.__cause__
        raise _refusal(answer, checkpoint) if answer else _failure(error, checkpoint) from error


def _refusal(answer: errors.HfHubHTTPError, checkpoint: str) -> UsageError:
    """What the hub answered, in a sentence."""
    at, token, status = _Address(checkpoint), hf.get_token(), answer.response.status_code
    page = f"https://huggingface.co/{quote(at.repository)}"
    sentence, hint = f"{checkpoint} could not be fetched: {_first_line(answer)}", AGAIN
    if isinstance(answer, errors.RemoteEntryNotFoundError):
        return _no_file(at)
    if isinstance(answer, errors.GatedRepoError) and token:
        sentence = f"{at.repository} is gated, and the account of your token has no access to it"
        hint = f"accept its terms at {page} with that account; once granted, run again"
    elif isinstance(answer, errors.GatedRepoError):
        sentence, hint = f"{at.repository} is gated", f"accept its terms at {page}, then {LOG_IN}"
    elif isinstance(answer, errors.RevisionNotFoundError):
        sentence = f"{at.repository} has no revision `{at.revision}`"
        hint = f"without `@{at.revision}` it is the newest: {checkpoint.partition('@')[0]}"
    elif isinstance(answer, errors.RepositoryNotFoundError):
        return _unknown(checkpoint)
    elif isinstance(answer, errors.DisabledRepoError):
        sentence, hint = f"the hub has disabled {at.repository}", f"{page} may say why; `ltx2 models` lists others"
    elif status == 401:
        sentence, hint = "the hub does not accept your token", f"it may have expired: {LOG_IN}"
    elif status == 429:
        sentence, hint = "the hub answers no more requests for now", f"wait some minutes, or {LOG_IN}"
    elif status == 403 and token:
        sentence = f"your token may not read {at.repository}: {_first_line(answer.server_message or answer)}"
        hint = f"give it read access to the repository, or to all gated ones you can access, at {TOKENS}"
    return UsageError(sentence, hint)


def _failure(error: Exception, checkpoint: str) -> UsageError:
    """What failed before the hub answered, in a sentence."""
    if (isinstance(error, OSError) and error.errno in FULL) or "No space left" in str(error):
        return UsageError(f"the disk with the cache is full: {constants.HF_HUB_CACHE}", ELSEWHERE)
    if isinstance(error, errors.HFValidationError):
        return _unknown(checkpoint)
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | errors.HTTPError):
        part = "only in part" if isinstance(error, errors.IncompleteSnapshotError) else "not"
        offline = "HF_HUB_OFFLINE is set: unset it" if constants.HF_HUB_OFFLINE else "check the network or the proxy"
        return UsageError(f"{checkpoint} is {part} in the local cache and the hub cannot be reached", offline)
    return UsageError(f"{checkpoint} could not be fetched: {_first_line(error)}", AGAIN)


def _no_file(at: _Address) -> UsageError:
    files = f"https://huggingface.co/{at.repository}/tree/main"
    hint = f"`ltx2 models` lists those that are known, {files} all there are"
    return UsageError(f"{at.repository} has no file `{at.file}`", hint)


def _unknown(checkpoint: str) -> UsageError:
    private = "your token may not read it" if hf.get_token() else f"for a private one {LOG_IN}"
    hint = f"`ltx2 models` lists what is known, and a path here will do too; {private}"
    return UsageError(f"no folder and no repository is called `{checkpoint}`", hint)


def _first_line(text: object) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "no reason given")
