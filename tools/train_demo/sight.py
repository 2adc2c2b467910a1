"""What is to be seen in a clip of the small world: colours, the shape and where it is, how sharp its edges are.

Nothing is learnt: the ground is the colour along the border, the shape the largest patch that differs from it, its kind
that whose drawing of the same area covers it best. Lengths are fractions of the frame.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import ndimage

from tools.train_demo.world import BACKGROUNDS, COLOURS, SHAPES, Path, outside

PIXELS = 128  # what larger frames are reduced to before a shape is looked for
BORDER = 0.025  # of a frame: no shape of the world comes so near its edge
BLUR = 0.8  # pixels, against noise
FAINTEST = 30  # how far from the ground a shape's colour must be, of 255
FARTHEST = 110  # how far from every colour that has a name
EXTENT = 0.0015, 0.5  # of the frame's area: what is smaller or larger is none of the world's shapes
ALIKE = 0.5  # what a patch and the drawing of a shape have in common at least, of what either covers


@dataclass(frozen=True)
class Sight:
    """What the frames show; None is what is not to be told, NaN in the track where no shape is found."""

    colour: str | None
    background: str | None
    shape: str | None
    track: Path
    edge: float  # how wide the edge is from ground to colour; NaN where there is no shape


def look(frames: np.ndarray) -> Sight:
    """Look at frames, uint8 [frames, pixels, pixels, 3]."""
    small = _reduced(frames)
    ground = np.median(_border(small), axis=1)  # [frames, 3]
    away = ndimage.gaussian_filter(small - ground[:, None, None], (0, BLUR, BLUR, 0), truncate=2)
    distance = np.sqrt(np.einsum("fyxc,fyxc->fyx", away, away))
    colour, behind = _interior_colour(small, distance), np.median(ground, axis=0)
    contrast = max(np.linalg.norm(colour - behind), FAINTEST)
    cover = _patches(np.clip(distance / contrast, 0, 1))
    centres, areas = _moments(cover)
    shape = _shape(cover, centres, areas)
    return Sight(
        _nearest(colour, COLOURS) if np.isfinite(areas).any() else None,
        _nearest(behind, BACKGROUNDS),
        shape,
        Path(centres, np.sqrt(areas / _unit_area(shape or SHAPES[0]))),
        _edge_width(frames, ground, colour, cover) if np.isfinite(areas).any() else np.nan,
    )


def _reduced(frames: np.ndarray) -> np.ndarray:
    """Frames as float32, means over squares of pixels where they are larger than need be."""
    step = max(1, min(frames.shape[1:3]) // PIXELS)
    rows, columns = (length // step * step for length in frames.shape[1:3])
    parts = [frames[:, y:rows:step, x:columns:step] for y in range(step) for x in range(step)]
    return sum(part.astype(np.float32) for part in parts) / step**2


def _border(frames: np.ndarray) -> np.ndarray:
    """The pixels along the frame's edge [frames, pixels, 3]."""
    wide = max(1, round(BORDER * min(frames.shape[1:3])))
    sides = (frames[:, :wide], frames[:, -wide:], frames[:, :, :wide], frames[:, :, -wide:])
    return np.concatenate([side.reshape(len(frames), -1, 3) for side in sides], axis=1)


def _nearest(rgb: np.ndarray, table: dict[str, tuple[int, int, int]]) -> str | None:
    distances = {name: float(np.linalg.norm(rgb - np.asarray(each))) for name, each in table.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] < FARTHEST else None


def _interior_colour(frames: np.ndarray, distance: np.ndarray) -> np.ndarray:
    """The median colour of what differs from the ground, away from its edge, where codecs mix colours."""
    solid, inside = distance > max(np.quantile(distance, 0.997) / 2, FAINTEST), np.empty(0)
    for depth in (3, 2, 1, 0):
        inside = ndimage.minimum_filter(solid, (1, 2 * depth + 1, 2 * depth + 1))
        if inside.sum() > 0.25 * solid.sum():
            break
    return np.median(frames[inside], axis=0) if inside.any() else np.zeros(3)


