"""What was made anew of a clip, joined with what is kept of it: the same frames and samples, and in a file the same
packets as far as they can be copied."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.media import Kept, Media, write_media, write_mp4
from ltx2_cli.media.ffmpeg import given, read_facts, run_ffmpeg

FADE = 0.05  # seconds


def joined(kept: Media, made: Media, first: int, frames: slice, seconds: tuple[float, float]) -> Media:
    """`kept` with the `frames` and the sound between `seconds` of `made`, which begins at its frame `first`. What is
    outside is that of `kept` to the bit; its sound fades into the new one inside."""
    new = made.frames[frames.start - first : frames.stop - first]
    picture = np.concatenate([kept.frames[: frames.start], new, kept.frames[frames.stop :]])
    sound = _sound(kept, made, first / kept.fps, seconds)
    return replace(kept, frames=picture, waveform=sound)


def _sound(kept: Media, made: Media, offset: float, seconds: tuple[float, float]) -> NDArray[np.float32]:
    """The waveform of both; `made` begins at `offset` seconds of `kept`."""
    rate, old = kept.sample_rate, kept.waveform
    start, stop, shift = (round(second * rate) for second in (*seconds, offset))
    fade = round(FADE * rate)
    new = made.waveform[start - shift : stop - shift]
    if not (len(old) and len(new)):
        return old
    end, fade = start + len(new), min(fade, len(new) // 2)
    rise, share = np.sin(np.pi / 2 * (np.arange(fade) + 0.5) / max(fade, 1)) ** 2, np.ones(len(new))
    share[:fade] = rise if start else 1
    share[len(new) - fade :] = rise[::-1] if len(old) > end else 1
    under = np.pad(old[start:end], ((0, len(new) - len(old[start:end])), (0, 0)))
    mixed = under + share[:, None] * (new - under)
    return np.concatenate([old[:start], mixed.astype(np.float32), old[end:]])


PACKET = re.compile(r"^0,\s*-?\d+,\s*(-?\d+),", re.MULTILINE)
FACT = re.compile(r"^#(\w+) 0: +(.*)$", re.MULTILINE)
ENCODING = ("codec_id", "dimensions", "extradata")


def write_joined(media: Media, path: Path, metadata: Mapping[str, str]) -> str:
    """Write as `write_mp4`; the packets of what is kept are copied as far as that can be done. Says how far; nothing of
    a clip that is new."""
    if (kept := media.kept) is None:
        write_media(media, path, metadata)
        return ""
    unchanged = _is_unchanged(kept)
    with replacing(path) as temporary:
        sound = kept.path if unchanged and kept.sound and _sound_codec(kept.path) == "aac" else None
        picture, count = (unchanged and _kept_packets(media, kept, temporary)) or (None, 0)
        write_mp4(media, temporary, metadata, picture, sound)
    why = "ltx2 encodes with other settings, or at another rate" if unchanged else f"{kept.path} has changed since"
    where = " before the new ones" if kept.frames < len(media.frames) else ""
    kinds = [f"{count} of {kept.frames} frames{where}{'' if count else f' ({why})'}"] if kept.frames else []
    kinds += [f"the sound{'' if sound else ' not'}"] if kept.sound else []
    return f"copied without encoding them again: {', '.join(kinds)}"


def _is_unchanged(kept: Kept) -> bool:
    """Whether the file is there as it was read: what was made of it is written in any case."""
    try:
        with kept.path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest() == kept.sha256
    except OSError:
        return False


def _kept_packets(media: Media, kept: Kept, temporary: Path) -> tuple[Path, int] | None:
    """A file beside `temporary`, or a list of such files, whose packets are the picture, and how many frames of the
    kept file are among them. None where none can be copied."""
    encoding, times = _packets(kept.path)
    count = _leading(times, kept.frames, media.fps)
    if not count or encoding["codec_id"] != "h264":
        return None
    old, new, listed = (temporary.with_name(f"{temporary.stem}{name}") for name in ("-old.mp4", "-new.mp4", ".txt"))
    copy = ["-map", "0:v:0", "-c", "copy", "-frames:v", str(count), f"file:{old}"]
    run_ffmpeg([*given(kept.path), *copy], old)
    if count == len(media.frames):
        return old, count
    write_mp4(replace(media, frames=media.frames[count:], waveform=media.waveform[:0]), new)
    if _packets(new)[0] != encoding:  # another encoder, or other settings: a decoder is told of one alone
        return None
    listed.write_text(f"ffconcat version 1.0\nfile '{old.name}'\nfile '{new.name}'\n")
    return listed, count


def _packets(path: Path) -> tuple[dict[str, str], list[float]]:
    """How the picture of a file is encoded, and the seconds of its packets in the order in which they are decoded."""
    printed = read_facts(path, "-map", "0:v:0", "-c", "copy", "-f", "framecrc", "-")
    facts = dict(FACT.findall(printed))
    times = [float(int(time) * Fraction(facts["tb"])) for time in PACKET.findall(printed)]
    return {name: facts.get(name, "") for name in ENCODING}, times


def _leading(times: list[float], most: int, fps: float) -> int:
    """How many packets have the first frames and no others, at most so many: they are decoded without those behind. 0
    where frames do not follow each other at this rate."""
    frames = np.asarray(times) * fps
    if not np.allclose(np.sort(frames), np.arange(len(frames)), atol=0.1):
        return 0
    latest = np.maximum.accumulate(np.rint(frames[:most]).astype(int))
    return max((number + 1 for number, frame in enumerate(latest) if frame == number), default=0)


def _sound_codec(path: Path) -> str:
    printed = read_facts(path, "-map", "0:a:0?", "-c", "copy", "-f", "framecrc", "-")
    return dict(FACT.findall(printed)).get("codec_id", "")
