"""Frames of videos are read at a rate, upright, the first or the last, and within limits."""

import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from ltx2_cli.errors import UsageError
from ltx2_cli.media import videos
from ltx2_cli.media.videos import read_video, read_whole_video

HEIGHT, WIDTH, FRAMES = 32, 48, 25


def ffmpeg(*arguments: object, data: bytes = b"") -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *map(str, arguments)]
    subprocess.run(command, input=data, check=True)


def write_lossless(path: Path, frames: np.ndarray, fps: float = 24) -> Path:
    """A video whose frames are read as they were."""
    size = f"{frames.shape[2]}x{frames.shape[1]}"
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-framerate", fps, "-i", "-"]
    ffmpeg(*raw, "-c:v", "png", "-pix_fmt", "rgb24", path, data=frames.tobytes())
    return path


@pytest.fixture(scope="module")
def frames() -> np.ndarray:
    return np.random.default_rng(2).integers(0, 256, (FRAMES, HEIGHT, WIDTH, 3), np.uint8)


@pytest.fixture(scope="module")
def video(frames: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lossless(tmp_path_factory.mktemp("videos") / "v.mov", frames)


@pytest.mark.parametrize(
    ("most", "from_end", "shown"),
    [
        (25, False, slice(0, 25)),
        (24, False, slice(0, 17)),
        (24, True, slice(8, 25)),
        (1, True, slice(24, 25)),
        (90, True, slice(0, 25)),
    ],
)
def test_frames_are_the_first_or_the_last(video: Path, frames: np.ndarray, most: int, from_end: bool, shown: slice):
    read = read_video(video, 24, most, from_end)
    np.testing.assert_array_equal(read.frames, frames[shown])
    assert read.remarks == (f"its {'last' if from_end else 'first'} {len(read.frames)} frames are shown",)


def test_frames_come_at_the_rate_of_the_clip(video: Path, frames: np.ndarray):
    read = read_video(video, 12, 9, from_end=False)
    assert read.remarks == ("its first 9 frames are shown, at 12 frames a second, not its 24",)
    places = [np.abs(frames.astype(int) - frame).sum((1, 2, 3)).argmin() for frame in read.frames]
    assert np.diff(places).tolist() == [2] * 8


def test_frames_that_come_at_uneven_times_are_repeated(video: Path, frames: np.ndarray, tmp_path: Path):
    """Four of the first, and after a gap the last nine."""
    path = tmp_path / "uneven.mov"
    ffmpeg("-i", video, "-vf", "select=lt(n\\,4)+gt(n\\,15)", "-fps_mode", "vfr", "-c:v", "png", path)
    read = read_video(path, 24, FRAMES, from_end=False)
    kept = [*range(4), *[3] * 12, *range(16, FRAMES)]
    np.testing.assert_array_equal(read.frames, frames[kept])
    assert read.remarks[0].endswith("at 24 frames a second, not its 12.48, its frames do not come at even times")
    assert read_video(video, 24, FRAMES, from_end=False).remarks == (f"its first {FRAMES} frames are shown",)


def test_all_of_a_video_is_read_once_at_its_own_rate(video: Path, frames: np.ndarray):
    """Whether that is named or not."""
    read = read_whole_video(video)
    np.testing.assert_array_equal(read.frames, frames)
    assert read_whole_video(video, 24) is read


def test_a_turned_video_is_upright(video: Path, frames: np.ndarray, tmp_path: Path):
    ffmpeg("-display_rotation", 90, "-i", video, "-c", "copy", tmp_path / "turned.mov")
    read = read_video(tmp_path / "turned.mov", 24, 1, from_end=False)
    assert read.frames.shape == (1, WIDTH, HEIGHT, 3)
    np.testing.assert_array_equal(read.frames[0], np.rot90(frames[0]))


@pytest.mark.parametrize("codec", ["libx264", "libx265"])
def test_ten_bits_become_those_of_eight(tmp_path: Path, codec: str):
    """Of a picture without edges, whose colours ffmpeg interpolates in another way."""
    place = np.indices((64, 64)).sum(0) // 2 + np.arange(9)[:, None, None]
    smooth = np.stack([60 + place, 180 - place, 90 + place // 2], -1).astype(np.uint8)
    source = write_lossless(tmp_path / "source.mov", smooth)
    for name, pixels in (("eight", "yuv420p"), ("ten", "yuv420p10le")):
        best = ["-x265-params", "log-level=none:crf=1"] if codec == "libx265" else ["-crf", 1]
        ffmpeg("-i", source, "-c:v", codec, "-pix_fmt", pixels, *best, tmp_path / f"{name}.mp4")
    eight, ten = (read_video(tmp_path / f"{name}.mp4", 24, 9, from_end=False) for name in ("eight", "ten"))
    assert ten.remarks == (f"{eight.remarks[0]}, its 10 bits became 8",)
    error = np.abs(ten.frames.astype(int) - eight.frames)
    assert error.mean() < 1
    assert error.max() <= 6


ENCODED = {
    "b-frames.mp4": "-c:v libx264 -bf 3",
    "open.mp4": "-c:v libx264 -x264-params open-gop=1:bframes=3",
    "refresh.mp4": "-c:v libx264 -x264-params intra-refresh=1:bframes=0",
    "ten.mp4": "-c:v libx265 -x265-params log-level=none -pix_fmt yuv420p10le",
    "uneven.mp4": "-vf select=lt(n\\,20)+gt(n\\,31) -fps_mode vfr -c:v libx264",
    "late.mkv": "-c:v libx264 -output_ts_offset 1.37",
    "late.ts": "-c:v libx264 -output_ts_offset 5",
    "no-b.webm": "-c:v libvpx-vp9",
}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of videos of three seconds, with sound and a key frame each half second."""
    folder = tmp_path_factory.mktemp("long")
    for name, options in ENCODED.items():
        moving = ["-f", "lavfi", "-i", "testsrc2=s=96x64:r=24:d=3", "-f", "lavfi", "-i", "sine=d=3"]
        ffmpeg(*moving, *options.split(), "-g", 12, folder / name)
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=96x64:r=30000/1001:d=3", "-g", 12, folder / "ntsc.mp4")
    source = ["-i", folder / "b-frames.mp4"]
    ffmpeg("-itsoffset", 0.3, *source, *source, "-map", "0:v", "-map", "1:a", "-c", "copy", folder / "late.mp4")
    ffmpeg("-ss", 1.1, *source, "-c", "copy", folder / "edit-list.mp4")
    ffmpeg("-display_rotation", 90, *source, "-c", "copy", folder / "turned.mp4")
    return folder


@pytest.mark.parametrize("fps", [24, 25, 24000 / 1001, 12])
@pytest.mark.parametrize("name", [*ENCODED, "ntsc.mp4", "late.mp4", "edit-list.mp4", "turned.mp4"])
def test_the_last_frames_are_those_of_the_whole_video(long: Path, name: str, fps: float):
    whole = read_video(long / name, fps, 81, from_end=True).frames
    for most in (1, 9, 25):
        np.testing.assert_array_equal(read_video(long / name, fps, most, from_end=True).frames, whole[-most:])


def test_a_picture_that_begins_later_than_its_sound_is_read_to_its_end(long: Path):
    """Its first frame is shown from the beginning on, as long as the sound is alone."""
    late, alone = (read_whole_video(long / name, 24).frames for name in ("late.mp4", "b-frames.mp4"))
    np.testing.assert_array_equal(late, np.concatenate([alone[:1]] * 7 + [alone]))


def test_what_comes_long_before_the_last_frames_is_not_decoded(video: Path, frames: np.ndarray, tmp_path: Path):
    """So that damage to it does no harm."""
    content = bytearray(video.read_bytes())
    place = len(content) // 4
    content[place : place + 4000] = bytes(4000)
    (damaged := tmp_path / "d.mov").write_bytes(content)
    with pytest.raises(UsageError, match="is damaged: "):
        read_whole_video(damaged)
    np.testing.assert_array_equal(read_video(damaged, 24, 9, from_end=True).frames, frames[-9:])


def test_frames_that_were_read_last_take_so_many_bytes(video: Path, monkeypatch: pytest.MonkeyPatch):
    first, size = read_video(video, 24, 9, from_end=False), 9 * HEIGHT * WIDTH * 3
    assert read_video(video, 24, 9, from_end=False) is first
    monkeypatch.setattr(videos._recent, "most", 2 * size)
    for most in (9, 10):  # others, of as many frames
        read_video(video, 24, most, from_end=True)
    assert read_video(video, 24, 9, from_end=False) is not first
    assert sum(kept.nbytes for kept in videos._recent.kept.values()) == 2 * size


def test_hdr_is_said(video: Path, tmp_path: Path):
    ffmpeg("-i", video, "-vf", "setparams=color_trc=smpte2084", "-c:v", "libx264", tmp_path / "hdr.mp4")
    (remark,) = read_video(tmp_path / "hdr.mp4", 24, 1, from_end=False).remarks
    assert remark.endswith("its HDR light is not mapped to what screens show")


@pytest.mark.parametrize("from_end", [False, True])
def test_a_video_with_a_damaged_frame_is_refused(video: Path, tmp_path: Path, from_end: bool):
    """The frames that can be read are not taken for all of it."""
    content = bytearray(video.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 4000] = bytes(4000)
    (damaged := tmp_path / "d.mov").write_bytes(content)
    with pytest.raises(UsageError, match=r"d\.mov is damaged: "):
        read_video(damaged, 24, 25, from_end)


def test_what_is_no_video_is_refused_in_a_sentence(video: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video")
    (tmp_path / "cut.mov").write_bytes(video.read_bytes()[:300])
    ffmpeg("-f", "lavfi", "-i", "sine=duration=1", tmp_path / "sound.wav")
    ffmpeg("-i", video, "-frames:v", 0, tmp_path / "none.mp4")
    ffmpeg("-i", video, "-movflags", "faststart", tmp_path / "whole.mp4")
    (tmp_path / "half.mp4").write_bytes((tmp_path / "whole.mp4").read_bytes()[:-5000])
    for name, sentence in (
        ("none.mp4", "is damaged"),
        ("half.mp4", "is damaged"),
        ("empty.mp4", "is empty"),
        ("text.mp4", "is damaged"),
        ("cut.mov", "is damaged"),
        ("sound.wav", "has no video"),
        ("absent.mp4", "cannot be read: No such file"),
        (".", "is a folder"),
    ):
        with pytest.raises(UsageError, match=r"^[^\n]*$") as refused:
            read_video(tmp_path / name, 24, 9, from_end=True)
        assert sentence in str(refused.value)
    monkeypatch.setattr(videos, "MAX_VIDEO_BYTES", 9 * HEIGHT * WIDTH * 3 - 1)
    video.touch()
    with pytest.raises(UsageError, match="have 48x32 pixels, more than is read at once"):
        read_video(video, 24, 9, from_end=False)
