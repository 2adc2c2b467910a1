"""What is written can be played: right sizes, rates, lengths and colours; and nothing is ever half written."""

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from ltx2_cli.artifacts.outputs import record_path
from ltx2_cli.errors import MAKE_ROOM, RunError
from ltx2_cli.media.clip import Media
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.write import write_hlg, write_master, write_mp4, write_record

LATENT_FRAME = 8 / 24  # seconds


def ffmpeg(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, check=False)


def description(path: Path) -> str:
    """What ffmpeg says about a file."""
    return ffmpeg("-i", path).stderr.decode()


def frames_of(path: Path, height: int, width: int) -> np.ndarray:
    """The decoded frames, converted by the matrix and range that the file says."""
    raw = ffmpeg("-i", path, "-vf", "scale=out_range=pc:flags=accurate_rnd", "-pix_fmt", "rgb24", "-f", "rawvideo", "-")
    return np.frombuffer(raw.stdout, np.uint8).reshape(-1, height, width, 3)


def sound_of(path: Path) -> np.ndarray:
    """The decoded samples [samples, 2]."""
    return np.frombuffer(ffmpeg("-i", path, "-f", "f32le", "-").stdout, "<f4").reshape(-1, 2)


def clip(frames: int = 17, height: int = 64, width: int = 96, fps: float = 24.0, sample_rate: int = 24000) -> Media:
    """A smooth moving picture and two tones."""
    time, y, x = np.mgrid[:frames, :height, :width].astype(np.float32)
    waves = [np.sin(x / 20 + time / 5), np.cos(y / 15 - time / 6), np.sin((x + y) / 30)]
    seconds = np.arange(round(frames / fps * sample_rate))[:, None] / sample_rate
    tones = 0.5 * np.sin(2 * np.pi * seconds * [440, 880])
    return Media(np.stack(127 + 100 * np.array(waves), -1).astype(np.uint8), tones.astype(np.float32), fps, sample_rate)


@pytest.mark.parametrize(
    ("media", "rate"),
    [
        (clip(), "24 fps"),
        (clip(frames=9, height=32, width=64, fps=23.976, sample_rate=48000), "23.98 fps"),
        (clip(frames=25, fps=12.5, sample_rate=16000), "12.50 fps"),
    ],
)
def test_an_mp4_keeps_rates_sizes_and_lengths(media: Media, rate: str, tmp_path: Path):
    path = tmp_path / "new" / "clip.mp4"
    write_mp4(media, path)
    count, height, width, _ = media.frames.shape
    described = description(path)
    assert re.search(
        rf"Video: h264 .*yuv420p\(tv, bt709, progressive\), {width}x{height}.* {re.escape(rate)},", described
    )
    assert f"Audio: aac (LC) (mp4a / 0x6134706D), {media.sample_rate} Hz, stereo" in described
    assert len(frames_of(path, height, width)) == count
    assert abs(len(sound_of(path)) / media.sample_rate - count / media.fps) < LATENT_FRAME
    assert os.listdir(path.parent) == ["clip.mp4"]


def test_fractional_frame_rates_are_exact(tmp_path: Path):
    write_mp4(clip(frames=25, fps=12.5), tmp_path / "clip.mp4")
    times = ffmpeg("-i", tmp_path / "clip.mp4", "-vf", "showinfo", "-f", "null", "-").stderr.decode()
    assert [float(time) for time in re.findall(r"pts_time:([\d.]+)", times)] == [frame / 12.5 for frame in range(25)]


def test_the_picture_is_encoded_closely(tmp_path: Path):
    media = clip()
    write_mp4(media, tmp_path / "clip.mp4")
    error = frames_of(tmp_path / "clip.mp4", 64, 96).astype(float) - media.frames
    assert 10 * np.log10(255**2 / np.mean(error**2)) > 36  # decibel


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (200, 100, 50)])
def test_colours_are_encoded_closely(colour: tuple[int, int, int], tmp_path: Path):
    frames = np.broadcast_to(np.array(colour, np.uint8), (9, 32, 32, 3))
    write_mp4(replace(clip(frames=9), frames=frames), tmp_path / "clip.mp4")
    decoded = frames_of(tmp_path / "clip.mp4", 32, 32).astype(int)
    assert np.abs(decoded - colour).max() <= 3


