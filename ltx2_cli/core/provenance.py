"""What a record says besides the request: of which files, on which devices, what each stage left; made and read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ltx2_cli.diffusion.fingerprints import SKETCH, Fingerprint, fingerprint, read_fingerprint
from ltx2_cli.diffusion.latents import STAGES, LatentsFile, unpack
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.profiles import PROVENANCE
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.validation import MAX_FPS

UNFINISHED = "goal"  # a metadata entry that only saved runs have
PACKAGES = ("ltx2", "jax", "jaxlib")
FIRST, UPSAMPLED, FINAL = STAGES


@dataclass(frozen=True)
class Source:
    """The latents that a clip went on from."""

    file: Path
    sha256: str
    fps: float


@dataclass(frozen=True)
class Provenance:
    """The provenance section of a record; older records have less."""

    versions: Mapping[str, str]
    devices: str | None
    meshes: Mapping[str, str]  # of each stage
    at_once: int  # videos in a batch
    files: Mapping[str, str]  # SHA-256 of each file of weights or noise, or `header` and its header's
    latents: Mapping[str, Streams[Fingerprint]]  # after each stage; empty in older records
    source: Source | None  # None: it started from noise


def read_provenance(record: Mapping[str, Any], place: str) -> Provenance:
    """Read the provenance of a record in `place`. Raises `UsageError` if it is damaged."""
    values = record[PROVENANCE]
    try:
        source, stages = values.get("source"), values.get("latents", {})
        if source:
            source = Source(Path(source["file"]), str(source["sha256"]), float(source["fps"]))
            if not 1 <= source.fps <= MAX_FPS:
                raise ValueError(source)
        return Provenance(
            {package: str(values[package]) for package in PACKAGES if package in values},
            values.get("devices"),
            _texts(values.get("meshes", {})),
            int(values.get("at_once", 1)),
            _texts(values.get("files", {})),
            {
                stage: Streams(*(read_fingerprint(streams[name]) for name in Streams._fields))
                for stage, streams in stages.items()
            },
            source,
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"{place} is damaged: its `{PROVENANCE}` is not what was written", "make the clip anew from its request"
        ) from error


def _texts(values: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


# What is written

History = tuple[Mapping[str, Any], ...]  # of each video, what its record says of latents: those it began with and made


def source_history(file: LatentsFile, fps: float) -> Mapping[str, Any]:
    """The history of a video that starts from saved latents at this frame rate."""
    return {"source": {"file": str(file.path.absolute()), "sha256": file.sha256(), "fps": fps}}


def extend_history(history: History, stage: Stage, tokens: Streams[np.ndarray]) -> History:
    """The history of each video with the fingerprints of the latents (tokens) that a stage left."""
    latents = unpack(tokens, stage.shapes)._asdict()
    extended = []
    for row, past in enumerate(history or ({},) * len(tokens.video)):
        prints = {name: fingerprint(stream[row]).values() for name, stream in latents.items()}
        extended.append({**past, "latents": {**past.get("latents", {}), stage.name: prints}})
    return tuple(extended)


def provenance(plan: Plan, files: Mapping[str, str], history: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance section of a video that is made here."""
    meshes = {stage.name: stage.sharding.text for stage in plan.stages}
    here = {"devices": devices(), "meshes": meshes, "at_once": plan.batch_size}
    return {**versions(), **here, "files": dict(files), **history}


def without_sketches(history: Mapping[str, Any]) -> dict[str, Any]:
    """The history of a video for people: without the sketches of its latents, which are long; the video has them."""

    def short(value: Any) -> Any:
        return {key: short(item) for key, item in value.items() if key != SKETCH} if isinstance(value, dict) else value

    return {**history, "latents": short(history.get("latents", {}))}


def versions() -> dict[str, str]:
    """The versions of the packages that decide how a clip is computed."""
    return {package: version(package) for package in PACKAGES}


def devices() -> str:
    """The number of devices and their kind."""
    return f"{jax.device_count()} {jax.devices()[0].device_kind}"


def input_files(plan: Plan) -> Collection[Path]:
    """Every file that clips depend on, except configs, tokenizers and latents."""
    networks = {*plan.checkpoint.files, *plan.added}
    weights = {file for network in networks for file in network_files(plan, network)}
    return sorted(weights | {Path(stage.noise).expanduser() for stage in plan.stages if stage.noise})


def network_files(plan: Plan, network: str) -> Collection[Path]:
    """The files of a network's weights and of its LoRAs."""
    weights = {tensor.file for tensor in plan.checkpoint.files.get(network, {}).values()}
    return weights | {part.lora.path for lora in plan.added.get(network, {}).values() for part in lora.parts}
