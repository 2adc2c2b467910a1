"""The small world that the embedded model knows: one shape before a plain background, and the tone that it makes.

Lengths are fractions of the frame, x to the right and y downwards; times are seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

FPS = 24.0
NUM_FRAMES = 49
MEL_RATE = 100  # instants of a spectrogram in a second: tones and clicks begin at one
SAMPLING_RATE = 48_000
DURATION = 2.01  # of the sound, in whole instants: what 49 frames' latents decode to

SHAPES = ("circle", "square", "triangle")
COLOURS = {
    "red": (225, 30, 40),
    "orange": (250, 130, 10),
    "yellow": (250, 225, 30),
    "green": (30, 165, 60),
    "cyan": (30, 215, 225),
    "blue": (35, 75, 235),
    "purple": (135, 45, 195),
    "pink": (255, 130, 195),
}
BACKGROUNDS = {"black": (12, 12, 12), "white": (243, 243, 243), "grey": (120, 120, 120), "navy": (18, 22, 72)}
SIZES = {"small": 0.14, "large": 0.2}  # radius
MOTIONS = ("still", "right", "left", "up", "down", "circle", "bounce", "grow")
ACROSS = ("top", "middle", "bottom")  # places of what moves from side to side
UPRIGHT = ("left", "middle", "right")  # of what moves up and down
PLACES = {"top": (0.5, 0.27), "bottom": (0.5, 0.73), "left": (0.27, 0.5), "right": (0.73, 0.5), "middle": (0.5, 0.5)}
PITCHES = {"low": 200, "medium": 400, "high": 800}  # Hz: whole periods an instant, so that a vocoder can keep the phase
LOUDNESS = {"quiet": 0.1, "loud": 0.4}  # amplitude
LADDERS = {"up": (2, 3, 4), "down": (4, 3, 2)}  # halves of the pitch, one after the other
# The value of an attribute that no caption states. The others are left open by a caption that does not state them.
UNSAID = {"background": "black", "size": "large", "motion": "still", "pitch": "medium", "loudness": "loud"}
RUNG = 0.68  # how long each lasts
CLICK = 0.5  # amplitude
MARGIN = 0.03  # between the edge of a frame and a shape
HEIGHTS = {"small": 0.55, "large": 0.4}  # from which bouncing shapes fall: the later falls of the larger come sooner
GRAVITY = 6.5  # heights of the frame per second squared


@dataclass(frozen=True)
class Scene:
    """One clip: what its caption may say, and what differs from clip to clip of one caption, each in [0, 1)."""

    shape: str
    colour: str
    background: str
    size: str
    motion: str
    place: str
    pitch: str
    loudness: str
    chance: tuple[float, float, float]
    start: float = 0  # seconds of the motion before the clip

    @property
    def held_out(self) -> bool:
        """Whether its combination of attributes is kept for tests and never trained on."""
        numbers = SHAPES.index(self.shape), list(COLOURS).index(self.colour), MOTIONS.index(self.motion)
        return (numbers[0] + 2 * numbers[1] + 3 * numbers[2]) % 5 == 0


def places(motion: str) -> tuple[str, ...]:
    """Where a shape of this motion can be."""
    kinds = {"left": ACROSS, "right": ACROSS, "up": UPRIGHT, "down": UPRIGHT, "bounce": UPRIGHT, "still": tuple(PLACES)}
    return kinds.get(motion, ("middle",))


def draw_scene(rng: np.random.Generator, held_out: bool = False) -> Scene:
    """A scene of the training's, or one that is kept from it."""
    while True:
        motion = MOTIONS[rng.integers(len(MOTIONS))]
        scene = Scene(
            SHAPES[rng.integers(len(SHAPES))],
            _one_of(rng, COLOURS),
            _one_of(rng, BACKGROUNDS),
            _one_of(rng, SIZES),
            motion,
            _one_of(rng, places(motion)),
            _one_of(rng, PITCHES),
            _one_of(rng, LOUDNESS),
            tuple(rng.random(3)),
        )
        if scene.held_out == held_out:
            return scene


def plain(scene: Scene) -> Scene:
    """`scene` with what a caption need not say."""
    unsaid: dict[str, Any] = {name: value for name, value in UNSAID.items() if name != "motion"}
    return replace(scene, **unsaid)


def _one_of(rng: np.random.Generator, names: Iterable[str]) -> str:
    listed = list(names)
    return listed[rng.integers(len(listed))]


@dataclass(frozen=True)
class Path:
    """Where the shape is at each of some times: centres [times, 2] as (x, y), and radii [times]."""

    centres: np.ndarray
    radii: np.ndarray