def test_both_channels_of_sound_are_encoded_closely_and_clipped_at_full_scale(tmp_path: Path):
    media = clip(frames=49)
    write_mp4(media, tmp_path / "clip.mp4")
    sound = sound_of(tmp_path / "clip.mp4")[: len(media.waveform)]
    for channel, hertz in enumerate((440, 880)):
        spectrum = np.abs(np.fft.rfft(sound[:, channel]))
        assert np.argmax(spectrum) * media.sample_rate / len(sound) == pytest.approx(hertz, abs=2)
    write_mp4(replace(media, waveform=10 * media.waveform), tmp_path / "loud.mp4")
    assert np.abs(sound_of(tmp_path / "loud.mp4")).max() < 2  # unlimited it would be 5


def test_mono_becomes_stereo(tmp_path: Path):
    media = clip()
    write_mp4(replace(media, waveform=media.waveform[:, :1]), tmp_path / "clip.mp4")
    assert "24000 Hz, stereo" in description(tmp_path / "clip.mp4")


# Failures


class Stop(BaseException):
    """Like Ctrl-C, nothing that `except Exception` would see."""


@pytest.mark.parametrize("failure", [Stop(), KeyboardInterrupt(), RunError("no", "")])
def test_an_interrupted_video_keeps_the_old_file(
    failure: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(media: Media, command: list[str], path: Path) -> None:
        assert list(tmp_path.glob(".partial-*.f32"))  # on the disk that is to hold the video
        raise failure

    (tmp_path / "clip.mp4").write_text("old")
    monkeypatch.setattr("ltx2_cli.media.write._write", interrupt)
    with pytest.raises(type(failure)):
        write_mp4(clip(), tmp_path / "clip.mp4")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("clip.mp4", "old")]


def test_an_error_of_ffmpeg_is_a_run_error(tmp_path: Path):
    with pytest.raises(RunError, match=f"ffmpeg cannot write {tmp_path}/clip.mp4: width not divisible by 2"):
        write_mp4(clip(width=33), tmp_path / "clip.mp4")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits are a POSIX thing")
def test_a_file_that_cannot_grow_is_a_run_error(tmp_path: Path):
    script = f"""
        import resource
        import numpy as np
        from pathlib import Path
        from ltx2_cli.media.clip import Media
        from ltx2_cli.media.write import write_mp4
        from ltx2_cli.errors import RunError
        noise = np.random.default_rng(0).integers(0, 255, (60, 64, 64, 3), np.uint8)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        try:
            write_mp4(Media(noise, np.zeros((100, 2), np.float32), 24.0, 24000), Path({str(tmp_path)!r}) / "clip.mp4")
        except RunError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"ffmpeg cannot write {tmp_path}/clip.mp4: ")
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="limits are a POSIX thing")
@pytest.mark.parametrize("write", ["write_record(path, 'x' * 500)", "write_mp4(clip, path)"])
def test_a_full_disk_is_a_run_error_that_names_the_file(write: str, tmp_path: Path):
    """The record, and the sound that ffmpeg is to read."""
    script = f"""
        import resource, signal
        import numpy as np
        from pathlib import Path
        from ltx2_cli.media.clip import Media
        from ltx2_cli.media.write import write_mp4, write_record
        from ltx2_cli.errors import RunError
        clip = Media(np.zeros((9, 64, 64, 3), np.uint8), np.zeros((1000, 2), np.float32), 24.0, 24000)
        path = Path({str(tmp_path)!r}) / "clip"
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            {write}
        except RunError as error:
            print(error, "|", error.hint)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout == f"cannot write {tmp_path}/clip: File too large | {MAKE_ROOM}\n"
    assert os.listdir(tmp_path) == []


