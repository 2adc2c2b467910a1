"""Media of a clip: mp4, wav and frames written through ffmpeg, none of them incomplete under its final name; mp4 files
read and compared; and what is wrong with a clip."""

import re
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.errors import UsageError
from ltx2_cli.media.ffmpeg import RETRY, described, given, own, read_facts, run_ffmpeg

KEY_PREFIX = "ltx2."  # of the keys of our metadata
SPECIAL = re.compile(r"([=;#\\\n])")  # characters that ffmpeg's metadata format escapes
ENTRY = re.compile(r"^((?:\\.|[^\\=\n])+)=((?:\\[\s\S]|[^\\\n])*)$", re.MULTILINE)
ESCAPED = re.compile(r"\\([\s\S])")
STREAMS = {"v": "picture", "a": "sound"}
# by stream: what ffmpeg computes, the name it is printed under, and its unit
MEASURES = {
    "v": (("psnr", r"PSNR .*average:(\S+)", "PSNR {:.2f} dB"), ("ssim", r"SSIM .*All:(\S+)", "SSIM {:.4f}")),
    "a": (("asdr", r"SDR ch0: (\S+) dB", "SDR {:.2f} dB"),),
}
WAV = ".wav"
LEAST_WAV = 44  # bytes of its header
UNEVEN = 1.5  # times the usual step between frames; times in milliseconds differ by less


@dataclass(frozen=True)
class VideoFile:
    """Picture and sound of a file, read from its packets without decoding."""

    width: int
    height: int
    num_frames: int
    seconds: float
    sample_rate: int | None  # None: no sound
    fps: float  # on average
    uneven: bool  # some frames last longer than others
    metadata: Mapping[str, str]  # as given to `write_mp4`; empty in a file of another program


def is_video(path: Path) -> bool:
    """Whether a file begins as an mp4 does. Raises `OSError` where it cannot be read."""
    with path.open("rb") as file:
        return file.read(8)[4:] == b"ftyp"  # the name of its first box


def open_video(path: Path) -> VideoFile:
    """The streams and metadata of `path`. Raises `UsageError` where it is damaged, or has no picture."""
    stated = ENTRY.findall(read_facts(path, "-f", "ffmetadata", "-"))
    pairs = [[ESCAPED.sub(r"\1", text) for text in pair] for pair in stated]
    packets = read_facts(path, "-map", "0:v:0?", "-map", "0:a:0?", "-c", "copy", "-f", "framecrc", "-")
    facts = dict(re.findall(r"^#(\w+ \d): (.*)$", packets, re.MULTILINE))
    times = re.findall(r"^0,\s*-?\d+,\s*(-?\d+),\s*(\d+),", packets, re.MULTILINE)
    lengths = [int(length) for _, length in times]
    if facts.get("media_type 0") != "video" or not sum(lengths):
        raise UsageError(f"{path} has no picture", "name a video")
    width, height = map(int, facts["dimensions 0"].split("x"))
    seconds = float(sum(lengths) * Fraction(facts["tb 0"]))
    steps = np.diff(sorted(int(time) for time, _ in times))
    uneven = len(steps) > 0 and bool(steps.max() > UNEVEN * np.median(steps))
    sample_rate = int(facts["sample_rate 1"]) if "sample_rate 1" in facts else None
    metadata = {key.removeprefix(KEY_PREFIX): text for key, text in pairs if key.startswith(KEY_PREFIX)}
    fps = round(len(lengths) / seconds, 3)
    return VideoFile(width, height, len(lengths), seconds, sample_rate, fps, uneven, metadata)


def video_differences(first: Path, second: Path) -> dict[str, str]:
    """The streams, `picture` and `sound`, whose packets differ, each with the measured difference of the decoded data.
    Raises `UsageError` for a damaged file."""
    printed = [read_facts(path, "-map", "0", "-c", "copy", "-f", "streamhash", "-") for path in (first, second)]
    hashes = [dict(re.findall(r"^\d+,([va]),(\S+)$", text, re.MULTILINE)) for text in printed]
    different = [kind for kind in STREAMS if hashes[0].get(kind) != hashes[1].get(kind)]
    return {STREAMS[kind]: _difference(kind, first, second) for kind in different}


