"""The diffusion video decoder of LTX-2.5: latents [batch, frames, height, width, channels] to pixels [batch, frames,
height, width, 3]. Four stages turn latents into a context of one token for each patch of pixels; the fifth denoises
pixels beside it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.models.config import NetworkArch
from ltx2_cli.models.video_vae import LatentStatistics, Pixels, Stride, VideoLatents
from ltx2_cli.nn.layers import SINUSOID_WIDTH, Linear, rms_norm, sinusoid
from ltx2_cli.nn.neighborhood import Window, neighborhood_attention
from ltx2_cli.weights.declare import Scope

NORM_EPS = 1e-6
ROPE_BASE = 10000.0
MODULATIONS = 7  # rows of a modulation, of which the four in `DiffusionBlock` are used
FEED_FORWARD_TOKENS = 16384  # whose hidden features are in memory at once
UNSPLIT_MATRIX = None, None  # logical axes of a matrix that is not split


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
    temporal_compression_ratio: int = 8

    def conflicts(self) -> Iterator[str]:
        channels, reductions = self.decoder_stage_channels, self.decoder_upsample_channel_reductions
        stages = (channels[1:], self.decoder_stage_depths[1:], self.decoder_stage_kernels, reductions)
        if {len(stage) for stage in stages} != {len(self.decoder_upsample_strides)}:
            yield "the decoder's lists differ in length"
        if any(a // by != b for a, by, b in zip(channels, reductions, channels[1:], strict=False)):
            yield "decoder_stage_channels do not shrink by decoder_upsample_channel_reductions"

    @property
    def ghosts(self) -> int:
        """Copies of the last latent frame after a video: they keep its end away from the shifted windows."""
        return self.decoder_stage_kernels[0][0] // 2 * 2

    def noise_shape(self, latents: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the noise for latents of this shape. A short clip keeps ghosts until its frames fill the window
        of the fifth stage."""
        batch, frames, height, width, _ = latents
        content = self.frames(frames)
        total = content + self.ghosts * self.temporal_compression_ratio
        scale = [self.patch_size * math.prod(s[i] for s in self.decoder_upsample_strides) for i in (1, 2)]
        kept = min(total, max(content, self.decoder_stage5_kernel[0]))
        return batch, kept, height * scale[0], width * scale[1], self.out_channels

    def frames(self, latent_frames: int) -> int:
        """Frames of a video of so many latent frames."""
        return (latent_frames - 1) * self.temporal_compression_ratio + 1


