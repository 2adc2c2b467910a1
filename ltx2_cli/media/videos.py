"""Read frames of input videos at the clip's rate, within limits."""

import hashlib
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio
from ltx2_cli.media.decode import decode_frames
from ltx2_cli.media.file_cache import FileCache
from ltx2_cli.media.probe import READABLE_VIDEOS, open_video

MAX_PIXELS = 2**26  # of a frame: 8192x8192, 200 MB decoded
MAX_VIDEO_BYTES = 2**31  # of the frames of a video
_recent = FileCache["Video"](MAX_VIDEO_BYTES, READABLE_VIDEOS)
COMPRESSION = 8  # frames that become one latent behind the first


@dataclass(frozen=True)
class Video:
    """An image or the frames of a video, and remarks on its conversion."""

    path: Path
    sha256: str  # of the file
    frames: NDArray[np.uint8]  # [frames, height, width, RGB]
    remarks: tuple[str, ...]  # each says a change: "transparent parts are shown on white"
    audio: Audio | None = None  # of a clip that has some

    @property
    def nbytes(self) -> int:
        """Bytes of its frames."""
        return self.frames.nbytes

    def cropped(self, height: int, width: int) -> str:
        """A sentence on the crop that covers a frame of this size; empty for the whole image."""
        _, source_height, source_width, _ = self.frames.shape
        scale = max(height / source_height, width / source_width)
        shown = min(source_width, round(width / scale)), min(source_height, round(height / scale))
        if shown == (source_width, source_height):
            return ""
        return f"it is {source_width}x{source_height}, its middle {shown[0]}x{shown[1]} fills the frame"


def read_video(path: Path, fps: float, most: int, from_end: bool) -> Video:
    """Read the first or last 8k + 1 frames of a video, at most `most`, at this rate. Raises `UsageError` for a file
    that is without video, damaged or huge."""
    return _recent.get(path, (fps, most, from_end), partial(_read, path, fps, most, from_end))


def in_whole_latents(count: int) -> int:
    """The most of `count` frames that whole latents make, 8k + 1."""
    return (count - 1) // COMPRESSION * COMPRESSION + 1


def read_whole_video(path: Path, fps: float | None = None) -> Video:
    """All frames of a video at this rate; None: its own. Raises `UsageError` as `read_video`."""
    rate = fps or open_video(path).fps
    return _recent.get(path, rate, partial(_read, path, rate, None, False))


def _read(path: Path, fps: float, most: int | None, from_end: bool) -> Video:
    """`most` frames, 8k + 1; None: all."""
    file = open_video(path)
    count = most or math.ceil(max(file.seconds, file.packets.starts.max() + 1 / file.fps) * fps) + 1
    if file.width * file.height > MAX_PIXELS or count * file.width * file.height * 3 > MAX_VIDEO_BYTES:
        sentence = f"{count} frames of {path} have {file.width}x{file.height} pixels, more than is read at once"
        raise UsageError(sentence, "make it smaller first")
    frames, remarks = decode_frames(path, file, fps, count, from_end), list[str]()
    if most:
        kept = in_whole_latents(len(frames))
        frames = frames[-kept:] if from_end else frames[:kept]
        remarks = [f"its {'last' if from_end else 'first'} {kept} frames are shown"]
    own = file.stated_fps
    remarks += [f"at {fps:g} frames a second, not its {own:g}"] if abs(fps - own) > 0.01 else []
    remarks += ["its frames do not come at even times"] if file.uneven else []
    remarks += [f"its {file.bits} bits became 8"] if file.bits > 8 else []
    remarks += ["its HDR light is not mapped to what screens show"] if file.hdr else []
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return Video(path, sha256, frames, (", ".join(remarks),) if remarks else ())
