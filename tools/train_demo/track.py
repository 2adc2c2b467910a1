"""What a shape does, told from its track: the kind of motion, and when it meets the ground."""

import numpy as np
from scipy import ndimage, signal

from tools.train_demo.world import Path

MOVES = 0.1  # of the frame: what stays within this is still
GROWS = 1.6  # from the first frame to the last
REACH = 5  # frames on either side of a contact that say when it is


def motion_of(track: Path) -> str | None:
    """The kind of motion; None for one that the world does not know, or where the shape is mostly not to be seen."""
    seen = np.isfinite(track.radii)
    if len(seen) < 5 or seen.mean() < 0.6:
        return None
    centres = ndimage.median_filter(track.centres[seen], (3, 1), mode="nearest")
    span = np.ptp(centres, axis=0)
    if span.max() < MOVES:
        return _growth(track.radii[seen])
    if span.min() > 0.5 * span.max():
        return "circle" if _laps(centres) > 0.75 else None
    axis = int(np.argmax(span))
    steps = np.diff(centres[:, axis])
    if abs(steps.sum()) > 0.75 * span[axis] and np.abs(steps).sum() < 1.5 * span[axis]:
        return (("left", "right"), ("up", "down"))[axis][int(steps.sum() > 0)]
    return "bounce" if axis == 1 and len(_lowest(track)) > 1 else None


def _growth(radii: np.ndarray) -> str | None:
    """Of what stays where it is."""
    slope, begin = np.polyfit(np.linspace(0, 1, len(radii)), radii, 1)
    ratio = (begin + slope) / max(begin, 1e-3)
    return "grow" if ratio > GROWS else "still" if ratio > 1 / GROWS else None


def _laps(centres: np.ndarray) -> float:
    """How often the track goes around its middle, less what it goes the other way."""
    x, y = (centres - (centres.max(0) + centres.min(0)) / 2).T
    turns = np.diff(np.unwrap(np.arctan2(y, x))) / (2 * np.pi)
    return 2 * abs(turns.sum()) - np.abs(turns).sum() if np.abs(turns).max() < 0.25 else 0


def contacts_of(track: Path, fps: float) -> tuple[float, ...]:
    """When a bouncing shape meets the ground, in seconds, between frames too."""
    if motion_of(track) != "bounce":
        return ()
    return tuple(_contact(_heights(track), frame) / fps for frame in _lowest(track))


def _heights(track: Path) -> np.ndarray:
    """How far down the shape is in each frame, also in those between where it is not seen."""
    seen = np.flatnonzero(np.isfinite(track.radii))
    return np.interp(np.arange(len(track.radii)), seen, track.centres[seen, 1])


def _lowest(track: Path) -> np.ndarray:
    """The frames where the shape is lowest for a while, the first and the last too, and near the ground."""
    down = _heights(track)
    span = np.ptp(down)
    around = np.pad(down, 1, constant_values=down.min() - 1e-3)
    peaks, _ = signal.find_peaks(around, prominence=0.3 * span, height=down.max() - 0.3 * span)
    return peaks - 1


def _contact(down: np.ndarray, frame: int) -> float:
    """Where between the frames around `frame` it is that the shape falls before as it rises afterwards: the best fit of
    a parabola in the time's distance from there."""
    if frame in (0, len(down) - 1):
        return float(frame)
    times = np.arange(max(0, frame - REACH), min(len(down), frame + REACH + 1))
    centres = frame + np.linspace(-1, 1, 81)
    apart = np.abs(times - centres[:, None])  # [candidates, frames]
    powers = np.stack([np.ones_like(apart), apart, apart**2], axis=-1)
    fitted = powers @ (np.linalg.pinv(powers) @ down[times][:, None])
    misses = np.square(fitted[..., 0] - down[times]).sum(-1)
    return float(centres[np.argmin(misses)])
