"""Tiles of a stage's latents in height, width and time: each step computes one after the other, and blends their
velocities. So a forward has the tokens of a tile, and the sampler those of the whole clip. Overlaps and weights are
those of DFR's last stage, as in diffusers.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.keyframe_windows import segment_counts
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import typed

TILE_OVERLAP = 12  # latents that neighbours share along height and width


class TemporalTile(NamedTuple):
    """A part of the clip's time. Planes are the latents of a frame or a keyframe over height and width."""

    planes: tuple[int, ...]  # their numbers in the clip: latents that follow each other, and the keyframes among them
    weights: tuple[float, ...]  # of each plane: those of all tiles add up to 1


class Tile(NamedTuple):
    """A part of the clip, in latents."""

    clip: tuple[int, int]  # its height and width
    size: tuple[int, int]
    start: Any  # the first row and column; also traced
    planes: Any  # their numbers; also traced

    def of(self, tokens: Any, axis: int) -> Any:
        """The tile's tokens among those of `axis`: planes of the clip's height and width."""
        shape = tokens.shape
        planes = tokens.reshape(*shape[:axis], -1, *self.clip, *shape[axis + 1 :])
        for place, (start, size) in enumerate(zip(self.start, self.size, strict=True), axis + 1):
            planes = jax.lax.dynamic_slice_in_dim(planes, start, size, place)
        return self.in_time(planes, axis).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    def of_planes(self, tokens: Any, axis: int) -> Any:
        """The tile's tokens among those of `axis`: planes of its height and width."""
        shape = tokens.shape
        planes = tokens.reshape(*shape[:axis], -1, math.prod(self.size), *shape[axis + 1 :])
        return self.in_time(planes, axis).reshape(*shape[:axis], -1, *shape[axis + 1 :])

    def in_time(self, values: Any, axis: int) -> Any:
        """The values of the tile's planes among those of `axis`."""
        return jnp.take(values, jnp.asarray(self.planes), axis, mode="clip")


class StageTiles(NamedTuple):
    """Tiles of one height and width, which are spread evenly. Times are those of the clip."""

    clip: tuple[int, int]  # latents along height and width
    size: tuple[int, int]  # of each tile
    starts: tuple[tuple[int, int], ...]  # the first row and column of each
    times: tuple[TemporalTile, ...]

    @property
    def number(self) -> int:
        """The number of tiles."""
        return len(self.starts) * len(self.times)

    @property
    def text(self) -> str:
        """The number of tiles, in words."""
        return f"{self.number} tiles" + f" ({len(self.times)} along time)" * (len(self.times) > 1)

    @property
    def turns(self) -> float:
        """The number of tiles, a shorter one as the part that it is of the longest."""
        lengths = [len(time.planes) for time in self.times]
        return len(self.starts) * sum(lengths) / max(lengths)

    def geometry(self, clip: Geometry) -> Geometry:
        """The latents of the tile that has the most."""
        longest = max((time.planes for time in self.times), key=len)
        keyframes = tuple(clip.keyframes[plane - clip.frames] for plane in longest if plane >= clip.frames)
        return replace(self.in_space(clip), frames=len(longest) - len(keyframes), keyframes=keyframes)

    def in_space(self, clip: Geometry) -> Geometry:
        """The clip's latents in a tile's height and width: the denoiser compares positions with one another, so all
        have the same."""
        height, width = self.size
        return replace(clip, height=height, width=width)

    def at(self, start: Any, planes: Any) -> Tile:
        """The tile that begins there, with these planes."""
        return Tile(self.clip, self.size, start, planes)

    def alike(self) -> list[list[tuple[tuple[int, int], TemporalTile]]]:
        """Begin and time of all tiles, those with as many tokens together."""

        def planes(time: TemporalTile) -> int:
            return len(time.planes)

        return [[*product(self.starts, times)] for _, times in groupby(sorted(self.times, key=planes), planes)]

    def tiles(self) -> list[Tile]:
        """All tiles, those with the most tokens last."""
        return [self.at(start, time.planes) for group in self.alike() for start, time in group]

    @property
    def weights(self) -> dict[tuple[int, int], np.ndarray]:
        """The weights of tiles by their begin, float32 [height, width]: they fall linearly where neighbours overlap,
        and those of all add up to 1."""
        ramps = [_ramps(*sizes, starts) for sizes, starts in zip(self._sides, self._starts, strict=True)]
        weights = [(rows[:, None] * columns).astype(np.float32) for rows, columns in product(*ramps)]
        return dict(zip(self.starts, weights, strict=True))

    @property
    def _sides(self) -> list[tuple[int, int]]:
        return [*zip(self.clip, self.size, strict=True)]

    @property
    def _starts(self) -> list[list[int]]:
        return [sorted(set(starts)) for starts in zip(*self.starts, strict=True)]


def plan_stage_tiles(spec: RunSpec, geometry: Geometry, ends: Sequence[tuple[float, float]]) -> StageTiles | None:
    """The tiles of a second stage whose keyframes span the frames `ends`; None: the whole clip at once. Raises
    `UsageError` for more tiles than latents or segments, without segments, and beside a reference."""
    second = spec.second_stage
    if not second.in_tiles:
        return None
    count, clip = second.spatial_tiles or 1, (geometry.height, geometry.width)
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
    parts = second.temporal_tiles or 1
    planes = geometry.frames + len(geometry.keyframes)
    whole = TemporalTile(tuple(range(planes)), (1.0,) * planes)
    times = _temporal_tiles(geometry, ends, parts) if parts > 1 else (whole,)
    return StageTiles(clip, (sizes[0], sizes[1]), tuple(product(*starts)), times)


def _temporal_tiles(geometry: Geometry, ends: Sequence[tuple[float, float]], count: int) -> tuple[TemporalTile, ...]:
    """Tiles of whole segments, which end at keyframes. Each but the first begins a segment early, of which it sees the
    latents and changes none. A keyframe that several tiles see is their mean."""
    scale, segments = geometry.scales.time, len(ends)
    length, rest = divmod(geometry.frames - 1, max(segments, 1))
    places = [scale * length * number for number in range(1, segments + 1)]
    if not segments or rest or places != [begin for begin, _ in ends]:
        found = f"the {segments} of this one do not end equal ones" if segments else "this one has none"
        sentence = f"tiles in time are whole segments of a clip, which keyframes end, and {found}"
        hint = f"{typed('second_stage.temporal_tiles', 1)}, or latents that {typed('recipe', 'dfr')} saves"
        raise UsageError(sentence, hint)
    if count > segments:
        sentence = f"{count} tiles in time are more than the {segments} segments between keyframes"
        raise UsageError(sentence, f"nearest: {typed('second_stage.temporal_tiles', segments)}")
    bounds, tiles = [0, *accumulate(segment_counts(segments, count))], []
    for before, end in pairwise(bounds):
        latents = range(max(before - 1, 0) * length, end * length + 1)
        first, last = max((latents.start - 1) * scale + 1, 0), (latents.stop - 1) * scale + 1
        seen = [number for number, (begin, stop) in enumerate(geometry.keyframes) if begin < last and stop > first]
        tiles.append((latents, before * length if before else -1, seen))
    tiles_of = [sum(number in seen for _, _, seen in tiles) for number in range(len(geometry.keyframes))]
    return tuple(
        TemporalTile(
            (*latents, *(geometry.frames + number for number in seen)),
            (*(float(latent > known) for latent in latents), *(1 / tiles_of[number] for number in seen)),
        )
        for latents, known, seen in tiles
    )


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
