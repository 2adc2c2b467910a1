"""The latent upsampler: de-normalised latents [batch, frames, height, width, channels] at more frames, rows, columns.
On disk it is a folder in diffusers' layout, or a published single file, with or without a config in its metadata."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float

from ltx2_cli.diffusion.geometry import UpsampleFactors
from ltx2_cli.errors import UsageError
from ltx2_cli.models.config import LTX2, LTX2_3, Config, NetworkArch, read_arch
from ltx2_cli.models.video_vae import LatentStatistics, VideoLatents, VideoVAEArch, depth_to_space
from ltx2_cli.nn.layers import Conv, Conv3D
from ltx2_cli.request.profiles import SAFETENSORS
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, abbreviate, collect, raise_all, read_json
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.load import mismatches
from ltx2_cli.weights.published import UPSAMPLER
from ltx2_cli.weights.tensors import shape_text

NORM_GROUPS = 32

Upsampled = Float[jax.Array, "batch frames height width channels"]
NORM_EPS = 1e-5
BLUR_WINDOW = 5
RATIONAL = {1.5: (3, 2), 2.0: (2, 1)}  # upsampling and then decimation factor of each scale

HINT = "download the upsampler again, or name another FILE, FOLDER or REPO"
INPUT_CONV = "initial_conv.weight"
BLOCK = re.compile(r"(?:post_upsample_)?res_blocks\.(\d+)\..*")
# keys of the single files' configs that diffusers' call otherwise
NATIVE_KEYS = {"spatial_scale": "rational_spatial_scale", "rational_resampler": "use_rational_resampler"}
SPATIAL: Config = {"spatial_upsample": True, "temporal_upsample": False}
BLURRED: Config = SPATIAL | {"use_rational_resampler": True}
# the kind of an upsampler by one weight: its name, its dimensions, and its channels out for one in
KINDS: dict[tuple[str, int, int], Config] = {
    ("upsampler.0.weight", 4, 4): SPATIAL | {"use_rational_resampler": False, "rational_spatial_scale": 2.0},
    ("upsampler.conv.weight", 4, 4): BLURRED | {"rational_spatial_scale": 2.0},
    ("upsampler.conv.weight", 4, 9): BLURRED | {"rational_spatial_scale": 1.5},
    ("upsampler.0.weight", 5, 2): {"spatial_upsample": False, "temporal_upsample": True},
    ("upsampler.0.weight", 5, 8): {"spatial_upsample": True, "temporal_upsample": True},
}


@dataclass(frozen=True)
class LatentUpsamplerArch(NetworkArch):
    """A latent upsampler; the last two fields are ignored where it resamples time."""

    in_channels: int = 128
    mid_channels: int = 1024
    num_blocks_per_stage: int = 4
    spatial_upsample: bool = True
    temporal_upsample: bool = False
    rational_spatial_scale: float = 2.0
    use_rational_resampler: bool = True

    def conflicts(self) -> Iterator[str]:
        if self.mid_channels % NORM_GROUPS:
            yield f"mid_channels is {self.mid_channels}, only multiples of {NORM_GROUPS} are"
        if not self.spatial_upsample and not self.temporal_upsample:
            yield "neither spatial_upsample nor temporal_upsample is true"
        if self.rational and self.rational_spatial_scale not in RATIONAL:
            known = " and ".join(map(str, RATIONAL))
            yield f"rational_spatial_scale is {self.rational_spatial_scale}, only {known} are"

    @property
    def rational(self) -> bool:
        """Whether it has a blur kernel, to decimate after upsampling."""
        return self.use_rational_resampler and not self.temporal_upsample

    @property
    def upsampling(self) -> UpsampleFactors:
        """The factors of a clip's size."""
        up, down = RATIONAL[self.rational_spatial_scale] if self.rational else (2, 1)
        return UpsampleFactors(2 if self.temporal_upsample else 1, *((up, down) if self.spatial_upsample else (1, 1)))

    @property
    def model_version(self) -> str | None:
        """LTX-2's only spatial one is rational and of scale 2; temporal ones are alike in all versions."""
        if self.temporal_upsample:
            return None
        return LTX2 if self.rational and self.upsampling.down == 1 else LTX2_3


