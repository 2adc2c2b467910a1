"""What a file is: latents, a video, a record, a checkpoint, a LoRA or a latent upsampler. Only headers of weights are
read."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import Streams

if TYPE_CHECKING:
    from ltx2_cli.request.layers import ConfigLayer
    from ltx2_cli.weights.checkpoint import Tensor, TensorFiles
    from ltx2_cli.weights.lora import LoraFile, LoraPair

KNOWN = "known are latents, mp4 videos, records, checkpoints (a folder or a file), LoRAs and latent upsamplers"
UPSAMPLER = "initial_conv.weight"  # a tensor of every latent upsampler
DENOISER = "model.diffusion_model."  # prefix of the denoiser's tensors in a single file
RECORDS = (".yaml", ".yml", ".json")
LORA_LAYER = re.compile(r"(blocks)\.\d+\.")
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


@dataclass(frozen=True)
class LoraTargets:
    """The targets of a LoRA that differ in their layer alone."""

    name: str  # with `*` for the layer
    shape: tuple[int, int]  # (out, in)
    targets: int
    ranks: tuple[int, ...]  # each that occurs, smallest first


@dataclass(frozen=True)
class LoraInfo:
    """The header of a LoRA."""

    file: str
    bytes: int
    model_version: str | None
    pairs: int
    ranks: tuple[int, ...]
    alphas: tuple[str | float | None, ...]  # `tensor`, a number that its config states, or None
    dtypes: tuple[str, ...]
    metadata: Mapping[str, str]
    targets: tuple[LoraTargets, ...]


FileInfo = RecordInfo | ClipInfo | CheckpointInfo | LoraInfo


def inspect(path: Path) -> FileInfo:
    """What `path` is. Raises `UsageError` where it is damaged, or of no known kind."""
    from ltx2_cli.files import refuse_special
    from ltx2_cli.media.video_file import is_video

    if path.is_dir():
        return _folder(path)
    refuse_special(path, KNOWN)
    try:
        video, tensors = is_video(path), _looks_like_safetensors(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", KNOWN) from error
    if video:
        return _video(path)
    if tensors or path.suffix == ".safetensors":
        return _tensors(path)
    if path.suffix in RECORDS:
        return _record_file(path)
    raise _unknown(path, "")


def config_page(path: Path | None) -> "ConfigLayer | None":
    """The request in the file that --config names: a page of YAML, or the record of a clip, of latents or in the output
    of `ltx2 info --json` of one file. Raises `UsageError` for anything else."""
    from ltx2_cli.files import read_limited
    from ltx2_cli.media.video_file import is_video
    from ltx2_cli.request.layers import ConfigLayer, read_file, read_text
    from ltx2_cli.request.yaml_text import MAX_TEXT, PAGE

    if path is None:
        return None
    if not path.is_file():
        return read_file(path)
    if is_video(path) or _looks_like_safetensors(path):
        info = inspect(path)
        if not isinstance(info, ClipInfo | RecordInfo) or info.record is None:
            raise UsageError(f"{path} does not say what made it", PAGE)
        return ConfigLayer(f"the record in {path}: ", dict(info.record))
    try:
        match json.loads(read_limited(path, MAX_TEXT, PAGE)):
            case [{"record": dict(record)}]:
                return read_text(json.dumps(record), f"the record in {path}")
    except (ValueError, RecursionError):
        pass  # it is no JSON
    return read_file(path)


def _looks_like_safetensors(path: Path) -> bool:
    """Whether it begins with the length of a JSON object, and the object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _unknown(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is nothing that is known here{reason}", KNOWN)


def _folder(folder: Path) -> FileInfo:
    from ltx2_cli.models.folder import is_checkpoint, open_folder
    from ltx2_cli.plan.recipe import is_distilled

    if is_checkpoint(folder):
        checkpoint = open_folder(folder)
        variant = "distilled" if is_distilled(str(folder), checkpoint.arch.scheduler) else "dev"
        return _weights("checkpoint", folder, checkpoint.arch.model_version, checkpoint.files, variant)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _tensors(files[0], folder)
    names = ", ".join(file.name for file in files[:5])
    raise _unknown(folder, f": it holds {len(files)} safetensors files, {names}" if files else "")


def _tensors(path: Path, place: Path | None = None) -> FileInfo:
    """A safetensors file, by the names of its tensors; `place` is what the user named."""
    from ltx2_cli.core.provenance import UNFINISHED
    from ltx2_cli.weights.checkpoint import read_header
    from ltx2_cli.weights.lora import FACTOR, open_lora

    tensors, metadata = read_header(path)
    if UNFINISHED in metadata and "record" in metadata:
        return RecordInfo("unfinished run", str(path), _parsed(metadata["record"], f"the record in {path}"))
    if tensors.keys() >= set(Streams._fields):
        return _latents(path)
    if any(FACTOR.fullmatch(name) for name in tensors):
        return lora_info(path, open_lora(path))
    if UPSAMPLER in tensors:
        return _upsampler(place or path)
    if any(name.startswith(DENOISER) for name in tensors):
        return _single_file(path)
    names = ", ".join(f"`{name}`" for name in list(tensors)[:3])
    raise _unknown(path, f": it holds {names or 'nothing'}")


def _latents(path: Path) -> ClipInfo:
    from ltx2_cli.diffusion.latents import open_latents

    file = open_latents(path)
    frames, height, width = file.size
    return ClipInfo(
        kind="latents",
        width=width,
        height=height,
        num_frames=frames,
        fps=file.fps,
        seconds=frames / file.fps if file.fps else None,
        sample_rate=None,
        latents=file.shapes._asdict(),
        **_origin(path, file.metadata),
    )


def _video(path: Path) -> ClipInfo:
    from ltx2_cli.media.video_file import open_video

    file = open_video(path)
    facts = {name: value for name, value in vars(file).items() if name not in ("path", "metadata")}
    return ClipInfo(kind="video", fps=file.fps, latents=None, **facts, **_origin(path, file.metadata))


def _origin(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a `ClipInfo` that videos and latents say alike."""
    version, stage = metadata.get("model_version"), metadata.get("stage")
    record = _record(metadata, path)
    return {"file": str(path), "bytes": path.stat().st_size, "model_version": version, "stage": stage, "record": record}


def _record(metadata: Mapping[str, str], path: Path) -> Mapping[str, Any] | None:
    """The record in a file's metadata."""
    if "record" not in metadata:
        return None
    try:
        return _parsed(metadata["record"], f"the record in {path}")
    except UsageError as error:
        raise UsageError(str(error), "it was changed after it was written") from error


def _parsed(text: str, source: str) -> Mapping[str, Any]:
    from ltx2_cli.core.provenance import read_provenance
    from ltx2_cli.request.layers import read_text
    from ltx2_cli.request.profiles import PROVENANCE

    values = read_text(text, source).values
    if not isinstance(values.get(PROVENANCE), dict):
        raise UsageError(f"{source} is no record of a clip: it does not say what it was `{PROVENANCE}`", KNOWN)
    read_provenance(values, source)
    return values


def _record_file(path: Path) -> RecordInfo:
    from ltx2_cli.files import read_limited
    from ltx2_cli.request.yaml_text import MAX_TEXT

    try:
        return RecordInfo("record", str(path), _parsed(read_limited(path, MAX_TEXT, KNOWN).decode("utf-8"), str(path)))
    except UnicodeDecodeError:
        raise _unknown(path, ": it is not text") from None


def _single_file(path: Path) -> CheckpointInfo:
    from ltx2_cli.models.parsed_checkpoint import ParsedCheckpoint
    from ltx2_cli.models.single_file import read_single_file
    from ltx2_cli.plan.recipe import is_distilled

    found = read_single_file(path, ParsedCheckpoint(path, {}, {}, None, path, []))
    found.check()
    variant = "distilled" if is_distilled(str(path), found.archs["scheduler"]) else "dev"
    return _weights("checkpoint", path, found.archs["transformer"].model_version, found.files, variant)


def _upsampler(path: Path) -> CheckpointInfo:
    from ltx2_cli.models.upsampler_source import open_upsampler

    arch, files = open_upsampler(path, None)
    factors = {"time": float(arch.upsampling.time), "space": arch.upsampling.up / arch.upsampling.down}
    networks = {"latent_upsampler": files}
    return _weights("latent upsampler", path, arch.model_version, networks, upsamples=factors)


def _weights(
    kind: str,
    path: Path,
    version: str | None,
    files: "Mapping[str, TensorFiles]",
    variant: str | None = None,
    upsamples: Mapping[str, float] | None = None,
) -> CheckpointInfo:
    networks = tuple(_network(name, tensors.values()) for name, tensors in files.items())
    paths = {tensor.file for tensors in files.values() for tensor in tensors.values()}
    size, parameters = sum(file.stat().st_size for file in paths), sum(network.parameters for network in networks)
    return CheckpointInfo(kind, str(path), size, version, variant, upsamples, parameters, networks)


def _network(name: str, tensors: "Iterable[Tensor]") -> NetworkInfo:
    numbers: dict[str, int] = {}
    for tensor in tensors:
        numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + prod(tensor.shape)
    return NetworkInfo(name, sum(numbers.values()), tuple(sorted(numbers, key=lambda dtype: -numbers[dtype])))


def lora_info(path: Path, file: "LoraFile") -> LoraInfo:
    """What the header of an open LoRA says."""
    from ltx2_cli.weights.lora import model_version

    pairs = file.pairs.values()
    alphas = {"tensor" if isinstance(pair.alpha, str) else pair.alpha for pair in pairs}
    return LoraInfo(
        str(path),
        path.stat().st_size,
        model_version(file),
        len(pairs),
        _ranks(pairs),
        tuple(sorted(alphas, key=str)),
        tuple(sorted({dtype for pair in pairs for dtype in pair.dtypes})),
        file.files.metadata(),
        tuple(_lora_targets(file.pairs)),
    )


def _lora_targets(pairs: "Mapping[str, LoraPair]") -> Iterator[LoraTargets]:
    groups: dict[tuple[str, tuple[int, int]], list[LoraPair]] = {}
    for target, pair in pairs.items():
        groups.setdefault((LORA_LAYER.sub(r"\1.*.", target), pair.shape), []).append(pair)
    for (name, shape), group in sorted(groups.items()):
        yield LoraTargets(name, shape, len(group), _ranks(group))


def _ranks(pairs: "Iterable[LoraPair]") -> tuple[int, ...]:
    return tuple(sorted({pair.rank for pair in pairs}))
