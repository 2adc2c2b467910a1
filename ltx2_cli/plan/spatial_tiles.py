"""Tiles of a stage's latents in height and width: each step computes one after the other, and blends their velocities.
So a forward has the tokens of a tile, and the sampler those of the whole clip. The overlap and the weights are those of
DFR's last stage, as in diffusers.
"""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import jax
import numpy as np

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import typed

TILE_OVERLAP = 12  # latents that neighbours share


class Tile(NamedTuple):
    """A part of the clip's height and width, in latents."""

    clip: tuple[int, int]
    size: tuple[int, int]
    start: Any  # the first row and column; also traced

    def of(self, tokens: Any, axis: int) -> Any:
        """The tile's tokens among those of `axis`: planes of the clip's height and width."""
        shape = tokens.shape
        planes = tokens.reshape(*shape[:axis], -1, *self.clip, *shape[axis + 1 :])
        for place, (start, size) in enumerate(zip(self.start, self.size, strict=True), axis + 1):
            planes = jax.lax.dynamic_slice_in_dim(planes, start, size, place)
        return planes.reshape(*shape[:axis], -1, *shape[axis + 1 :])


class SpatialTiles(NamedTuple):
    """Tiles of one size, which are spread evenly. Times are those of the clip."""

    clip: tuple[int, int]  # latents along height and width
    size: tuple[int, int]  # of each tile
    starts: tuple[tuple[int, int], ...]  # the first row and column of each

    def geometry(self, clip: Geometry) -> Geometry:
        """The geometry of a tile: the denoiser compares positions with one another, so all tiles have the same."""
        height, width = self.size
        return replace(clip, height=height, width=width)

    def at(self, start: Any) -> Tile:
        """The tile that begins there."""
        return Tile(self.clip, self.size, start)

    @property
    def first(self) -> Tile:
        """The first tile."""
        return self.at(self.starts[0])

    @property
    def weights(self) -> np.ndarray:
        """The weight of each tile for its latents, float32 [tiles, height, width]: it falls linearly where neighbours
        overlap, and those of all tiles add up to 1."""
        ramps = [_ramps(*sizes, starts) for sizes, starts in zip(self._sides, self._starts, strict=True)]
        return np.stack([rows[:, None] * columns for rows, columns in product(*ramps)]).astype(np.float32)

    @property
    def _sides(self) -> list[tuple[int, int]]:
        return [*zip(self.clip, self.size, strict=True)]

    @property
    def _starts(self) -> list[list[int]]:
        return [sorted(set(starts)) for starts in zip(*self.starts, strict=True)]


def plan_spatial_tiles(spec: RunSpec, geometry: Geometry) -> SpatialTiles | None:
    """The tiles of a second stage; None: the whole clip at once. Raises `UsageError` for more tiles than latents, and
    beside a reference."""
    count = spec.second_stage.spatial_tiles or 1
    if count == 1:
        return None
    clip = geometry.height, geometry.width
    if count > (most := min(clip)):
        sentence = f"{count} tiles are more than the {most} latents of the shorter side"
        raise UsageError(sentence, f"nearest: {typed('second_stage.spatial_tiles', most)}")
    if geometry.references:
        hint = typed("second_stage.follow_first", value=False)
        raise UsageError("a clip that follows the first stage's video is not refined in tiles", hint)
    sizes = [-(-(side + min(TILE_OVERLAP, side - count) * (count - 1)) // count) for side in clip]
    starts = [
        np.rint(np.linspace(0, side - size, count)).astype(int).tolist() for side, size in zip(clip, sizes, strict=True)
    ]
    return SpatialTiles(clip, (sizes[0], sizes[1]), tuple(product(*starts)))


def _ramps(side: int, size: int, starts: list[int]) -> list[np.ndarray]:
    """The weight of each tile along one side, [size]."""
    overlaps = [before + size - start for before, start in pairwise(starts)]
    weights = [np.ones(size) for _ in starts]
    for number, overlap in enumerate(overlaps):
        rising = np.linspace(0, 1, overlap + 2)[1:-1]
        weights[number][size - overlap :] *= rising[::-1]
        weights[number + 1][:overlap] *= rising
    total = np.zeros(side)
    for start, weight in zip(starts, weights, strict=True):
        total[start : start + size] += weight
    return [weight / total[start : start + size] for start, weight in zip(starts, weights, strict=True)]
