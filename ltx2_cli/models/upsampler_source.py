"""A latent upsampler on disk: what it is, by its tensors, and whether its config says the same.

It is a folder in diffusers' layout, with a config.json, or a published single file, with or without a config in its
metadata. The tensors decide, since a config may leave out how its upsampler resamples; what it states must agree.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ltx2_cli.models.arch import VideoVAEArch
from ltx2_cli.models.config import Config, read_arch
from ltx2_cli.models.upsampler import LatentUpsampler, LatentUpsamplerArch
from ltx2_cli.spec import SpecError
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, read_json
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.findings import attempt, by, refuse, shortened
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

    Raises `SpecError` with all that is missing, damaged, not implemented, or does not fit.
    """
    place = path / UPSAMPLER if has_upsampler(path) else path
    try:
        files, config = _in_folder(place) if place.is_dir() else _in_file(place)
        return _described(files, config, place, vae), files
    except SpecError as error:
        hints = [HINT if hint == AGAIN else hint for hint in error.hint.split("; ")]
        raise SpecError(str(error), "; ".join(dict.fromkeys(hints))) from error


def _in_folder(folder: Path) -> tuple[TensorFiles, Config]:
    config = folder / "config.json"
    single = sorted(each.name for each in folder.glob(f"*upscaler*{SUFFIX}"))
    if single and not config.exists():
        raise SpecError(
            f"{folder} holds single files: {shortened(single)}", f"name one: --upsampler {folder / single[0]}"
        )
    opened, problems = attempt({"tensors": partial(TensorFiles, folder)})
    read, misread = attempt({"config": partial(read_json, config)})
    refuse([*problems, *misread])
    return opened["tensors"], read["config"]


def _in_file(path: Path) -> tuple[TensorFiles, Config]:
    if path.suffix != SUFFIX or not path.exists():
        raise SpecError(f"{path} is no folder and no safetensors file", HINT)
    files = TensorFiles(path.parent, (path.stem,))
    config = files.config(absent="{}")
    if config is None:
        raise SpecError(f"{path}: the config in its metadata is not a JSON object", HINT)
    return files, {ORIGINAL.get(key) or key: value for key, value in config.items()}


def _described(files: TensorFiles, config: Config, where: Path, vae: VideoVAEArch | None) -> LatentUpsamplerArch:
    """What the tensors are; raises `SpecError` for what is wrong with them, the config, or both."""
    seen = _by_tensors(files, where)
    problems = [*_contradictions(seen, config, where)]
    read, refused = attempt({"arch": partial(read_arch, LatentUpsamplerArch, config | seen, str(where))})
    problems += refused
    for arch in read.values():
        found = mismatches(LatentUpsampler(Scope("float32"), arch), files)
        problems += [SpecError(f"{where}: {each}", HINT) for each in found]
        problems += _misfits(arch, where, vae) if vae else []
    refuse(problems)
    return read["arch"]


def _by_tensors(files: TensorFiles, where: Path) -> dict[str, Any]:
    """What the config of such tensors has to say."""
    first = files.get(FIRST)
    if first is None or len(first.shape) != 5:
        raise SpecError(f"{where} is no latent upsampler: it has no `{FIRST}` of five dimensions", HINT)
    mid_channels, in_channels = first.shape[:2]
    for (name, rank, factor), kind in KINDS.items():
        if name in files and len(files[name].shape) == rank and files[name].shape[0] == factor * mid_channels:
            blocks = {block[1] for block in map(BLOCK.fullmatch, files) if block}
            sizes = {"in_channels": in_channels, "mid_channels": mid_channels, "num_blocks_per_stage": len(blocks)}
            return kind | sizes
    names = dict.fromkeys(name for name, _, _ in KINDS)
    found = [f"`{name}` is {by(files[name].shape)}" for name in names if name in files]
    lacking = f"it has no {' and no '.join(f'`{name}`' for name in names)}"
    raise SpecError(
        f"{where} is a latent upsampler of no known kind: with {mid_channels} channels, {', '.join(found) or lacking}",
        HINT,
    )


def _contradictions(seen: Config, config: Config, where: Path) -> Iterator[SpecError]:
    """What a config states that its tensors are not."""
    for key, value in seen.items():
        stated = config.get(key)
        if stated is not None and stated != value:
            yield SpecError(f"{where}: the config says {key} {stated!r}, by its tensors it is {value!r}", HINT)


def _misfits(arch: LatentUpsamplerArch, where: Path, vae: VideoVAEArch) -> Iterator[SpecError]:
    """Latents that it cannot take, or was not trained on."""
    if arch.in_channels != vae.latent_channels:
        yield SpecError(
            f"{where} upsamples latents of {arch.in_channels} channels, the model's have {vae.latent_channels}", HINT
        )
    if arch.generation and vae.generation and arch.generation != vae.generation:
        yield SpecError(
            f"{where} was trained on latents of {arch.generation}, the model's are of {vae.generation}", HINT
        )
