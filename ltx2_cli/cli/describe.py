"""What a file is: latents, a video, a record, a checkpoint, a LoRA or a latent upsampler. Of weights the headers alone
are read."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2_cli.cli.lora import Summary, summarise
from ltx2_cli.spec import AV, SpecError

if TYPE_CHECKING:
    from ltx2_cli.profile_layers import Layer
    from ltx2_cli.weights.checkpoint import Tensor, TensorFiles

KNOWN = "known are latents, mp4 videos, records, checkpoints (a folder or a file), LoRAs and latent upsamplers"
UPSAMPLES = "initial_conv.weight"  # a tensor of every latent upsampler
DENOISES = "model.diffusion_model."  # how the denoiser's begin in a single file
RECORDS = (".yaml", ".yml", ".json")
SHORT = 12  # digits of a hash that people read


def shortened(digest: str) -> str:
    """A hash as people read it, and of what it is if not of a whole file."""
    what, _, digits = digest.rpartition(" ")
    return f"{what} {digits[:SHORT]}".strip()


DAMAGED = "it was changed after it was written"


@dataclass(frozen=True)
class Record:
    """The request that made a clip, and the versions that it was made with."""

    kind: str
    file: str
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Clip:
    """A video, or latents and the video that they decode to. What a file does not say of itself is None."""

    kind: str
    file: str
    bytes: int
    generation: str | None
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
class Part:
    """One network of a checkpoint."""

    name: str
    parameters: int
    dtypes: tuple[str, ...]  # the one with the most numbers first


@dataclass(frozen=True)
class Weights:
    """A checkpoint, or a latent upsampler."""

    kind: str
    file: str
    bytes: int
    generation: str | None  # None: its header does not tell
    variant: str | None  # `dev` or `distilled`, of a checkpoint
    upsamples: Mapping[str, float] | None  # time and space, by these factors
    parameters: int
    networks: tuple[Part, ...]


Description = Record | Clip | Weights | Summary


def describe(path: Path) -> Description:
    """What `path` is. Raises `SpecError` where it is damaged, or nothing that is known."""
    from ltx2_cli.files import refuse_special
    from ltx2_cli.video_file import is_video

    if path.is_dir():
        return _folder(path)
    refuse_special(path, KNOWN)
    try:
        video, looks = is_video(path), _looks_like_safetensors(path)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}", KNOWN) from error
    if video:
        return _video(path)
    if looks or path.suffix == ".safetensors":
        return _tensors(path)
    if path.suffix in RECORDS:
        return _record_file(path)
    raise _unknown(path, "")


def config_page(path: Path | None) -> "Layer | None":
    """The request that --config names: a page of YAML, or what a clip, latents or the output of `ltx2 info --json` of
    one file say of what made them. Raises `SpecError` for anything else."""
    from ltx2_cli.files import read_limited
    from ltx2_cli.profile_layers import Layer, read_file, read_text
    from ltx2_cli.video_file import is_video
    from ltx2_cli.yaml_text import MAX_TEXT, PAGE

    if path is None:
        return None
    if not path.is_file():
        return read_file(path)
    if is_video(path) or _looks_like_safetensors(path):
        found = describe(path)
        if not isinstance(found, Clip | Record) or found.record is None:
            raise SpecError(f"{path} does not say what made it", PAGE)
        return Layer(f"the record in {path}: ", dict(found.record))
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


def _unknown(path: Path, why: str) -> SpecError:
    return SpecError(f"{path} is nothing that is known here{why}", KNOWN)


def _folder(folder: Path) -> Description:
    from ltx2_cli.models.folder import is_checkpoint, open_folder
    from ltx2_cli.recipe import is_distilled

    if is_checkpoint(folder):
        found = open_folder(folder)
        distilled = is_distilled(str(folder), found.arch.scheduler)
        return _checkpoint(folder, found.arch.generation, distilled, found.files)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return _tensors(files[0], folder)
    names = ", ".join(each.name for each in files[:5])
    raise _unknown(folder, f": it holds {len(files)} safetensors files, {names}" if files else "")


def _tensors(path: Path, place: Path | None = None) -> Description:
    """What a safetensors file holds, by the names in it; `place` is what the user named."""
    from ltx2_cli.core.made_with import UNFINISHED
    from ltx2_cli.weights.checkpoint import read_header
    from ltx2_cli.weights.lora import FACTOR, open_lora

    tensors, said = read_header(path)
    if UNFINISHED in said and "record" in said:
        return Record("unfinished run", str(path), _parsed(said["record"], f"the record in {path}"))
    if tensors.keys() >= set(AV._fields):
        return _latents(path)
    if any(FACTOR.fullmatch(name) for name in tensors):
        return summarise(path, open_lora(path))
    if UPSAMPLES in tensors:
        return _upsampler(place or path)
    if any(name.startswith(DENOISES) for name in tensors):
        return _single_file(path)
    names = ", ".join(f"`{name}`" for name in list(tensors)[:3])
    raise _unknown(path, f": it holds {names or 'nothing'}")


def _latents(path: Path) -> Clip:
    from ltx2_cli.diffusion.latents import open_latents

    file = open_latents(path)
    frames, height, width = file.size
    said = file.metadata
    return Clip(
        "latents",
        str(path),
        path.stat().st_size,
        said.get("generation"),
        said.get("stage"),
        width,
        height,
        frames,
        file.fps,
        frames / file.fps if file.fps else None,
        None,
        file.shapes._asdict(),
        _record(said, path),
    )


def _video(path: Path) -> Clip:
    from ltx2_cli.video_file import open_video

    file = open_video(path)
    return Clip(
        "video",
        str(path),
        path.stat().st_size,
        file.about.get("generation"),
        file.about.get("stage"),
        file.width,
        file.height,
        file.num_frames,
        file.fps,
        file.seconds,
        file.sample_rate,
        None,
        _record(file.about, path),
    )


def _record(said: Mapping[str, str], path: Path) -> Mapping[str, Any] | None:
    """The record among what a file says of itself."""
    if "record" not in said:
        return None
    try:
        return _parsed(said["record"], f"the record in {path}")
    except SpecError as error:
        raise SpecError(str(error), DAMAGED) from error


def _parsed(text: str, source: str) -> Mapping[str, Any]:
    from ltx2_cli.core.made_with import read_made_with
    from ltx2_cli.profile_layers import read_text
    from ltx2_cli.profiles import MADE_WITH

    values = read_text(text, source).values
    if not isinstance(values.get(MADE_WITH), dict):
        raise SpecError(f"{source} is no record of a clip: it does not say what it was `{MADE_WITH}`", KNOWN)
    read_made_with(values, source)
    return values


def _record_file(path: Path) -> Record:
    from ltx2_cli.files import read_limited
    from ltx2_cli.yaml_text import MAX_TEXT

    try:
        return Record("record", str(path), _parsed(read_limited(path, MAX_TEXT, KNOWN).decode("utf-8"), str(path)))
    except UnicodeDecodeError:
        raise _unknown(path, ": it is not text") from None


def _single_file(path: Path) -> Weights:
    from ltx2_cli.models.fit import Readings
    from ltx2_cli.models.single_file import read_single_file
    from ltx2_cli.recipe import is_distilled

    found = read_single_file(path, Readings(path, {}, {}, None, path, []))
    found.check()
    distilled = is_distilled(str(path), found.described["scheduler"])
    return _checkpoint(path, found.described["transformer"].generation, distilled, found.files)


def _checkpoint(path: Path, generation: str | None, distilled: bool, networks: "Mapping[str, TensorFiles]") -> Weights:
    parts = tuple(_part(name, files.values()) for name, files in networks.items())
    return Weights(
        "checkpoint",
        str(path),
        _bytes(networks.values()),
        generation,
        "distilled" if distilled else "dev",
        None,
        sum(part.parameters for part in parts),
        parts,
    )


def _upsampler(path: Path) -> Weights:
    from ltx2_cli.models.upsampler_source import open_upsampler

    arch, files = open_upsampler(path, None)
    factors = {"time": float(arch.upsampling.time), "space": arch.upsampling.up / arch.upsampling.down}
    part = _part("latent_upsampler", files.values())
    return Weights(
        "latent upsampler",
        str(path),
        _bytes([files]),
        arch.generation,
        None,
        factors,
        part.parameters,
        (part,),
    )


def _part(name: str, tensors: "Iterable[Tensor]") -> Part:
    numbers: dict[str, int] = {}
    for tensor in tensors:
        numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + prod(tensor.shape)
    return Part(name, sum(numbers.values()), tuple(sorted(numbers, key=lambda dtype: -numbers[dtype])))


def _bytes(networks: "Iterable[TensorFiles]") -> int:
    """The size of all the files."""
    return sum(file.stat().st_size for file in {tensor.file for files in networks for tensor in files.values()})
