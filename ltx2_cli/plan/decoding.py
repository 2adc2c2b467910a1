"""Division of decoding, which changes no clip: videos and parts of images over devices; and the decoder's last layers,
where activations are largest, over tiles to save memory. A tile reads its result plus the receptive field of its
layers, so its pixels equal those of the whole clip."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
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
from ltx2_cli.models.video_vae import Extent, VideoDecoder, VideoVAE
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
COLOURS = (1, 1, 3)  # numbers of levels for a pixel along frames, height and width
SHARED = (1, 0, 0)  # positions along each axis that neighbouring tiles both write
LIVE_BUFFERS = 10  # live activations, in sizes of the largest one: 8 to 10 on a TPU v6e, 7 on the CPU
# Live activations of a tile in the diffusion decoder's program, in sizes of its tokens in the fifth stage, by platform;
# measured as `AUDIO_BUFFERS` are.
TOKEN_BUFFERS = {"cpu": 15, "gpu": 10, "tpu": 16}


@dataclass(frozen=True)
class Tiles:
    """Tiles of all layers but the first `cut`: counts along frames, height and width."""

    cut: int
    counts: Extent


def tile_video(decoder: VideoDecoder, tiles: Tiles, size: Extent) -> tuple[AxisTiling, AxisTiling, AxisTiling]:
    """The tiles of the cut layers' output, whose extent is `size`. The decoder drops the leading frames of a tile's
    first position in time, so neighbouring tiles overlap by one position."""
    frames, side = receptive_field(decoder, tiles.cut)
    axes = zip(size, tiles.counts, (frames, side, side), SHARED, strict=True)
    along_frames, height, width = (tile_axis(*axis) for axis in axes)
    return along_frames, height, width


def receptive_field(decoder: VideoDecoder, cut: int) -> tuple[int, int]:
    """Receptive field of a pixel in the output of the first `cut` layers: frames before it, and positions on each
    side."""
    past = max(decoder.conv_out.time_padding)
    frames, side = past, 1
    for layer in reversed(decoder.layers[cut:]):
        frames = -(-frames // layer.stride[0]) + layer.convolutions * past
        side = -(-side // layer.stride[1]) + layer.convolutions
    return frames, side


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


def video_decode_bytes(decoder: VideoDecoder, size: Extent, tiles: Tiles | None, itemsize: int) -> int:
    """Approximate bytes of `decode_frames` for a video with latents of this size, without the weights; `itemsize`: of
    the convolutions' results."""
    after = activations(decoder, size)
    if tiles is None:
        return _decode_bytes(after, decoder.patch_size, itemsize)
    extent, _ = after[tiles.cut]
    seen = math.prod(axis.read_size for axis in tile_video(decoder, tiles, extent)) / math.prod(extent)
    return _decode_bytes(after, decoder.patch_size, itemsize, tiles.cut, seen)


def _decode_bytes(
    after: list[tuple[Extent, int]], patch_size: int, itemsize: int, cut: int = 0, seen: float | None = None
) -> int:
    """`video_decode_bytes` by activations; `seen`: the part of the cut layers' output that a tile reads."""
    sizes = [math.prod(extent) * channels for extent, channels in after]
    frames = 3 * math.prod(after[-1][0]) * patch_size**2
    if seen is None:
        return LIVE_BUFFERS * max(sizes) * itemsize + frames
    at_once = LIVE_BUFFERS * max(*sizes[: cut + 1], seen * max(sizes[cut:])) + sizes[cut]
    return round(at_once * itemsize) + frames