def test_an_impossible_folder_is_a_run_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=f"cannot write {tmp_path}/file/a/clip.yaml: Not a directory"):
        write_record(tmp_path / "file" / "a" / "clip.yaml", "")


def test_ffmpeg_accepts_every_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_mp4(clip(), Path("-at:12") / "clip.mp4")
    assert os.listdir(tmp_path / "-at:12") == ["clip.mp4"]


def test_records_are_written_atomically(tmp_path: Path):
    path = record_path(tmp_path / "new" / "clip.mp4")
    write_record(path, "prompt: fühl\n")
    write_record(path, "prompt: ☂\n")
    assert [(file.name, file.read_text("utf-8")) for file in path.parent.iterdir()] == [("clip.yaml", "prompt: ☂\n")]


@pytest.mark.parametrize(("name", "most"), [("clip.mkv", 0), ("clip.mov", 65535 / 2**8)])
def test_master_files_keep_levels_between_those_of_8_bits(tmp_path: Path, name: str, most: float) -> None:
    """All of them in a .mkv; in a .mov those of 10 bits, of smooth colours."""
    y, x = np.mgrid[:256, :256]
    frames = np.stack([x * 257, y * 257, (x + y) * 128], -1).astype(np.uint16)[None].repeat(3, axis=0)
    media = replace(clip(frames=3), frames=frames)
    write_master(media, tmp_path / name, {"record": "seed: 3"})
    raw = ffmpeg(
        "-i", tmp_path / name, "-vf", "scale=out_range=pc", "-pix_fmt", "rgb48le", "-f", "rawvideo", "-"
    ).stdout
    error = np.abs(np.frombuffer(raw, "<u2").reshape(frames.shape).astype(int) - frames)
    assert error.max() <= most
    assert error.mean() <= most / 8
    assert np.abs(sound_of(tmp_path / name) - media.waveform).max() < 2**-22
    assert open_video(tmp_path / name).metadata == {"record": "seed: 3"}
    assert name.endswith("mkv") or "(tv, bt709" in description(tmp_path / name)


@pytest.mark.parametrize(("name", "most"), [("clip.mkv", 0.0005), ("clip.mov", 0.005), ("clip.mp4", 0.005)])
def test_hlg_shows_light_as_broadcasters_do(tmp_path: Path, name: str, most: float) -> None:
    """A grey card at 38 %, diffuse white at 75 % (ITU-R BT.2408), and a saturated red among the colours of BT.2020."""
    red = np.sqrt(3 * 0.265 * 0.25 * np.array([0.6274, 0.0691, 0.0164]))  # of BT.709 in BT.2020 (ITU-R BT.2087)
    # LogC3 of 0.18, 1.0 and 0 by ARRI's tables
    cases = [((0.391, 0.391, 0.391), 0.379), ((0.5706, 0.5706, 0.5706), 0.75), ((0.4255, 0.0928, 0.0928), red)]
    logc3, wanted = (np.array([np.broadcast_to(case[i], 3) for case in cases]) for i in (0, 1))
    frames = np.round(logc3 * 65535).astype(np.uint16)[None, :, None, None].repeat(64, 2).repeat(64, 3)
    media = replace(clip(frames=3), frames=frames.reshape(1, 192, 64, 3).repeat(3, 0))
    write_hlg(media, tmp_path / name, {"record": "seed: 3"})
    command = ["-vf", "scale=out_range=pc:flags=accurate_rnd", "-pix_fmt", "rgb48le", "-f", "rawvideo", "-"]
    shown = np.frombuffer(ffmpeg("-i", tmp_path / name, *command).stdout, "<u2").reshape(3, 3, 64, 64, 3)
    middle = shown[:, :, 16:48, 16:48] / 65535
    assert np.abs(middle - wanted[:, None, None]).max() < most + 0.003  # the tables have three digits
    assert open_video(tmp_path / name).hdr
    assert open_video(tmp_path / name).metadata == {"record": "seed: 3"}