def path(scene: Scene, times: np.ndarray) -> Path:
    """The motion of a scene: circles and bounces go on, all else comes to rest where a clip from its start ends."""
    times = times + scene.start
    radius = SIZES[scene.size]
    x, y = (np.full(times.shape, each) for each in PLACES[scene.place])
    radii = np.full(times.shape, radius)
    edge, clip = radius + MARGIN, NUM_FRAMES / FPS
    begin, end = edge + 0.08 * scene.chance[0], 1 - edge - 0.08 * scene.chance[1]
    moved = np.minimum(times / clip, 1)
    run = begin + (end - begin) * moved
    if scene.motion in ("right", "left"):
        x = run if scene.motion == "right" else 1 - run
    elif scene.motion in ("up", "down"):
        y = run if scene.motion == "down" else 1 - run
    elif scene.motion == "circle":
        angle = 2 * np.pi * (0.65 + 0.2 * scene.chance[0] + times / clip)  # from near the top, clockwise
        x, y = 0.5 + 0.25 * np.cos(angle), 0.5 + 0.25 * np.sin(angle)
    elif scene.motion == "bounce":
        phase = (times / fall(scene) + 1) / 2 % 1
        y = 1 - edge - HEIGHTS[scene.size] * 4 * phase * (1 - phase)
    elif scene.motion == "grow":
        radii = radius * (0.5 + 1.2 * moved)
    return Path(np.stack([x, y], axis=-1), radii)


def fall(scene: Scene) -> float:
    """How long a bouncing shape takes from its height to the ground."""
    return float(np.sqrt(2 * HEIGHTS[scene.size] / GRAVITY))


def contacts(scene: Scene, duration: float = DURATION) -> np.ndarray:
    """When the shape meets the ground within the clip."""
    if scene.motion != "bounce":
        return np.empty(0)
    times = fall(scene) * (1 + 2 * np.arange(16)) - scene.start
    return times[(times >= 0) & (times < duration - 0.05)]


def draw_frames(scene: Scene, pixels: int, frames: slice = slice(NUM_FRAMES)) -> np.ndarray:
    """Some of a scene's frames, float32 [frames, pixels, pixels, 3] in [-1, 1], with smooth edges."""
    times = np.arange(frames.stop)[frames] / FPS
    where = path(scene, times)
    grid = (np.arange(pixels, dtype=np.float32) + 0.5) / pixels
    x = grid[None, None, :] - where.centres[:, 0, None, None].astype(np.float32)
    y = grid[None, :, None] - where.centres[:, 1, None, None].astype(np.float32)
    distance = outside(scene.shape, x, y, where.radii[:, None, None].astype(np.float32))
    cover = np.clip(0.5 - distance * pixels / 1.5, 0, 1)[..., None]
    colour, ground = (
        np.asarray(rgb, np.float32) / 127.5 - 1 for rgb in (COLOURS[scene.colour], BACKGROUNDS[scene.background])
    )
    return ground + cover * (colour - ground)


def outside(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """How far points lie outside a shape around the origin, negative inside."""
    if shape == "circle":
        return np.hypot(x, y) - radius
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.9 * radius
    slope = np.sqrt(3) / 2  # of an upright triangle with equal sides
    return np.maximum(slope * np.abs(x) - y / 2, y) - 0.6 * radius


def record_sound(scene: Scene, duration: float = DURATION) -> np.ndarray:
    """A scene's sound, float32 [samples, 2] at 48 kHz: a tone that pans with the shape, and a click at each contact."""
    times = np.arange(round(duration * SAMPLING_RATE)) / SAMPLING_RATE
    where = path(scene, times)
    level = np.full(len(times), LOUDNESS[scene.loudness] * (0.4 if scene.motion == "bounce" else 1))
    if scene.motion == "grow":
        level *= 0.2 + 0.8 * np.minimum((times + scene.start) / DURATION, 1)
    tone = level * np.sin(2 * np.pi * frequencies(scene, times) * times)
    pan = panning(where.centres[:, 0])
    sound = np.sqrt(2) * tone[:, None] * np.stack([np.cos(pan), np.sin(pan)], axis=-1)
    burst = _click()[:, None]
    for time in contacts(scene, duration):
        start = round(time * MEL_RATE) * SAMPLING_RATE // MEL_RATE
        sound[start : start + len(burst)] += CLICK * burst
    return sound.astype(np.float32)


def panning(x: np.ndarray) -> np.ndarray:
    """The angle whose cosine is the left channel's share of what is at `x`, and whose sine is the right one's."""
    return np.pi / 2 * (0.15 + 0.7 * x)


def frequencies(scene: Scene, times: np.ndarray) -> np.ndarray:
    """The tone's pitch in Hz at each time."""
    base = PITCHES[scene.pitch]
    ladder = LADDERS.get(scene.motion, (2, 2, 2))
    return base / 2 * np.asarray(ladder)[np.minimum(((times + scene.start) / RUNG).astype(int), 2)]


@cache
def _click() -> np.ndarray:
    """A burst of noise of 12 ms, the same each time."""
    samples = np.arange(576)
    noise = np.random.default_rng(12).uniform(-1, 1, len(samples))
    return noise * np.exp(-samples / 150)
