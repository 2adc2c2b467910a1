"""Latents to frames, if need be with the decoder's last layers in tiles, where the activations are largest.

A tile reads its layers' receptive field beyond what is kept of it, so its pixels are exactly those of the whole clip.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.video_vae import VideoDecoder, VideoVAE

Extent = tuple[int, int, int]  # frames, height, width
LIVE_BUFFERS = 10  # activations as large as the largest that there are at a time: for a TPU v6e 8 to 10, on the CPU 7


@dataclass(frozen=True)
class Tiles:
    """All layers but the first `cut` see the video as this many tiles along frames, height and width."""

    cut: int
    counts: Extent


@dataclass(frozen=True)
class AxisTiling:
    """Tiling of one axis: tile i reads `read_size` positions from `read_starts[i]`, and yields `write_size` positions
    from `write_starts[i]`, which is inside what it reads. The written ranges cover the axis."""

    read_size: int
    read_starts: tuple[int, ...]
    write_size: int
    write_starts: tuple[int, ...]


def tile_axis(length: int, count: int, halo: int, shared: int) -> AxisTiling:
    """`length` in `count` tiles of one size that read `halo` positions on each side of what they write; neighbours both
    write at least the `shared` positions between them."""
    write = -(-(length - shared) // count) + shared
    read = min(length, write + 2 * halo)
    write_starts = tuple(min(tile * (write - shared), length - write) for tile in range(count))
    read_starts = tuple(min(max(start - halo, 0), length - read) for start in write_starts)
    return AxisTiling(read, read_starts, write, write_starts)


def tile_video(decoder: VideoDecoder, tiles: Tiles, size: Extent) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
    """The tiles of the cut layers' output, whose extent is `size`. A position in time becomes several frames, but the
    first of a tile only the last of them: so neighbouring tiles share one position."""
    frames, side = receptive_field(decoder, tiles.cut)
    along_frames = tile_axis(size[0], tiles.counts[0], frames, shared=1)
    height, width = (tile_axis(size[axis], tiles.counts[axis], side, shared=0) for axis in (1, 2))
    return along_frames, height, width


def receptive_field(decoder: VideoDecoder, cut: int) -> tuple[int, int]:
    """The frames before, and the positions on each side, in the output of the first `cut` layers that a pixel needs."""
    past = max(decoder.conv_out.around)
    frames, side = past, 1
    for layer in reversed(decoder.layers[cut:]):
        frames = -(-frames // layer.stride[0]) + layer.convolutions * past
        side = -(-side // layer.stride[1]) + layer.convolutions
    return frames, side


def scale(decoder: VideoDecoder, cut: int) -> Extent:
    """Frames and pixels that a place of what the first `cut` layers give becomes."""
    strides = [layer.stride for layer in decoder.layers[cut:]]
    frames, height, width = (math.prod(sizes) for sizes in zip((1, 1, 1), *strides, strict=True))
    return frames, height * decoder.patch_size, width * decoder.patch_size


def activations(decoder: VideoDecoder, size: Extent) -> list[tuple[Extent, int]]:
    """The extent and channels of one video after the first `n` layers, for n from 0; its latents are of this size."""
    after = [(size, decoder.conv_in.bias.shape[0])]
    for layer in decoder.layers:
        frames, height, width = (side * times for side, times in zip(after[-1][0], layer.stride, strict=True))
        after.append(((frames - (layer.stride[0] - 1), height, width), layer.channels))
    return after


def decode_bytes(decoder: VideoDecoder, size: Extent, tiles: Tiles | None, itemsize: int) -> int:
    """About what `decode_frames` takes for a video whose latents are of this size, without the weights; `itemsize` is
    that of what the convolutions give."""
    after = activations(decoder, size)
    most = [math.prod(extent) * channels for extent, channels in after]
    pixels, _ = after[-1]
    frames = 3 * math.prod(pixels) * decoder.patch_size**2
    if tiles is None:
        return LIVE_BUFFERS * max(most) * itemsize + frames
    extent, _ = after[tiles.cut]
    seen = math.prod(axis.read_size for axis in tile_video(decoder, tiles, extent)) / math.prod(extent)
    at_once = LIVE_BUFFERS * max(*most[: tiles.cut + 1], seen * max(most[tiles.cut :])) + most[tiles.cut]
    return round(at_once * itemsize) + 2 * frames


def decode_frames(vae: VideoVAE, latents: jax.Array, tiles: Tiles | None) -> tuple[jax.Array, jax.Array]:
    """uint8 [videos, frames, height, width · 3] of normalised latents [videos, frames, height, width, channels], and
    whether the pixels are finite. Colours lie along the width: an array whose last axis is 3 takes an accelerator forty
    times its size."""
    decoder, latents = vae.decoder, vae.statistics.denormalise(latents)
    if tiles is None:
        return _levels(decoder(latents))
    x = decoder.head(latents, tiles.cut)
    _, frames, height, width, _ = x.shape
    cuts, scales = tile_video(decoder, tiles, (frames, height, width)), scale(decoder, tiles.cut)
    frames, height, width = (axis.write_size * times for axis, times in zip(cuts, scales, strict=True))
    kept = frames - (scales[0] - 1), height, width

    def tile(start: jax.Array, skipped: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = _part(x, start, [axis.read_size for axis in cuts])
        return _levels(_part(decoder.tail(seen, tiles.cut), skipped, kept))

    read_starts = np.array(list(product(*(axis.read_starts for axis in cuts))))
    write_starts = np.array(list(product(*(axis.write_starts for axis in cuts))))
    pieces, finite = jax.lax.map(lambda starts: tile(*starts), (read_starts, (write_starts - read_starts) * scales))
    return _assemble(pieces, write_starts * scales), finite.all()


def _part(x: jax.Array, start: jax.Array, size: Sequence[int]) -> jax.Array:
    return jax.lax.dynamic_slice(x, (0, *start, 0), (x.shape[0], *size, x.shape[-1]))


def _levels(pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """uint8 of pixels in [-1, 1], colours along the width; whether they are finite."""
    pixels = pixels.astype(jnp.float32)
    levels = jnp.round(jnp.clip((pixels + 1) / 2, 0, 1) * 255).astype(jnp.uint8)
    return levels.reshape(*pixels.shape[:3], -1), jnp.isfinite(pixels).all()


def _assemble(pieces: jax.Array, places: np.ndarray) -> jax.Array:
    """The frames of which `pieces` [tile, videos, frames, height, width · 3] begin at `places`."""
    size = places.max(axis=0) + np.array([*pieces.shape[2:4], pieces.shape[4] // 3])
    whole = jnp.zeros((pieces.shape[1], *size[:2], size[2] * 3), pieces.dtype)
    for piece, (frame, row, column) in zip(pieces, places, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, (0, frame, row, column * 3))
    return whole
