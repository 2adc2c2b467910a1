"""Division of decoding, which changes no clip: videos and parts of images over devices; and the decoder's last layers,
where activations are largest, over tiles of each frame and, in time, few frames after few frames, to save memory. A
tile reads its result plus the receptive field of its layers, and convolutions keep the frames that they have seen, so
pixels equal those of the whole clip."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.errors import UsageError
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder
from ltx2_cli.models.networks import Networks
from ltx2_cli.models.video_vae import PAST_FRAMES, Extent, Past, VideoDecoder, VideoVAE
from ltx2_cli.nn.layers import IMAGE_AXES, convolved_itemsize
from ltx2_cli.parallel.devices import device_memory
from ltx2_cli.parallel.mesh import ShardingPlan, divisors
from ltx2_cli.plan.audio_tiles import AudioPlanner, AudioTiles, no_audio
from ltx2_cli.plan.axis_tiling import AxisTiling, tile_axis
from ltx2_cli.plan.pixel_tiles import PixelTiles, tile_pixels
from ltx2_cli.request.spec import Decoder
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.declare import kinds
from ltx2_cli.weights.quantized_matrix import bytes_on_device

WHITE, DEEP_WHITE = 2**8 - 1, 2**16 - 1  # the highest level of a colour in 8 and in 16 bits
COLOURS = (1, 3)  # numbers of levels for a pixel along height and width
LIVE_BUFFERS = 10  # live activations, in sizes of the largest one: 8 to 10 on a TPU v6e, 7 on the CPU
HEAD_BUFFERS = 6  # as many of the layers before the cut: 3 on a TPU v6e, 3 to 5 on an H100, 6 on the CPU
PAST_COPIES = {"cpu": 3, "gpu": 1, "tpu": 2}  # of the frames that convolutions have seen, at most
# Live activations of a tile in the diffusion decoder's program, in sizes of its tokens in the fifth stage, by platform;
# measured as `AUDIO_BUFFERS` are.
TOKEN_BUFFERS = {"cpu": 15, "gpu": 10, "tpu": 16}


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


def video_decode_bytes(decoder: VideoDecoder, size: Extent, tiles: Tiles | None, platform: str) -> int:
    """Approximate bytes of `decode_tiled` for a video with latents of this size, without the weights. With few frames
    at once compilers take 0.74 to 0.93 of it for an H100, 0.58 to 0.90 for v6e, 0.7 to 1.2 for a CPU."""
    after, itemsize = activations(decoder, size), convolved_itemsize(decoder.conv_in.kernel, platform)
    sizes, levels = [math.prod(extent) * channels for extent, channels in after], 3 * math.prod(after[-1][0])
    levels *= decoder.patch_size**2
    if tiles is None:
        return LIVE_BUFFERS * max(sizes) * itemsize + levels
    cut, ((frames, height, width), _) = tiles.cut, after[tiles.cut]
    seen = _seen(tile_images(decoder, tiles, height, width), height, width)
    at_once = seen * (tiles.frames_at_once or frames) / frames
    live = max(HEAD_BUFFERS * max(sizes[: cut + 1]), LIVE_BUFFERS * at_once * max(sizes[cut:])) + sizes[cut]
    kept = PAST_COPIES[platform] * seen * _past_values(decoder, after, cut) if tiles.frames_at_once else 0
    return round((live + kept) * itemsize) + levels


def _seen(tiling: tuple[AxisTiling, AxisTiling], height: int, width: int) -> float:
    """The part of an image that a tile reads."""
    return math.prod(axis.read_size for axis in tiling) / (height * width)


def _past_values(decoder: VideoDecoder, after: list[tuple[Extent, int]], cut: int) -> int:
    """Values that the convolutions behind the cut keep of the frames that they have seen, by `activations`."""
    counts = [*(layer.convolutions for layer in decoder.layers[cut:]), 1]
    frames = [math.prod(extent[1:]) * channels for extent, channels in after[cut:]]
    return PAST_FRAMES * sum(count * frame for count, frame in zip(counts, frames, strict=True))


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


def level_type(white: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type of levels from 0 to `white`."""
    return np.uint8 if white <= WHITE else np.uint16


def _levels(pixels: jax.Array, white: int) -> jax.Array:
    """Levels from 0 to `white` of pixels in [-1, 1], colours along the width."""
    levels = jnp.round(jnp.clip((pixels.astype(jnp.float32) + 1) / 2, 0, 1) * white).astype(level_type(white))
    return levels.reshape(*pixels.shape[:3], -1)


VIDEO_AXIS = "videos"  # of the mesh
TILE_AXIS = "tiles"  # of the diffusion decoder; devices of another one do the same work along it
LEAST_PART = 2  # latents along a split side: a mirrored border repeats the second
TILE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # of tiles along an axis
FRAMES_AT_ONCE = (0, 8, 4, 2, 1)  # tried; 0: all
SPLITS = 4  # tried with tiles: those with the least work