def _patches(cover: np.ndarray) -> np.ndarray:
    """The largest connected patch of each frame with its soft edge, cracks closed; all else is zero."""
    closed = ndimage.minimum_filter(ndimage.maximum_filter(cover > 0.5, (1, 5, 5)), (1, 5, 5))
    largest = ndimage.maximum_filter(np.stack([_largest(each) for each in closed]), (1, 7, 7))
    return np.where(largest, cover, 0)


def _largest(mask: np.ndarray) -> np.ndarray:
    """The largest connected part of a frame's mask."""
    marks, count = ndimage.label(mask)
    return marks == 1 + np.argmax(np.bincount(marks.ravel())[1:]) if count else mask


def _moments(cover: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centres [frames, 2] as (x, y) and areas [frames], NaN where too little is covered, or too much."""
    areas = cover.mean((1, 2))
    areas = np.where((areas > EXTENT[0]) & (areas < EXTENT[1]), areas, np.nan)
    y, x = ((np.arange(length) + 0.5) / length for length in cover.shape[1:])
    weighted = np.stack([np.mean(cover.mean(1) * x, axis=1), np.mean(cover.mean(2) * y, axis=1)], axis=-1)
    return weighted / areas[:, None], areas


def _shape(cover: np.ndarray, centres: np.ndarray, areas: np.ndarray) -> str | None:
    """The kind of shape that most of every fourth frame show; None if that is none of those that are known."""
    looked_at = [frame for frame in range(0, len(cover), 4) if np.isfinite(areas[frame])]
    if 8 * len(looked_at) < len(cover):
        return None
    votes = Counter(_best_drawing(cover[frame], centres[frame], areas[frame]) for frame in looked_at)
    return votes.most_common(1)[0][0]


def _best_drawing(cover: np.ndarray, centre: np.ndarray, area: float) -> str | None:
    """The shape whose drawing with this centre and area has the most in common with a patch."""
    rows, columns = cover.shape
    reach = 2.0 * np.sqrt(area)
    ys, xs = ((np.arange(length) + 0.5) / length for length in (rows, columns))
    across, along = np.abs(xs - centre[0]) < reach, np.abs(ys - centre[1]) < reach
    x, y = (xs[across] - centre[0])[None, :], (ys[along] - centre[1])[:, None]
    part = cover[np.ix_(along, across)]

    def overlap(shape: str) -> float:
        beyond = outside(shape, x, y, np.sqrt(area / _unit_area(shape)))
        drawn = np.clip(0.5 - beyond * min(rows, columns) / 3, 0, 1)
        return float(np.minimum(part, drawn).sum() / np.maximum(part, drawn).sum())

    overlaps = {shape: overlap(shape) for shape in SHAPES}
    best = max(SHAPES, key=overlaps.__getitem__)
    return best if overlaps[best] > ALIKE else None


@cache
def _unit_area(shape: str) -> float:
    """The area of a shape of radius 1."""
    grid = (np.arange(800) + 0.5) / 200 - 2
    return float(np.mean(outside(shape, grid[None, :], grid[:, None], np.ones(1)) < 0) * 16)


def _edge_width(frames: np.ndarray, ground: np.ndarray, colour: np.ndarray, cover: np.ndarray) -> float:
    """How wide the step from ground to colour is: the sum of its slopes over the sum of their squares, which is the
    width where the step is a ramp; the median of five frames."""
    widths = []
    for frame in np.linspace(0, len(frames) - 1, 5).astype(int):
        difference = colour - ground[frame]
        share = ((frames[frame] - ground[frame]) @ (difference / max(difference @ difference, 1))).astype(np.float32)
        slope = np.hypot(*np.gradient(ndimage.gaussian_filter(share, 0.5)))
        step = slope.shape[0] // cover.shape[1]
        near = np.kron(cover[frame] > 0, np.ones((step, step), bool))
        steep = slope[: near.shape[0], : near.shape[1]][near]
        steep = steep[steep > 0.03]
        if len(steep):
            widths.append(steep.sum() / np.square(steep).sum() / slope.shape[1])
    return float(np.median(widths)) if widths else np.nan
