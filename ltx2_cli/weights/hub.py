"""The hub: a checkpoint that is not a path here is fetched into the cache of huggingface_hub."""

from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ltx2_cli.spec import SpecError


def locate(checkpoint: str, wanted: list[str]) -> Path:
    """The folder or the single file that `checkpoint` is, or that a repository id, with an optional `/FILE` and an
    optional `@revision`, names: fetched into the cache of huggingface_hub, whose environment variables and token
    apply; of a folder, as far as the patterns in `wanted` go."""
    path = Path(checkpoint).expanduser()
    if path.exists():
        return path
    name, _, revision = checkpoint.partition("@")
    owner, project, *inside = name.split("/")
    repository = f"{owner}/{project}"
    try:
        if inside:
            return Path(hf_hub_download(repository, "/".join(inside), revision=revision or None))
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=wanted))
    except GatedRepoError as error:
        raise SpecError(
            f"{repository} is gated",
            f"accept its terms at https://huggingface.co/{repository} and set HF_TOKEN or run `hf auth login`",
        ) from error
    except RevisionNotFoundError as error:
        raise SpecError(
            f"{repository} has no revision `{revision}`",
            f"without `@{revision}` it is the newest: --model {repository}",
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SpecError(
            f"no folder and no repository is called `{checkpoint}`",
            "--model takes a profile, a FOLDER or a REPO; for a private one set HF_TOKEN or run `hf auth login`",
        ) from error
    except LocalEntryNotFoundError as error:
        raise SpecError(
            f"{checkpoint} is not in the local cache and the hub cannot be reached",
            "check the network or HF_HUB_OFFLINE",
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise SpecError(f"{checkpoint} could not be fetched: {error}", "try again, or --model FOLDER") from error
