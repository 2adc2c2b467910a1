"""Division of decoding: videos and parts of images over devices, and tiles that save memory. It changes no clip."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.errors import UsageError
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder
from ltx2_cli.models.networks import Networks
from ltx2_cli.models.video_vae import Extent, VideoDecoder
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.parallel.devices import device_memory
from ltx2_cli.parallel.mesh import ShardingPlan, divisors
from ltx2_cli.plan.audio_tiles import AudioPlanner, AudioTiles, no_audio
from ltx2_cli.plan.pixel_tiles import PixelTiles, tile_pixels
from ltx2_cli.plan.video_tiles import Tiles, activations, copying_factor, tiled_work, video_decode_bytes
from ltx2_cli.request.spec import Decoder
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.declare import kinds
from ltx2_cli.weights.quantized_matrix import bytes_on_device

WHITE, DEEP_WHITE = 2**8 - 1, 2**16 - 1  # the highest level of a colour in 8 and in 16 bits
COLOURS = (1, 3)  # numbers of levels for a pixel along height and width
# Live activations of a tile in the diffusion decoder's program, in sizes of its tokens in the fifth stage, by platform;
# measured as `AUDIO_BUFFERS` are.
TOKEN_BUFFERS = {"cpu": 15, "gpu": 10, "tpu": 16}


def level_type(white: int) -> type[np.unsignedinteger[Any]]:
    """The smallest type of levels from 0 to `white`."""
    return np.uint8 if white <= WHITE else np.uint16


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


_Choice = tuple[int, _Split, Tiles | None]  # with its bytes


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
    choices = list[_Choice]()

    def time(choice: _Choice) -> float:
        """Relative to that of other choices."""
        _, split, tiles = choice
        work, _ = split.cost(videos, size)
        return work * tiled_work(decoder, split.part(size), tiles) * copying_factor(decoder, tiles)

    for cut in (None, *reversed(upsampling)):
        for split in splits[: None if cut is None else SPLITS]:
            choices += _choices(decoder, cut, split, size, devices[0])
        if fitting := [choice for choice in choices if choice[0] <= decode_budget]:
            needed, split, tiles = min(fitting, key=time)
            break
    else:
        needed, split, tiles = min(choices, key=itemgetter(0))
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


@lru_cache(maxsize=256)  # a search for what fits plans one clip many times, with other settings
def _choices(
    decoder: VideoDecoder, cut: int | None, split: _Split, size: Extent, device: jax.Device
) -> tuple[_Choice, ...]:
    """The tiles of a split of a clip's latents behind this cut."""
    part = split.part(size)
    tilings = _tilings(decoder, cut, part, split)
    return tuple((video_decode_bytes(decoder, part, tiles, device), split, tiles) for tiles in tilings)


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


def bytes_left_after(all_resident: bool, networks: Networks, sharding: ShardingPlan, names: Collection[str]) -> float:
    """Bytes left on each device beside the weights of these networks, or of all networks if they stay resident."""
    held = [
        len(alike) * bytes_on_device(alike[0].get_value(), sharding.place(alike[0]))
        for name, network in networks.present().items()
        if all_resident or name in names
        for alike in kinds(network)
    ]
    return device_memory(list(sharding.mesh.devices.flat)).planned - sum(held)
