"""Checkpoints by name: a local path, or a repository of the hub, which is downloaded into huggingface_hub's cache. Slow
imports of that library are inside functions."""

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

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.errors import DISK_FULL, UsageError
from ltx2_cli.units import quantity
from ltx2_cli.weights.published import companions

EMBEDDED, DEMO_FOLDER = "embedded", Path(__file__).parents[1] / "demo"  # the checkpoint in this package
MOVE_CACHE = "make room there, or set HF_HOME to a folder on another disk"
INDEX_ENDING = ".safetensors.index.json"
TOKEN_PAGE = "https://huggingface.co/settings/tokens"
LOG_IN = f"set HF_TOKEN or run `hf auth login` with a token from {TOKEN_PAGE}"
NO_HUB = "check the network or the proxy; the model `demo` needs none"
TRY_AGAIN = "try again, or name a folder or a file on this machine"


@dataclass(frozen=True)
class Download:
    """One file of a repository: its name there, its bytes, and whether the cache has it."""

    repository: str
    name: str
    size: int
    cached: bool


class _Repo:
    """The parts of `REPO[/FILE][@revision]`."""

    def __init__(self, checkpoint: str):
        name, _, revision = checkpoint.partition("@")
        parts = name.split("/")
        self.id, self.file, self.revision = "/".join(parts[:2]), "/".join(parts[2:]), revision or None

    def patterns(self, wanted: Sequence[str]) -> list[str]:
        """Patterns of the needed files, `wanted` of a folder: those, or FILE, with those beside it of a split model."""
        beside = companions(self.file) if wanted else ()
        return [escape(self.file), *beside] if self.file else [*wanted]


def as_path(checkpoint: str) -> Path:
    """`checkpoint` as a path, which exists unless it is a repository."""
    return DEMO_FOLDER if checkpoint == EMBEDDED else user_path(checkpoint)


def locate_or_download(checkpoint: str, wanted: Sequence[str]) -> Path:
    """The folder or file at the path `checkpoint`, or of the repository `REPO[/FILE][@revision]`. Downloads the files
    of a repository that match `wanted` unless the cache has them; without an answer of the hub a complete cache
    suffices. Raises `UsageError` if the files cannot be had."""
    path, repo = as_path(checkpoint), _Repo(checkpoint)
    if path.exists():
        return path
    with _hub_errors(checkpoint):
        try:
            _commit(repo)  # where there is no network, a download would try five times, for half a minute
        except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
            return _fetch(repo, wanted, local_only=True, reason=error)
        return _fetch(repo, wanted)


def local_path(checkpoint: str, wanted: Sequence[str]) -> Path | None:
    """The result of `locate_or_download` if nothing must be downloaded, else None. Does not ask the hub."""
    path = as_path(checkpoint)
    if path.exists():
        return path
    with _hub_errors(checkpoint), suppress(errors.LocalEntryNotFoundError):
        return _fetch(_Repo(checkpoint), wanted, local_only=True)
    return None


def beside(checkpoint: str, file: str) -> str:
    """The address of a file in the repository of a split checkpoint, or its path above the folder of the denoiser."""
    path, repo = as_path(checkpoint), _Repo(checkpoint)
    if path.exists():
        return str(path.absolute().parent.parent / file)
    return f"{repo.id}/{file}" + (f"@{repo.revision}" if repo.revision else "")