def _difference(kind: str, first: Path, second: Path) -> str:
    """What ffmpeg measures of two streams, or their sizes where these differ."""
    size, other = (_size(kind, open_video(path)) for path in (first, second))
    if size != other:
        return f"{other}, not {size}"
    graph = ";".join(f"[0:{kind}][1:{kind}]{measure}" for measure, _, _ in MEASURES[kind])
    log = described(*given(first), *given(second), "-lavfi", graph, "-f", "null", "-")
    matches = [(re.search(printed, log), text) for _, printed, text in MEASURES[kind]]
    return ", ".join(text.format(float(match[1])) for match, text in matches if match) or "differs"


def _size(kind: str, file: VideoFile) -> str:
    if kind == "a":
        return f"{file.sample_rate} Hz" if file.sample_rate else "none"
    return f"{file.width}x{file.height}, {file.num_frames} frames"


Frames = NDArray[np.uint8]

# BT.709 in limited range, converted and tagged: players disagree about untagged files.
TO_YUV = "scale=in_range=pc:out_range=tv:out_color_matrix=bt709:flags=accurate_rnd+full_chroma_int,format=yuv420p"
TAGS = "setparams=range=tv:colorspace=bt709:color_primaries=bt709:color_trc=bt709"
PICTURE = ["-vf", f"{TO_YUV},{TAGS}", "-c:v", "libx264", "-crf", "19", "-preset", "veryfast"]
SOUND = ["-c:a", "aac", "-b:a", "192k", "-ac", "2"]
# Metadata under keys of our own: players ignore them, and `-movflags use_metadata_tags` keeps them in a copy.
FILE = ["-movflags", "+faststart+use_metadata_tags", "-f", "mp4"]


@dataclass(frozen=True)
class Kept:
    """What a clip has of the file that it was made of."""

    path: Path
    sha256: str  # of the file, as it was read
    frames: int  # its first ones
    sound: bool  # all of its sound


@dataclass(frozen=True)
class Media:
    """A finished clip. Picture and sound differ in length by less than one latent frame; either may be empty."""

    frames: Frames  # [frames, height, width, RGB]
    waveform: NDArray[np.float32]  # [samples, channels] in −1 … 1
    fps: float
    sample_rate: int
    kept: Kept | None = None  # None: all of it is new


