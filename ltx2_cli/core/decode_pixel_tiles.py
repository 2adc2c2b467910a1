"""Latents to frames by the diffusion decoder: what is common to a clip, then tile after tile on each device. The host
blends tiles, which need not be in its memory together."""

from collections import deque
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.core.advice import check_finite
from ltx2_cli.core.components import network_program
from ltx2_cli.core.programs import Program
from ltx2_cli.diffusion.latents import pixel_noise_key
from ltx2_cli.models.diffusion_decoder import DiffusionDecoder
from ltx2_cli.parallel.arrays import to_devices, to_first_host, to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.decoding import TILE_AXIS, VIDEO_AXIS, WHITE, level_type
from ltx2_cli.plan.pixel_tiles import PixelTiles
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.weights.published import DIFFUSION_DECODER

TURNS_AHEAD = 2  # the devices compute a tile while the host blends that before it
REPLICATED, OF_VIDEOS, OF_TILES = PartitionSpec(), PartitionSpec(VIDEO_AXIS), PartitionSpec(VIDEO_AXIS, TILE_AXIS)


def decode_by_tiles(
    plan: Plan, network: Any, latents: jax.Array, seeds: np.ndarray, otherwise: list[np.ndarray]
) -> list[np.ndarray]:
    """The frames [frames, height, width, 3] of each of these videos, of latents [videos, frames, height, width,
    channels], on the first host; `otherwise` on the others."""
    begin, tile = tile_programs(plan)
    tiles, at_once = _tiles(plan), plan.decoding.mesh.shape[TILE_AXIS]
    features, seeds = begin(network, latents), to_devices(seeds, _of_videos(plan))
    blends = [TileBlend(tiles, plan.decoding.white) for _ in range(len(latents))]
    ahead: deque[tuple[int, tuple[jax.Array, jax.Array]]] = deque()
    for turn in range(0, len(tiles.starts), at_once):
        ahead.append((turn, tile(network, features, seeds, np.int32(turn))))
        if len(ahead) == TURNS_AHEAD:
            _blend(plan, *ahead.popleft(), blends)
    for turn, outputs in ahead:
        _blend(plan, turn, outputs, blends)
    return [blend.frames() for blend in blends] if jax.process_index() == 0 else otherwise


def _blend(plan: Plan, turn: int, outputs: tuple[jax.Array, jax.Array], blends: list["TileBlend"]) -> None:
    """Add the tiles from number `turn` on to the videos, on the first host."""
    pieces, finite = outputs
    check_finite(to_host(finite), "the decoded video is", plan)
    if (on_host := to_first_host(pieces)) is None:
        return
    for blend, row in zip(blends, on_host, strict=True):
        for number, piece in enumerate(row[: len(_tiles(plan).starts) - turn], turn):
            blend.add(number, piece)


def tile_programs(plan: Plan) -> tuple[Program, Program]:
    """The programs of `decode_by_tiles`: the decoder's first stages on whole videos, and its last ones on a tile of
    each device."""
    (_, channels, *size), decoding, tiles = plan.latent_shapes.video, plan.decoding, _tiles(plan)
    latents = jax.ShapeDtypeStruct((decoding.videos, *size, channels), np.float32, sharding=decoding.latents)
    options = {"tiles": tiles, "mesh": decoding.mesh}
    first = jitted(_features, None, plan.sharding, sizes=latents.shape, mesh=decoding.mesh)
    begin = network_program(plan, "features", [DIFFUSION_DECODER], first, latents)
    seeds = jax.ShapeDtypeStruct((decoding.videos,), np.uint32, sharding=_of_videos(plan))
    turn = jax.ShapeDtypeStruct((), np.int32)
    function = jitted(_tile, None, plan.sharding, sizes=latents.shape, **options)
    return begin, network_program(plan, "frames", [DIFFUSION_DECODER], function, begin.outputs(), seeds, turn)


def _of_videos(plan: Plan) -> NamedSharding:
    return NamedSharding(plan.decoding.mesh, OF_VIDEOS)


def _tiles(plan: Plan) -> PixelTiles:
    assert isinstance(plan.decoding.tiles, PixelTiles)
    return plan.decoding.tiles