class GroupNorm(nnx.Module):
    """Mean 0 and variance 1 in each clip and group of neighbouring channels, then a scale and a shift for each channel;
    statistics in float32. Wu and He, 2018, https://arxiv.org/abs/1803.08494."""

    def __init__(self, scope: Scope, channels: int):
        self.scale = scope.weight("weight", (channels,), ("conv_out",))
        self.shift = scope.weight("bias", (channels,), ("conv_out",))

    def __call__(self, x: jax.Array) -> jax.Array:
        groups = x.astype(jnp.float32).reshape(len(x), -1, NORM_GROUPS, x.shape[-1] // NORM_GROUPS)
        centred = groups - groups.mean((1, 3), keepdims=True)
        variance = jnp.square(centred).mean((1, 3), keepdims=True)
        normed = (centred * jax.lax.rsqrt(variance + NORM_EPS)).reshape(x.shape)
        return (normed * self.scale[...] + self.shift[...]).astype(x.dtype)


zero_padded_conv = partial(Conv3D, time_padding=(1, 1), time_mode="constant")


class LatentResNet(nnx.Module):
    """silu(x + norm(conv(silu(norm(conv(x))))))."""

    def __init__(self, scope: Scope, channels: int):
        self.conv1 = zero_padded_conv(scope / "conv1", channels, channels)
        self.norm1 = GroupNorm(scope / "norm1", channels)
        self.conv2 = zero_padded_conv(scope / "conv2", channels, channels)
        self.norm2 = GroupNorm(scope / "norm2", channels)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jax.nn.silu(self.norm1(self.conv1(x)))
        return jax.nn.silu(x + self.norm2(self.conv2(y)))


def decimate(x: jax.Array, kernel: jax.Array, every: int) -> jax.Array:
    """Each channel of x convolved with `kernel` [rows, columns], at every `every`-th row and column; float32 sums."""
    pad, kernel = len(kernel) // 2, kernel.astype(jnp.float32)
    last_row, last_column = ((length - 1) // every * every + 1 for length in x.shape[2:4])
    padded = jnp.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad), (0, 0)))
    taps = [(i, j) for i in range(len(kernel)) for j in range(len(kernel))]
    # A convolution of each channel by itself would take many times as long.
    terms = (kernel[i, j] * padded[:, :, i : i + last_row : every, j : j + last_column : every] for i, j in taps)
    return reduce(add, terms).astype(x.dtype)


class Resample(nnx.Module):
    """Depth to space of a convolution, in each frame or across frames; the first latent frame stays one frame."""

    def __init__(self, scope: Scope, arch: LatentUpsamplerArch):
        by, width = arch.upsampling, arch.mid_channels
        self.cell, self.every = (by.time, by.up, by.up), by.down
        place, d_out = scope / ("conv" if arch.rational else 0), width * math.prod(self.cell)
        if arch.temporal_upsample:
            self.conv: Conv3D | Conv = zero_padded_conv(place, width, d_out)
        else:
            self.conv = Conv(place, (3, 3, width, d_out), ((1, 1), (1, 1)))
        shape = (1, 1, BLUR_WINDOW, BLUR_WINDOW)
        self.blur = (scope / "blur_down").weight("kernel", shape, (None,) * 4) if arch.rational else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.conv(x if isinstance(self.conv, Conv3D) else x.reshape(-1, *x.shape[2:]))
        y = depth_to_space(y.reshape(*x.shape[:-1], -1), self.cell)[:, self.cell[0] - 1 :]
        return y if self.blur is None or self.every == 1 else decimate(y, self.blur[0, 0], self.every)


class LatentUpsampler(nnx.Module):
    """The network of all kinds of upsamplers: residual blocks, resampling, residual blocks; zeros pad, in time too."""

    def __init__(self, scope: Scope, arch: LatentUpsamplerArch):
        width, numbers = arch.mid_channels, range(arch.num_blocks_per_stage)
        self.conv_in = zero_padded_conv(scope / "initial_conv", arch.in_channels, width)
        self.norm_in = GroupNorm(scope / "initial_norm", width)
        self.before = nnx.List([LatentResNet(scope / "res_blocks" / i, width) for i in numbers])
        self.resample = Resample(scope / "upsampler", arch)
        self.after = nnx.List([LatentResNet(scope / "post_upsample_res_blocks" / i, width) for i in numbers])
        self.conv_out = zero_padded_conv(scope / "final_conv", width, arch.in_channels)

    def __call__(self, latents: VideoLatents) -> Upsampled:
        """De-normalised latents, upsampled by `LatentUpsamplerArch.upsampling`."""
        x = self.conv_in(latents.astype(self.conv_in.kernel.dtype))
        x = jax.nn.silu(self.norm_in(x))
        for block in (*self.before, self.resample, *self.after):
            x = block(x)
        return self.conv_out(x)


def upsample_latents(upsampler: LatentUpsampler, statistics: LatentStatistics, latents: VideoLatents) -> Upsampled:
    """Normalised latents to upsampled ones, normalised, float32. The upsampler works on the autoencoder's scale."""
    return statistics.normalise(upsampler(statistics.denormalise(latents)).astype(jnp.float32))