@dataclass(frozen=True)
class DecodePlan:
    """Devices, tiles and memory of decoding. Hashable: a static argument of compiled functions."""

    mesh: Mesh  # the devices of a sharding plan, in its order
    tiles: Tiles | PixelTiles | None
    video_bytes: int  # approximate, on each device, to decode the video, without weights
    audio_bytes: int  # to decode the audio; 0: there is none
    audio_tiles: AudioTiles | None  # None: there is no audio
    at_once: bool  # whether video and audio are decoded concurrently
    videos: int  # decoded at a time
    whole: NamedSharding  # of weights: replicated
    tokens: NamedSharding  # of audio latents [videos, tokens, channels], and of waveforms
    latents: NamedSharding  # of [videos, frames, height, width, channels], and of frames
    white: int = WHITE  # the highest level of a colour

    @property
    def bytes(self) -> int:
        """Approximate bytes of decoding on each device, without weights."""
        return (sum if self.at_once else max)((self.video_bytes, self.audio_bytes))

    def deep(self, frames: int, height: int, width: int) -> "DecodePlan":
        """The plan for a clip of this size with levels of 16 bits. The diffusion decoder's are made on the host."""
        parts = math.prod(self.mesh.shape[axis] for axis in IMAGE_AXES)
        further = 0 if isinstance(self.tiles, PixelTiles) else 3 * frames * height * width // parts
        return replace(self, white=DEEP_WHITE, video_bytes=self.video_bytes + further)