def _features(network: DiffusionDecoder, latents: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    """What the tiles read, the same on all devices of a video."""
    specs = REPLICATED, OF_VIDEOS
    return jax.shard_map(DiffusionDecoder.features, mesh=mesh, in_specs=specs, out_specs=OF_VIDEOS)(network, latents)


def _tile(
    network: DiffusionDecoder,
    features: jax.Array,
    seeds: jax.Array,
    turn: jax.Array,
    tiles: PixelTiles,
    mesh: jax.sharding.Mesh,
) -> tuple[jax.Array, jax.Array]:
    """Pixels [videos, tiles, frames, height, width · 3] of as many tiles from number `turn` on as devices share them,
    the last one again beyond it; and whether each is finite."""

    def part(
        network: DiffusionDecoder, features: jax.Array, seeds: jax.Array, turn: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        number = jnp.minimum(turn + jax.lax.axis_index(TILE_AXIS), len(tiles.starts) - 1)
        start, arch = jnp.asarray(tiles.starts)[number], tiles.arch
        frames, height, width = tiles.size
        size = (len(features), frames + arch.ghost_cells, height, width, features.shape[-1])
        seen = jax.lax.dynamic_slice(features, (0, *start, 0), size)
        pixels = network.pixels(seen, jax.vmap(partial(_noise, start=start, tiles=tiles, whole=features.shape))(seeds))
        return pixels.reshape(len(pixels), 1, *pixels.shape[1:3], -1), jnp.isfinite(pixels).all().reshape(1, 1)

    specs = REPLICATED, OF_VIDEOS, OF_VIDEOS, REPLICATED
    split = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=(OF_TILES, OF_TILES))
    return split(network, features, seeds, turn)


def _noise(seed: jax.Array, start: jax.Array, tiles: PixelTiles, whole: tuple[int, ...]) -> jax.Array:
    """The noise of a tile's patches. That of a patch is the same in every tile: each frame of the clip is drawn."""
    by, (frames, height, width) = tiles.arch.decoder_upsample_strides[-1], tiles.tokens
    key, features = pixel_noise_key(seed), tiles.arch.patch_features

    def frame(index: jax.Array) -> jax.Array:
        shape = whole[2] * by[1], whole[3] * by[2], features
        drawn = jax.random.normal(jax.random.fold_in(key, index), shape, jnp.float32)
        return jax.lax.dynamic_slice(drawn, (start[1] * by[1], start[2] * by[2], 0), (height, width, features))

    return jax.lax.map(frame, start[0] * by[0] + jnp.arange(frames))


class TileBlend:
    """The frames of a video from its tiles, added in their order. Where tiles overlap, the weight of the later one
    rises linearly from 0. Frames are float32 until no further tile has them."""

    def __init__(self, tiles: PixelTiles, white: int = WHITE):
        self.white = white
        self.starts = [*np.ndindex(tiles.counts)]
        self.axes = [*tiles.pixel_axes()]
        (frames, _), *sides = self.axes
        height, width = (size + starts[-1] for size, starts in sides)
        self.open = np.zeros((frames, height, width * 3), np.float32)
        self.first = 0  # frame of the clip that is the first of `open`
        self.done: list[np.ndarray] = []

    def add(self, number: int, piece: np.ndarray) -> None:
        """Add tile `number`, pixels [frames, height, width · 3] in [-1, 1]."""
        places = self.starts[number]
        frame, row, column = (starts[place] for (_, starts), place in zip(self.axes, places, strict=True))
        self._finish(frame)
        weighted = piece.astype(np.float32)
        for axis, ((size, starts), place) in enumerate(zip(self.axes, places, strict=True)):
            if len(starts) > 1:
                weights = np.repeat(_weights(size, starts, place), 3 if axis == 2 else 1)
                weighted *= weights.reshape(-1, *[1] * (2 - axis))
        self.open[:, row : row + piece.shape[1], column * 3 : column * 3 + piece.shape[2]] += weighted

    def frames(self) -> np.ndarray:
        """All frames [frames, height, width, 3], once all tiles were added."""
        self._finish(self.first + len(self.open))
        whole = np.concatenate(self.done)
        return whole.reshape(*whole.shape[:2], -1, 3)

    def _finish(self, frame: int) -> None:
        """Round the frames before `frame`, and go on behind them."""
        count = frame - self.first
        if count:
            levels = np.rint(np.clip((self.open[:count] + 1) / 2, 0, 1) * self.white)
            self.done.append(levels.astype(level_type(self.white)))
            self.open = np.concatenate([self.open[count:], np.zeros_like(self.open[:count])])
            self.first = frame


def _weights(size: int, starts: list[int], place: int) -> np.ndarray:
    """The weights of a tile along one axis: with those of its neighbours they add up to 1."""
    weights = np.ones(size, np.float32)
    if place > 0:
        shared = starts[place - 1] + size - starts[place]
        weights[:shared] *= np.arange(shared, dtype=np.float32) / shared
    if place + 1 < len(starts):
        shared = starts[place] + size - starts[place + 1]
        weights[-shared:] *= 1 - np.arange(shared, dtype=np.float32) / shared
    return weights
