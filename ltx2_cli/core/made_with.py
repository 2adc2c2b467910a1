"""What a record says besides the request, as it is read back: with what a clip was made, and from what."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ltx2_cli.diffusion.fingerprints import Fingerprint, read_fingerprint
from ltx2_cli.diffusion.latents import STAGES
from ltx2_cli.profiles import MADE_WITH
from ltx2_cli.spec import AV, SpecError
from ltx2_cli.validation import MAX_FPS

UNFINISHED = "errand"  # what a file says that keeps how far a run is, and no other does
PACKAGES = ("ltx2", "jax", "jaxlib")
FIRST, UPSAMPLED, FINAL = STAGES


@dataclass(frozen=True)
class Source:
    """The latents that a clip went on from."""

    file: Path
    sha256: str
    fps: float


@dataclass(frozen=True)
class MadeWith:
    """What a record says; an older one says less."""

    versions: Mapping[str, str]
    devices: str | None
    meshes: Mapping[str, str]  # of each stage
    at_once: int  # in a batch of so many videos
    files: Mapping[str, str]  # of each that was read, weights and noise: its SHA-256, or `header` and its header's
    latents: Mapping[str, AV[Fingerprint]]  # after each stage; nothing in an older one
    source: Source | None  # None: it began as noise


def read_made_with(record: Mapping[str, Any], place: str) -> MadeWith:
    """What a record in `place` says. Raises `SpecError` where that makes no sense."""
    said = record[MADE_WITH]
    try:
        source, stages = said.get("source"), said.get("latents", {})
        return MadeWith(
            {package: str(said[package]) for package in PACKAGES if package in said},
            said.get("devices"),
            _texts(said.get("meshes", {})),
            int(said.get("at_once", 1)),
            _texts(said.get("files", {})),
            {stage: AV(*(read_fingerprint(streams[name]) for name in AV._fields)) for stage, streams in stages.items()},
            source and Source(Path(source["file"]), str(source["sha256"]), _rate(source["fps"])),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise SpecError(
            f"{place} is damaged: its `{MADE_WITH}` is not what was written", "make the clip anew from its request"
        ) from error


def _texts(values: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


def _rate(value: Any) -> float:
    """Frames a second. Raises `ValueError` or `TypeError` for what is none."""
    if not 1 <= (rate := float(value)) <= MAX_FPS:
        raise ValueError(f"{rate} frames a second")
    return rate
