"""A latent upsampler on disk: what it is, by its tensors, and whether its config says the same.

It is a folder in diffusers' layout, with a config.json, or a published single file, with or without a config in its
metadata. The tensors decide, since a config may leave out how its upsampler resamples; what it states must agree.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import Config, read_arch
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, abbreviate, collect, raise_all, read_json, shape_text
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.load import mismatches
from ltx2_cli.weights.published import UPSAMPLER

HINT = "download the upsampler again, or name another: --upsampler FILE, FOLDER or REPO"
SUFFIX = ".safetensors"
FIRST = "initial_conv.weight"
BLOCK = re.compile(r"(?:post_upsample_)?res_blocks\.(\d+)\..*")
# keys of the single files' configs that diffusers' call otherwise
ORIGINAL = {"spatial_scale": "rational_spatial_scale", "rational_resampler": "use_rational_resampler"}

SPACE: Config = {"spatial_upsample": True, "temporal_upsample": False}
PLAIN: Config = {"use_rational_resampler": False}
BLURRED: Config = {"use_rational_resampler": True}
# the weight that makes cells, its dimensions, and its channels out for one in: what an upsampler that has it is
KINDS: dict[tuple[str, int, int], Config] = {
    ("upsampler.0.weight", 4, 4): SPACE | PLAIN | {"rational_spatial_scale": 2.0},
    ("upsampler.conv.weight", 4, 4): SPACE | BLURRED | {"rational_spatial_scale": 2.0},
    ("upsampler.conv.weight", 4, 9): SPACE | BLURRED | {"rational_spatial_scale": 1.5},
    ("upsampler.0.weight", 5, 2): {"spatial_upsample": False, "temporal_upsample": True},
    ("upsampler.0.weight", 5, 8): {"spatial_upsample": True, "temporal_upsample": True},
}


def has_upsampler(folder: Path) -> bool:
    """Whether a checkpoint's folder holds one."""
    return (folder / UPSAMPLER).is_dir()


def open_upsampler(path: Path, vae: VideoVAEArch | None) -> tuple[LatentUpsamplerArch, TensorFiles]:
    """The upsampler in a single file, in a folder, or in the `latent_upsampler` of a checkpoint's folder, for the
    latents of `vae`; None: for any.

    Raises `UsageError` with all that is missing, damaged, not implemented, or does not fit.
    """
    place = path / UPSAMPLER if has_upsampler(path) else path
    try:
        files, config = _in_folder(place) if place.is_dir() else _in_file(place)
        return _described(files, config, place, vae), files
    except UsageError as error:
        hints = [HINT if hint == AGAIN else hint for hint in error.hint.split("; ")]
        raise UsageError(str(error), "; ".join(dict.fromkeys(hints))) from error


def _in_folder(folder: Path) -> tuple[TensorFiles, Config]:
    config = folder / "config.json"
    single = sorted(file.name for file in folder.glob(f"*upscaler*{SUFFIX}"))
    if single and not config.exists():
        raise UsageError(
            f"{folder} holds single files: {abbreviate(single)}", f"name one: --upsampler {folder / single[0]}"
        )
    opened, problems = collect({"tensors": partial(TensorFiles, folder)})
    read, misread = collect({"config": partial(read_json, config)})
    raise_all([*problems, *misread])
    return opened["tensors"], read["config"]


def _in_file(path: Path) -> tuple[TensorFiles, Config]:
    if path.suffix != SUFFIX or not path.exists():
        raise UsageError(f"{path} is no folder and no safetensors file", HINT)
    files = TensorFiles(path.parent, (path.stem,))
    config = files.config(absent="{}")
    if config is None:
        raise UsageError(f"{path}: the config in its metadata is not a JSON object", HINT)
    return files, {ORIGINAL.get(key) or key: value for key, value in config.items()}


def _described(files: TensorFiles, config: Config, where: Path, vae: VideoVAEArch | None) -> LatentUpsamplerArch:
    """The upsampler by its tensors; raises `UsageError` for what is wrong with them, the config, or both."""
    by_tensors = _by_tensors(files, where)
    sentences = [*_contradictions(by_tensors, config, where)]
    read, refused = collect({"arch": partial(read_arch, LatentUpsamplerArch, config | by_tensors, str(where))})
    for arch in read.values():
        sentences += [f"{where}: {mismatch}" for mismatch in mismatches(LatentUpsampler(Scope("float32"), arch), files)]
        sentences += _misfits(arch, where, vae) if vae else []
    raise_all([*refused, *(UsageError(sentence, HINT) for sentence in sentences)])
    return read["arch"]


def _by_tensors(files: TensorFiles, where: Path) -> dict[str, Any]:
    """The config that belongs to these tensors."""
    first = files.get(FIRST)
    if first is None or len(first.shape) != 5:
        raise UsageError(f"{where} is no latent upsampler: it has no `{FIRST}` of five dimensions", HINT)
    mid_channels, in_channels = first.shape[:2]
    for (name, rank, factor), kind in KINDS.items():
        if name in files and len(files[name].shape) == rank and files[name].shape[0] == factor * mid_channels:
            blocks = {block[1] for block in map(BLOCK.fullmatch, files) if block}
            sizes = {"in_channels": in_channels, "mid_channels": mid_channels, "num_blocks_per_stage": len(blocks)}
            return kind | sizes
    names = dict.fromkeys(name for name, _, _ in KINDS)
    found = [f"`{name}` is {shape_text(files[name].shape)}" for name in names if name in files]
    lacking = f"it has no {' and no '.join(f'`{name}`' for name in names)}"
    raise UsageError(
        f"{where} is a latent upsampler of no known kind: with {mid_channels} channels, {', '.join(found) or lacking}",
        HINT,
    )


def _contradictions(by_tensors: Config, config: Config, where: Path) -> Iterator[str]:
    """What the config states otherwise than the tensors."""
    for key, value in by_tensors.items():
        stated = config.get(key)
        if stated is not None and stated != value:
            yield f"{where}: the config says {key} {stated!r}, by its tensors it is {value!r}"


def _misfits(arch: LatentUpsamplerArch, where: Path, vae: VideoVAEArch) -> Iterator[str]:
    """Latents that it cannot take, or was not trained on."""
    if arch.in_channels != vae.latent_channels:
        yield f"{where} upsamples latents of {arch.in_channels} channels, the model's have {vae.latent_channels}"
    if arch.model_version and vae.model_version and arch.model_version != vae.model_version:
        yield f"{where} was trained on latents of {arch.model_version}, the model's are of {vae.model_version}"
