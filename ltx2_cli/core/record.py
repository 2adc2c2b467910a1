"""What a record says besides the request: with what the clip was made, of which files, and what each stage left."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ltx2_cli.diffusion.fingerprints import Fingerprint, fingerprint, read_fingerprint
from ltx2_cli.diffusion.latents import LatentsFile, unpack
from ltx2_cli.plan import Plan
from ltx2_cli.profiles import MADE_WITH
from ltx2_cli.spec import AV, SpecError
from ltx2_cli.stages import Stage
from ltx2_cli.weights.digests import digest

History = tuple[Mapping[str, Any], ...]  # of each video, what its record says of latents: those it began with and made
PACKAGES = ("ltx2", "jax", "jaxlib")
FIRST, UPSAMPLED, FINAL = "stage1", "upsampled", "final"  # what the latents after a stage are


@dataclass(frozen=True)
class SourceFile:
    """The latents that a clip went on from."""

    file: Path
    sha256: str
    fps: float


@dataclass(frozen=True)
class MadeWith:
    """What a record says; an older one says less."""

    versions: Mapping[str, str]
    devices: str | None
    meshes: Mapping[str, str] | None  # of each stage
    files: Mapping[str, str] | None  # the SHA-256 of each that was read, weights and noise
    latents: Mapping[str, AV[Fingerprint]]  # after each stage; nothing in an older one
    source: SourceFile | None  # None: it began as noise


def begun(file: LatentsFile, fps: float) -> Mapping[str, Any]:
    """The history of a video that goes on from latents of so many frames a second."""
    return {"source": {"file": str(file.path.absolute()), "sha256": digest(file.path), "fps": fps}}


def continued(history: History, plan: Plan, stage: Stage, tokens: AV[np.ndarray]) -> History:
    """With the latents of each video that a stage left, as tokens."""
    latents = unpack(tokens, stage.shapes)
    name, rows = stage_name(plan, stage), range(len(tokens.video))
    left = [{each: fingerprint(stream[row]).text() for each, stream in latents._asdict().items()} for row in rows]
    before = history or ({},) * len(left)
    return tuple(
        {**one, "latents": {**one.get("latents", {}), name: each}} for one, each in zip(before, left, strict=True)
    )


def made_with(plan: Plan, files: Mapping[str, str], history: Mapping[str, Any]) -> dict[str, Any]:
    """What the record of a video says that was made here."""
    meshes = {stage_name(plan, stage): stage.sharding.text for stage in plan.stages}
    return {**versions(), "devices": devices(), "meshes": meshes, "files": dict(files), **history}


def versions() -> dict[str, str]:
    """Of what decides how a clip is computed."""
    return {package: version(package) for package in PACKAGES}


def devices() -> str:
    """All that there are: how many, of which kind."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}"


def stage_name(plan: Plan, stage: Stage) -> str:
    """What the latents are that a stage leaves."""
    if stage.source is None:
        return FIRST if plan.spec.refinement.sigmas else FINAL
    return FINAL if len(stage.sigmas) > 1 else UPSAMPLED


def input_files(plan: Plan) -> Collection[Path]:
    """Every file that the clips depend on, but for configs, tokenizers and latents."""
    weights = {tensor.file for files in plan.checkpoint.files.values() for tensor in files.values()}
    loras = {part.lora.path for network in plan.added.values() for each in network.values() for part in each.parts}
    return sorted(weights | loras | ({Path(plan.spec.noise).expanduser()} if plan.spec.noise else set()))


def read_made_with(record: Mapping[str, Any], place: str) -> MadeWith:
    """What a record in `place` says. Raises `SpecError` where that makes no sense."""
    said = record[MADE_WITH]
    try:
        source, stages = said.get("source"), said.get("latents", {})
        return MadeWith(
            {package: str(said[package]) for package in PACKAGES if package in said},
            said.get("devices"),
            said.get("meshes"),
            said.get("files"),
            {stage: AV(*(read_fingerprint(streams[name]) for name in AV._fields)) for stage, streams in stages.items()},
            source and SourceFile(Path(source["file"]), str(source["sha256"]), float(source["fps"])),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SpecError(
            f"{place} is damaged: its `{MADE_WITH}` is not what was written", "make the clip anew from its request"
        ) from error
