"""Facts of a media file, read from its header and its packets without decoding."""

import re
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from ltx2_cli.errors import UsageError
from ltx2_cli.media.ffmpeg import RETRY, read_facts

KEY_PREFIX = "ltx2."  # of the keys of our metadata
ENTRY = re.compile(r"^((?:\\.|[^\\=\n])+)=((?:\\[\s\S]|[^\\\n])*)$", re.MULTILINE)
ESCAPED = re.compile(r"\\([\s\S])")
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