def decode_tiled(
    vae: VideoVAE, latents: jax.Array, tiles: Tiles | None, white: int = WHITE
) -> tuple[jax.Array, jax.Array]:
    """Decode normalised latents [videos, frames, height, width, channels] to levels from 0 to `white` [videos, frames,
    height, width · 3], and whether the pixels are finite. Colours are along the width: on an accelerator, an array
    whose last axis is 3 takes forty times its size."""
    decoder, latents = vae.decoder, vae.statistics.denormalise(latents)
    if tiles is None:
        return _levels(decoder(latents), white)
    x = decoder.head(latents, tiles.cut)
    _, frames, height, width, _ = x.shape
    cuts, scales = tile_video(decoder, tiles, (frames, height, width)), output_scale(decoder, tiles.cut)
    frames, height, width = (axis.write_size * times for axis, times in zip(cuts, scales, strict=True))
    kept = frames - (scales[0] - 1), height, width

    def tile(clip: jax.Array, starts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        start, skipped, place = starts
        seen = _part(x, start, [axis.read_size for axis in cuts])
        levels, finite = _levels(_part(decoder.tail(seen, tiles.cut), skipped, kept), white)
        return jax.lax.dynamic_update_slice(clip, levels, (0, *place)), finite

    read_starts = np.array(list(product(*(axis.read_starts for axis in cuts))))
    write_starts = np.array(list(product(*(axis.write_starts for axis in cuts))))
    skipped, places = (write_starts - read_starts) * scales, write_starts * np.multiply(scales, COLOURS)
    size = places[-1] + np.multiply(kept, COLOURS)
    clip = jnp.zeros_like(x, level_type(white), (len(x), *size.tolist()))
    clip, finite = jax.lax.scan(tile, clip, tuple(map(jnp.asarray, (read_starts, skipped, places))))
    return clip, finite.all()


def _part(x: jax.Array, start: jax.Array, size: Sequence[int]) -> jax.Array:
    return jax.lax.dynamic_slice(x, (0, *start, 0), (x.shape[0], *size, x.shape[-1]))


def level_type(white: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type of levels from 0 to `white`."""
    return np.uint8 if white <= WHITE else np.uint16


def _levels(pixels: jax.Array, white: int) -> tuple[jax.Array, jax.Array]:
    """Levels from 0 to `white` of pixels in [-1, 1], colours along the width; whether they are finite."""
    pixels = pixels.astype(jnp.float32)
    levels = jnp.round(jnp.clip((pixels + 1) / 2, 0, 1) * white).astype(level_type(white))
    return levels.reshape(*pixels.shape[:3], -1), jnp.isfinite(pixels).all()


VIDEO_AXIS = "videos"  # of the mesh
TILE_AXIS = "tiles"  # of the diffusion decoder; devices of another one do the same work along it
LEAST_PART = 2  # latents along a split side: a mirrored border repeats the second
TILE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # of tiles along an axis
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
    """The split and tiles with the least work per device whose frames fit into `decode_budget` bytes, with the fewest
    layers in tiles; if none fits, the split and tiles with the least memory. `size`: of a video's latents."""
    splits = sorted(_splits(devices.size, size), key=lambda split: split.cost(videos, size))
    itemsize = convolved_itemsize(decoder.conv_in.kernel, devices[0].platform)
    upsampling = [index for index, layer in enumerate(decoder.layers) if math.prod(layer.stride) > 1]
    choices: list[tuple[float, int, _Split, Tiles | None]] = []  # with the work and the bytes of each
    for cut in (None, *reversed(upsampling)):
        for split in splits[: None if cut is None else SPLITS]:
            work, _ = split.cost(videos, size)
            tilings = _tilings(decoder, cut, split.part(size), split, itemsize)
            choices += [(work * factor, needed, split, tiles) for tiles, factor, needed in tilings]
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


def _tilings(
    decoder: VideoDecoder, cut: int | None, part: Extent, split: _Split, itemsize: int
) -> Iterator[tuple[Tiles | None, float, int]]:
    """Tiles of a device's part along sides that are not split; their work relative to that of no tiles; their bytes."""
    after, patch_size = activations(decoder, part), decoder.patch_size
    if cut is None:
        yield None, 1.0, _decode_bytes(after, patch_size, itemsize)
        return
    (extent, _), (frames, side) = after[cut], receptive_field(decoder, cut)
    most = (extent[0], 1 if split.height > 1 else extent[1], 1 if split.width > 1 else extent[2])
    read_sizes = [  # along each axis, behind the number of tiles
        [(count, tile_axis(length, count, halo, shared).read_size) for count in TILE_COUNTS if count <= limit]
        for length, limit, halo, shared in zip(extent, most, (frames, side, side), SHARED, strict=True)
    ]
    for axes in product(*read_sizes):
        counts, sizes = zip(*axes, strict=True)
        seen = math.prod(sizes) / math.prod(extent)
        yield Tiles(cut, counts), math.prod(counts) * seen, _decode_bytes(after, patch_size, itemsize, cut, seen)


def bytes_left_after(all_resident: bool, networks: Networks, sharding: ShardingPlan, names: Collection[str]) -> float:
    """Bytes left on each device beside the weights of these networks, or of all networks if they stay resident."""
    held = [
        len(alike) * bytes_on_device(alike[0].get_value(), sharding.place(alike[0]))
        for name, network in networks.present().items()
        if all_resident or name in names
        for alike in kinds(network)
    ]
    return device_memory(list(sharding.mesh.devices.flat)).planned - sum(held)
