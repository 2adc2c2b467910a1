"""What is made anew of a clip lies where it was asked for; all else is the clip's own, to the bit or to the packet."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ltx2_cli.media.audio import read_audio
from ltx2_cli.media.clip import Media, Original
from ltx2_cli.media.packets import _leading, write_clip
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.splice import FADE, joined
from ltx2_cli.media.videos import read_whole_video
from ltx2_cli.media.write import write_mp4
from media.test_videos import ffmpeg, write_lossless
from sounds import tone

RATE, FPS, SIDE = 16000, 24.0, 64


def clip(frames: int, hertz: float, brightness: int) -> Media:
    """Stripes that move, and a tone."""
    place = np.arange(SIDE)[None, :, None, None] + np.arange(SIDE)[None, None, :, None]
    moving = (place + 3 * np.arange(frames)[:, None, None, None]) % 64 + brightness
    picture = np.broadcast_to(moving, (frames, SIDE, SIDE, 3)).astype(np.uint8)
    return Media(picture, tone(frames / FPS, RATE, hertz), FPS, RATE)


OLD, NEW = clip(48, 400, 0), clip(33, 1000, 128)


def test_inside_a_clip_all_else_stays() -> None:
    """From frame 8 on, 33 frames were made; of them 17 to 25 are taken, and the sound of half a second."""
    media = joined(OLD, NEW, 8, slice(17, 25), (0.75, 1.25))
    np.testing.assert_array_equal(media.frames, np.concatenate([OLD.frames[:17], NEW.frames[9:17], OLD.frames[25:]]))
    first, last, fade, shift = 12000, 20000, round(FADE * RATE), round(8 / FPS * RATE)
    assert media.waveform.shape == OLD.waveform.shape
    outside = np.r_[:first, last : len(OLD.waveform)]
    np.testing.assert_array_equal(media.waveform[outside], OLD.waveform[outside])
    inside = slice(first + fade, last - fade)
    np.testing.assert_allclose(
        media.waveform[inside], NEW.waveform[first - shift : last - shift][fade:-fade], atol=1e-6
    )
    assert np.abs(np.diff(media.waveform[:, 0])).max() < 0.25  # no click: a tone of 1000 Hz moves by 0.19 a sample


def test_at_the_ends_of_a_clip_nothing_fades() -> None:
    media = joined(OLD, OLD, 0, slice(0, 48), (0.0, 2.0))
    np.testing.assert_array_equal(media.waveform, OLD.waveform)
    made = joined(OLD, NEW, 0, slice(0, 0), (0.0, 1.0))
    np.testing.assert_array_equal(made.frames, OLD.frames)
    np.testing.assert_array_equal(made.waveform[:1000], NEW.waveform[:1000])


def test_behind_the_end_the_sound_goes_over_before_it() -> None:
    """From frame 39 on, 33 frames were made; they go on to frame 60, and the sound from 1.9 s on."""
    media = joined(OLD, NEW, 39, slice(48, 60), (1.9, 2.5))
    np.testing.assert_array_equal(media.frames, np.concatenate([OLD.frames, NEW.frames[9:21]]))
    assert len(media.waveform) == round(2.5 * RATE)
    np.testing.assert_array_equal(media.waveform[:30400], OLD.waveform[:30400])
    shift = round(39 / FPS * RATE)
    np.testing.assert_allclose(media.waveform[32000:], NEW.waveform[32000 - shift : 40000 - shift], atol=1e-6)


def test_a_clip_without_sound_gets_none() -> None:
    silent = replace(OLD, waveform=OLD.waveform[:0])
    assert not len(joined(silent, NEW, 39, slice(48, 60), (1.9, 2.5)).waveform)


@pytest.mark.parametrize(
    ("frames", "most", "leading"),
    [
        ((0, 4, 2, 1, 3, 8, 6, 5, 7), 9, 9),
        ((0, 4, 2, 1, 3, 8, 6, 5, 7), 8, 5),  # the next ones cannot be decoded without frame 8
        ((0, 4, 2, 1, 3, 8, 6, 5, 7), 4, 1),
        ((0, 4, 2, 1, 3), 0, 0),
        ((0, 2, 4, 6), 4, 0),  # of another rate
        ((1, 2, 3), 3, 0),
    ],
)
def test_packets_are_copied_up_to_where_none_behind_is_needed(frames: tuple[int, ...], most: int, leading: int) -> None:
    assert _leading([frame / FPS for frame in frames], most, FPS) == leading


def original_of(path: Path, frames: int, audio: bool) -> Original:
    return Original(path, hashlib.sha256(path.read_bytes()).hexdigest(), frames, audio)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    write_mp4(OLD, path := tmp_path_factory.mktemp("joining") / "old.mp4", {"record": "old"})
    return path


def test_what_goes_on_has_the_packets_of_the_clip(file: Path, tmp_path: Path) -> None:
    media = replace(joined(OLD, NEW, 39, slice(48, 60), (1.9, 2.5)), original=original_of(file, 48, audio=False))
    said = write_clip(media, path := tmp_path / "new.mp4", {"record": "new"})
    assert said == "copied without encoding them again: 48 of 48 frames before the new ones"
    frames = read_whole_video(path).frames
    np.testing.assert_array_equal(frames[:48], read_whole_video(file).frames)
    assert np.abs(frames[48:].astype(int) - NEW.frames[9:21]).mean() < 8
    written = open_video(path)
    assert (written.num_frames, written.fps, written.metadata) == (60, FPS, {"record": "new"})
    assert [path.name for path in tmp_path.iterdir()] == ["new.mp4"]


def test_an_untouched_sound_has_the_packets_of_the_clip(file: Path, tmp_path: Path) -> None:
    media = replace(joined(OLD, NEW, 8, slice(17, 25), (0.0, 0.0)), original=original_of(file, 17, audio=True))
    said = write_clip(media, path := tmp_path / "new.mp4", {})
    copied = int(said.split()[5])
    assert said == f"copied without encoding them again: {copied} of 17 frames before the new ones, the audio"
    assert 13 <= copied <= 17  # at most three frames between two others
    old, new = read_whole_video(file).frames, read_whole_video(path).frames
    np.testing.assert_array_equal(new[:copied], old[:copied])
    assert np.abs(new.astype(int) - media.frames).mean() < 8
    np.testing.assert_array_equal(read_audio(path, 2).waveform, read_audio(file, 2).waveform)


def test_an_untouched_picture_is_that_of_the_clip(file: Path, tmp_path: Path) -> None:
    media = replace(joined(OLD, NEW, 8, slice(0, 0), (0.75, 1.25)), original=original_of(file, 48, audio=False))
    said = write_clip(media, path := tmp_path / "new.mp4", {})
    assert said == "copied without encoding them again: 48 of 48 frames"
    np.testing.assert_array_equal(read_whole_video(path).frames, read_whole_video(file).frames)


@pytest.mark.parametrize("other", ["settings", "codec"])
def test_packets_of_another_encoder_are_not_copied(file: Path, tmp_path: Path, other: str) -> None:
    kept = tmp_path / "kept.mov"
    if other == "codec":
        write_lossless(kept, OLD.frames)
    else:
        ffmpeg("-i", file, "-c:v", "libx264", "-preset", "ultrafast", "-an", kept)
    media = replace(joined(OLD, NEW, 39, slice(48, 60), (1.9, 2.5)), original=original_of(kept, 48, audio=False))
    said = write_clip(media, path := tmp_path / "new.mp4", {})
    why = "ltx2 encodes with other settings, or at another rate"
    assert said == f"copied without encoding them again: 0 of 48 frames before the new ones ({why})"
    assert np.abs(read_whole_video(path).frames.astype(int) - media.frames).mean() < 8


@pytest.mark.parametrize("gone", [True, False])
def test_a_clip_that_is_gone_or_changed_loses_nothing(file: Path, tmp_path: Path, gone: bool) -> None:
    (kept := tmp_path / "kept.mp4").write_bytes(file.read_bytes())
    media = replace(joined(OLD, NEW, 8, slice(17, 25), (0.0, 0.0)), original=original_of(kept, 17, audio=True))
    kept.unlink() if gone else write_mp4(NEW, kept)
    said = write_clip(media, path := tmp_path / "new.mp4", {})
    frames = f"0 of 17 frames before the new ones ({kept} has changed since)"
    assert said == f"copied without encoding them again: {frames}, the audio not"
    assert np.abs(read_whole_video(path).frames.astype(int) - media.frames).mean() < 8


def test_what_is_all_new_is_written_as_ever(tmp_path: Path) -> None:
    assert write_clip(NEW, tmp_path / "new.mp4", {}) == ""
    assert open_video(tmp_path / "new.mp4").num_frames == 33
