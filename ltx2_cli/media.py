"""Frames and sound to mp4 through ffmpeg, and the record beside it. Nothing is half written under its final name."""

import subprocess
import tempfile
import wave
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from ltx2_cli.spec import MAKE_ROOM, RunError
from ltx2_cli.video_file import first_complaint, metadata_text
from ltx2_cli.writing import replacing

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

    frames: Frames | Iterable[Frames]  # [frames, height, width, RGB], whole or in chunks along the frames
    waveform: NDArray[np.float32]  # [samples, channels] in −1 … 1
    fps: float
    sample_rate: int


def write_mp4(media: Media, path: Path, about: Mapping[str, str] = NOTHING) -> None:
    """Write H.264 and AAC to `path`, replacing what is there; `about` is what the file says of itself.

    Raises `RunError` with what the system or ffmpeg says.
    """
    with replacing(path) as temporary:
        sound, tags = temporary.with_suffix(".f32"), temporary.with_suffix(".tags")
        sound.write_bytes(media.waveform.clip(-1, 1).astype("<f4").tobytes())
        tags.write_text(metadata_text(about), encoding="utf-8")
        first, chunks = _chunks(media)
        failure = _ffmpeg(_command(media, first.shape, sound, tags, temporary), chunks)
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
        first, chunks = _chunks(media)
        numbered = ["-start_number", "0", "-f", "image2", f"file:{str(temporary).replace('%', '%%')}/%05d.png"]
        failure = _ffmpeg([*_reading(media, first.shape), *numbered], chunks)
        if failure:
            raise RunError(f"ffmpeg cannot write {folder}: {failure}", MAKE_ROOM)


def write_record(path: Path, text: str) -> None:
    """Write the YAML record of a video."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _chunks(media: Media) -> tuple[Frames, Iterable[Frames]]:
    """The first chunk of frames, and all of them."""
    chunks = iter([media.frames] if isinstance(media.frames, np.ndarray) else media.frames)
    first = next(chunks)
    return first, chain([first], chunks)


def _reading(media: Media, shape: tuple[int, ...]) -> list[str]:
    """The call of ffmpeg, so far as it reads raw frames of `shape` from its standard input."""
    rate = Fraction(media.fps).limit_denominator(100_000)  # 23.976 stays what it is, 24000 / 1001 too
    frames = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{shape[2]}x{shape[1]}", "-framerate", str(rate), "-i", "-"]
    return [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-y", *frames]


def _command(media: Media, shape: tuple[int, ...], sound: Path, tags: Path, output: Path) -> list[str]:
    """The call of ffmpeg that makes an mp4, without a sound track where there is no sound."""
    about = ["-f", "ffmetadata", "-i", f"file:{tags}"]
    samples = ["-f", "f32le", "-ar", str(media.sample_rate), "-ac", str(media.waveform.shape[1]), "-i", f"file:{sound}"]
    heard = [*samples, *PICTURE, *SOUND] if len(media.waveform) else PICTURE
    return [*_reading(media, shape), *about, *heard, "-map_metadata", "1", *FILE, f"file:{output}"]


def _ffmpeg(command: list[str], chunks: Iterable[Frames]) -> str:
    """Run it; the reason if it fails."""
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=log) as process:
        try:
            assert process.stdin
            _feed(process.stdin, chunks)
            process.wait()
        finally:
            process.kill()  # nothing to a process that has ended by itself
        log.seek(0)
        return first_complaint(log.read(), process.returncode) if process.returncode else ""


def _feed(pipe: IO[bytes], chunks: Iterable[Frames]) -> None:
    with suppress(BrokenPipeError), pipe:  # a broken pipe: ffmpeg gave up, and its log says why
        for chunk in chunks:
            pipe.write(np.ascontiguousarray(chunk).data)
