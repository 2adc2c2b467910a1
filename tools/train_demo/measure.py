"""What a clip of the small world shows and sounds like, measured from its frames and its waveform by classical means;
whether that is what a scene asked for; and `python -m tools.train_demo.measure clip.mp4`, which prints it."""

import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as File

import imageio_ffmpeg
import numpy as np

from ltx2_cli.media.clip import Media
from ltx2_cli.media.probe import open_video
from tools.train_demo import hearing
from tools.train_demo.hearing import SEMITONE
from tools.train_demo.sight import look
from tools.train_demo.track import contacts_of, motion_of
from tools.train_demo.world import (
    DURATION,
    LOUDNESS,
    PLACES,
    RUNG,
    SAMPLING_RATE,
    SIZES,
    Path,
    Scene,
    frequencies,
    panning,
    path,
    record_sound,
)

TOGETHER = 0.08  # seconds between a contact and its click
CLICKED = (0.12, DURATION - 0.09)  # the world's clicks end there, give or take a frame: other contacts may have none
NEAR = (PLACES["right"][0] - PLACES["middle"][0]) / 2
BESIDE = 0.15  # radians between where the shape is and where its tone is
STEADY = {"right": [1], "left": [1], "up": [0], "down": [0], "bounce": [0]}  # axes along which nothing moves


@dataclass(frozen=True)
class Seen:
    """What a clip shows and sounds like. None is what could not be told, NaN in an array likewise."""

    colour: str | None
    background: str | None
    shape: str | None
    motion: str | None
    track: Path  # of the shape, at each frame
    contacts: tuple[float, ...]  # seconds, when a bouncing shape meets the ground
    edge: float  # width of the shape's edge, as a fraction of the frame's
    pitches: tuple[float | None, ...]  # Hz, in each third
    level: float  # amplitude of the tone
    pan: np.ndarray  # where the tone is at each frame: as `panning` of the shape's x
    clicks: tuple[float, ...]  # seconds, when each begins


def measure(frames: np.ndarray, waveform: np.ndarray, rate: int, fps: float) -> Seen:
    """Measure frames, uint8 [frames, pixels, pixels, 3], and a waveform, float32 [samples, channels]."""
    sight, sound = look(frames), hearing.stereo(waveform)
    tone = hearing.tone_of(sound, rate)
    return Seen(
        sight.colour,
        sight.background,
        sight.shape,
        motion_of(sight.track),
        sight.track,
        contacts_of(sight.track, fps),
        sight.edge,
        hearing.pitches(sound, rate),
        hearing.level(tone),
        hearing.places(tone, rate, np.arange(len(frames)) / fps),
        hearing.clicks(sound, rate),
    )


def judge(scene: Scene, seen: Seen) -> dict[str, bool | None]:
    """Whether each attribute is what the scene says; None where there is nothing to tell, as of sync without bounces.

    What the scene leaves to chance, as where a motion begins, is not judged.
    """
    return {
        "colour": seen.colour == scene.colour,
        "background": seen.background == scene.background,
        "shape": seen.shape == scene.shape,
        "size": _size(scene, seen) == scene.size,
        "motion": seen.motion == scene.motion,
        "place": _in_place(scene, seen),
        "pitch": _in_tune(scene, seen),
        "loudness": _loudness(scene, seen) == scene.loudness,
        "pan": _beside(seen),
        "sync": _in_time(seen) if scene.motion == "bounce" else None,
    }


def shares(
    scenes: Sequence[Scene], seen: Sequence[Seen], left_open: Sequence[Collection[str]] | None = None
) -> dict[str, float]:
    """Of the clips that an attribute applies to, the share that shows it; NaN where it applies to none.

    `left_open` are the attributes of each scene that its prompt leaves open: they do not apply.
    """
    judged = [judge(*pair) for pair in zip(scenes, seen, strict=True)]
    for answers, open_attributes in zip(judged, left_open or [], strict=left_open is not None):
        answers.update(dict.fromkeys(open_attributes))
    return means(judged)


def means(judged: Sequence[Mapping[str, bool | None]]) -> dict[str, float]:
    """Of the answers to each question that are not None, the share that is true; NaN where all are None."""
    known = {key: [answer for each in judged if (answer := each[key]) is not None] for key in judged[0]}
    return {key: round(float(np.mean(answers)), 3) if answers else float("nan") for key, answers in known.items()}