def rotate_by_place(x: jax.Array) -> jax.Array:
    """RoPE of [batch, frames, height, width, heads, dim]: neighbouring features are rotated as pairs, a quarter of them
    by the frame, the others half by the row and half by the column."""
    dim = x.shape[-1]
    space = (dim - dim // 4 // 2 * 2) // 2
    space += space % 2
    angles = []
    for axis, features in enumerate((dim - 2 * space, space, space), start=1):
        inverse = (ROPE_BASE ** -(np.arange(0, features, 2) / max(features, 1))).astype(np.float32)
        turned = np.arange(x.shape[axis], dtype=np.float32)[:, None] * inverse
        shape = [x.shape[i] if i == axis else 1 for i in (1, 2, 3)]
        angles.append(jnp.broadcast_to(turned.reshape(*shape, -1), (*x.shape[1:4], features // 2)))
    angle = jnp.concatenate(angles, axis=-1)[:, :, :, None]
    even, odd = x[..., ::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape).astype(x.dtype)


class NeighborhoodAttention(nnx.Module):
    """Self-attention of each token to its window."""

    def __init__(self, scope: Scope, dim: int, window: Window, head_dim: int):
        self.to_q, self.to_k, self.to_v = (Linear(scope / f"to_{name}", dim, dim, UNSPLIT_MATRIX) for name in "qkv")
        self.to_out = Linear(scope / "to_out" / 0, dim, dim, UNSPLIT_MATRIX)
        self.norm_q, self.norm_k = ((scope / f"norm_{name}").weight("weight", (head_dim,), (None,)) for name in "qk")
        self.window, self.head_dim = window, head_dim

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = *x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim
        q, k, v = (linear(x).reshape(heads) for linear in (self.to_q, self.to_k, self.to_v))
        q = rms_norm(q, NORM_EPS, self.norm_q[...]) * self.head_dim**-0.5
        k = rms_norm(k, NORM_EPS, self.norm_k[...])
        return self.to_out(
            neighborhood_attention(rotate_by_place(q), rotate_by_place(k), v, self.window).reshape(x.shape)
        )


class SwiGLU(nnx.Module):
    """down(silu(gate(x))·up(x)), computed for 16,384 tokens at a time."""

    def __init__(self, scope: Scope, dim: int):
        hidden = -(-4 * dim // 16) * 16
        self.up = Linear(scope / "w_up", dim, hidden, UNSPLIT_MATRIX, bias=False)
        self.gate = Linear(scope / "w_gate", dim, hidden, UNSPLIT_MATRIX, bias=False)
        self.down = Linear(scope / "w_down", hidden, dim, UNSPLIT_MATRIX, bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        def some(x: jax.Array) -> jax.Array:
            return self.down(jax.nn.silu(self.gate(x)) * self.up(x))

        tokens = x.reshape(-1, x.shape[-1])
        return jax.lax.map(some, tokens, batch_size=min(FEED_FORWARD_TOKENS, len(tokens))).reshape(x.shape)


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

    def __init__(self, scope: Scope, dim: int, window: Window, head_dim: int):
        super().__init__(scope, dim, window, head_dim)
        self.context_proj = Linear(scope / "context_proj", dim, dim, UNSPLIT_MATRIX)
        self.table = scope.weight("scale_shift_table", (MODULATIONS, dim), (None, None))

    def modulated(self, x: jax.Array, context: jax.Array, modulation: jax.Array) -> jax.Array:
        """`__call__` with the context, and a modulation [batch, 7, dim]."""
        rows = (modulation + self.table[...])[:, :, None, None, None]
        scale_attn, shift_attn, scale_mlp, shift_mlp = (rows[:, i] for i in (0, 1, 3, 4))
        x += self.context_proj(context)
        x += self.attn(rms_norm(x, NORM_EPS, self.norm1[...]) * (1 + scale_attn) + shift_attn)
        return x + self.mlp(rms_norm(x, NORM_EPS, self.norm2[...]) * (1 + scale_mlp) + shift_mlp)


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


class PixelDenoiser(nnx.Module):
    """The fifth stage: pixels without noise from pixels with noise, their context and the noise level."""

    def __init__(self, scope: Scope, arch: DiffusionDecoderArch):
        dim, level = arch.decoder_stage_channels[-1], arch.decoder_t_emb_dim
        patch, embedder = arch.out_channels * arch.patch_size**2, scope / "t_embedder" / "timestep_embedder"
        self.linear_1 = Linear(embedder / "linear_1", SINUSOID_WIDTH, level, UNSPLIT_MATRIX)
        self.linear_2 = Linear(embedder / "linear_2", level, level, UNSPLIT_MATRIX)
        self.adaln = Linear(scope / "shared_adaln" / "proj", level, MODULATIONS * dim, UNSPLIT_MATRIX)
        self.conv_in = Linear(scope / "conv_in_x_t", patch, dim, UNSPLIT_MATRIX)
        window, head_dim = arch.decoder_stage5_kernel, arch.decoder_head_dim
        names = (scope / "diff_blocks" / i for i in range(arch.decoder_stage_depths[-1]))
        self.blocks = nnx.List([DiffusionBlock(name, dim, window, head_dim) for name in names])
        self.norm_out = (scope / "norm_out").weight("weight", (dim,), (None,))
        self.conv_out = Linear(scope / "conv_out", dim, patch, UNSPLIT_MATRIX)
        self.patch_size, self.scale = arch.patch_size, arch.decoder_timestep_scale_multiplier

    def __call__(self, context: jax.Array, pixels: Pixels, level: float) -> Pixels:
        timestep = jnp.full(pixels.shape[:1], level * self.scale, jnp.float32)
        embedded = self.linear_2(jax.nn.silu(self.linear_1(sinusoid(timestep).astype(context.dtype))))
        modulation = self.adaln(jax.nn.silu(embedded)).reshape(len(pixels), MODULATIONS, -1)
        batch, frames, height, width, _ = context.shape
        p = self.patch_size
        x = pixels.reshape(batch, frames, height, p, width, p, -1).transpose(0, 1, 2, 4, 6, 5, 3)
        x = self.conv_in(x.reshape(batch, frames, height, width, -1).astype(context.dtype))
        for block in self.blocks:
            x = block.modulated(x, context, modulation)
        x = self.conv_out(rms_norm(x, NORM_EPS, self.norm_out[...]))
        x = x.reshape(batch, frames, height, width, -1, p, p).transpose(0, 1, 2, 6, 3, 5, 4)
        return x.reshape(pixels.shape)


class DiffusionDecoder(nnx.Module):
    """The decoder. Its noise comes from the caller, in the shape that `arch.noise_shape` says."""

    def __init__(self, scope: Scope, arch: DiffusionDecoderArch):
        self.arch = arch
        self.statistics = LatentStatistics(scope, arch.latent_channels)
        scope /= "decoder"
        widths, head_dim = arch.decoder_stage_channels, arch.decoder_head_dim
        self.conv_in = Linear(scope / "conv_in", arch.latent_channels, widths[0], UNSPLIT_MATRIX)
        self.stages: nnx.List[nnx.List[ContextBlock]] = nnx.List([])
        self.upsamples: nnx.List[ChannelsToVideo] = nnx.List([])
        for i, stride in enumerate(arch.decoder_upsample_strides):
            names = (scope / "det_stages" / i / j for j in range(arch.decoder_stage_depths[i]))
            window = arch.decoder_stage_kernels[i]
            self.stages.append(nnx.List([ContextBlock(name, widths[i], window, head_dim) for name in names]))
            reduction = arch.decoder_upsample_channel_reductions[i]
            self.upsamples.append(ChannelsToVideo(scope / "upsamples" / i, widths[i], stride, reduction))
        self.denoiser = PixelDenoiser(scope, arch)

    def __call__(self, latents: VideoLatents, noise: Pixels, steps: int = 1) -> Pixels:
        """Pixels of normalised latents. One step takes what the denoiser says, more follow it with Euler's method."""
        context = self._context(latents, noise.shape[1])
        pixels = noise
        for left in range(steps, 0, -1):
            clean = self.denoiser(context, pixels, left / steps).astype(jnp.float32)
            pixels = clean + (pixels - clean) * ((left - 1) / left)
        return pixels[:, : self.arch.frames(latents.shape[1])]

    def _context(self, latents: VideoLatents, frames: int) -> jax.Array:
        """The first `frames` frames of the context, ghosts among them if it has fewer."""
        x = self.statistics.denormalise(latents).astype(latents.dtype)
        x = self.conv_in(jnp.pad(x, [(0, 0), (0, self.arch.ghosts), *[(0, 0)] * 3], mode="edge"))
        for blocks, upsample in zip(self.stages, self.upsamples, strict=True):
            for block in blocks:
                x = block(x)
            x = upsample(x)
        return x[:, :frames]
