"""Frames and sound to mp4 through ffmpeg, and the record beside it. Nothing is half written under its final name."""

import subprocess
import tempfile
import wave
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import MAKE_ROOM, RunError
from ltx2_cli.files import replacing
from ltx2_cli.media.video_file import first_error, metadata_text

Frames = NDArray[np.uint8]

# BT.709 in limited range, both converted to and said: an untagged file looks different in different players.
TO_YUV = "scale=in_range=pc:out_range=tv:out_color_matrix=bt709:flags=accurate_rnd+full_chroma_int,format=yuv420p"
TAGS = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
PICTURE = ["-vf", f"{TO_YUV},{TAGS}", "-c:v", "libx264", "-crf", "19", "-preset", "veryfast"]
SOUND = ["-c:a", "aac", "-b:a", "192k", "-ac", "2"]
# Tags under names of our own: players pass over them, and `-movflags use_metadata_tags` keeps them in a copy.
FILE = ["-movflags", "+faststart+use_metadata_tags", "-f", "mp4"]
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Media:
    """One finished clip. Picture and sound begin together and differ in length by less than one latent frame; either
    may be empty."""

    frames: Frames  # [frames, height, width, RGB]
    waveform: NDArray[np.float32]  # [samples, channels] in −1 … 1
    fps: float
    sample_rate: int


def write_mp4(media: Media, path: Path, metadata: Mapping[str, str] = NOTHING) -> None:
    """Write H.264 and AAC to `path`, replacing what is there; `metadata` is what the file says of itself.

    Raises `RunError` with what the system or ffmpeg says.
    """
    with replacing(path) as temporary:
        sound, tags = temporary.with_suffix(".f32"), temporary.with_suffix(".tags")
        sound.write_bytes(media.waveform.clip(-1, 1).astype("<f4").tobytes())
        tags.write_text(metadata_text(metadata), encoding="utf-8")
        failure = _ffmpeg(_command(media, sound, tags, temporary), media.frames)
        if failure:
            raise RunError(f"ffmpeg cannot write {path}: {failure}", MAKE_ROOM)


def write_wav(media: Media, path: Path) -> None:
    """Write the sound alone, 16 bit. Raises `RunError` with what the system says."""
    samples = np.round(media.waveform.clip(-1, 1) * 32767).astype("<i2")
    with replacing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(media.sample_rate)
        file.writeframes(samples.tobytes())


def write_frames(media: Media, folder: Path) -> None:
    """Write the frames alone as `00000.png`, `00001.png`, … into a new folder, which replaces one that is there.

    Raises `RunError` as `write_mp4`.
    """
    with replacing(folder.resolve()) as temporary:
        temporary.mkdir()
        numbered = ["-start_number", "0", "-f", "image2", f"file:{str(temporary).replace('%', '%%')}/%05d.png"]
        failure = _ffmpeg([*_reading(media), *numbered], media.frames)
        if failure:
            raise RunError(f"ffmpeg cannot write {folder}: {failure}", MAKE_ROOM)


def write_record(path: Path, text: str) -> None:
    """Write the YAML record of a video."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _reading(media: Media) -> list[str]:
    """The ffmpeg command as far as it reads raw frames from its standard input."""
    rate = Fraction(media.fps).limit_denominator(100_000)  # 23.976 stays what it is, 24000 / 1001 too
    size = f"{media.frames.shape[2]}x{media.frames.shape[1]}"
    frames = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-framerate", str(rate), "-i", "-"]
    return [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-y", *frames]


def _command(media: Media, sound: Path, tags: Path, output: Path) -> list[str]:
    """The ffmpeg command that makes an mp4, without a sound track where there is no sound."""
    about = ["-f", "ffmetadata", "-i", f"file:{tags}"]
    samples = ["-f", "f32le", "-ar", str(media.sample_rate), "-ac", str(media.waveform.shape[1]), "-i", f"file:{sound}"]
    heard = [*samples, *PICTURE, *SOUND] if len(media.waveform) else PICTURE
    return [*_reading(media), *about, *heard, "-map_metadata", "1", *FILE, f"file:{output}"]


def _ffmpeg(command: list[str], frames: Frames) -> str:
    """Run ffmpeg on raw frames. Returns the reason if it fails."""
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log) as process:
        try:
            assert process.stdin
            with suppress(BrokenPipeError), process.stdin as pipe:  # ffmpeg gave up, and its log says why
                pipe.write(np.ascontiguousarray(frames).data)
            process.wait()
        finally:
            process.kill()  # nothing to a process that has ended by itself
        log.seek(0)
        return first_error(log.read(), process.returncode) if process.returncode else ""