def list_downloads(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The files of `locate_or_download`, as the hub lists them; none for a path, or if the hub does not answer and the
    cache is complete. Writes nothing. Raises `UsageError` as `locate_or_download`."""
    from huggingface_hub.utils import tqdm

    if as_path(checkpoint).exists():
        return []
    repo, silent = _Repo(checkpoint), partial(tqdm, disable=True)
    patterns = repo.patterns(wanted)
    with _hub_errors(checkpoint):
        try:
            # A branch would be noted in the cache as what it is now, and the older files there no longer found offline.
            which = {"revision": _commit(repo), "allow_patterns": patterns}
            files = hf.snapshot_download(repo.id, **which, dry_run=True, tqdm_class=silent)
        except (errors.HTTPError, errors.OfflineModeIsEnabled, errors.DryRunError) as error:
            _fetch(repo, wanted, local_only=True, reason=error)
            return []
    if repo.file and repo.file not in [file.filename for file in files]:
        raise UsageError(*_no_file(repo))
    if not files:
        hint = f"of a single file name it too: {repo.id}/FILE; `ltx2 models` lists what is known"
        raise UsageError(f"{repo.id} holds no file that is needed of it", hint)
    return [Download(repo.id, file.filename, file.file_size or 0, not file.will_download) for file in files]


def _commit(repo: _Repo) -> str | None:
    """The commit of a repository's revision, by the hub."""
    return hf.HfApi().model_info(repo.id, revision=repo.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha


def _fetch(repo: _Repo, wanted: Sequence[str], local_only: bool = False, reason: BaseException | None = None) -> Path:
    """The file or folder in the cache. `local_only`: without a network; an incomplete cache raises
    `LocalEntryNotFoundError` with the cause `reason`."""
    options = {"revision": repo.revision, "local_files_only": local_only}
    try:
        patterns = repo.patterns(wanted)
        if repo.file and len(patterns) == 1:
            return Path(hf.hf_hub_download(repo.id, repo.file, **options))
        return Path(hf.snapshot_download(repo.id, allow_patterns=patterns, **options)) / repo.file
    except errors.LocalEntryNotFoundError as absent:
        raise absent from reason or absent.__cause__


def cached_files(checkpoint: str, wanted: Sequence[str]) -> list[Download]:
    """The wanted files of a repository by the cache alone: by the listing of the last download, else those present and,
    with size 0, the shards that an index among them names."""
    from huggingface_hub.utils import filter_repo_objects

    repo = _Repo(checkpoint)
    if (folder := _snapshot(repo)) is None:
        return []
    present = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    try:
        listed = {file.path: file.size for file in hf.get_cached_repo_tree(repo.id, revision=repo.revision)}
    except errors.CachedRepoTreeNotFoundError:
        listed = dict.fromkeys(_shards(folder), 0) | present
    names = filter_repo_objects(listed, allow_patterns=[*wanted])
    return [Download(repo.id, name, listed[name], name in present) for name in names]


def local_weights(checkpoint: str) -> list[Path]:
    """The files of weights at a path, or of a repository in the cache. Does not ask the hub."""
    place, repo = as_path(checkpoint), _Repo(checkpoint)
    if not place.exists():
        with suppress(errors.HFValidationError):
            place = (_snapshot(repo) or place) / repo.file
    return [place] if place.is_file() else sorted(place.rglob("*.safetensors"))


def _snapshot(repo: _Repo) -> Path | None:
    """The folder of a repository in the cache, which may lack files."""
    try:
        return Path(hf.snapshot_download(repo.id, revision=repo.revision, local_files_only=True))
    except errors.IncompleteSnapshotError as incomplete:
        return Path(incomplete.snapshot_path)
    except errors.LocalEntryNotFoundError:
        return None


def _shards(folder: Path) -> Iterator[str]:
    """The files that the indices in a folder name; a damaged index names none, and a run refuses it."""
    for index in folder.rglob(f"*{INDEX_ENDING}"):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            files = json.loads(index.read_bytes())["weight_map"].values()
            yield from ((index.parent / file).relative_to(folder).as_posix() for file in files)


def check_disk_space(missing: Sequence[Download]) -> None:
    """Raise `UsageError` if the disk of the cache has too little space for the downloads."""
    if not missing:
        return
    needed, cache = sum(file.size for file in missing), Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        room = f"{cache} has room for {quantity(free)}"
        raise UsageError(f"{quantity(needed)} are to be downloaded, and {room}", MOVE_CACHE)


@contextmanager
def _hub_errors(checkpoint: str) -> Iterator[None]:
    """Turn every error of huggingface_hub about `checkpoint` into a `UsageError`."""
    try:
        yield
    except (errors.HTTPError, OSError, errors.HFValidationError, RuntimeError) as error:  # the last of its Rust part
        answer: BaseException | None = error
        while answer is not None and not isinstance(answer, errors.HfHubHTTPError):
            answer = answer.__cause__
        raise UsageError(*_sentence_and_hint(answer or error, checkpoint)) from error


def _sentence_and_hint(error: BaseException, checkpoint: str) -> tuple[str, str]:
    """A sentence and a hint on the answer of the hub, or on the failure to get one."""
    repo, token = _Repo(checkpoint), hf.get_token()
    page = f"https://huggingface.co/{quote(repo.id)}"
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    match error:
        case errors.GatedRepoError() if token:
            sentence = f"{repo.id} is gated, and the account of your token has no access to it"
            return sentence, f"accept its terms at {page} with that account; once granted, run again"
        case errors.GatedRepoError():
            return f"{repo.id} is gated", f"accept its terms at {page}, then {LOG_IN}"
        case errors.RevisionNotFoundError():
            newest = f"without `@{repo.revision}` it is the newest: {checkpoint.partition('@')[0]}"
            return f"{repo.id} has no revision `{repo.revision}`", newest
        case errors.RemoteEntryNotFoundError():
            return _no_file(repo)
        case errors.RepositoryNotFoundError() | errors.HFValidationError():
            private = "your token may not read it" if token else f"for a private one {LOG_IN}"
            hint = f"`ltx2 models` lists what is known, and a path here will do too; {private}"
            return f"no folder and no repository is called `{checkpoint}`", hint
        case errors.DisabledRepoError():
            return f"the hub has disabled {repo.id}", f"{page} may say why; `ltx2 models` lists others"
        case _ if status == 401:
            return "the hub does not accept your token", f"it may have expired: {LOG_IN}"
        case _ if status == 429:
            return "the hub answers no more requests for now", f"wait some minutes, or {LOG_IN}"
        case errors.HfHubHTTPError() if status == 403 and token:
            hint = f"give it read access to the repository, or to all gated ones you can access, at {TOKEN_PAGE}"
            return f"your token may not read {repo.id}: {_first_line(error.server_message or error)}", hint
        case errors.HfHubHTTPError():
            pass
        case _ if (isinstance(error, OSError) and error.errno in DISK_FULL) or "No space left" in str(error):
            return f"the disk with the cache is full: {constants.HF_HUB_CACHE}", MOVE_CACHE
        case errors.LocalEntryNotFoundError() | errors.OfflineModeIsEnabled() | errors.HTTPError():
            part = "only in part" if isinstance(error, errors.IncompleteSnapshotError) else "not"
            hint = "HF_HUB_OFFLINE is set: unset it" if constants.HF_HUB_OFFLINE else NO_HUB
            return f"{checkpoint} is {part} in the local cache and the hub cannot be reached", hint
    return f"{checkpoint} could not be fetched: {_first_line(error)}", TRY_AGAIN


def _no_file(repo: _Repo) -> tuple[str, str]:
    files = f"https://huggingface.co/{repo.id}/tree/main"
    hint = f"`ltx2 models` lists those that are known, {files} all there are"
    return f"{repo.id} has no file `{repo.file}`", hint


def _first_line(text: object) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "no reason given")
