"""Media files written through ffmpeg, under a temporary name until they are complete."""

import re
import wave
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.media.clip import Frames, Media
from ltx2_cli.media.ffmpeg import own_input, run_ffmpeg, untrusted_input
from ltx2_cli.media.probe import KEY_PREFIX
from ltx2_cli.media.transfer_functions import Light, light_to_hlg, logc3_to_light

WAV = ".wav"
SPECIAL = re.compile(r"([=;#\\\n])")  # characters that ffmpeg's metadata format escapes


class Colours(NamedTuple):
    """Colours of a file, by ffmpeg's names. Players disagree about files that are not tagged with them."""

    matrix: str
    primaries: str
    transfer: str


SDR = Colours("bt709", "bt709", "bt709")
HLG = Colours("bt2020nc", "bt2020", "arib-std-b67")


def _tags(colours: Colours) -> str:
    return f"colorspace={colours.matrix}:color_primaries={colours.primaries}:color_trc={colours.transfer}"


def _to_yuv(colours: Colours, pixels: str) -> str:
    """The filters that convert RGB to a pixel format in limited range."""
    scale = f"scale=in_range=pc:out_range=tv:out_color_matrix={colours.matrix}:flags=accurate_rnd+full_chroma_int"
    return f"{scale},format={pixels},setparams=range=tv:{_tags(colours)}"


H264 = ["-c:v", "libx264", "-crf", "19", "-preset", "veryfast"]
# 10 bits, under the name by which Apple's players know it
H265 = ["-c:v", "libx265", "-crf", "19", "-preset", "fast", "-tag:v", "hvc1", "-x265-params", "log-level=error"]
# Metadata under keys of our own: players ignore them, and `-movflags use_metadata_tags` keeps them in a copy.
TAGGED = ["-movflags", "+faststart+use_metadata_tags"]


PIXEL_FORMATS = {"uint8": "rgb24", "uint16": "rgb48le", "float32": "gbrpf32le"}  # of frames, by their type
LINEAR_AT_ONCE = 8  # frames of linear light in memory


class Container(NamedTuple):
    """How a kind of file is written: ffmpeg's arguments."""

    video: list[str]
    audio: list[str]
    file: list[str]


# Master files, by their ending: ProRes 4444, 10 bits, for editing; and FFV1, lossless, of all 16 bits.
PRORES = ["-c:v", "prores_ks", "-profile:v", "4444", "-vendor", "apl0"]
FFV1 = ["format=gbrp16le", "-c:v", "ffv1", "-level", "3", "-slices", "4", "-slicecrc", "1"]
PCM = ["-c:a", "pcm_s24le"]
AAC = ["-c:a", "aac", "-b:a", "192k", "-ac", "2"]
MP4 = Container(["-vf", _to_yuv(SDR, "yuv420p"), *H264], AAC, [*TAGGED, "-f", "mp4"])
MASTERS = {
    ".mov": Container(["-vf", _to_yuv(SDR, "yuv444p10le"), *PRORES], PCM, [*TAGGED, "-f", "mov"]),
    ".mkv": Container(["-vf", *FFV1], PCM, ["-f", "matroska"]),
}
OF_HLG = {
    ".mp4": Container(["-vf", _to_yuv(HLG, "yuv420p10le"), *H265], AAC, [*TAGGED, "-f", "mp4"]),
    ".mov": Container(["-vf", _to_yuv(HLG, "yuv444p10le"), *PRORES], PCM, [*TAGGED, "-f", "mov"]),
    ".mkv": Container(["-vf", f"setparams={_tags(HLG)},{FFV1[0]}", *FFV1[1:]], PCM, ["-f", "matroska"]),
}


def write_master(media: Media, path: Path, metadata: Mapping[str, str]) -> None:
    """Write frames of 16 bits and audio to a master file, as its name says: ProRes in a .mov, FFV1 in a .mkv, both with
    uncompressed audio. Raises as `write_mp4`."""
    _write_container(media, path, metadata, MASTERS[path.suffix.lower()])


def write_mp4(
    media: Media,
    path: Path,
    metadata: Mapping[str, str] = MappingProxyType({}),
    copied_video: Path | None = None,
    copied_audio: Path | None = None,
) -> None:
    """Write H.264, AAC and metadata to `path`, replacing an existing file. Packets are copied from the files
    `copied_video` (a .txt: a list of such files) and `copied_audio`. Raises `RunError` with the reason of the system or
    of ffmpeg."""
    _write_container(media, path, metadata, MP4, copied_video, copied_audio)