def write_mp4(
    media: Media,
    path: Path,
    metadata: Mapping[str, str] = MappingProxyType({}),
    picture: Path | None = None,
    sound: Path | None = None,
) -> None:
    """Write H.264, AAC and metadata to `path`, replacing an existing file. The packets are copied of a file that is
    named as the `picture` (a .txt: a list of such files), or as the `sound`. Raises `RunError` with the reason of the
    system or of ffmpeg."""
    with replacing(path) as temporary:
        samples, tags = temporary.with_suffix(".f32"), temporary.with_suffix(".tags")
        samples.write_bytes(media.waveform.clip(-1, 1).astype("<f4").tobytes())
        pairs = ((SPECIAL.sub(r"\\\1", key), SPECIAL.sub(r"\\\1", text)) for key, text in sorted(metadata.items()))
        lines = [";FFMETADATA1", *(f"{KEY_PREFIX}{key}={text}" for key, text in pairs), ""]
        tags.write_text("\n".join(lines), encoding="utf-8")
        rate, channels = (str(number) for number in (media.sample_rate, media.waveform.shape[1]))
        raw = own("f32le", samples, "-ar", rate, "-ac", channels)
        heard = (given(sound) if sound else raw) if len(media.waveform) else []
        streams = ["-map", "0:v", *(["-c:v", "copy"] if picture else PICTURE)]
        streams += ["-map", "2:a:0", *(["-c:a", "copy"] if sound else SOUND)] if heard else []
        command = [*own("ffmetadata", tags), *heard, *streams, "-map_metadata", "1", *FILE]
        if picture:
            kept = own("concat", picture, "-safe", "0") if picture.suffix == ".txt" else given(picture)
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
    """Write the sound alone, 16 bit. Raises `RunError` with the system's reason."""
    samples = np.round(media.waveform.clip(-1, 1) * 32767).astype("<i2")
    with replacing(path) as temporary, wave.open(str(temporary), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(media.sample_rate)
        file.writeframes(samples.tobytes())


def is_wav(path: Path) -> bool:
    """Whether a file begins as a WAV does. Raises `OSError` where it cannot be read."""
    with path.open("rb") as file:
        start = file.read(12)
    return (start[:4], start[8:]) == (b"RIFF", b"WAVE")


def open_wav(path: Path) -> tuple[float, int]:
    """The seconds of a WAV of whole numbers, as `write_wav` writes it, and its samples a second. Raises `UsageError`
    for one of another kind, or a damaged one."""
    try:
        with wave.open(str(path)) as file:
            length, rate, size = file.getnframes(), file.getframerate(), file.getnchannels() * file.getsampwidth()
            cut = path.stat().st_size < LEAST_WAV + length * size
    except (wave.Error, EOFError) as error:
        raise UsageError(f"{path} is no WAV that ltx2 writes: {str(error) or 'it ends in its header'}", RETRY) from None
    if cut or not (length and rate):
        raise UsageError(f"{path} is damaged: it {'is cut short' if cut else 'has no samples'}", RETRY)
    return length / rate, rate


def write_frames(media: Media, folder: Path) -> None:
    """Write the frames alone as `00000.png`, `00001.png`, … into a new folder, which replaces an existing one. Raises
    `RunError` as `write_mp4`."""
    with replacing(folder.resolve()) as temporary:
        temporary.mkdir()
        names = f"file:{str(temporary).replace('%', '%%')}/%05d.png"
        _write(media, ["-start_number", "0", "-f", "image2", names], folder)


def write_record(path: Path, text: str) -> None:
    """Write the YAML record of a video."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _write(media: Media, command: list[str], path: Path) -> None:
    """Run ffmpeg with the raw frames as its first input. Raises `RunError` that names `path`."""
    rate = Fraction(media.fps).limit_denominator(100_000)  # keeps 23.976, and 24000 / 1001
    size = f"{media.frames.shape[2]}x{media.frames.shape[1]}"
    frames = own("rawvideo", None, "-pix_fmt", "rgb24", "-s", size, "-framerate", str(rate))
    run_ffmpeg([*frames, *command], path, np.ascontiguousarray(media.frames).data)


SIDE = 64  # about the number of rows and columns of a frame that are checked
SPECK = 1e-3  # the share of a frame's values that may differ: 20x20 pixels of 768x512
DARK = 16  # levels of 255: less than a four-hundredth of white's light
FLAT = 6  # levels around a frame's mean: hardly visible, and light falls off by more on any wall
STILL = 3  # levels between frames: less than grain, breath or wind cause
SILENT = 1e-3  # of full scale, -60 dB: under the noise of a quiet room
FULL = 32767 / 32768  # the largest sample of 16 bits; decoding clips to full scale
CLIPPED = 1e-2  # of the samples: a pure tone that just reaches full scale does so in 0.005 of them
MAX_DIFFERENCE = 0.1  # of lengths, in seconds: sound of whole latents, less 0.03 s, may be 0.05 s short


def findings(media: Media) -> list[str]:
    """A sentence for each thing that is wrong with `media`. Missing picture or sound is not wrong."""
    picture, sound = len(media.frames) / media.fps, len(media.waveform) / media.sample_rate
    differ = picture and sound and abs(picture - sound) > MAX_DIFFERENCE
    lengths = [f"picture and sound differ in length: {picture:.2f} s and {sound:.2f} s"] if differ else []
    return [*_picture_findings(media.frames), *_sound_findings(media.waveform), *lengths]


def _picture_findings(frames: Frames) -> Iterator[str]:
    """The gravest of black, one colour and frozen: the former imply the latter. The first frames mostly decide."""
    if not frames.size:
        return
    step = max(1, min(frames.shape[1:3]) // SIDE)
    sampled = [frame.astype(np.int16) for frame in frames[:, ::step, ::step]]
    if all(_rare(frame > DARK) for frame in sampled):
        yield "the picture is black"
    elif all(_rare(np.abs(frame - frame.mean((0, 1))) > FLAT) for frame in sampled):
        yield "every frame of the picture is a single colour"
    elif sampled[1:] and all(_rare(np.abs(frame - sampled[0]) > STILL) for frame in sampled[1:]):
        yield "the picture is frozen: every frame is like the first"


def _rare(values: NDArray[np.bool_]) -> bool:
    """Whether at most a speck is true."""
    return bool(np.count_nonzero(values) <= SPECK * values.size)


def _sound_findings(waveform: NDArray[np.float32]) -> Iterator[str]:
    if not len(waveform):
        return
    if all(np.ptp(channel) <= 2 * SILENT for channel in waveform.T):  # a constant is not heard either
        yield "the sound is silent"
    elif (share := np.count_nonzero(np.abs(waveform) >= FULL) / waveform.size) > CLIPPED:
        yield f"the sound is clipped: {100 * share:.0f} % of it is at full scale"
