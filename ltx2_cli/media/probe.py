"""Facts of a media file, read from its header and its packets without decoding."""

import re
import wave
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import UsageError
from ltx2_cli.media.ffmpeg import RETRY, read_facts, read_printed
from ltx2_cli.media.file_cache import FileCache

READABLE_VIDEOS = "a video that ffmpeg reads: MP4, MOV, WebM, MKV, …"

KEY_PREFIX = "ltx2."  # of the keys of our metadata
MATROSKA = b"\x1a\x45\xdf\xa3"
ENTRY = re.compile(r"^((?:\\.|[^\\=\n])+)=((?:\\[\s\S]|[^\\\n])*)$", re.MULTILINE)
ESCAPED = re.compile(r"\\([\s\S])")
LEAST_WAV = 44  # bytes of its header
PACKET = re.compile(r"^0,\s*-?\d+,\s*(-?\d+),\s*(\d+),\s*\d+, 0x\w+(?:, F=0x(\w+))?", re.MULTILINE)
CONTAINER = re.compile(r"^\[info\] Input #0, (\S+), from ", re.MULTILINE)
VIDEO_STREAM = re.compile(r"^\[info\]   Stream #0:.*: Video: .*$", re.MULTILINE)
KEY = 1  # a flag of packets; those that have it alone are printed without flags
ENCODING = ("codec_id", "dimensions", "extradata")
HDR = ("smpte2084", "arib-std-b67")  # transfer functions, PQ and HLG
PACKED_BITS = {48: 16, 64: 16, 565: 8, 555: 8, 444: 8}  # bits a pixel: bits a value
UNEVEN_STEP = 1.5  # times the usual step between frames; times in milliseconds differ by less
_recent = FileCache["VideoFile"](2**26, READABLE_VIDEOS)


@dataclass(frozen=True, eq=False)
class Packets:
    """The encoded frames of a video stream, in decoding order."""

    encoding: tuple[str, ...]  # what a decoder is told of all: equal packets may follow each other
    starts: NDArray[np.float64]  # seconds at which each is shown, from the beginning of the file
    keys: NDArray[np.bool_]  # which can be decoded without those before


@dataclass(frozen=True)
class VideoFile:
    """Video and audio of a file, by its packets, without decoding."""

    width: int
    height: int
    num_frames: int
    seconds: float
    sample_rate: int | None  # None: no audio
    fps: float  # on average
    metadata: Mapping[str, str]  # as given to `write_mp4`; empty in a file of another program
    uneven: bool  # some frames last longer than others
    container: str  # ffmpeg's names of its format
    stated: str  # the line in which ffmpeg describes the video
    packets: Packets
    audio_codec: str | None  # None: no audio

    @property
    def nbytes(self) -> int:
        """About the used part of the file."""
        return self.packets.starts.nbytes + sum(map(len, self.metadata.values()))

    @property
    def stated_fps(self) -> float:
        """Frames per second by its header: packets of some formats have no exact times."""
        stated = re.search(r"([\d.]+) fps", self.stated)
        return float(stated[1]) if stated else self.fps

    @property
    def bits(self) -> int:
        """Bits of a value of its pixels: 10 of `yuv420p10le` and `p010le`, 16 of `rgb48le`."""
        stated = re.search(r", [a-z][a-z0-9]*?(\d+)[lb]e\b", self.stated)
        return 8 if stated is None else PACKED_BITS.get(int(stated[1]), int(stated[1]) % 100)

    @property
    def hdr(self) -> bool:
        """Whether its values are of light that screens do not show."""
        return any(map(self.stated.count, HDR))


def is_video(path: Path) -> bool:
    """Whether a file begins as an mp4, a MOV or a Matroska file does. Raises `OSError` where it cannot be read."""
    with path.open("rb") as file:
        begin = file.read(8)
    return begin[4:] == b"ftyp" or begin[:4] == MATROSKA  # the name of a first box, or an element's number


def open_video(path: Path) -> VideoFile:
    """Streams and metadata of `path`, by one call of ffmpeg until the file changes. Raises `UsageError` for a file that
    is damaged or without video."""
    return _recent.get(path, None, partial(_open, path))


def _open(path: Path) -> VideoFile:
    with TemporaryFile() as file:
        about = ["-f", "ffmetadata", f"pipe:{file.fileno()}"]
        copied = ["-map", "0:v:0?", "-map", "0:a:0?", "-c", "copy", "-f", "framecrc", "-"]
        printed, log = read_facts(path, *about, *copied, descriptors=[file.fileno()])
        file.seek(0)
        stated = ENTRY.findall(read_printed(path, file))
    pairs = [[ESCAPED.sub(r"\1", text) for text in pair] for pair in stated]
    lower = [(key.lower(), text) for key, text in pairs]  # Matroska's are in capitals
    metadata = {key.removeprefix(KEY_PREFIX): text for key, text in lower if key.startswith(KEY_PREFIX)}
    facts = dict(re.findall(r"^#(\w+ \d): +(.*)$", printed, re.MULTILINE))
    packets = PACKET.findall(printed)
    units = sum(int(length) for _, length, _ in packets)
    if facts.get("media_type 0") != "video" or not units:
        raise UsageError(f"{path} has no video", "name a video")
    seconds = float(units * Fraction(facts["tb 0"]))
    steps = np.diff(sorted(int(time) for time, _, _ in packets))
    sample_rate = int(facts["sample_rate 1"]) if "sample_rate 1" in facts else None
    width, height = map(int, facts["dimensions 0"].split("x"))
    return VideoFile(
        width,
        height,
        num_frames=len(packets),
        seconds=seconds,
        sample_rate=sample_rate,
        fps=round(len(packets) / seconds, 3),
        metadata=metadata,
        uneven=len(steps) > 0 and bool(steps.max() > UNEVEN_STEP * np.median(steps)),
        container=found[1] if (found := CONTAINER.search(log)) else "",
        stated=found[0] if (found := VIDEO_STREAM.search(log)) else "",
        packets=_packets(facts, packets),
        audio_codec=facts.get("codec_id 1"),
    )


def _packets(facts: Mapping[str, str], printed: list[tuple[str, str, str]]) -> Packets:
    encoding = tuple(facts.get(f"{name} 0", "") for name in ENCODING)
    starts = [float(int(time) * Fraction(facts["tb 0"])) for time, _, _ in printed]
    keys = [not flags or bool(int(flags, 16) & KEY) for _, _, flags in printed]
    return Packets(encoding, np.array(starts), np.array(keys, bool))


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
