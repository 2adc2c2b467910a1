"""The provenance of a clip, written to and read from its record: source files, devices, and hashes of the latents after
each stage."""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ltx2_cli.diffusion.latents import LatentsFile, from_tokens
from ltx2_cli.errors import UsageError
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.request.profiles import PROVENANCE
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.validation import MAX_FPS

if TYPE_CHECKING:
    from ltx2_cli.plan.resolve import Plan
    from ltx2_cli.plan.stages import Stage

version = cache(metadata.version)  # reads files; every step of a checkpointed run asks for it


@dataclass(frozen=True)
class Fingerprint:
    """Size and hash of an array."""

    size: int  # number of values
    sha256: str  # of the values in float32, little-endian, in C order


def fingerprint(array: np.ndarray) -> Fingerprint:
    """The fingerprint of an array in float32."""
    values = np.ascontiguousarray(array, "<f4")
    return Fingerprint(values.size, hashlib.sha256(values.data).hexdigest())


ENHANCED_FROM = "enhanced_from"  # the key of the prompt that was given, where the text encoder wrote the request's
UNFINISHED = "goal"  # a metadata entry that only saved runs have
PACKAGES = ("ltx2", "jax", "jaxlib")


@dataclass(frozen=True)
class SourceLatents:
    """The saved latents that a clip was made from."""

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
    source: SourceLatents | None  # None: it started from noise
    enhanced_from: str | None = None  # the prompt that was given; None: the request's


def read_provenance(record: Mapping[str, Any], place: str) -> Provenance:
    """Read the provenance of a record in `place`. Raises `UsageError` if it is damaged."""
    values = record[PROVENANCE]
    try:
        source, stages = values.get("source"), values.get("latents", {})
        if source:
            source = SourceLatents(Path(source["file"]), str(source["sha256"]), float(source["fps"]))
            if not 1 <= source.fps <= MAX_FPS:
                raise ValueError(source)
        return Provenance(
            {package: str(values[package]) for package in PACKAGES if package in values},
            values.get("devices"),
            _texts(values.get("meshes", {})),
            int(values.get("at_once", 1)),
            _texts(values.get("files", {})),
            {
                stage: Streams(*(_read_fingerprint(streams[name]) for name in Streams._fields))
                for stage, streams in stages.items()
            },
            source,
            None if ENHANCED_FROM not in values else str(values[ENHANCED_FROM]),
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        hint = "make the clip again from its request"
        raise UsageError(f"{place} is damaged: its `{PROVENANCE}` is not what was written", hint) from error


def _read_fingerprint(values: Mapping[str, Any]) -> Fingerprint:
    return Fingerprint(int(values["size"]), str(values["sha256"]))  # older records also have a `sketch`


def _texts(values: Mapping[Any, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in values.items()}


SKIPPED_FORWARDS = "skipped_forwards"  # key: forwards of the first stage that ran its first block alone, by its cache
History = tuple[Mapping[str, Any], ...]  # for each video, the latents of its record: source and results


def source_history(file: LatentsFile, fps: float) -> Mapping[str, Any]:
    """The history of a video that starts from saved latents at this frame rate."""
    return {"source": {"file": str(file.path.absolute()), "sha256": file.sha256(), "fps": fps}}


def extend_history(history: History, stage: "Stage", tokens: Streams[np.ndarray]) -> History:
    """The history of each video, with the fingerprints of a stage's latents (tokens)."""
    latents = from_tokens(tokens, stage.shapes)._asdict()
    extended = []
    for row, past in enumerate(history or ({},) * len(tokens.video)):
        prints = {name: vars(fingerprint(stream[row])) for name, stream in latents.items()}
        extended.append({**past, "latents": {**past.get("latents", {}), stage.name: prints}})
    return tuple(extended)


def provenance(plan: "Plan", files: Mapping[str, str], history: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance section of a video that is made here."""
    meshes = {stage.name: stage.sharding.text for stage in plan.stages}
    here = {"devices": devices(), "meshes": meshes, "at_once": plan.at_once}
    return {**versions(), **here, "files": dict(files), **history}


def environment_changes(recorded: Provenance, plan: "Plan") -> Iterator[str]:
    """Sentences on versions, devices, meshes and batches that differ from the record."""
    current = provenance(plan, {}, {})
    for package, before in recorded.versions.items():
        if before != current[package]:
            yield f"{package} was {before}, is {current[package]}"
    if recorded.devices not in (None, current["devices"]):
        yield f"devices were {recorded.devices}, are {current['devices']}"
    for stage, mesh in current["meshes"].items():
        if (before := recorded.meshes.get(stage, mesh)) != mesh:
            yield f"the mesh of {stage} was {before}, is {mesh}"
    if recorded.at_once != current["at_once"]:
        yield f"it was one of {recorded.at_once} videos made at once, which may change its last bits"


def versions() -> dict[str, str]:
    """The versions of the packages that decide how a clip is computed."""
    return {package: version(package) for package in PACKAGES}


def devices() -> str:
    """The number of devices and their kind."""
    here = find_devices()
    return f"{len(here)} {here[0].device_kind}"


def input_files(plan: "Plan") -> Collection[Path]:
    """Every file that clips depend on, except configs, tokenizers and latents."""
    networks = {*plan.checkpoint.files, *plan.lora_deltas}
    weights = {file for network in networks for file in network_files(plan, network)}
    return sorted(weights | {Path(stage.noise).expanduser() for stage in plan.stages if stage.noise})


def network_files(plan: "Plan", network: str) -> Collection[Path]:
    """The files of a network's weights and of its LoRAs."""
    weights = {tensor.file for tensor in plan.checkpoint.files.get(network, {}).values()}
    return weights | {lora.path for delta in plan.lora_deltas.get(network, {}).values() for lora, _, _ in delta.parts}
