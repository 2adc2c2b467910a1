"""Tiles of the video decoder's last layers, where activations are largest: parts of each frame, and few frames at once.
They change no pixel: a tile reads its result plus the receptive field of its layers, and convolutions keep the frames
that they have seen."""

import math
from dataclasses import dataclass

import jax

from ltx2_cli.models.video_vae import PAST_FRAMES, Extent, VideoDecoder
from ltx2_cli.nn.layers import convolved_itemsize
from ltx2_cli.plan.axis_tiling import AxisTiling, tile_axis

# Live activations of the whole decoder, in sizes of the largest one: 6.4 to 6.9 on the CPU, 5 and 6 on an RTX 4090 and
# an H100, 8 to 10 on a TPU v6e.
WHOLE_BUFFERS = {"cpu": 7, "gpu": 7, "tpu": 10}
LIVE_BUFFERS = 10  # as many of the layers behind the cut
HEAD_BUFFERS = 6  # as many of the layers before the cut: 3 on a TPU v6e, 3 to 5 on an H100, 6 on the CPU
PAST_COPIES = {"cpu": 3, "gpu": 1, "tpu": 2}  # of the frames that convolutions have seen, at most


@dataclass(frozen=True)
class Tiles:
    """How all layers but the first `cut` work: in tiles, counted along height and width, on few frames of the cut
    layers' output after another."""

    cut: int
    counts: tuple[int, int]
    frames_at_once: int = 0  # 0: all

    def steps(self, decoder: VideoDecoder, frames: int) -> int:
        """How often the layers work until all `frames` of the cut layers' output are decoded."""
        if not self.frames_at_once:
            return 1
        by, _, _ = output_scale(decoder, self.cut)
        return -(-(by * (frames - 1) + 1 + output_delay(decoder, self.cut)) // (by * self.frames_at_once))


def tile_images(decoder: VideoDecoder, tiles: Tiles, height: int, width: int) -> tuple[AxisTiling, AxisTiling]:
    """The tiles of the cut layers' output along its height and width."""
    side = receptive_field(decoder, tiles.cut)
    along_height, along_width = (
        tile_axis(length, count, side, 0) for length, count in zip((height, width), tiles.counts, strict=True)
    )
    return along_height, along_width


def receptive_field(decoder: VideoDecoder, cut: int) -> int:
    """Positions of the output of the first `cut` layers on each side of a pixel that it depends on."""
    side = 1
    for layer in reversed(decoder.layers[cut:]):
        side = -(-side // layer.stride[1]) + layer.convolutions
    return side


def output_delay(decoder: VideoDecoder, cut: int) -> int:
    """Frames that come before those of the clip where the layers behind the cut get few frames after another."""
    return -int(decoder.output_start(cut, 0))


def output_scale(decoder: VideoDecoder, cut: int) -> Extent:
    """Frames and pixels for each position in the output of the first `cut` layers."""
    strides = [layer.stride for layer in decoder.layers[cut:]]
    frames, height, width = (math.prod(sizes) for sizes in zip((1, 1, 1), *strides, strict=True))
    return frames, height * decoder.patch_size, width * decoder.patch_size


def activations(decoder: VideoDecoder, size: Extent) -> list[tuple[Extent, int]]:
    """Extent and channels of one video after the first n layers, for n from 0; `size` is that of its latents."""
    after = [(size, decoder.conv_in.bias.shape[0])]
    for layer in decoder.layers:
        frames, height, width = (side * times for side, times in zip(after[-1][0], layer.stride, strict=True))
        after.append(((frames - (layer.stride[0] - 1), height, width), layer.channels))
    return after


def video_decode_bytes(decoder: VideoDecoder, size: Extent, tiles: Tiles | None, device: jax.Device) -> int:
    """Approximate bytes of `decode_tiled` for a video with latents of this size, without the weights. With few frames
    at once compilers take 0.74 to 0.93 of it for an H100, 0.58 to 0.90 for v6e, 0.7 to 1.2 for a CPU."""
    after, itemsize = activations(decoder, size), convolved_itemsize(decoder.conv_in.kernel, device)
    sizes, levels = [math.prod(extent) * channels for extent, channels in after], 3 * math.prod(after[-1][0])
    levels *= decoder.patch_size**2
    if tiles is None:
        return WHOLE_BUFFERS[device.platform] * max(sizes) * itemsize + levels
    cut, ((frames, height, width), _) = tiles.cut, after[tiles.cut]
    seen = _seen(tile_images(decoder, tiles, height, width), height, width)
    at_once = seen * (tiles.frames_at_once or frames) / frames
    live = max(HEAD_BUFFERS * max(sizes[: cut + 1]), LIVE_BUFFERS * at_once * max(sizes[cut:])) + sizes[cut]
    kept = PAST_COPIES[device.platform] * seen * _past_values(decoder, after, cut) if tiles.frames_at_once else 0
    return round((live + kept) * itemsize) + levels


def _seen(tiling: tuple[AxisTiling, AxisTiling], height: int, width: int) -> float:
    """The part of an image that a tile reads."""
    return math.prod(axis.read_size for axis in tiling) / (height * width)


def _past_values(decoder: VideoDecoder, after: list[tuple[Extent, int]], cut: int) -> int:
    """Values that the convolutions behind the cut keep of the frames that they have seen, by `activations`."""
    counts = [*(layer.convolutions for layer in decoder.layers[cut:]), 1]
    frames = [math.prod(extent[1:]) * channels for extent, channels in after[cut:]]
    return PAST_FRAMES * sum(count * frame for count, frame in zip(counts, frames, strict=True))


def tiled_work(decoder: VideoDecoder, size: Extent, tiles: Tiles | None) -> float:
    """The work of the layers behind the cut, relative to that of no tiles, of a video with latents of this size."""
    if tiles is None:
        return 1.0
    (frames, height, width), _ = activations(decoder, size)[tiles.cut]
    seen = math.prod(tiles.counts) * _seen(tile_images(decoder, tiles, height, width), height, width)
    return seen * (tiles.frames_at_once * tiles.steps(decoder, frames) / frames if tiles.frames_at_once else 1)


def copying_factor(decoder: VideoDecoder, tiles: Tiles | None) -> float:
    """The time of the layers behind the cut that work on few frames at once, relative to that of as many frames among
    all: they copy the frames that they have seen. Fitted to XLA's estimates for v6e: 5.3 for a frame of the clip at
    once, 2.1 for 8, 1.5 for 32."""
    if tiles is None or not tiles.frames_at_once:
        return 1.0
    return 1.3 + 6 / (output_scale(decoder, tiles.cut)[0] * tiles.frames_at_once)
