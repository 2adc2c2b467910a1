"""How decoding is divided, which changes no clip: videos and parts of images over devices, and tiles to save memory."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.devices import device_memory
from ltx2_cli.models.networks import Networks
from ltx2_cli.models.tiles import Extent, Tiles, activations, decode_bytes, tile_video
from ltx2_cli.models.video_vae import VideoDecoder
from ltx2_cli.nn.layers import IMAGE_AXES
from ltx2_cli.sharding import ShardingPlan, divisors
from ltx2_cli.weights.declare import Weight, weights

VIDEOS = "videos"
LEAST_PART = 2  # latents along a side that is split: a mirrored border repeats the second
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)  # of tiles along an axis
SPLITS = 4  # of those with the least work that are tried with tiles


@dataclass(frozen=True)
class DecodePlan:
    """Where the decoders run. Hashable: a static argument of compiled functions."""

    mesh: Mesh  # the devices of a sharding plan, in its order
    tiles: Tiles | None
    bytes: int  # about what the video decoder takes on each device, without weights
    videos: int  # that are decoded at a time
    whole: NamedSharding  # of weights: all of them on every device
    tokens: NamedSharding  # of the latents of sound [videos, tokens, channels], and of waveforms
    latents: NamedSharding  # of [videos, frames, height, width, channels]; frames and pixels lie alike


class _Split(NamedTuple):
    """Over how many devices videos, heights and widths are split."""

    videos: int
    height: int
    width: int

    def part(self, size: Extent) -> Extent:
        return size[0], size[1] // self.height, size[2] // self.width

    def cost(self, videos: int, size: Extent) -> tuple[int, int]:
        """Latents that a device works on, with an edge that it exchanges for each split side; then how many sides are
        split."""
        frames, height, width = self.part(size)
        seen = (height + (self.height > 1)) * (width + (self.width > 1))
        return -(-videos // self.videos) * frames * seen, (self.height > 1) + (self.width > 1)


class _Choice(NamedTuple):
    work: float
    bytes: int
    split: _Split
    tiles: Tiles | None


def plan_tiling(decoder: VideoDecoder, videos: int, size: Extent, devices: np.ndarray, room: float) -> DecodePlan:
    """The least work for each of `devices` that takes at most `room` bytes, with the fewest layers in tiles; where
    nothing does, what takes the least. `size` is that of a video's latents."""
    splits = sorted(_splits(devices.size, size), key=lambda split: split.cost(videos, size))
    # what a CPU convolves is float32 in between
    itemsize = 4 if devices[0].platform == "cpu" else decoder.conv_in.kernel.dtype.itemsize
    upsampling = [index for index, layer in enumerate(decoder.layers) if math.prod(layer.stride) > 1]
    choices: list[_Choice] = []
    for cut in (None, *reversed(upsampling)):
        for split in splits[: None if cut is None else SPLITS]:
            part, (work, _) = split.part(size), split.cost(videos, size)
            for tiles, factor in [(None, 1.0)] if cut is None else _tilings(decoder, cut, part, split):
                choices.append(_Choice(work * factor, decode_bytes(decoder, part, tiles, itemsize), split, tiles))
        if fitting := [choice for choice in choices if choice.bytes <= room]:
            best = min(fitting, key=lambda choice: choice.work)
            break
    else:
        best = min(choices, key=lambda choice: choice.bytes)
    mesh = Mesh(devices.reshape(*best.split, -1), (VIDEOS, *IMAGE_AXES, "spare"))
    axes = ((), (VIDEOS,), (VIDEOS, None, *IMAGE_AXES))
    shardings = (NamedSharding(mesh, PartitionSpec(*names)) for names in axes)
    return DecodePlan(mesh, best.tiles, best.bytes, best.split.videos, *shardings)


def _splits(devices: int, size: Extent) -> Iterator[_Split]:
    """All ways to split videos and image sides evenly over a number of devices that divides `devices`."""
    for videos in divisors(devices):
        for height in _even_parts(devices // videos, size[1]):
            for width in _even_parts(devices // (videos * height), size[2]):
                yield _Split(videos, height, width)


def _even_parts(devices: int, side: int) -> list[int]:
    """Numbers of equal parts of a side of so many latents that divide `devices`."""
    return [parts for parts in divisors(math.gcd(devices, side)) if parts == 1 or side // parts >= LEAST_PART]


def _tilings(decoder: VideoDecoder, cut: int, part: Extent, split: _Split) -> Iterator[tuple[Tiles, float]]:
    """Tiles of a device's part, of sides that are not split, and how many times as much work they are."""
    extent, _ = activations(decoder, part)[cut]
    most = (extent[0], 1 if split.height > 1 else extent[1], 1 if split.width > 1 else extent[2])
    for frames, height, width in product(*([count for count in COUNTS if count <= limit] for limit in most)):
        tiles, count = Tiles(cut, (frames, height, width)), frames * height * width
        read = math.prod(axis.read_size for axis in tile_video(decoder, tiles, extent))
        yield tiles, count * read / math.prod(extent)


def free_bytes(all_resident: bool, networks: Networks, sharding: ShardingPlan, names: Collection[str]) -> float:
    """Bytes of each device that the weights of these networks leave, or of all networks where they stay resident."""
    held = [
        bytes_on_device(weight, sharding)
        for name, network in networks.present().items()
        for weight in weights(network)
        if all_resident or name in names
    ]
    return device_memory(list(sharding.mesh.devices.flat)).planned - sum(held)


def bytes_on_device(weight: Weight, plan: ShardingPlan) -> int:
    """Bytes of a weight on each device."""
    value = weight.get_value()
    return math.prod(plan.weight(weight.axes).shard_shape(value.shape)) * value.dtype.itemsize
