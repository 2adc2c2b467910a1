"""Write edited clips with copied packets of the original file, where possible."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.media.clip import Media, Original
from ltx2_cli.media.ffmpeg import run_ffmpeg, untrusted_input
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.write import write_media, write_mp4


def write_clip(media: Media, path: Path, metadata: Mapping[str, str]) -> str:
    """Write as `write_mp4`, with copied packets for kept frames where possible. Returns a sentence on them; empty for a
    new clip."""
    if (original := media.original) is None:
        write_media(media, path, metadata)
        return ""
    unchanged = _is_unchanged(original)
    with replacing(path) as temporary:
        copied = unchanged and original.audio and open_video(original.path).audio_codec == "aac"
        copied_audio = original.path if copied else None
        copied_video, count = (unchanged and _copied_packets(media, original, temporary)) or (None, 0)
        write_mp4(media, temporary, metadata, copied_video, copied_audio)
    why = "ltx2 encodes with other settings, or at another rate" if unchanged else f"{original.path} has changed since"
    where = " before the new ones" if original.frames < len(media.frames) else ""
    kinds = [f"{count} of {original.frames} frames{where}{'' if count else f' ({why})'}"] if original.frames else []
    kinds += [f"the audio{'' if copied_audio else ' not'}"] if original.audio else []
    return f"copied without encoding them again: {', '.join(kinds)}" if kinds else ""


def _is_unchanged(original: Original) -> bool:
    """Whether the original file has not changed since it was read."""
    try:
        with original.path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == original.sha256
    except OSError:
        return False


def _copied_packets(media: Media, original: Original, temporary: Path) -> tuple[Path, int] | None:
    """A file beside `temporary`, or a list of such files, whose packets are the video, and how many frames of the
    kept file are among them. None where none can be copied."""
    packets = open_video(original.path).packets
    count = _leading(packets.starts, original.frames, media.fps)
    if not count or packets.encoding[0] != "h264":
        return None
    old, new, listed = (temporary.with_name(f"{temporary.stem}{name}") for name in ("-old.mp4", "-new.mp4", ".txt"))
    copy = ["-map", "0:v:0", "-c", "copy", "-frames:v", str(count), f"file:{old}"]
    run_ffmpeg([*untrusted_input(original.path), *copy], old)
    if count == len(media.frames):
        return old, count
    write_mp4(replace(media, frames=media.frames[count:], waveform=media.waveform[:0]), new)
    if open_video(new).packets.encoding != packets.encoding:  # a decoder is told of one alone
        return None
    listed.write_text(f"ffconcat version 1.0\nfile '{old.name}'\nfile '{new.name}'\n")
    return listed, count


def _leading(times: ArrayLike, most: int, fps: float) -> int:
    """The number of leading packets, at most `most`, that hold the first frames and no others: they can be decoded
    without later ones. 0 unless frames have this rate."""
    frames = np.asarray(times) * fps
    if not np.allclose(np.sort(frames), np.arange(len(frames)), atol=0.1):
        return 0
    latest = np.maximum.accumulate(np.rint(frames[:most]).astype(int))
    return max((number + 1 for number, frame in enumerate(latest) if frame == number), default=0)
