"""The measures of the small world say what a clip was made of, from its mp4 alone; and they say so of no other clip."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from tools.train_demo.measure import Seen, judge, main, measure, read_mp4, shares
from tools.train_demo.world import (
    FPS,
    MOTIONS,
    SAMPLING_RATE,
    Scene,
    draw_frames,
    draw_scene,
    record_sound,
)

KEYS = {"colour", "background", "shape", "size", "motion", "place", "pitch", "loudness", "pan", "sync"}
BOUNCE = Scene("circle", "red", "grey", "large", "bounce", "left", "low", "loud", (0.5, 0.5, 0.5))
RIGHT = Scene("square", "blue", "black", "small", "right", "top", "medium", "quiet", (0.1, 0.2, 0.3))


def drawn(number: int) -> Scene:
    """Every motion comes as often; held out and not in turns."""
    rng = np.random.default_rng([7, number])
    scenes = (draw_scene(rng, held_out=number // len(MOTIONS) % 2 == 0) for _ in count())
    return next(scene for scene in scenes if scene.motion == MOTIONS[number % len(MOTIONS)])


SCENES = [drawn(number) for number in range(8)]


class Clip(NamedTuple):
    scene: Scene
    media: Media
    seen: Seen


def measured(media: Media) -> Seen:
    return measure(media.frames, media.waveform, media.sample_rate, media.fps)


def written(scene: Scene, pixels: int, folder: Path) -> Path:
    """A scene as the product writes a video."""
    frames = np.round((draw_frames(scene, pixels) + 1) * 127.5).astype(np.uint8)
    file = folder / f"{pixels}.mp4"
    write_mp4(Media(frames, record_sound(scene), FPS, SAMPLING_RATE), file)
    return file


def clip_of(scene: Scene, pixels: int, folder: Path) -> Clip:
    media = read_mp4(written(scene, pixels, folder))
    return Clip(scene, media, measured(media))


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Clip]:
    folder = tmp_path_factory.mktemp("clips")
    return [clip_of(scene, 128, folder) for scene in SCENES]


@pytest.fixture(scope="module")
def bounce(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    return clip_of(BOUNCE, 128, tmp_path_factory.mktemp("bounce"))


def wrong(scene: Scene, seen: Seen) -> set[str]:
    return {key for key, verdict in judge(scene, seen).items() if verdict is False}


def test_every_word_of_a_scene_is_found_in_its_video(clips: list[Clip]):
    assert shares(SCENES, [clip.seen for clip in clips]) == dict.fromkeys(KEYS, 1.0)


def test_another_scene_does_not_match(clips: list[Clip]):
    for clip, other in zip(clips, [*clips[1:], clips[0]], strict=True):
        verdicts = judge(clip.scene, other.seen)
        for key in ("colour", "background", "shape", "motion"):
            assert verdicts[key] == (vars(clip.scene)[key] == vars(other.scene)[key])
        if clip.scene.motion == "bounce" and other.scene.motion != "bounce":
            assert verdicts["sync"] is False


def test_nothing_is_found_in_an_empty_clip(bounce: Clip):
    """Silence, noise, a plain ground; half a clip; each without an error."""
    noise = np.random.default_rng(0)
    empty = np.full((49, 128, 128, 3), 120, np.uint8)
    heard = {"pitch", "loudness", "pan", "sync"}
    for silence in (np.zeros((0, 2), np.float32), np.full((96000, 2), 1e-4, np.float32)):
        assert wrong(replace(BOUNCE, loudness="quiet"), measured(replace(bounce.media, waveform=silence))) == heard
    hiss = noise.normal(0, 0.1, (96000, 1)).astype(np.float32)
    assert measured(replace(bounce.media, waveform=hiss)).pitches == (None, None, None)
    drawn = {"colour", "shape", "size", "motion", "place", "pan", "sync"}
    assert wrong(BOUNCE, measured(replace(bounce.media, frames=empty))) == drawn
    snow = measured(replace(bounce.media, frames=noise.integers(0, 256, empty.shape, np.uint8)))
    assert (snow.colour, snow.shape, snow.motion) == (None, None, None)
    gone = np.where(np.arange(49)[:, None, None, None] < 25, bounce.media.frames, empty)
    assert measured(replace(bounce.media, frames=gone)).motion is None


def test_the_program_prints_its_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([str(written(RIGHT, 128, tmp_path))])
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert (said["colour"], said["shape"], said["motion"], said["clicks"]) == ("blue", "square", "right", "none")
