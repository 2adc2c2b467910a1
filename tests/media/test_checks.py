"""Each finding is made of a clip that has it, and not of one that looks alike."""

import numpy as np
import pytest

from ltx2_cli.media.checks import clip_flaws
from ltx2_cli.media.clip import Media

FRAMES, HEIGHT, WIDTH, RATE = 24, 128, 192, 16000  # a second
BLACK, COLOUR = "the video is black", "every frame of the video is a single colour"
FROZEN, SILENT = "the video is frozen: every frame is like the first", "the audio is silent"
DRAW = np.random.default_rng(0)
TONE = np.sin(2 * np.pi * 441 * np.arange(RATE) / RATE, dtype=np.float32)[:, None].repeat(2, 1)


def scene(frames: int = FRAMES) -> np.ndarray:
    """A smooth moving picture."""
    time, y, x = np.mgrid[:frames, :HEIGHT, :WIDTH].astype(np.float32)
    waves = [np.sin(x / 20 + time / 5), np.cos(y / 15 - time / 6), np.sin((x + y) / 30)]
    return np.stack(127 + 100 * np.array(waves), -1).astype(np.uint8)


def clip(frames: np.ndarray | None = None, waveform: np.ndarray | None = None) -> Media:
    """A good clip but for what is given."""
    return Media(scene() if frames is None else frames, TONE / 2 if waveform is None else waveform, 24.0, RATE)


def filled(level: int) -> np.ndarray:
    return np.full((FRAMES, HEIGHT, WIDTH, 3), level, np.uint8)


def flickering(frames: np.ndarray, levels: int) -> np.ndarray:
    """With noise of at most so many levels."""
    noise = DRAW.integers(0, levels + 1, frames.shape)
    return np.minimum(frames + noise, 255).astype(np.uint8)


def with_disc(frames: np.ndarray, radius: int, level: int, speed: int = 0) -> np.ndarray:
    """With a disc that moves to the right by so many pixels a frame."""
    time, y, x = np.mgrid[: len(frames), :HEIGHT, :WIDTH]
    inside = (x - 20 - speed * time) ** 2 + (y - 64) ** 2 <= radius**2
    return np.where(inside[..., None], np.uint8(level), frames)


def test_a_good_clip_has_no_findings() -> None:
    assert clip_flaws(clip()) == []


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (filled(0), [BLACK]),
        (flickering(filled(0), 16), [BLACK]),
        (scene() // 16, [BLACK]),
        (with_disc(filled(0), 8, 220), []),  # a moon at night, which does not move, is
        (scene() // 6, []),
        (flickering(filled(0), 40), []),
    ],
    ids=["zeros", "dark noise", "an unlit scene", "a moon", "a dim scene", "noise"],
)
def test_a_black_picture_is_a_finding(frames: np.ndarray, expected: list[str]) -> None:
    assert [finding for finding in clip_flaws(clip(frames)) if finding != FROZEN] == expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (filled(128), [COLOUR]),
        (flickering(filled(128), 10), [COLOUR]),
        (filled(20) * np.arange(1, 13, dtype=np.uint8).repeat(2)[:, None, None, None], [COLOUR]),
        (filled(1) * np.array([200, 20, 90], np.uint8), [COLOUR]),
        (flickering(filled(128), 40), []),
        (filled(100) + np.linspace(0, 40, HEIGHT, dtype=np.uint8)[:, None, None], [FROZEN]),
        (np.concatenate([filled(128)[:-1], scene(1)]), []),
    ],
    ids=["grey", "a ripple", "flashes", "a colour", "noise", "a sky", "one frame of a scene"],
)
def test_a_single_colour_is_a_finding(frames: np.ndarray, expected: list[str]) -> None:
    assert clip_flaws(clip(frames)) == expected


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (scene(1).repeat(FRAMES, 0), [FROZEN]),
        (flickering(scene(1).repeat(FRAMES, 0), 3), [FROZEN]),
        (flickering(scene(1).repeat(FRAMES, 0), 12), []),
        (with_disc(scene(1).repeat(FRAMES, 0), 8, 255, speed=1), []),
        (np.concatenate([scene(1).repeat(FRAMES - 1, 0), scene()[-1:]]), []),
        (scene()[:1], []),
    ],
    ids=["a still", "a still with noise", "grain", "a ball", "a late move", "one frame"],
)
def test_a_frozen_picture_is_a_finding(frames: np.ndarray, expected: list[str]) -> None:
    waveform = TONE[: len(frames) * RATE // 24] / 2
    assert clip_flaws(clip(frames, waveform)) == expected


@pytest.mark.parametrize(
    ("waveform", "expected"),
    [
        (0 * TONE, [SILENT]),
        (0.0005 * TONE, [SILENT]),
        (0.3 + 0 * TONE, [SILENT]),
        (0.003 * TONE, []),
        (TONE / 2 * [1, 0], []),
        (TONE[:0], []),
    ],
    ids=["zeros", "-66 dB", "a constant", "-50 dB", "one channel", "left out"],
)
def test_silent_sound_is_a_finding(waveform: np.ndarray, expected: list[str]) -> None:
    assert clip_flaws(clip(waveform=waveform.astype(np.float32))) == expected


@pytest.mark.parametrize(
    ("waveform", "expected"),
    [
        (np.clip(2 * TONE, -1, 1), ["the audio is clipped: 67 % of it is at full scale"]),
        (np.clip(1.001 * TONE, -1, 1), ["the audio is clipped: 3 % of it is at full scale"]),
        (TONE, []),
        (np.where(np.arange(RATE)[:, None] % 200 == 0, np.float32(1), TONE / 2), []),
    ],
    ids=["twice too loud", "a little too loud", "a tone at full scale", "clicks"],
)
def test_clipped_sound_is_a_finding(waveform: np.ndarray, expected: list[str]) -> None:
    """Of a sine of amplitude 2, two thirds are beyond 1."""
    assert clip_flaws(clip(waveform=waveform)) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.85, ["video and audio differ in length: 1.00 s and 0.85 s"]),
        (1.2, ["video and audio differ in length: 1.00 s and 1.20 s"]),
        (0.95, []),
        (1.05, []),
    ],
)
def test_unequal_lengths_are_a_finding(seconds: float, expected: list[str]) -> None:
    waveform = np.concatenate([TONE, TONE])[: round(seconds * RATE)] / 2
    assert clip_flaws(clip(waveform=waveform)) == expected


def test_a_missing_picture_is_no_finding() -> None:
    assert clip_flaws(clip(np.empty((0, 0, 0, 3), np.uint8))) == []


def test_all_findings_are_listed() -> None:
    listed = clip_flaws(clip(filled(0), 0 * TONE[: RATE // 2]))
    assert listed == [BLACK, SILENT, "video and audio differ in length: 1.00 s and 0.50 s"]
