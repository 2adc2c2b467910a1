"""Frames of videos that a clip is to show, at its rate, read by ffmpeg as data and within limits."""

import hashlib
import math
import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from tempfile import TemporaryFile

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.artifacts.files import refuse_special
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.ffmpeg import described, given, logged, program, unreadable
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.recent import Recent

READABLE = "a video that ffmpeg reads: MP4, MOV, WebM, MKV, …"
MAX_PIXELS = 2**26  # of a frame: 8192x8192, 200 MB decoded
MAX_BYTES = 2**31  # of the frames of a video
_recent = Recent["Video"](MAX_BYTES)
HDR = ("smpte2084", "arib-std-b67")  # transfer functions, PQ and HLG
PPM = ("-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24")
PACKED = {48: 16, 64: 16, 565: 8, 555: 8, 444: 8}  # bits a pixel: bits a value
COMPRESSION = 8  # frames that become one latent behind the first


@dataclass(frozen=True)
class Video:
    """A picture, or frames of a video, and what was done to read it."""

    path: Path
    sha256: str  # of the file
    frames: NDArray[np.uint8]  # [frames, height, width, RGB]
    remarks: tuple[str, ...]  # each says a change: "transparent parts are shown on white"
    audio: Audio | None = None  # of a clip that has some

    @property
    def nbytes(self) -> int:
        """Of its frames."""
        return self.frames.nbytes

    def cropped(self, height: int, width: int) -> str:
        """What of the picture covers a frame of this size, in words; empty if it is all of it."""
        _, source_height, source_width, _ = self.frames.shape
        scale = max(height / source_height, width / source_width)
        shown = min(source_width, round(width / scale)), min(source_height, round(height / scale))
        if shown == (source_width, source_height):
            return ""
        return f"it is {source_width}x{source_height}, its middle {shown[0]}x{shown[1]} fills the frame"


def read_video(path: Path, fps: float, most: int, from_end: bool) -> Video:
    """8k + 1 frames of a video, at most `most`, at this rate: its first or its last. Raises `UsageError` for a file
    without a picture, a damaged or a huge one."""
    return _recent.get((path, fps, most, from_end, _version(path)), partial(_read, path, fps, most, from_end))


def read_whole_video(path: Path, fps: float | None = None) -> Video:
    """All frames of a video at this rate; None: its own. Raises `UsageError` as `read_video`."""
    version = _version(path)
    rate = fps or open_video(path).fps
    return _recent.get((path, rate, version), partial(_read, path, rate, None, False))


def _version(path: Path) -> tuple[int, int]:
    """What changes with the content of a file. Raises `UsageError` where there is none to read."""
    refuse_special(path, READABLE)
    try:
        stat = path.stat()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check its path") from None
    if not stat.st_size:
        raise UsageError(f"{path} is empty", READABLE)
    return stat.st_mtime_ns, stat.st_size


def _read(path: Path, fps: float, most: int | None, from_end: bool) -> Video:
    """`most` frames, 8k + 1; None: all."""
    file = open_video(path)
    count = most or math.ceil(file.seconds * fps) + 1
    if file.width * file.height > MAX_PIXELS or count * file.width * file.height * 3 > MAX_BYTES:
        sentence = f"{count} frames of {path} have {file.width}x{file.height} pixels, more than is read at once"
        raise UsageError(sentence, "make it smaller first")
    frames, remarks = _decode(path, fps, count, from_end), list[str]()
    if most:
        kept = (len(frames) - 1) // COMPRESSION * COMPRESSION + 1
        frames = frames[-kept:] if from_end else frames[:kept]
        remarks = [f"its {'last' if from_end else 'first'} {kept} frames are shown"]
    line = _described(path)
    stated, bits = re.search(r"([\d.]+) fps", line), _bits(line)
    own = float(stated[1]) if stated else file.fps  # packets of some formats have no exact times
    remarks += [f"at {fps:g} frames a second, not its {own:g}"] if abs(fps - own) > 0.01 else []
    remarks += ["its frames do not come at even times"] if file.uneven else []
    remarks += [f"its {bits} bits became 8"] if bits > 8 else []
    remarks += ["its HDR light is not mapped to what screens show"] if any(map(line.count, HDR)) else []
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return Video(path, sha256, frames, (", ".join(remarks),) if remarks else ())


def _described(path: Path) -> str:
    """The line in which ffmpeg describes the picture."""
    return next((line for line in described(*given(path)).splitlines() if "Video: " in line), "")


def _bits(line: str) -> int:
    """Bits a value of the pixels that this line describes: of `yuv420p10le` 10, of `p010le` 10, of `rgb48le` 16."""
    stated = re.search(r", [a-z][a-z0-9]*?(\d+)[lb]e\b", line)
    return 8 if stated is None else PACKED.get(int(stated[1]), int(stated[1]) % 100)


def _decode(path: Path, fps: float, most: int, from_end: bool) -> np.ndarray:
    """The first or last frames [frames, height, width, RGB] at this rate, upright, one by one: a long video takes no
    memory."""
    rate, kept = Fraction(fps).limit_denominator(100_000), deque[np.ndarray](maxlen=most)
    first = [] if from_end else ["-frames:v", str(most)]
    target = ["-map", "0:v:0", "-vf", f"fps={rate}", *first, *PPM, "-"]
    with TemporaryFile() as log:
        with Popen(program(*given(path), *target), stdin=DEVNULL, stdout=PIPE, stderr=log) as process:
            assert process.stdout
            while process.stdout.readline():
                width, height = map(int, process.stdout.readline().split())
                process.stdout.readline()  # the largest value
                if len(frame := process.stdout.read(3 * width * height)) < 3 * width * height:
                    break
                kept.append(np.frombuffer(frame, np.uint8).reshape(height, width, 3))
        errors = logged(log)
    if errors or process.returncode or not kept:
        raise unreadable(path, errors, process.returncode)
    return np.stack(kept)