def has_upsampler(folder: Path) -> bool:
    """Whether a checkpoint's folder holds one."""
    return (folder / UPSAMPLER).is_dir()


def open_upsampler(path: Path, vae: VideoVAEArch | None) -> tuple[LatentUpsamplerArch, TensorFiles]:
    """The upsampler in a single file, in a folder, or in the `latent_upsampler` of a checkpoint's folder, for the
    latents of `vae`; None: for any. Raises `UsageError` with everything that is missing, damaged, not implemented or
    unfit."""
    place = path / UPSAMPLER if has_upsampler(path) else path
    try:
        files, config = _in_folder(place) if place.is_dir() else _in_file(place)
        return _described(files, config, place, vae), files
    except UsageError as error:
        hints = [HINT if hint == AGAIN else hint for hint in error.hint.split("; ")]
        raise UsageError(str(error), "; ".join(dict.fromkeys(hints))) from error


def _in_folder(folder: Path) -> tuple[TensorFiles, Config]:
    config = folder / "config.json"
    single = sorted(file.name for file in folder.glob(f"*upscaler*{SAFETENSORS}"))
    if single and not config.exists():
        hint = f"name one: {typed('second_stage.upsampler', folder / single[0])}"
        raise UsageError(f"{folder} holds single files: {abbreviate(single)}", hint)
    opened, problems = collect({"tensors": partial(TensorFiles, folder)})
    read, misread = collect({"config": partial(read_json, config)})
    raise_all([*problems, *misread])
    return opened["tensors"], read["config"]


def _in_file(path: Path) -> tuple[TensorFiles, Config]:
    if path.suffix != SAFETENSORS or not path.exists():
        raise UsageError(f"{path} is no folder and no safetensors file", HINT)
    files = TensorFiles(path)
    if (config := files.config(absent="{}")) is None:
        raise UsageError(f"{path}: the config in its metadata is not a JSON object", HINT)
    return files, {NATIVE_KEYS.get(key, key): value for key, value in config.items()}


def _described(files: TensorFiles, config: Config, where: Path, vae: VideoVAEArch | None) -> LatentUpsamplerArch:
    """The upsampler by its tensors, since a config may leave out the resampling. Raises `UsageError` for a config that
    contradicts the tensors, and for all faults of either."""
    by_tensors = _by_tensors(files, where)
    problems = [
        f"the config says {key} {config[key]!r}, by its tensors it is {value!r}"
        for key, value in by_tensors.items()
        if config.get(key) is not None and config[key] != value
    ]
    read, refused = collect({"arch": partial(read_arch, LatentUpsamplerArch, config | by_tensors, str(where))})
    if arch := read.get("arch"):
        problems += mismatches(LatentUpsampler(Scope("float32"), arch), files)
    sentences = [f"{where}: {problem}" for problem in problems]
    if arch and vae and arch.in_channels != vae.latent_channels:
        model = f"the model's have {vae.latent_channels}"
        sentences.append(f"{where} upsamples latents of {arch.in_channels} channels, {model}")
    if arch and vae and {arch.model_version, vae.model_version} >= {LTX2, LTX2_3}:
        model = f"the model's are of {vae.model_version}"
        sentences.append(f"{where} was trained on latents of {arch.model_version}, {model}")
    raise_all([*refused, *(UsageError(sentence, HINT) for sentence in sentences)])
    return read["arch"]


def _by_tensors(files: TensorFiles, where: Path) -> Config:
    """The config that belongs to these tensors."""
    first = files.get(INPUT_CONV)
    if first is None or len(first.shape) != 5:
        raise UsageError(f"{where} is no latent upsampler: it has no `{INPUT_CONV}` of five dimensions", HINT)
    mid_channels, in_channels = first.shape[:2]
    for (name, rank, factor), kind in KINDS.items():
        if name in files and len(files[name].shape) == rank and files[name].shape[0] == factor * mid_channels:
            blocks = {block[1] for block in map(BLOCK.fullmatch, files) if block}
            sizes = {"in_channels": in_channels, "mid_channels": mid_channels, "num_blocks_per_stage": len(blocks)}
            return kind | sizes
    names = dict.fromkeys(name for name, _, _ in KINDS)
    found = ", ".join(f"`{name}` is {shape_text(files[name].shape)}" for name in names if name in files)
    lacking = f"it has no {' and no '.join(f'`{name}`' for name in names)}"
    finding = f"with {mid_channels} channels, {found or lacking}"
    raise UsageError(f"{where} is a latent upsampler of no known kind: {finding}", HINT)
