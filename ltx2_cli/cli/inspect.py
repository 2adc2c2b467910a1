"""What a file is: latents, a video, a record, a checkpoint, a LoRA or a latent upsampler. Only headers of weights are
read."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ltx2_cli.cli.lora import LoraInfo, lora_info
from ltx2_cli.cli.requests import looks_like_safetensors
from ltx2_cli.core.provenance import UNFINISHED, read_provenance
from ltx2_cli.diffusion.latents import SIZE, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.files import read_limited, refuse_special
from ltx2_cli.media.video_file import is_video, open_video
from ltx2_cli.models.layouts import ParsedCheckpoint, is_checkpoint, open_folder, read_single_file
from ltx2_cli.models.upsampler import open_upsampler
from ltx2_cli.plan.recipe import is_distilled
from ltx2_cli.request.layers import read_text
from ltx2_cli.request.profiles import PROVENANCE
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.yaml_text import MAX_TEXT
from ltx2_cli.weights.checkpoint import TensorFiles, read_header
from ltx2_cli.weights.lora import FACTOR, open_lora

KNOWN = "known are latents, mp4 videos, records, checkpoints (a folder or a file), LoRAs and latent upsamplers"
UPSAMPLER = "initial_conv.weight"  # a tensor of every latent upsampler
DENOISER = "model.diffusion_model."  # prefix of the denoiser's tensors in a single file
RECORDS = (".yaml", ".yml", ".json")
SHORT = 12  # digits of a hash that people read


def short_hash(digest: str) -> str:
    """A hash as people read it, with the part of a file that it is of, if not the whole."""
    part, _, digits = digest.rpartition(" ")
    return f"{part} {digits[:SHORT]}".strip()


@dataclass(frozen=True)
class RecordInfo:
    """The request that made a clip, and the versions that it was made with."""

    kind: str
    file: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class ClipInfo:
    """A video, or latents and the video that they decode to. What a file does not say of itself is None."""

    kind: str
    file: str
    bytes: int
    model_version: str | None
    stage: str | None
    width: int
    height: int
    num_frames: int
    fps: float | None
    seconds: float | None
    sample_rate: int | None  # of a video's sound; None: it has none
    latents: Mapping[str, tuple[int, ...]] | None  # their shapes
    record: Mapping[str, Any] | None


@dataclass(frozen=True)
class NetworkInfo:
    """One network of a checkpoint."""

    name: str
    parameters: int
    dtypes: tuple[str, ...]  # the one with the most numbers first


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint, or a latent upsampler."""

    kind: str
    file: str
    bytes: int
    model_version: str | None  # None: its header does not tell
    variant: str | None  # `dev` or `distilled`, of a checkpoint
    upsamples: Mapping[str, float] | None  # time and space, by these factors
    parameters: int
    networks: tuple[NetworkInfo, ...]


FileInfo = RecordInfo | ClipInfo | CheckpointInfo | LoraInfo


