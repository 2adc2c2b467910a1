"""What huggingface_hub says when it fails, as one sentence and a way out."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ltx2_cli.spec import SpecError
from ltx2_cli.weights.hub import ELSEWHERE

FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
TOKENS = "https://huggingface.co/settings/tokens"
LOG_IN = f"set HF_TOKEN or run `hf auth login` with a token from {TOKENS}"
AGAIN = "try again, or name a folder or a file on this machine"


@contextmanager
def explained(checkpoint: str) -> Iterator[None]:
    """Raise `SpecError` for all that huggingface_hub raises in the body about `checkpoint`."""
    try:
        yield
    # the downloader in Rust raises RuntimeError
    except (HTTPError, OSError, HFValidationError, RuntimeError) as error:
        raise _explanation(error, checkpoint) from error


def no_file(repository: str, file: str) -> SpecError:
    """A file that a repository does not hold."""
    return SpecError(
        f"{repository} has no file `{file}`",
        f"`ltx2 models` lists those that are known, https://huggingface.co/{repository}/tree/main all there are",
    )


def nothing_wanted(repository: str) -> SpecError:
    """A repository of something else."""
    return SpecError(
        f"{repository} holds no file that is needed of it",
        f"of a single file name it too: {repository}/FILE; `ltx2 models` lists what is known",
    )


def _explanation(error: Exception, checkpoint: str) -> SpecError:
    """Of an error, and of the hub's answer behind it where there was one."""
    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, HfHubHTTPError):
        answer = answer.__cause__
    return _of_hub(answer, checkpoint) if answer is not None else _of_machine(error, checkpoint)


def _of_hub(error: HfHubHTTPError, checkpoint: str) -> SpecError:
    name, _, revision = checkpoint.partition("@")
    repository, file = "/".join(name.split("/")[:2]), "/".join(name.split("/")[2:])
    status, page = error.response.status_code, f"https://huggingface.co/{quote(repository)}"
    match error:
        case GatedRepoError() if get_token():
            return SpecError(
                f"{repository} is gated, and the account of your token has no access to it",
                f"accept its terms at {page} with that account; once granted, run again",
            )
        case GatedRepoError():
            return SpecError(f"{repository} is gated", f"accept its terms at {page}, then {LOG_IN}")
        case RevisionNotFoundError():
            return SpecError(
                f"{repository} has no revision `{revision}`",
                f"without `@{revision}` it is the newest: {name}",
            )
        case RemoteEntryNotFoundError():
            return no_file(repository, file)
        case RepositoryNotFoundError():
            return _unknown(checkpoint)
        case DisabledRepoError():
            return SpecError(f"the hub has disabled {repository}", f"{page} may say why; `ltx2 models` lists others")
    if status == 401:
        return SpecError("the hub does not accept your token", f"it may have expired: {LOG_IN}")
    if status == 403 and get_token():
        return SpecError(
            f"your token may not read {repository}: {_line(error.server_message or error)}",
            f"give it read access to the repository, or to all gated ones you can access, at {TOKENS}",
        )
    if status == 429:
        return SpecError("the hub answers no more requests for now", f"wait some minutes, or {LOG_IN}")
    return SpecError(f"{checkpoint} could not be fetched: {_line(error)}", AGAIN)


def _of_machine(error: Exception, checkpoint: str) -> SpecError:
    full = isinstance(error, OSError) and error.errno in FULL
    if full or "No space left" in str(error):
        return SpecError(f"the disk with the cache is full: {constants.HF_HUB_CACHE}", ELSEWHERE)
    if isinstance(error, HFValidationError):
        return _unknown(checkpoint)
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled | HTTPError):
        here = "only in part" if isinstance(error, IncompleteSnapshotError) else "not"
        offline = constants.HF_HUB_OFFLINE
        return SpecError(
            f"{checkpoint} is {here} in the local cache and the hub cannot be reached",
            "HF_HUB_OFFLINE is set: unset it" if offline else "check the network or the proxy",
        )
    return SpecError(f"{checkpoint} could not be fetched: {_line(error)}", AGAIN)


def _unknown(checkpoint: str) -> SpecError:
    private = "your token may not read it" if get_token() else f"for a private one {LOG_IN}"
    return SpecError(
        f"no folder and no repository is called `{checkpoint}`",
        f"`ltx2 models` lists what is known, and a path here will do too; {private}",
    )


def _line(what: object) -> str:
    """The first line that says something."""
    return next((line.strip() for line in str(what).splitlines() if line.strip()), "no reason given")