def _size(scene: Scene, seen: Seen) -> str | None:
    times = np.linspace(0, DURATION, 49)
    expected = {size: path(replace(scene, size=size), times).radii.mean() for size in SIZES}
    return _nearest(_mean(seen.track.radii), expected)


def _loudness(scene: Scene, seen: Seen) -> str | None:
    unit = hearing.level(hearing.tone_of(record_sound(scene), SAMPLING_RATE)) / LOUDNESS[scene.loudness]
    audible = seen.level if seen.level > hearing.SILENCE else np.nan
    return _nearest(audible, {name: unit * amplitude for name, amplitude in LOUDNESS.items()})


def _nearest(value: float, table: dict[str, float]) -> str | None:
    """By ratio; None of NaN."""
    return min(table, key=lambda name: abs(np.log(value / table[name]))) if np.isfinite(value) else None


def _mean(values: np.ndarray) -> float:
    """Of those that are known, NaN if none is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan


def _in_place(scene: Scene, seen: Seen) -> bool:
    """Whether the shape keeps where it is said to be, along the axes on which it does not move."""
    axes = STEADY.get(scene.motion, [0, 1])
    return all(abs(_mean(seen.track.centres[:, axis]) - PLACES[scene.place][axis]) < NEAR for axis in axes)


def _in_tune(scene: Scene, seen: Seen) -> bool:
    expected = frequencies(scene, RUNG * (np.arange(3) + 0.5))
    return all(
        heard is not None and 1 / SEMITONE < heard / pitch < SEMITONE
        for heard, pitch in zip(seen.pitches, expected, strict=True)
    )


def _beside(seen: Seen) -> bool:
    """Whether the tone is where the shape is."""
    apart = np.abs(panning(seen.track.centres[:, 0]) - seen.pan)
    known = apart[np.isfinite(apart)]
    return len(known) > 0.5 * len(apart) and bool(np.quantile(known, 0.8) < BESIDE)


def _in_time(seen: Seen) -> bool:
    """Whether each contact that is to be heard has its click, and each click its contact."""

    def all_near(times: list[float], others: tuple[float, ...]) -> bool:
        return all(any(abs(time - other) <= TOGETHER for other in others) for time in times)

    heard = [time for time in seen.contacts if CLICKED[0] < time < CLICKED[1]]
    return bool(heard) and all_near(heard, seen.clicks) and all_near(list(seen.clicks), seen.contacts)


def read_mp4(file: File) -> Media:
    """The frames and the sound of an mp4, decoded. Raises `UsageError` where it is damaged."""
    video = open_video(file)
    # The matrix and the range are those that the file says.
    picture = ["-vf", "scale=out_range=pc:flags=accurate_rnd", "-pix_fmt", "rgb24", "-f", "rawvideo", "-"]
    frames = np.frombuffer(_decoded(file, picture), np.uint8).reshape(-1, video.height, video.width, 3)
    sound = _decoded(file, ["-ac", "2", "-f", "f32le", "-"]) if video.sample_rate else b""
    return Media(frames, np.frombuffer(sound, "<f4").reshape(-1, 2), video.fps, video.sample_rate or SAMPLING_RATE)


def _decoded(file: File, wanted: list[str]) -> bytes:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", f"file:{file}", *wanted]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True).stdout


def measure_mp4(file: File) -> Seen:
    """Measure a finished clip."""
    clip = read_mp4(file)
    return measure(np.asarray(clip.frames), clip.waveform, clip.sample_rate, clip.fps)


def main(files: list[str]) -> None:
    """Print what is seen and heard in each file."""
    for name in files:
        print(name)
        for key, value in vars(measure_mp4(File(name))).items():
            print(f"  {key:10} {_printed(value)}")


def _printed(value: object) -> str:
    if isinstance(value, Path):
        first, last = (f"({x:.2f}, {y:.2f})" for x, y in value.centres[[0, -1]])
        return f"{first} to {last}, radius {value.radii[0]:.2f} to {value.radii[-1]:.2f}"
    if isinstance(value, np.ndarray):
        value = (value[0], value[-1])
    if isinstance(value, tuple):
        return ", ".join(map(_printed, value)) or "none"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main(sys.argv[1:])