def inspect(path: Path) -> FileInfo:
    """What `path` is. Raises `UsageError` where it is damaged, or of no known kind."""
    if path.is_dir():
        if is_checkpoint(path):
            folder = open_folder(path)
            return _checkpoint(path, folder.arch.model_version, folder.files, folder.arch.scheduler)
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return _tensors(files[0], path)
        names = ", ".join(file.name for file in files[:5])
        raise _unknown(path, f": it holds {len(files)} safetensors files, {names}" if files else "")
    refuse_special(path, KNOWN)
    try:
        video, tensors = is_video(path), looks_like_safetensors(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", KNOWN) from error
    if video:
        clip = open_video(path)
        facts = {name: value for name, value in vars(clip).items() if name not in ("path", "metadata")}
        return _clip("video", path, clip.metadata, fps=clip.fps, latents=None, **facts)
    if tensors or path.suffix == ".safetensors":
        return _tensors(path, path)
    if path.suffix not in RECORDS:
        raise _unknown(path, "")
    try:
        return RecordInfo("record", str(path), _parsed(read_limited(path, MAX_TEXT, KNOWN).decode("utf-8"), str(path)))
    except UnicodeDecodeError:
        raise _unknown(path, ": it is not text") from None


def _unknown(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is nothing that is known here{reason}", KNOWN)


def _tensors(path: Path, place: Path) -> FileInfo:
    """A safetensors file, by the names of its tensors; `place` is what the user named."""
    tensors, metadata = read_header(path)
    if UNFINISHED in metadata and "record" in metadata:
        return RecordInfo("unfinished run", str(path), _parsed(metadata["record"], f"the record in {path}"))
    if tensors.keys() >= set(Streams._fields):
        file = open_latents(path)
        size, shapes = dict(zip(SIZE, file.size, strict=True)), file.shapes._asdict()
        seconds = file.size[0] / file.fps if file.fps else None
        facts = {**size, "fps": file.fps, "seconds": seconds, "sample_rate": None, "latents": shapes}
        return _clip("latents", path, file.metadata, **facts)
    if any(FACTOR.fullmatch(name) for name in tensors):
        return lora_info(open_lora(path))
    if UPSAMPLER in tensors:
        arch, files = open_upsampler(place, None)
        factors = {"time": float(arch.upsampling.time), "space": arch.upsampling.up / arch.upsampling.down}
        return _weights("latent upsampler", place, arch.model_version, {"latent_upsampler": files}, None, factors)
    if any(name.startswith(DENOISER) for name in tensors):
        found = read_single_file(path, ParsedCheckpoint(path, {}, {}, path, []))
        found.check()
        return _checkpoint(path, found.archs["transformer"].model_version, found.files, found.archs["scheduler"])
    names = ", ".join(f"`{name}`" for name in list(tensors)[:3])
    raise _unknown(path, f": it holds {names or 'nothing'}")


def _clip(kind: str, path: Path, metadata: Mapping[str, str], **facts: Any) -> ClipInfo:
    """A video or latents, with what the metadata says of both alike."""
    version, stage, record = metadata.get("model_version"), metadata.get("stage"), None
    if "record" in metadata:
        try:
            record = _parsed(metadata["record"], f"the record in {path}")
        except UsageError as error:
            raise UsageError(str(error), "it was changed after it was written") from error
    return ClipInfo(kind, str(path), path.stat().st_size, version, stage, record=record, **facts)


def _parsed(text: str, source: str) -> Mapping[str, Any]:
    """A record. Raises `UsageError` where the text is none."""
    values = read_text(text, source).values
    if not isinstance(values.get(PROVENANCE), dict):
        raise UsageError(f"{source} is no record of a clip: it does not say what it was `{PROVENANCE}`", KNOWN)
    read_provenance(values, source)
    return values


def _checkpoint(path: Path, version: str, files: Mapping[str, TensorFiles], scheduler: Any) -> CheckpointInfo:
    variant = "distilled" if is_distilled(str(path), scheduler) else "dev"
    return _weights("checkpoint", path, version, files, variant, None)


def _weights(
    kind: str,
    path: Path,
    version: str | None,
    files: Mapping[str, TensorFiles],
    variant: str | None,
    upsamples: Mapping[str, float] | None,
) -> CheckpointInfo:
    networks = []
    for name, tensors in files.items():
        numbers: dict[str, int] = {}
        for tensor in tensors.values():
            numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + prod(tensor.shape)
        dtypes = tuple(sorted(numbers, key=numbers.__getitem__, reverse=True))
        networks.append(NetworkInfo(name, sum(numbers.values()), dtypes))
    size = sum(path.stat().st_size for path in {tensor.file for part in files.values() for tensor in part.values()})
    parameters = sum(network.parameters for network in networks)
    return CheckpointInfo(kind, str(path), size, version, variant, upsamples, parameters, tuple(networks))
