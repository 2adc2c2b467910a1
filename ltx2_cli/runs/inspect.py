"""Recognise files and read their facts and origin. Reads only the headers of weights."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from ltx2_cli.artifacts.files import read_limited, refuse_special
from ltx2_cli.artifacts.outputs import record_path
from ltx2_cli.core.provenance import UNFINISHED, read_provenance
from ltx2_cli.diffusion.geometry import SIZE_KEYS
from ltx2_cli.diffusion.latents import open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.media.probe import is_video, is_wav, open_video, open_wav
from ltx2_cli.models.tokenizer import TOKENIZER_TENSOR
from ltx2_cli.request.layers import read_text
from ltx2_cli.request.profiles import GGUF, PROVENANCE, SAFETENSORS
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.yaml import MAX_TEXT
from ltx2_cli.weights.checkpoint import TensorFiles, read_header
from ltx2_cli.weights.lora import FACTOR, LoraFile, LoraPair, model_version, open_lora
from ltx2_cli.weights.published import DIFFUSION_DECODER
from ltx2_cli.weights.quantized_files import DENOISER_PREFIX
from ltx2_cli.weights.tensors import Tensor

INSPECTABLE = "known are latents, videos, WAVs, records, checkpoints, files of their networks, LoRAs and upsamplers"
UPSAMPLER_TENSOR = "initial_conv.weight"  # a tensor of every latent upsampler
BARE_DENOISER_TENSOR = "patchify_proj.weight"  # a tensor of every denoiser
DIFFUSION_DECODER_TENSOR = "decoder.diff_blocks.0.context_proj.weight"  # a tensor of every diffusion decoder
# Files of a split checkpoint, by a tensor of each: their kind, and their networks by the prefixes of tensors.
NETWORK_FILES = {
    TOKENIZER_TENSOR: (
        "text encoder",
        {"text_encoder": "model.", "connectors": "text_embedding_projection."},
    ),
    "duration_head.mlp_out.weight": ("duration head", {"duration_head": "duration_head."}),
    DIFFUSION_DECODER_TENSOR: ("diffusion decoder", {DIFFUSION_DECODER: ""}),
    f"vae.{DIFFUSION_DECODER_TENSOR}": ("diffusion decoder", {DIFFUSION_DECODER: "vae."}),
    "decoder.up_blocks.0.res_blocks.0.conv1.conv.weight": ("video autoencoder", {"vae": ""}),
    "audio_vae.decoder.conv_in.conv.weight": ("audio autoencoder", {"audio_vae": "audio_vae.", "vocoder": "vocoder."}),
}
VIDEO_FACTS = ("width", "height", "num_frames", "seconds", "sample_rate", "fps")
RECORDS = (".yaml", ".yml", ".json")
LAYER = re.compile(r"(blocks)\.\d+\.")
FileFacts = dict[str, Any]  # for JSON; None: the file does not state it


def inspect(path: Path) -> FileFacts:
    """The facts of a file: `kind`, `file`, and more; a clip, latents, a record or an unfinished run has a `record`, the
    request that made it. Raises `UsageError` if it is damaged or of no known kind."""
    if path.is_dir():
        from ltx2_cli.models.open_checkpoint import is_checkpoint, open_folder

        if is_checkpoint(path):
            return _checkpoint(path, open_folder(path))
        files = sorted(path.glob("*.safetensors"))
        if len(files) == 1:
            return _tensors(files[0], path)
        names = ", ".join(file.name for file in files[:5])
        raise _unknown(path, f": it holds {len(files)} safetensors files, {names}" if files else "")
    refuse_special(path, INSPECTABLE)
    try:
        video, wav, tensors = is_video(path), is_wav(path), looks_like_safetensors(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", INSPECTABLE) from error
    if video:
        clip = open_video(path)
        facts = {name: getattr(clip, name) for name in VIDEO_FACTS}
        return _clip("video", path, clip.metadata, {**facts, "latents": None})
    if wav:
        return _wav(path)
    if tensors or path.suffix in (SAFETENSORS, GGUF):
        return _tensors(path, path)
    if path.suffix not in RECORDS:
        raise _unknown(path, "")
    try:
        text = read_limited(path, MAX_TEXT, INSPECTABLE).decode("utf-8")
    except UnicodeDecodeError:
        raise _unknown(path, ": it is not text") from None
    return {"kind": "record", "file": str(path), "record": _parsed(text, str(path))}


def _unknown(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is nothing that is known here{reason}", INSPECTABLE)


def _tensors(path: Path, place: Path) -> FileFacts:
    """A safetensors or GGUF file, recognised by the names of its tensors; `place` is the path that the user named."""
    tensors, metadata = read_header(path)
    if UNFINISHED in metadata and "record" in metadata:
        record = _parsed(metadata["record"], f"the record in {path}")
        return {"kind": "unfinished run", "file": str(path), "record": record}
    if tensors.keys() >= set(Streams._fields):
        file = open_latents(path)
        seconds = file.size[0] / file.fps if file.fps else None
        facts = {"fps": file.fps, "seconds": seconds, "sample_rate": None, "latents": file.shapes._asdict()}
        facts |= {"generated_keyframes": file.keyframes} if file.keyframes else {}
        return _clip("latents", path, file.metadata, {**dict(zip(SIZE_KEYS, file.size, strict=True)), **facts})
    if any(FACTOR.fullmatch(name) for name in tensors):
        return {"kind": "lora", **lora_facts(open_lora(path))}
    if UPSAMPLER_TENSOR in tensors:
        from ltx2_cli.models.upsampler import open_upsampler

        arch, files = open_upsampler(place, None)
        factors = {"time": float(arch.upsampling.time), "space": arch.upsampling.up / arch.upsampling.down}
        stated = {"model_version": arch.model_version, "variant": None, "upsamples": factors}
        return {"kind": "latent upsampler", "file": str(place), **stated, **_weights({"latent_upsampler": files})}
    if BARE_DENOISER_TENSOR in tensors or any(name.startswith(DENOISER_PREFIX) for name in tensors):
        from ltx2_cli.models.open_checkpoint import lone_denoiser, open_file

        if version := lone_denoiser(files := TensorFiles(path)):
            return _denoiser(path, files, version)
        return _checkpoint(path, open_file(path, None))
    if tensor := next((tensor for tensor in NETWORK_FILES if tensor in tensors), None):
        return _networks(path, *NETWORK_FILES[tensor])
    names = ", ".join(f"`{name}`" for name in list(tensors)[:3])
    raise _unknown(path, f": it holds {names or 'nothing'}")


def _clip(kind: str, path: Path, metadata: Mapping[str, str], facts: FileFacts) -> FileFacts:
    """A video or latents, with the metadata that both have."""
    record, stated = None, {name: metadata.get(name) for name in ("model_version", "stage")}
    if "record" in metadata:
        try:
            record = _parsed(metadata["record"], f"the record in {path}")
        except UsageError as error:
            raise UsageError(str(error), "it was changed after it was written") from error
    return {"kind": kind, "file": str(path), "bytes": path.stat().st_size, **stated, **facts, "record": record}


def _wav(path: Path) -> FileFacts:
    """A WAV, with the record beside it if that is of a WAV: the file itself has no place for a record."""
    seconds, rate = open_wav(path)
    facts = {"kind": "audio", "file": str(path), "bytes": path.stat().st_size, "seconds": seconds, "sample_rate": rate}
    record = None
    if (beside := record_path(path)).is_file():
        with suppress(UsageError):  # another file of that name
            stated = inspect(beside)["record"]
            record = stated if stated.get("streams") == "audio" else None
    return {**facts, "record": record}


def _parsed(text: str, source: str) -> FileFacts:
    """A record. Raises `UsageError` for another text."""
    values = dict(read_text(text, source).values)
    if not isinstance(values.get(PROVENANCE), dict):
        raise UsageError(f"{source} is no record of a clip: it does not say what it was `{PROVENANCE}`", INSPECTABLE)
    read_provenance(values, source)
    return values


def _checkpoint(path: Path, checkpoint: Any) -> FileFacts:
    from ltx2_cli.plan.recipe import is_distilled

    arch, variant = checkpoint.arch, "distilled" if is_distilled(str(path), checkpoint.arch.scheduler) else "dev"
    facts = {"file": str(path), "model_version": arch.model_version, "variant": variant, "upsamples": None}
    return {"kind": "checkpoint", **facts, **_weights(checkpoint.files)}


def _denoiser(path: Path, files: TensorFiles, version: str) -> FileFacts:
    from ltx2_cli.plan.recipe import says_distilled

    variant = {True: "distilled", False: "dev", None: None}[says_distilled(str(path))]
    facts = {"file": str(path), "model_version": version, "variant": variant, "upsamples": None}
    return {"kind": "denoiser", **facts, **_weights({"transformer": files})}


def _networks(path: Path, kind: str, prefixes: Mapping[str, str]) -> FileFacts:
    """A file with some networks of a checkpoint, which states no version; `prefixes` of tensors by network."""
    files, facts = TensorFiles(path), {"file": str(path), "model_version": None, "variant": None, "upsamples": None}
    networks = {
        network: {name: tensor for name, tensor in files.items() if name.startswith(prefix)}
        for network, prefix in prefixes.items()
    }
    return {"kind": kind, **facts, **_weights({network: tensors for network, tensors in networks.items() if tensors})}


def _weights(files: Mapping[str, Mapping[str, Tensor]]) -> FileFacts:
    """The size of networks, and the numbers of tensors by format; the format with the most numbers comes first."""
    networks = list[FileFacts]()
    for name, tensors in files.items():
        numbers, counts = Counter[str](), Counter[str](tensor.format for tensor in tensors.values())
        for tensor in tensors.values():
            numbers[tensor.format] += prod(tensor.shape)
        formats = {form: counts[form] for form, _ in numbers.most_common()}
        networks.append({"name": name, "parameters": numbers.total(), "formats": formats})
    size = sum(path.stat().st_size for path in {tensor.file for part in files.values() for tensor in part.values()})
    parameters = sum(network["parameters"] for network in networks)
    return {"bytes": size, "parameters": parameters, "networks": networks}


def lora_facts(file: LoraFile) -> FileFacts:
    """Facts from the header of a LoRA. Targets that differ only in their layer are one, with `*` for the layer."""
    pairs, groups = file.pairs.values(), dict[tuple[str, tuple[int, int]], list[LoraPair]]()
    for target, pair in file.pairs.items():
        groups.setdefault((LAYER.sub(r"\1.*.", target), pair.shape), []).append(pair)
    return {
        "file": str(file.path),
        "bytes": file.path.stat().st_size,
        "model_version": model_version(file),
        "pairs": len(pairs),
        "ranks": sorted({pair.rank for pair in pairs}),
        # each is `tensor`, a number that the config states, or None
        "alphas": sorted({"tensor" if isinstance(pair.alpha, str) else pair.alpha for pair in pairs}, key=str),
        "dtypes": sorted({dtype for pair in pairs for dtype in pair.dtypes}),
        "metadata": file.files.metadata,
        "targets": [
            {"name": name, "shape": shape, "targets": len(group), "ranks": sorted({pair.rank for pair in group})}
            for (name, shape), group in sorted(groups.items())
        ],
    }


def looks_like_safetensors(path: Path) -> bool:
    """Whether it begins with the length of a JSON object, and the object."""
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"
