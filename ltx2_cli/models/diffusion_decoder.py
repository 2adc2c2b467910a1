"""The diffusion video decoder of LTX-2.5: latents [batch, frames, height, width, channels] to pixels [batch, frames,
height, width, 3]. Four stages turn latents into a context of one token for each patch of pixels; the fifth denoises
patches beside it. The first three work on a whole video, the others also on a tile of it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from ltx2_cli.models.config import NetworkArch
from ltx2_cli.models.video_vae import Extent, LatentStatistics, Pixels, Stride, VideoLatents
from ltx2_cli.nn.layer_loop import StackedLayers
from ltx2_cli.nn.layers import SINUSOID_WIDTH, Linear, rms_norm, sinusoid
from ltx2_cli.nn.neighborhood import Window, neighborhood_attention
from ltx2_cli.weights.declare import Scope, Weight

T = TypeVar("T")
NORM_EPS = 1e-6
ROPE_BASE = 10000.0
BRANCHES = ("ctx", "msa", "mlp")  # of a block of the fifth stage: context, attention, feed-forward
MODULATIONS = 7  # rows of a modulation, of which the four in `DiffusionBlock` are used
PART_TOKENS = 16384  # whose hidden features are in memory at once
UNSPLIT_MATRIX = None, None  # logical axes of a matrix that is not split
CellFeatures = Float[jax.Array, "batch cell_frames cell_height cell_width cell_features"]
Patches = Float[jax.Array, "batch patch_frames patch_height patch_width patch_features"]


@dataclass(frozen=True)
class DiffusionDecoderArch(NetworkArch):
    """The diffusion video decoder. Lists run from the latents to the pixels."""

    out_channels: int = 3
    latent_channels: int = 128
    patch_size: int = 4
    decoder_head_dim: int = 64
    decoder_stage_channels: tuple[int, ...] = (2048, 1024, 512, 512, 256)
    decoder_stage_depths: tuple[int, ...] = (4, 6, 4, 2, 8)
    decoder_stage_kernels: tuple[Window, ...] = ((3, 7, 7), (3, 7, 7), (3, 5, 5), (3, 5, 5))
    decoder_upsample_strides: tuple[Stride, ...] = ((1, 2, 2), (2, 1, 1), (2, 2, 2), (2, 2, 2))
    decoder_upsample_channel_reductions: tuple[int, ...] = (2, 2, 1, 2)
    decoder_stage5_kernel: Window = (11, 11, 11)
    decoder_t_emb_dim: int = 384
    decoder_timestep_scale_multiplier: float = 1000.0
    decoder_num_inference_steps: int = 1
    spatial_compression_ratio: int = 32
    temporal_compression_ratio: int = 8
    gated: bool = False  # residual branches of the fifth stage have factors, which Diffusers' folder has folded in

    def conflicts(self) -> Iterator[str]:
        channels, reductions = self.decoder_stage_channels, self.decoder_upsample_channel_reductions
        stages = (channels[1:], self.decoder_stage_depths[1:], self.decoder_stage_kernels, reductions)
        if {len(stage) for stage in stages} != {len(self.decoder_upsample_strides)}:
            yield "the decoder's lists differ in length"
        if any(a // by != b for a, by, b in zip(channels, reductions, channels[1:], strict=False)):
            yield "decoder_stage_channels do not shrink by decoder_upsample_channel_reductions"
        if any(width % self.decoder_head_dim for width in channels):
            yield "decoder_head_dim does not divide decoder_stage_channels"
        if any(stride[0] not in (1, 2) for stride in self.decoder_upsample_strides):
            yield "decoder_upsample_strides have frames other than 1 and 2"
        scale = [math.prod(by) for by in zip(*self.decoder_upsample_strides, strict=True)]
        compression = self.spatial_compression_ratio // self.patch_size
        if scale != [self.temporal_compression_ratio, compression, compression]:
            yield "decoder_upsample_strides and the compression ratios differ"

    @property
    def ghosts(self) -> int:
        """Copies of the last latent frame after a video: they keep its end away from the shifted windows."""
        return self.decoder_stage_kernels[0][0] // 2 * 2

    @property
    def ghost_cells(self) -> int:
        """The ghosts among the frames that the fourth stage reads."""
        return self.ghosts * math.prod(stride[0] for stride in self.decoder_upsample_strides[:-1])

    def cells(self, latents: Extent) -> Extent:
        """The grid that the fourth stage reads of latents of this extent, without ghosts."""
        return self.grids(latents)[3]

    def grids(self, latents: Extent) -> list[Extent]:
        """The grid that each stage reads of latents of this extent, without ghosts: of frames doubled, the first is
        dropped."""
        grids = [latents]
        for stride in self.decoder_upsample_strides:
            frames, height, width = (n * by for n, by in zip(grids[-1], stride, strict=True))
            grids.append((frames - (stride[0] - 1), height, width))
        return grids

    def tokens(self, cells: Extent) -> Extent:
        """The grid of the fifth stage over a tile of the fourth's, one token for each patch. Of few frames some are
        ghosts, as many as fill its window."""
        by, least = self.decoder_upsample_strides[-1], self.decoder_stage5_kernel[0]
        frames, most = (by[0] * (count - 1) + 1 for count in (cells[0], cells[0] + self.ghost_cells))
        return min(most, max(frames, least)), cells[1] * by[1], cells[2] * by[2]

    @property
    def patch_features(self) -> int:
        """Numbers of a patch."""
        return self.out_channels * self.patch_size**2

    @property
    def smallest(self) -> tuple[int, int]:
        """Least height and width of a clip in pixels: the windows of all stages fit into it."""
        windows = *self.decoder_stage_kernels, self.decoder_stage5_kernel
        scales = [grid[1:] for grid in self.grids((1, 1, 1))]
        sides = (
            max(-(-window[1 + i] // scale[i]) for window, scale in zip(windows, scales, strict=True)) for i in (0, 1)
        )
        height, width = (side * self.spatial_compression_ratio for side in sides)
        return height, width


def rotate_by_place(x: jax.Array, places: jax.Array) -> jax.Array:
    """RoPE of [tokens, heads, dim] with places int [tokens, 3]: neighbouring features are rotated as pairs, a quarter
    of them by the frame, the others half by the row and half by the column. In the result the first of all pairs stand
    before the second: an order that queries and keys share changes no score."""
    dim = x.shape[-1]
    space = (dim - dim // 4 // 2 * 2) // 2
    space += space % 2
    frequencies = np.zeros((3, dim // 2), np.float32)
    first = 0
    for axis, features in enumerate((dim - 2 * space, space, space)):
        inverse = ROPE_BASE ** -(np.arange(0, features, 2) / max(features, 1))
        frequencies[axis, first : first + len(inverse)] = inverse
        first += len(inverse)
    # a sum with zeros, which is exact
    angle = (places[:, :, None].astype(jnp.float32) * frequencies).sum(axis=1)[:, None]
    even, odd = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([even * cos - odd * sin, even * sin + odd * cos], axis=-1).astype(x.dtype)


def _by_parts(function: Callable[[T], Any], tokens: T) -> Any:
    """A function of each token on all of them, with the intermediate results of at most 16,384 in memory."""
    tokens_in_all = len(jax.tree.leaves(tokens)[0])
    parts = next(n for n in count(-(-tokens_in_all // PART_TOKENS)) if tokens_in_all % n == 0)
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), tokens)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), jax.lax.map(function, split))


class NeighborhoodAttention(nnx.Module):
    """Self-attention of each token to its window."""

    def __init__(self, scope: Scope, dim: int, window: Window, head_dim: int):
        self.to_q, self.to_k, self.to_v = (Linear(scope / f"to_{name}", dim, dim, UNSPLIT_MATRIX) for name in "qkv")
        self.to_out = Linear(scope / "to_out" / 0, dim, dim, UNSPLIT_MATRIX)
        self.norm_q, self.norm_k = ((scope / f"norm_{name}").weight("weight", (head_dim,), (None,)) for name in "qk")
        self.window, self.head_dim = window, head_dim

    def __call__(self, x: jax.Array) -> jax.Array:
        def normed(linear: Linear, norm: Weight, x: jax.Array, places: jax.Array) -> jax.Array:
            heads = rms_norm(linear(x).reshape(len(x), -1, self.head_dim), NORM_EPS, norm[...])
            return rotate_by_place(heads, places).reshape(x.shape)

        def project(some: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            x, places = some
            q = normed(self.to_q, self.norm_q, x, places) * self.head_dim**-0.5
            return q, normed(self.to_k, self.norm_k, x, places), self.to_v(x)

        places = jnp.stack(jnp.indices(x.shape[1:4]), axis=-1).reshape(-1, 3)
        tokens = x.reshape(-1, x.shape[-1]), jnp.tile(places, (len(x), 1))
        q, k, v = (part.reshape(x.shape) for part in _by_parts(project, tokens))
        return self.to_out(neighborhood_attention(q, k, v, self.window, self.head_dim))


class SwiGLU(nnx.Module):
    """down(silu(gate(x))·up(x))."""

    def __init__(self, scope: Scope, dim: int):
        hidden = -(-4 * dim // 16) * 16
        self.up = Linear(scope / "w_up", dim, hidden, UNSPLIT_MATRIX, bias=False)
        self.gate = Linear(scope / "w_gate", dim, hidden, UNSPLIT_MATRIX, bias=False)
        self.down = Linear(scope / "w_down", hidden, dim, UNSPLIT_MATRIX, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        def some(x: jax.Array) -> jax.Array:
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

        return _by_parts(some, x.reshape(-1, x.shape[-1])).reshape(x.shape)


class ContextBlock(nnx.Module):
    """Attention and feed-forward of the first four stages."""

    def __init__(self, scope: Scope, dim: int, window: Window, head_dim: int):
        self.norm1, self.norm2 = ((scope / name).weight("weight", (dim,), (None,)) for name in ("norm1", "norm2"))
        self.attn = NeighborhoodAttention(scope / "attn", dim, window, head_dim)
        self.mlp = SwiGLU(scope / "mlp", dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        x += self.attn(rms_norm(x, NORM_EPS, self.norm1[...]))
        return x + self.mlp(rms_norm(x, NORM_EPS, self.norm2[...]))


class DiffusionBlock(ContextBlock):
    """The block of the fifth stage: adds the context, and is modulated by the noise level."""

    def __init__(self, scope: Scope, dim: int, window: Window, head_dim: int, gated: bool):
        super().__init__(scope, dim, window, head_dim)
        self.context_proj = Linear(scope / "context_proj", dim, dim, UNSPLIT_MATRIX)
        names = BRANCHES if gated else ()
        self.gates = nnx.Dict({name: scope.weight(f"gate_{name}", (dim,), (None,)) for name in names})
        self.table = scope.weight("scale_shift_table", (MODULATIONS, dim), (None, None))

    def modulated(self, x: jax.Array, context: jax.Array, modulation: jax.Array) -> jax.Array:
        """`__call__` with the context, and a modulation [batch, 7, dim]."""
        rows = (modulation + self.table[...])[:, :, None, None, None]
        scale_attn, shift_attn, scale_mlp, shift_mlp = (rows[:, i] for i in (0, 1, 3, 4))
        x += self._gated("ctx", self.context_proj(context))
        x += self._gated("msa", self.attn(rms_norm(x, NORM_EPS, self.norm1[...]) * (1 + scale_attn) + shift_attn))
        return x + self._gated("mlp", self.mlp(rms_norm(x, NORM_EPS, self.norm2[...]) * (1 + scale_mlp) + shift_mlp))

    def _gated(self, branch: str, x: jax.Array) -> jax.Array:
        return x * self.gates[branch][...] if self.gates else x


class ChannelsToVideo(nnx.Module):
    """Channels to frames, rows and columns. Of frames doubled, the first is dropped."""

    def __init__(self, scope: Scope, dim: int, stride: Stride, reduction: int):
        self.proj = Linear(scope / "proj", dim, dim * math.prod(stride) // reduction, UNSPLIT_MATRIX)
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, *grid, _ = x.shape
        x = self.proj(x).reshape(batch, *grid, -1, *self.stride).transpose(0, 1, 5, 2, 6, 3, 7, 4)
        x = x.reshape(batch, *(n * by for n, by in zip(grid, self.stride, strict=True)), -1)
        return x[:, 1:] if self.stride[0] == 2 else x


class PatchDenoiser(nnx.Module):
    """The fifth stage: patches without noise from patches with noise, their context and the noise level."""

    def __init__(self, scope: Scope, arch: DiffusionDecoderArch):
        dim, level = arch.decoder_stage_channels[-1], arch.decoder_t_emb_dim
        embedder = scope / "t_embedder" / "timestep_embedder"
        self.linear_1 = Linear(embedder / "linear_1", SINUSOID_WIDTH, level, UNSPLIT_MATRIX)
        self.linear_2 = Linear(embedder / "linear_2", level, level, UNSPLIT_MATRIX)
        self.adaln = Linear(scope / "shared_adaln" / "proj", level, MODULATIONS * dim, UNSPLIT_MATRIX)
        self.conv_in = Linear(scope / "conv_in_x_t", arch.patch_features, dim, UNSPLIT_MATRIX)
        window, head_dim = arch.decoder_stage5_kernel, arch.decoder_head_dim
        blocks = scope.stacked("diff_blocks", range(arch.decoder_stage_depths[-1]))
        self.blocks = DiffusionBlock(blocks, dim, window, head_dim, arch.gated)
        self.norm_out = (scope / "norm_out").weight("weight", (dim,), (None,))
        self.conv_out = Linear(scope / "conv_out", dim, arch.patch_features, UNSPLIT_MATRIX)
        self.scale = arch.decoder_timestep_scale_multiplier

    def __call__(self, context: jax.Array, patches: Patches, level: float) -> Patches:
        timestep = jnp.full(patches.shape[:1], level * self.scale, jnp.float32)
        embedded = self.linear_2(jax.nn.silu(self.linear_1(sinusoid(timestep).astype(context.dtype))))
        modulation = self.adaln(jax.nn.silu(embedded)).reshape(len(patches), MODULATIONS, -1)
        x = self.conv_in(patches.astype(context.dtype))
        x, _ = StackedLayers(self.blocks).scan(lambda x, block: (block.modulated(x, context, modulation), None), x)
        return self.conv_out(rms_norm(x, NORM_EPS, self.norm_out[...]))


class DiffusionDecoder(nnx.Module):
    """The decoder. Its noise comes from the caller: of a tile it has the shape that `arch.tokens` says."""

    def __init__(self, scope: Scope, arch: DiffusionDecoderArch):
        self.arch = arch
        self.statistics = LatentStatistics(scope, arch.latent_channels)
        scope /= "decoder"
        widths, head_dim = arch.decoder_stage_channels, arch.decoder_head_dim
        self.conv_in = Linear(scope / "conv_in", arch.latent_channels, widths[0], UNSPLIT_MATRIX)
        self.stages: nnx.List[ContextBlock] = nnx.List([])  # the blocks of each
        self.upsamples: nnx.List[ChannelsToVideo] = nnx.List([])
        for i, stride in enumerate(arch.decoder_upsample_strides):
            blocks = (scope / "det_stages").stacked(str(i), range(arch.decoder_stage_depths[i]))
            self.stages.append(ContextBlock(blocks, widths[i], arch.decoder_stage_kernels[i], head_dim))
            reduction = arch.decoder_upsample_channel_reductions[i]
            self.upsamples.append(ChannelsToVideo(scope / "upsamples" / i, widths[i], stride, reduction))
        self.denoiser = PatchDenoiser(scope, arch)

    def features(self, latents: VideoLatents) -> CellFeatures:
        """What the fourth stage reads of normalised latents, in the grid that `arch.cells` says and with ghosts behind
        its frames."""
        x = self.statistics.denormalise(latents).astype(self.conv_in.kernel.dtype)
        x = self.conv_in(jnp.pad(x, [(0, 0), (0, self.arch.ghosts), *[(0, 0)] * 3], mode="edge"))
        for blocks, upsample in zip(self.stages[:-1], self.upsamples[:-1], strict=True):
            x = _upsampled(x, blocks, upsample)
        return x

    def pixels(self, features: CellFeatures, noise: Patches) -> Pixels:
        """The pixels of a tile of `features`, which has as many frames behind its own as there are ghosts. One step
        takes what the denoiser says, more follow it with Euler's method."""
        context = _upsampled(features, self.stages[-1], self.upsamples[-1])[:, : noise.shape[1]]
        steps, patches = self.arch.decoder_num_inference_steps, noise
        for left in range(steps, 0, -1):
            clean = self.denoiser(context, patches, left / steps).astype(jnp.float32)
            patches = clean + (patches - clean) * ((left - 1) / left)
        frames = features.shape[1] - self.arch.ghost_cells
        content = self.arch.decoder_upsample_strides[-1][0] * (frames - 1) + 1
        return from_patches(patches[:, :content].astype(context.dtype), self.arch.patch_size)


def _upsampled(x: jax.Array, blocks: ContextBlock, upsample: ChannelsToVideo) -> jax.Array:
    x, _ = StackedLayers(blocks).scan(lambda x, block: (block(x), None), x)
    return upsample(x)


def from_patches(patches: Patches, size: int) -> Pixels:
    """The pixels of patches, whose features are by colour, column and row."""
    batch, frames, height, width, _ = patches.shape
    x = patches.reshape(batch, frames, height, width, -1, size, size).transpose(0, 1, 2, 6, 3, 5, 4)
    return x.reshape(batch, frames, height * size, width * size, -1)
