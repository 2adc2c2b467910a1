"""Latents to frames, where need be with the decoder's last layers tile by tile: there the activations are largest, and
only those of one tile exist at a time.

A tile sees as far beyond what is kept of it as its layers look. So its pixels are those of the whole clip, and there is
no seam to blend.
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
ALIVE = 10  # activations as large as the largest that there are at a time: for a TPU v6e 8 to 10, on the CPU 7


@dataclass(frozen=True)
class Tiles:
    """All layers but the first `cut` see the video as this many tiles along frames, height and width."""

    cut: int
    counts: Extent


@dataclass(frozen=True)
class Cuts:
    """One axis in tiles of one size: each sees `seen` places from one of `begins`, and of what becomes of them the part
    of `kept` places from one of `firsts` is kept. Together they keep the axis."""

    seen: int
    begins: tuple[int, ...]
    kept: int
    firsts: tuple[int, ...]


def cut_axis(length: int, count: int, reach: int, shared: int) -> Cuts:
    """`count` tiles of `length` places; what is kept depends on `reach` places around it, and neighbours both keep at
    least the `shared` places between them."""
    kept = -(-(length - shared) // count) + shared
    seen = min(length, kept + 2 * reach)
    firsts = tuple(min(tile * (kept - shared), length - kept) for tile in range(count))
    begins = tuple(min(max(first - reach, 0), length - seen) for first in firsts)
    return Cuts(seen, begins, kept, firsts)


def cut_video(decoder: VideoDecoder, tiles: Tiles, size: Extent) -> tuple[Cuts, Cuts, Cuts]:
    """The tiles of what the layers before the cut give, which is of this size.

    A frame there becomes several, but the first of a video, and of a tile, becomes one: the last of them. So a tile
    gives whole frames from the last of its first place on, and its last place is the first of the next tile.
    """
    frames, side = reach(decoder, tiles.cut)
    along_frames = cut_axis(size[0], tiles.counts[0], frames, shared=1)
    height, width = (cut_axis(size[axis], tiles.counts[axis], side, shared=0) for axis in (1, 2))
    return along_frames, height, width


def reach(decoder: VideoDecoder, cut: int) -> tuple[int, int]:
    """How many frames, and how many places to each side, of what the first `cut` layers give a pixel depends on."""
    past = max(decoder.conv_out.conv.around)
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
    extent, channels = size, decoder.conv_in.conv.bias.shape[0]
    found = [(extent, channels)]
    for layer in decoder.layers:
        frames, height, width = (side * times for side, times in zip(extent, layer.stride, strict=True))
        extent, channels = (frames - (layer.stride[0] - 1), height, width), layer.channels
        found.append((extent, channels))
    return found


def decode_bytes(decoder: VideoDecoder, size: Extent, tiles: Tiles | None, itemsize: int) -> int:
    """About what `decode_frames` takes for a video whose latents are of this size, without the weights.

    `itemsize` is that of what the convolutions give.
    """
    after = activations(decoder, size)
    most = [math.prod(extent) * channels for extent, channels in after]
    pixels, _ = after[-1]
    frames = 3 * math.prod(pixels) * decoder.patch_size**2
    if tiles is None:
        return ALIVE * max(most) * itemsize + frames
    extent, _ = after[tiles.cut]
    seen = math.prod(axis.seen for axis in cut_video(decoder, tiles, extent)) / math.prod(extent)
    at_once = ALIVE * max(*most[: tiles.cut + 1], seen * max(most[tiles.cut :])) + most[tiles.cut]
    return round(at_once * itemsize) + 2 * frames


def decode_frames(vae: VideoVAE, latents: jax.Array, tiles: Tiles | None) -> tuple[jax.Array, jax.Array]:
    """uint8 [videos, frames, height, width · 3] of normalised latents [videos, frames, height, width, channels], and
    whether the pixels are finite.

    Colours lie along the width: an array whose last axis is 3 takes an accelerator forty times its size.
    """
    decoder, latents = vae.decoder, vae.statistics.denormalise(latents)
    if tiles is None:
        return _levels(decoder(latents))
    x = decoder.head(latents, tiles.cut)
    _, frames, height, width, _ = x.shape
    cuts, scales = cut_video(decoder, tiles, (frames, height, width)), scale(decoder, tiles.cut)
    frames, height, width = (axis.kept * times for axis, times in zip(cuts, scales, strict=True))
    kept = frames - (scales[0] - 1), height, width

    def tile(begin: jax.Array, skipped: jax.Array) -> tuple[jax.Array, jax.Array]:
        seen = _part(x, begin, [axis.seen for axis in cuts])
        return _levels(_part(decoder.tail(seen, tiles.cut), skipped, kept))

    begins = np.array(list(product(*(axis.begins for axis in cuts))))
    firsts = np.array(list(product(*(axis.firsts for axis in cuts))))
    pieces, finite = jax.lax.map(lambda place: tile(*place), (begins, (firsts - begins) * scales))
    return _assemble(pieces, firsts * scales), finite.all()


def _part(x: jax.Array, begin: jax.Array, size: Sequence[int]) -> jax.Array:
    return jax.lax.dynamic_slice(x, (0, *begin, 0), (x.shape[0], *size, x.shape[-1]))


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