class _Split(NamedTuple):
    """Numbers of devices along videos, height and width."""

    videos: int
    height: int
    width: int

    def part(self, size: Extent) -> Extent:
        return size[0], size[1] // self.height, size[2] // self.width

    def cost(self, videos: int, size: Extent) -> tuple[int, int]:
        """Latents of a device, including an exchanged edge for each split side; then the number of split sides."""
        frames, height, width = self.part(size)
        seen = (height + (self.height > 1)) * (width + (self.width > 1))
        return -(-videos // self.videos) * frames * seen, (self.height > 1) + (self.width > 1)


def plan_tiling(
    decoder: VideoDecoder,
    videos: int,
    size: Extent,
    devices: np.ndarray,
    decode_budget: float,
    audio: AudioPlanner = no_audio,
) -> DecodePlan:
    """The split and tiles with the least time per device whose frames fit into `decode_budget` bytes, with the fewest
    layers in tiles; if none fits, the split and tiles with the least memory. `size`: of a video's latents."""
    splits = sorted(_splits(devices.size, size), key=lambda split: split.cost(videos, size))
    upsampling = [index for index, layer in enumerate(decoder.layers) if math.prod(layer.stride) > 1]
    choices: list[tuple[float, int, _Split, Tiles | None]] = []  # with the time, relative, and the bytes of each
    for cut in (None, *reversed(upsampling)):
        for split in splits[: None if cut is None else SPLITS]:
            work, _ = split.cost(videos, size)
            for tiles in _tilings(decoder, cut, split.part(size), split):
                part = split.part(size)
                cost = work * tiled_work(decoder, part, tiles) * copying_factor(decoder, tiles)
                choices.append((cost, video_decode_bytes(decoder, part, tiles, devices[0].platform), split, tiles))
        if fitting := [choice for choice in choices if choice[1] <= decode_budget]:
            _, needed, split, tiles = min(fitting, key=itemgetter(0))
            break
    else:
        _, needed, split, tiles = min(choices, key=itemgetter(1))
    return _decode_plan(devices, split, tiles, needed, audio, decode_budget)


def window_budget(
    decoder: VideoDecoder, videos: int, size: Extent, window: int, devices: np.ndarray, decode_budget: float
) -> float:
    """Bytes of a device to decode this number of a long clip's latent frames, and for all its frames; at most
    `decode_budget`. `size`: of a whole video's latents."""
    plan = plan_tiling(decoder, videos, (window, *size[1:]), devices, decode_budget)
    (extent, _), parts = activations(decoder, size)[-1], math.prod(plan.mesh.shape[axis] for axis in IMAGE_AXES)
    return min(decode_budget, plan.video_bytes + 3 * math.prod(extent) * decoder.patch_size**2 // parts)


def plan_pixel_tiles(
    decoder: DiffusionDecoder,
    videos: int,
    size: Extent,
    devices: np.ndarray,
    decode_budget: float,
    audio: AudioPlanner,
) -> DecodePlan:
    """As `plan_tiling`, for the diffusion decoder, whose tiles are the same on all devices: the split of videos and
    tiles with the fewest tiles one after another. Raises `UsageError` for a clip smaller than a window of attention."""
    by, least = decoder.arch.spatial_compression_ratio, decoder.arch.smallest
    if any(by * side < smallest for side, smallest in zip(size[1:], least, strict=True)):
        sentence = f"{by * size[2]}x{by * size[1]} is too small for the diffusion decoder"
        hint = f"at least {least[1]}x{least[0]}, or {typed('decoder', Decoder.convolution.value)}"
        raise UsageError(sentence, hint)
    tiles = tile_pixels(decoder.arch, size)

    def turns(at_once: int) -> int:
        return -(-videos // at_once) * -(-math.prod(tiles.counts) // (devices.size // at_once))

    at_once = min(divisors(devices.size), key=turns)
    needed = _pixel_decode_bytes(tiles, size, decoder.conv_in.kernel.dtype.itemsize, devices[0].platform)
    plan = _decode_plan(devices, _Split(at_once, 1, 1), tiles, needed, audio, decode_budget)
    return replace(plan, at_once=False)


def _pixel_decode_bytes(tiles: PixelTiles, size: Extent, itemsize: int, platform: str) -> int:
    """Approximate bytes to decode a tile of a video with latents of this size, without the weights: what the fourth
    stage reads of the whole video, and the activations of the tile."""
    arch = tiles.arch
    frames, height, width = arch.cells(size)
    features = (frames + arch.ghost_cells) * height * width * arch.decoder_stage_channels[-2]
    return itemsize * (features + TOKEN_BUFFERS[platform] * math.prod(tiles.tokens) * arch.decoder_stage_channels[-1])


def _decode_plan(
    devices: np.ndarray,
    split: _Split,
    tiles: Tiles | PixelTiles | None,
    video_bytes: int,
    plan_audio: AudioPlanner,
    budget: float,
) -> DecodePlan:
    mesh, audio = _mesh(devices, split), plan_audio(devices.size // split.videos)
    axes = ((), (VIDEO_AXIS,), (VIDEO_AXIS, None, *IMAGE_AXES))
    whole, tokens, latents = (NamedSharding(mesh, PartitionSpec(*names)) for names in axes)
    at_once = video_bytes + audio.bytes <= budget
    if devices[0].platform == "cpu" and audio.tiles and audio.tiles.number_of_parts > 1:
        at_once = False  # programs that exchange at the same time may deadlock on each other's threads
    return DecodePlan(mesh, tiles, video_bytes, audio.bytes, audio.tiles, at_once, split.videos, whole, tokens, latents)


def image_mesh(devices: np.ndarray, size: Extent) -> Mesh:
    """The mesh that splits the images of one video with latents of this size over all devices."""
    splits = (split for split in _splits(devices.size, size) if split.videos == 1)
    return _mesh(devices, min(splits, key=lambda split: split.cost(1, size)))


def _mesh(devices: np.ndarray, split: _Split) -> Mesh:
    return Mesh(devices.reshape(*split, -1), (VIDEO_AXIS, *IMAGE_AXES, TILE_AXIS))


def _splits(devices: int, size: Extent) -> Iterator[_Split]:
    """All ways to split videos and image sides evenly over a number of devices that divides `devices`."""
    for videos in divisors(devices):
        for height in _even_parts(devices // videos, size[1]):
            for width in _even_parts(devices // (videos * height), size[2]):
                yield _Split(videos, height, width)


def _even_parts(devices: int, side: int) -> list[int]:
    """Numbers of equal parts of a side of `side` latents that divide `devices`."""
    return [parts for parts in divisors(math.gcd(devices, side)) if parts == 1 or side // parts >= LEAST_PART]


def _tilings(decoder: VideoDecoder, cut: int | None, part: Extent, split: _Split) -> Iterator[Tiles | None]:
    """Tiles of a device's part along sides that are not split."""
    if cut is None:
        yield None
        return
    (frames, height, width), _ = activations(decoder, part)[cut]
    most = 1 if split.height > 1 else height, 1 if split.width > 1 else width
    down, across = ([count for count in TILE_COUNTS if count <= limit] for limit in most)
    for height, width, some in product(down, across, FRAMES_AT_ONCE):
        if some < frames:
            yield Tiles(cut, (height, width), some)


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


def bytes_left_after(all_resident: bool, networks: Networks, sharding: ShardingPlan, names: Collection[str]) -> float:
    """Bytes left on each device beside the weights of these networks, or of all networks if they stay resident."""
    held = [
        len(alike) * bytes_on_device(alike[0].get_value(), sharding.place(alike[0]))
        for name, network in networks.present().items()
        if all_resident or name in names
        for alike in kinds(network)
    ]
    return device_memory(list(sharding.mesh.devices.flat)).planned - sum(held)
