"""The files of the diffusion decoder: the folder of diffusers, and the video autoencoder among the files of LTX-2.5, in
which projections of queries, keys and values are one tensor and branches of the fifth stage have factors."""

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from math import prod
from pathlib import Path

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import Config, read_arch
from ltx2_cli.models.diffusion_decoder import BRANCHES, DiffusionDecoder, DiffusionDecoderArch
from ltx2_cli.request.profiles import SAFETENSORS
from ltx2_cli.weights.checkpoint import AGAIN, Renaming, TensorFiles, read_json
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.load import mismatches
from ltx2_cli.weights.tensors import Tensor

OUTER = "vae."  # before all names in some files
FUSED_ATTENTION, SEPARATE_ATTENTION = re.compile(r"(.*\.attn)\.qkv\.(weight|bias)"), ("to_q", "to_k", "to_v")
PUBLISHED_NAMES = Renaming(
    "",
    (
        ("latents_mean", "per_channel_statistics.mean-of-means"),
        ("latents_std", "per_channel_statistics.std-of-means"),
        ("timestep_embedder.linear_1", "mlp.0"),
        ("timestep_embedder.linear_2", "mlp.2"),
        ("attn.to_out.0", "attn.proj"),
        ("attn.norm_q", "attn.q_norm"),
        ("attn.norm_k", "attn.k_norm"),
    ),
)
GATES = re.compile(rf"decoder\.diff_blocks\.\d+\.gate_({'|'.join(BRANCHES)})")
# of another network, of decoding beside keyframes, or of no use
UNREAD_TENSORS = re.compile(r"encoder\.|per_channel_statistics\.|decoder\.(coarse_|type_emb)")


def open_diffusion_decoder(place: Path) -> tuple[DiffusionDecoderArch, TensorFiles]:
    """The decoder in a folder of diffusers, or in the published file, and its tensors under the names that it declares.
    Raises `UsageError` for another one."""
    if place.is_dir():
        arch = read_arch(DiffusionDecoderArch, read_json(place / "config.json"), str(place / "config.json"))
        files = TensorFiles(place)
    else:
        arch, files = _in_file(place)
    if wrong := mismatches(DiffusionDecoder(Scope("float32"), arch), files):
        raise UsageError(f"{place} does not hold this diffusion decoder: {'; '.join(wrong)}", AGAIN)
    return arch, files


def _in_file(path: Path) -> tuple[DiffusionDecoderArch, TensorFiles]:
    """A file states what it holds as the published one does, or not at all."""
    stored = TensorFiles(path)
    if path.suffix != SAFETENSORS or (config := stored.config(absent="{}")) is None:
        raise UsageError(f"{path} is no safetensors file with a JSON object as its config", AGAIN)
    files = stored.renamed({name.removeprefix(OUTER): name for name in stored})
    separate = dict(_separated(files))
    files.clear()
    files.update(separate)
    section: Config = config["vae"] if isinstance(config.get("vae"), dict) else config
    known = {*(field.name for field in fields(DiffusionDecoderArch)), *DiffusionDecoderArch.only}
    stated = {key: value for key, value in section.items() if key in known}
    arch = read_arch(DiffusionDecoderArch, stated | {"gated": any(map(GATES.fullmatch, files))}, str(path))
    names = PUBLISHED_NAMES.originals(declared(DiffusionDecoder(Scope("float32"), arch)))
    strange = files.keys() - {*names.values()}
    return arch, files.renamed(names | {name: name for name in strange if not UNREAD_TENSORS.match(name)})


def _separated(files: TensorFiles) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name; a fused projection as three, whose rows follow one another."""
    for name, tensor in files.items():
        fused = FUSED_ATTENTION.fullmatch(name)
        if not fused or not tensor.shape or tensor.shape[0] % len(SEPARATE_ATTENTION) or tensor.encoding:
            yield name, tensor
            continue
        shape = (tensor.shape[0] // len(SEPARATE_ATTENTION), *tensor.shape[1:])
        size = tensor.stored_dtype.itemsize * prod(shape)
        for index, part in enumerate(SEPARATE_ATTENTION):
            own = replace(tensor, shape=shape, begin=tensor.begin + index * size)
            yield f"{fused[1]}.{part}.{fused[2]}", own
