"""The measures of the small world say what a clip was made of, from its mp4 alone; and they say so of no other clip."""

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from ltx2_cli.media import Media, write_mp4
from tools.train_demo.measure import Seen, judge, main, measure, read_mp4, shares
from tools.train_demo.world import (
    FPS,
    MOTIONS,
    SAMPLING_RATE,
    Scene,
    contacts,
    draw_frames,
    draw_scene,
    path,
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


SCENES = [drawn(number) for number in range(16)]


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


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    return clip_of(RIGHT, 128, tmp_path_factory.mktemp("right"))


def wrong(scene: Scene, seen: Seen) -> set[str]:
    return {key for key, verdict in judge(scene, seen).items() if verdict is False}


def test_every_word_of_a_scene_is_found_in_its_video(clips: list[Clip]):
    assert shares(SCENES, [clip.seen for clip in clips]) == dict.fromkeys(KEYS, 1.0)


def test_every_word_is_found_in_larger_videos(tmp_path: Path):
    scenes = SCENES[:8]
    assert shares(scenes, [clip_of(scene, 256, tmp_path).seen for scene in scenes]) == dict.fromkeys(KEYS, 1.0)


def test_tracks_and_contacts_are_finer_than_pixels_and_frames(clips: list[Clip]):
    for scene, _, seen in clips:
        true = path(scene, np.arange(49) / FPS)
        assert np.abs(seen.track.centres - true.centres).max() < 0.5 / 128
        assert np.abs(seen.track.radii / true.radii - 1).max() < 0.05
        if scene.motion == "bounce":
            for time in contacts(scene):
                assert np.abs(np.array(seen.contacts) - time).min() < 0.005
                assert np.abs(np.array(seen.clicks) - time).min() < 0.01  # clicks begin at whole hundredths
        else:
            assert (seen.contacts, seen.clicks) == ((), ())


def test_another_scene_does_not_match(clips: list[Clip]):
    for clip, other in zip(clips, [*clips[1:], clips[0]], strict=True):
        verdicts = judge(clip.scene, other.seen)
        for key in ("colour", "background", "shape", "motion"):
            assert verdicts[key] == (vars(clip.scene)[key] == vars(other.scene)[key])
        if clip.scene.motion == "bounce" and other.scene.motion != "bounce":
            assert verdicts["sync"] is False


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ({"colour": "orange"}, "colour"),
        ({"background": "navy"}, "background"),
        ({"shape": "square"}, "shape"),
        ({"shape": "triangle"}, "shape"),
        ({"size": "small"}, "size"),
        ({"place": "middle"}, "place"),
        ({"pitch": "medium"}, "pitch"),
        ({"loudness": "quiet"}, "loudness"),
    ],
    ids=str,
)
def test_one_wrong_word_fails_one_measure(said: dict, key: str, bounce: Clip):
    assert wrong(BOUNCE, bounce.seen) == set()
    assert wrong(replace(BOUNCE, **said), bounce.seen) == {key}


def test_reversed_time_is_another_motion(right: Clip):
    seen = measured(replace(right.media, frames=right.media.frames[::-1]))
    assert seen.motion == "left"
    assert wrong(RIGHT, seen) == {"motion", "pan"}  # the tone still goes to the right


def test_exchanged_channels_are_another_place(right: Clip):
    assert wrong(RIGHT, measured(replace(right.media, waveform=right.media.waveform[:, ::-1]))) == {"pan"}


@pytest.mark.parametrize(("delay", "expected"), [(0.0, set()), (0.04, set()), (0.15, {"sync"}), (-0.15, {"sync"})])
def test_late_or_early_sound_is_not_in_time(delay: float, expected: set[str], bounce: Clip):
    late = np.roll(bounce.media.waveform, round(delay * SAMPLING_RATE), axis=0)
    assert wrong(BOUNCE, measured(replace(bounce.media, waveform=late))) == expected


def test_clicks_and_contacts_must_match(bounce: Clip):
    sound, first = bounce.media.waveform.copy(), slice(*(round(48000 * (bounce.seen.clicks[0] + x)) for x in (0, 0.02)))
    click = sound[first]
    more = np.concatenate([sound[: first.start + 12000], click, sound[first.stop + 12000 :]])
    assert wrong(BOUNCE, measured(replace(bounce.media, waveform=more))) == {"sync"}
    sound[first] = 0
    assert wrong(BOUNCE, measured(replace(bounce.media, waveform=sound))) == {"sync"}


def test_the_edges_of_a_sound_are_no_clicks(bounce: Clip):
    sound, noise = bounce.media.waveform.copy(), np.random.default_rng(2).normal(0, 0.5, (2, 480, 2))
    sound[:480], sound[-480:] = noise
    assert wrong(BOUNCE, measured(replace(bounce.media, waveform=sound))) == set()


@pytest.mark.parametrize(("semitones", "expected"), [(0.8, set()), (-0.8, set()), (1.2, {"pitch"}), (-1.2, {"pitch"})])
def test_the_pitch_is_right_within_a_semitone(semitones: float, expected: set[str], right: Clip):
    retuned = replace(right.media, sample_rate=round(SAMPLING_RATE * 2 ** (semitones / 12)))
    seen = measured(replace(retuned, waveform=np.tile(right.media.waveform, (2, 1))))
    assert (wrong(RIGHT, seen) & {"pitch"}) == expected


def test_a_ladder_of_pitches_is_not_one_pitch(right: Clip):
    heard = [400.0, 600.0, 800.0]
    rising = replace(right.scene, motion="up", place="left", pitch="medium")
    ladder = measured(replace(right.media, waveform=record_sound(rising)))
    assert ladder.pitches == pytest.approx(heard, rel=1e-3)
    assert judge(rising, ladder)["pitch"]
    assert not judge(right.scene, ladder)["pitch"]


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


DEGRADED = {
    "blurred": lambda frames, rng: gaussian_filter(frames, (0, 2, 2, 0)),
    "another colour": lambda frames, rng: frames * rng.uniform(0.88, 1.12, 3),
    "noisy": lambda frames, rng: frames + rng.normal(0, 25, frames.shape),
}


@pytest.mark.parametrize("how", DEGRADED)
def test_imperfect_clips_are_measured(how: str, clips: list[Clip]):
    rng, seen = np.random.default_rng(1), []
    for _, media, _ in clips[:8]:
        frames = DEGRADED[how](media.frames.astype(np.float32), rng).clip(0, 255).astype(np.uint8)
        hiss = rng.normal(0, 0.01, media.waveform.shape)
        seen.append(measured(replace(media, frames=frames, waveform=media.waveform + hiss)))
    assert min(shares(SCENES[:8], seen).values()) >= 0.95


def test_a_sharper_picture_has_narrower_edges(bounce: Clip, tmp_path: Path):
    large = clip_of(BOUNCE, 256, tmp_path)
    soft = gaussian_filter(large.media.frames, (0, 2, 2, 0))
    doubled = bounce.media.frames.repeat(2, axis=1).repeat(2, axis=2)
    assert large.seen.edge < 0.6 * bounce.seen.edge
    assert large.seen.edge < 0.6 * measured(replace(large.media, frames=soft)).edge
    assert large.seen.edge < 0.75 * measured(replace(bounce.media, frames=doubled)).edge


def test_the_program_prints_its_measurements(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main([str(written(RIGHT, 128, tmp_path))])
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()[1:])
    assert (said["colour"], said["shape"], said["motion"], said["clicks"]) == ("blue", "square", "right", "none")
