"""Tiles of the diffusion decoder, as published: boxes of the grid that its fourth stage reads, which overlap and are
blended. They depend on the clip alone, so that a clip is the same on all devices, which share them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from ltx2_cli.models.diffusion_decoder import DiffusionDecoderArch
from ltx2_cli.models.video_vae import Extent
from ltx2_cli.plan.axis_tiling import AxisTiling, tile_axis

LARGEST_TILE: Extent = (80, 768, 768)  # frames, height and width
OVERLAP: Extent = (24, 64, 64)


@dataclass(frozen=True)
class PixelTiles:
    """The tiles of a clip: along frames, height and width of the fourth stage's grid. Hashable."""

    arch: DiffusionDecoderArch
    axes: tuple[AxisTiling, AxisTiling, AxisTiling]

    @property
    def counts(self) -> Extent:
        """Tiles along each axis."""
        frames, height, width = (len(axis.read_starts) for axis in self.axes)
        return frames, height, width

    @property
    def starts(self) -> np.ndarray:
        """The first cell of each tile, int32 [tiles, 3], those of the first frames first."""
        return np.array(list(product(*(axis.read_starts for axis in self.axes))), np.int32)

    @property
    def size(self) -> Extent:
        """Cells of a tile along each axis."""
        frames, height, width = (axis.read_size for axis in self.axes)
        return frames, height, width

    @property
    def tokens(self) -> Extent:
        """The tokens of a tile in the fifth stage."""
        return self.arch.tokens(self.size)

    def pixel_axes(self) -> Iterator[tuple[int, list[int]]]:
        """Along each axis: the frames or pixels of a tile, and the first one of each."""
        (by, *_), scale = self.arch.decoder_upsample_strides[-1], pixels_of_cell(self.arch)
        frames, *sides = self.axes
        yield by * (frames.read_size - 1) + 1, [by * start for start in frames.read_starts]
        for axis, times in zip(sides, scale[1:], strict=True):
            yield times * axis.read_size, [times * start for start in axis.read_starts]


def pixels_of_cell(arch: DiffusionDecoderArch) -> Extent:
    """Frames and pixels of a cell of the fourth stage's grid."""
    frames, height, width = arch.decoder_upsample_strides[-1]
    return frames, height * arch.patch_size, width * arch.patch_size


def tile_pixels(arch: DiffusionDecoderArch, size: Extent) -> PixelTiles:
    """The fewest tiles of a clip with latents of this extent, alike in size."""
    axes = []
    for length, most, shared, scale in zip(arch.cells(size), LARGEST_TILE, OVERLAP, pixels_of_cell(arch), strict=True):
        overlap, most = shared // scale, most // scale
        count = 1 if length <= most else -(-(length - overlap) // (most - overlap))
        axes.append(tile_axis(length, count, 0, overlap if count > 1 else 0))
    frames, height, width = axes
    return PixelTiles(arch, (frames, height, width))
