"""Latents to frames by the video decoder, whole or in tiles, in one program."""

from collections.abc import Callable
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.video_vae import Past, VideoDecoder, VideoVAE
from ltx2_cli.plan.decoding import COLOURS, WHITE, level_type
from ltx2_cli.plan.video_tiles import Tiles, output_scale, tile_images


def decode_tiled(
    vae: VideoVAE, latents: jax.Array, tiles: Tiles | None, white: int = WHITE
) -> tuple[jax.Array, jax.Array]:
    """Decode normalised latents [videos, frames, height, width, channels] to levels from 0 to `white` [videos, frames,
    height, width · 3], and whether the pixels are finite. Colours are along the width: on an accelerator, an array
    whose last axis is 3 takes forty times its size."""
    decoder, latents = vae.decoder, vae.statistics.denormalise(latents)
    if tiles is None:
        return _levels(pixels := decoder(latents), white), jnp.isfinite(pixels).all()
    x = decoder.head(latents, tiles.cut)
    videos, frames, height, width, channels = x.shape
    cuts, (by, *scales) = tile_images(decoder, tiles, height, width), output_scale(decoder, tiles.cut)
    read = videos, frames, *(axis.read_size for axis in cuts), channels
    kept = [axis.write_size * times for axis, times in zip(cuts, scales, strict=True)]

    def tile(clip: jax.Array, starts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        start, skipped, place = starts

        def add(clip: jax.Array, pixels: jax.Array, first: jax.Array | int) -> tuple[jax.Array, jax.Array]:
            own = jax.lax.dynamic_slice(pixels, (0, 0, *skipped, 0), (*pixels.shape[:2], *kept, 3))
            return _add_frames(clip, own, place, first, white)

        seen = jax.lax.dynamic_slice(x, (0, 0, *start, 0), read)
        if not tiles.frames_at_once:
            return add(clip, decoder.tail(seen, tiles.cut), 0)
        return _decode_in_steps(decoder, tiles, seen, clip, add)

    read_starts = np.array(list(product(*(axis.read_starts for axis in cuts))))
    write_starts = np.array(list(product(*(axis.write_starts for axis in cuts))))
    skipped, places = (write_starts - read_starts) * scales, write_starts * np.multiply(scales, COLOURS)
    size = by * (frames - 1) + 1, *(places[-1] + np.multiply(kept, COLOURS)).tolist()
    clip = jnp.zeros_like(x, level_type(white), (videos, *size))
    clip, finite = jax.lax.scan(tile, clip, tuple(map(jnp.asarray, (read_starts, skipped, places))))
    return clip, finite.all()


AddFrames = Callable[[jax.Array, jax.Array, jax.Array | int], tuple[jax.Array, jax.Array]]


def _decode_in_steps(
    decoder: VideoDecoder, tiles: Tiles, x: jax.Array, clip: jax.Array, add: AddFrames
) -> tuple[jax.Array, jax.Array]:
    """The clip with the pixels of x, a part of the cut layers' output, few frames after another; whether they are
    finite. `add` gives both for pixels and the frame of the clip where they begin."""
    some, frames = partial(_frames_from, x, tiles.frames_at_once), x.shape[1]

    def step(begun: tuple[jax.Array, Past], number: jax.Array) -> tuple[tuple[jax.Array, Past], jax.Array]:
        (clip, past), start = begun, number * tiles.frames_at_once
        pixels, past = decoder.resume(some(start), tiles.cut, past, start, frames)
        clip, finite = add(clip, pixels, decoder.output_start(tiles.cut, start))
        return (clip, past), finite

    _, past = jax.eval_shape(lambda: decoder.resume(some(0), tiles.cut, None, 0, frames))
    past = jax.tree.map(lambda kept: jnp.zeros_like(x, kept.dtype, kept.shape), past)
    (clip, _), finite = jax.lax.scan(step, (clip, past), jnp.arange(tiles.steps(decoder, frames)))
    return clip, finite.all()


def _frames_from(x: jax.Array, count: int, start: jax.Array | int) -> jax.Array:
    """So many frames of x, the last one again beyond the end; in slices, as a TPU gathers slowly."""
    numbers = (jnp.minimum(start + n, x.shape[1] - 1) for n in range(count))
    return jnp.concatenate([jax.lax.dynamic_slice_in_dim(x, number, 1, axis=1) for number in numbers], axis=1)


def _add_frames(
    clip: jax.Array, pixels: jax.Array, place: jax.Array, first: jax.Array | int, white: int
) -> tuple[jax.Array, jax.Array]:
    """The clip with the levels of these pixels from its frame `first` on, and from `place` along height and width on;
    whether they are finite. Frames outside the clip are dropped."""
    levels, length, count = _levels(pixels, white), clip.shape[1], pixels.shape[1]
    begin = jnp.clip(first, 0, length - count)
    number, where = begin - first + jnp.arange(count), (0, begin, *place)  # the number of the frame that comes there
    inside = (number >= 0) & (number < count)
    if count < length:
        there = jax.lax.dynamic_slice(clip, where, levels.shape)
        levels = jnp.where(inside[:, None, None], jnp.roll(levels, first - begin, axis=1), there)
    finite = jnp.roll(jnp.isfinite(pixels).all(axis=(0, 2, 3, 4)), first - begin) | ~inside
    return jax.lax.dynamic_update_slice(clip, levels, where), finite.all()


def _levels(pixels: jax.Array, white: int) -> jax.Array:
    """Levels from 0 to `white` of pixels in [-1, 1], colours along the width."""
    levels = jnp.round(jnp.clip((pixels.astype(jnp.float32) + 1) / 2, 0, 1) * white).astype(level_type(white))
    return levels.reshape(*pixels.shape[:3], -1)
