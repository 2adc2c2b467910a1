"""Media of a clip, written through ffmpeg as mp4, wav or frames. No file is incomplete under its final name."""

import wave
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from types import MappingProxyType

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import MAKE_ROOM, RunError
from ltx2_cli.files import replacing
from ltx2_cli.media.video_file import first_error, metadata_text

Frames = NDArray[np.uint8]

# BT.709 in limited range, converted and tagged: players disagree about untagged files.
TO_YUV = "scale=in_range=pc:out_range=tv:out_color_matrix=bt709:flags=accurate_rnd+full_chroma_int,format=yuv420p"
TAGS = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
PICTURE = ["-vf", f"{TO_YUV},{TAGS}", "-c:v", "libx264", "-crf", "19", "-preset", "veryfast"]
SOUND = ["-c:a", "aac", "-b:a", "192k", "-ac", "2"]
# Metadata under keys of our own: players ignore them, and `-movflags use_metadata_tags` keeps them in a copy.
FILE = ["-movflags", "+faststart+use_metadata_tags", "-f", "mp4"]
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Media:
    """A finished clip. Picture and sound differ in length by less than one latent frame; either may be empty."""

    frames: Frames  # [frames, height, width, RGB]
    waveform: NDArray[np.float32]  # [samples, channels] in −1 … 1
    fps: float
    sample_rate: int


def write_mp4(media: Media, path: Path, metadata: Mapping[str, str] = NOTHING) -> None:
    """Write H.264, AAC and metadata to `path`, replacing an existing file. Raises `RunError` with the reason of the
    system or of ffmpeg."""
    with replacing(path) as temporary:
        sound, tags = temporary.with_suffix(".f32"), temporary.with_suffix(".tags")
        sound.write_bytes(media.waveform.clip(-1, 1).astype("<f4").tobytes())
        tags.write_text(metadata_text(metadata), encoding="utf-8")
        channels, rate = str(media.waveform.shape[1]), str(media.sample_rate)
        samples = ["-f", "f32le", "-ar", rate, "-ac", channels, "-i", f"file:{sound}", *PICTURE, *SOUND]
        streams = samples if len(media.waveform) else PICTURE
        command = ["-f", "ffmetadata", "-i", f"file:{tags}", *streams, "-map_metadata", "1", *FILE, f"file:{temporary}"]
        _run_ffmpeg(media, command, path)


def write_wav(media: Media, path: Path) -> None:
    """Write the sound alone, 16 bit. Raises `RunError` with the system's reason."""
    samples = np.round(media.waveform.clip(-1, 1) * 32767).astype("<i2")
    with replacing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(media.sample_rate)
        file.writeframes(samples.tobytes())


def write_frames(media: Media, folder: Path) -> None:
    """Write the frames alone as `00000.png`, `00001.png`, … into a new folder, which replaces an existing one. Raises
    `RunError` as `write_mp4`."""
    with replacing(folder.resolve()) as temporary:
        temporary.mkdir()
        names = f"file:{str(temporary).replace('%', '%%')}/%05d.png"
        _run_ffmpeg(media, ["-start_number", "0", "-f", "image2", names], folder)


def write_record(path: Path, text: str) -> None:
    """Write the YAML record of a video."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _run_ffmpeg(media: Media, command: list[str], path: Path) -> None:
    """Run ffmpeg with the raw frames as its first input. Raises `RunError` that names `path`."""
    rate = Fraction(media.fps).limit_denominator(100_000)  # keeps 23.976, and 24000 / 1001
    size = f"{media.frames.shape[2]}x{media.frames.shape[1]}"
    program = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-loglevel", "error", "-y"]
    frames = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-framerate", str(rate), "-i", "-"]
    with TemporaryFile() as log, Popen([*program, *frames, *command], stdin=PIPE, stderr=log) as process:
        try:
            assert process.stdin
            with suppress(BrokenPipeError), process.stdin as pipe:  # ffmpeg gave up, and its log says why
                pipe.write(np.ascontiguousarray(media.frames).data)
            process.wait()
        finally:
            process.kill()  # without effect on one that has ended
        log.seek(0)
        if process.returncode:
            raise RunError(f"ffmpeg cannot write {path}: {first_error(log.read(), process.returncode)}", MAKE_ROOM)