def _write_container(
    media: Media,
    path: Path,
    metadata: Mapping[str, str],
    container: Container,
    copied_video: Path | None = None,
    copied_audio: Path | None = None,
) -> None:
    with replacing(path) as temporary:
        samples, tags = temporary.with_suffix(".f32"), temporary.with_suffix(".tags")
        samples.write_bytes(media.waveform.clip(-1, 1).astype("<f4").tobytes())
        pairs = ((SPECIAL.sub(r"\\\1", key), SPECIAL.sub(r"\\\1", text)) for key, text in sorted(metadata.items()))
        lines = [";FFMETADATA1", *(f"{KEY_PREFIX}{key}={text}" for key, text in pairs), ""]
        tags.write_text("\n".join(lines), encoding="utf-8")
        rate, channels = (str(number) for number in (media.sample_rate, media.waveform.shape[1]))
        raw = own_input("f32le", samples, "-ar", rate, "-ac", channels)
        heard = (untrusted_input(copied_audio) if copied_audio else raw) if len(media.waveform) else []
        streams = ["-map", "0:v", *(["-c:v", "copy"] if copied_video else container.video)]
        streams += ["-map", "2:a:0", *(["-c:a", "copy"] if copied_audio else container.audio)] if heard else []
        command = [*own_input("ffmetadata", tags), *heard, *streams, "-map_metadata", "1", *container.file]
        if copied_video:
            kept = (
                own_input("concat", copied_video, "-safe", "0")
                if copied_video.suffix == ".txt"
                else untrusted_input(copied_video)
            )
            run_ffmpeg([*kept, *command, f"file:{temporary}"], path)
        else:
            _write(media, [*command, f"file:{temporary}"], path)


def write_media(media: Media, path: Path, metadata: Mapping[str, str]) -> None:
    """Write a clip as its name says; a WAV has no place for metadata. Raises `RunError` as both."""
    if path.suffix.lower() == WAV:
        write_wav(media, path)
    else:
        write_mp4(media, path, metadata)


def write_wav(media: Media, path: Path) -> None:
    """Write the audio alone, 16 bit. Raises `RunError` with the system's reason."""
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
        _write(media, ["-start_number", "0", "-f", "image2", names], folder)


def write_hlg(media: Media, path: Path, metadata: Mapping[str, str]) -> None:
    """Write frames of LogC3 and audio in HLG, as the file's name says: H.265 of 10 bits in an mp4, ProRes in a .mov,
    FFV1 in a .mkv. Raises as `write_mp4`."""
    frames = np.empty(media.frames.shape, np.uint16)
    for few in _few_at_once(media):
        frames[few] = light_to_hlg(logc3_to_light(media.frames[few]))
    _write_container(replace(media, frames=frames), path, metadata, OF_HLG[path.suffix.lower()])


def write_linear_frames(media: Media, folder: Path, to_light: Callable[[Frames], Light]) -> None:
    """Write the frames alone as OpenEXR, `00000.exr` and so on, in half floats of linear light with BT.709 primaries.
    Raises `RunError` as `write_frames`."""
    with replacing(folder.resolve()) as temporary:
        temporary.mkdir()
        names = f"file:{str(temporary).replace('%', '%%')}/%05d.exr"
        command = ["-f", "image2", "-c:v", "exr", "-format", "half", "-compression", "zip16", names]
        for few in _few_at_once(media):
            light = to_light(media.frames[few])
            _write(replace(media, frames=light), ["-start_number", str(few.start), *command], folder)


def _few_at_once(media: Media) -> Iterator[slice]:
    """Frames whose light is in memory at once."""
    return (slice(first, first + LINEAR_AT_ONCE) for first in range(0, len(media.frames), LINEAR_AT_ONCE))


def write_record(path: Path, text: str) -> None:
    """Write the YAML record of a video."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _write(media: Media, command: list[str], path: Path) -> None:
    """Run ffmpeg with the raw frames as its first input. Raises `RunError` that names `path`."""
    rate = Fraction(media.fps).limit_denominator(100_000)  # keeps 23.976, and 24000 / 1001
    size = f"{media.frames.shape[2]}x{media.frames.shape[1]}"
    pixels = media.frames
    if pixels.dtype == np.float32:  # in planes, green first
        pixels = pixels[..., [1, 2, 0]].transpose(0, 3, 1, 2)
    layout = ("-pix_fmt", PIXEL_FORMATS[pixels.dtype.name], "-s", size, "-framerate", str(rate))
    run_ffmpeg([*own_input("rawvideo", None, *layout), *command], path, np.ascontiguousarray(pixels).data.cast("B"))
