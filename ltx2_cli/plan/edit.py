"""Edits of a clip: a part that is regenerated, inside it or behind its end. The frames that one run sees, the latents
that condition it, and the place of its result in the clip."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry, VAECompression
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio, read_audio
from ltx2_cli.media.images import resized
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.videos import COMPRESSION, Video, in_whole_latents, read_whole_video
from ltx2_cli.request.spec import ConditionSpec, RunSpec, Streams
from ltx2_cli.request.spelling import typed

NOTHING = slice(0, 0)
CROP_MARGIN = 64  # pixels; sides of two stages are multiples of it
CUT_OFF = 0.1  # seconds at the end of an audio track that may hold its fade-out: an extension regenerates them


class Edit(NamedTuple):
    """The regenerated part of an edited clip: frames and audio."""

    number: int  # of the clip among the plan's input videos
    first: int  # frame of the clip with which the latents begin
    latents: Streams[slice]  # those that are new; all others are conditions
    frames: slice  # of the clip, that are new
    seconds: tuple[float, float]  # of the clip, between which its audio is new


def edited(spec: RunSpec) -> int | None:
    """The number of the condition that is an edited clip, or None."""
    return next((number for number, condition in enumerate(spec.conditions) if condition.kind == "clip"), None)


def noise_level(spec: RunSpec) -> float:
    """The noise level at which the first stage begins: that of an edited clip, else 1, which is noise alone."""
    number = edited(spec)
    return 1.0 if number is None else spec.conditions[number].noise_level


def read_edited(spec: RunSpec, condition: ConditionSpec) -> Video:
    """Read all frames of an edited clip at the request's size: cropped to it, or resized if none is kept. Raises
    `UsageError` for a clip of another size, or without the part to regenerate."""
    path = Path(condition.path).expanduser()
    whole, (begin, end) = read_whole_video(path, spec.fps), condition.regenerate
    fitted = _resized if all_new(condition, len(whole.frames)) else _middle
    video = fitted(whole, spec.height, spec.width)
    count = len(video.frames)
    if begin == count and condition.noise_level < 1:
        sentence = f"what follows {path} begins as noise, and a noise level of {condition.noise_level:g} is asked for"
        raise UsageError(sentence, "noise_level: 1")
    if begin > count or begin < count < end:
        sentence = f"{path} has {count} frames at {spec.fps:g} a second, not the frames {begin} to {end}"
        raise UsageError(sentence, f"nearest: regenerate: [{min(begin, count - 1)}, {count}]")
    if open_video(path).sample_rate is not None:
        audio = read_audio(path, count / spec.fps)
        cut_off = begin == count or count < len(whole.frames)  # the end is regenerated, or left out
        most = round(count / spec.fps * audio.sample_rate) if cut_off else None
        return replace(video, audio=replace(audio, waveform=audio.waveform[:most]))
    if condition.streams == "audio":
        raise UsageError(f"{path} has no audio that could be regenerated", "streams: video")
    return video


def all_new(condition: ConditionSpec, count: int) -> bool:
    """Whether no frame of a clip of `count` is kept but for those behind its last whole latent."""
    begin, end = condition.regenerate
    return condition.streams != "audio" and begin == 0 and end == in_whole_latents(count)


def keeps_frames(spec: RunSpec, videos: Sequence[Video]) -> bool:
    """Whether the clip of a request has frames of an edited one as they are."""
    number = edited(spec)
    return number is not None and not all_new(spec.conditions[number], len(videos[number].frames))


def _resized(video: Video, height: int, width: int) -> Video:
    """Resize a clip of another size, up to its last whole latent."""
    own_height, own_width = video.frames.shape[1:3]
    if (own_height, own_width) == (height, width):
        return video
    frames = np.stack([resized(frame, height, width) for frame in video.frames[: in_whole_latents(len(video.frames))]])
    return replace(video, frames=frames, remarks=(*video.remarks, f"resized from {own_width}x{own_height}"))


def _middle(video: Video, height: int, width: int) -> Video:
    """Crop a clip to its middle if it is less than `CROP_MARGIN` larger than the request: most clips have other sizes
    than models make."""
    above, beside = (have - wanted for have, wanted in zip(video.frames.shape[1:3], (height, width), strict=True))
    if not (0 <= above < CROP_MARGIN and 0 <= beside < CROP_MARGIN):
        size = f"{width + beside}x{height + above}"
        sentence = f"{video.path} is {size}, and a clip of {width}x{height} is asked for"
        raise UsageError(sentence, f"{typed('height', height + above)} {typed('width', width + beside)}")
    if not (above or beside):
        return video
    frames = video.frames[:, above // 2 : above // 2 + height, beside // 2 : beside // 2 + width]
    return replace(video, frames=frames, remarks=(*video.remarks, f"its middle {width}x{height} is edited"))


def num_shown(spec: RunSpec, condition: ConditionSpec, video: Video, compression: VAECompression) -> int:
    """The number of frames of an edited clip that a run sees, 8k + 1: all of its frames, or for an extension the last
    ones."""
    count, (begin, end) = len(video.frames), condition.regenerate
    goes_on, half = begin == count, max(spec.num_frames // 2, 1)
    most = condition.num_frames or half if goes_on else spec.num_frames
    shown = compression.clip_size(compression.latents(min(most, count)), 1, 1)[0]
    if goes_on and shown >= spec.num_frames:
        sentence = f"{video.path} is to go on, and all {spec.num_frames} frames of the clip are its end"
        raise UsageError(sentence, typed("num_frames", shown + compression.frames))
    if goes_on and end - begin > (room := spec.num_frames - shown):
        asked = f"{end - begin} frames are to follow {video.path}"
        sentence = f"{asked}, and {spec.num_frames} frames have room for {room}"
        raise UsageError(sentence, f"extend twice; nearest: regenerate: [{begin}, {begin + room}]")
    if not goes_on and shown != spec.num_frames:
        sentence = f"a clip of {spec.num_frames} frames is asked for, and {video.path} has {count}"
        raise UsageError(sentence, typed("num_frames", shown))
    if not goes_on and end - begin > shown:
        sentence = f"{end - begin} frames of {video.path} are to be regenerated, and {shown} are made at once"
        raise UsageError(sentence, typed("num_frames", fewest_shown(spec)))
    follows = any(other.kind == "reference" for other in spec.conditions)
    if follows and first_shown(replace(condition, num_frames=shown), count):
        sentence = f"references begin with {video.path}, and what is made at once of it does not"
        raise UsageError(sentence, "no reference" if goes_on else typed("num_frames", count))
    return shown


def fewest_shown(spec: RunSpec) -> int:
    """The fewest frames that a run may see of a request's clip: those of the part that an edit regenerates inside."""
    begin, end = (0, 0) if (number := edited(spec)) is None else spec.conditions[number].regenerate
    return ceil(max(end - begin - 1, 1) / COMPRESSION) * COMPRESSION + 1


def extension(count: int, added: int, most: int) -> tuple[int, int]:
    """Frames that a run sees of a clip of `count`, at most half of `most`, and those that it makes to add some."""
    shown = in_whole_latents(min(max(most // 2, 1), count))
    return shown, shown + ceil(added / COMPRESSION) * COMPRESSION


def first_shown(condition: ConditionSpec, count: int) -> int:
    """The first frame of a clip of `count` frames that a run sees: the regenerated part is in the middle where the clip
    allows it; an extension sees the last frames."""
    (begin, end), shown = condition.regenerate, condition.num_frames or count
    if begin == count:
        return max(begin - shown, 0)
    return min(max((begin + end - shown) // 2, 0), count - shown)


def shown_audio(spec: RunSpec, videos: Sequence[Video]) -> Audio | None:
    """The audio of an edited clip from the first frame that a run sees; None without such a clip or audio."""
    number = edited(spec)
    audio = None if number is None else videos[number].audio
    if number is None or audio is None:
        return None
    first = first_shown(spec.conditions[number], len(videos[number].frames))
    start = round(first / spec.fps * audio.sample_rate)
    return replace(audio, waveform=audio.waveform[start:])


def edit_of(spec: RunSpec, videos: Sequence[Video], geometry: Geometry) -> Edit | None:
    """The edit of the request's clip in latents of this geometry, or None. Latents that are new in part are
    regenerated; an extension ends at the requested frame."""
    if (number := edited(spec)) is None:
        return None
    condition, video = spec.conditions[number], videos[number]
    (begin, end), fps = condition.regenerate, geometry.fps
    first = first_shown(condition, len(video.frames))
    edges = first + np.rint(geometry.edges.video * fps).astype(int)
    seconds = first / fps + geometry.edges.audio.astype(np.float64)
    new, heard = _overlapping(edges, begin, end), NOTHING
    if condition.streams == "audio":
        new = NOTHING
    if condition.streams != "video" and video.audio:
        length = len(video.audio.waveform) / video.audio.sample_rate
        cut_off = length - CUT_OFF if end > len(video.frames) else length
        heard = _overlapping(seconds, min(begin / fps, cut_off), end / fps)
    most = end if end > len(video.frames) else np.inf  # a part inside a clip ends with its latents
    frames, span = _span(edges, new, most), _span(seconds, heard, most / fps)
    return Edit(number, first, Streams(new, heard), slice(*map(int, frames)), span)


def _span(edges: np.ndarray, new: slice, most: float) -> tuple[float, float]:
    """Begin and end of these latents; the end is at most `most`."""
    if new.start >= new.stop:
        return 0.0, 0.0
    return float(edges[0, new.start]), min(float(edges[1, new.stop - 1]), most)


def _overlapping(edges: np.ndarray, begin: float, end: float) -> slice:
    """Latents that overlap `begin` to `end`; `edges` [2, latents] are their begins and ends."""
    return slice(int(np.searchsorted(edges[1], begin, "right")), int(np.searchsorted(edges[0], end, "left")))


def edit_remark(spec: RunSpec, video: Video, edit: Edit) -> str:
    """A sentence on the part of a clip that is regenerated."""
    condition = spec.conditions[edit.number]
    (begin, end), fps, shown = condition.regenerate, spec.fps, condition.num_frames or 0
    if end > len(video.frames):
        return f"{video.path} goes on from its last {shown / fps:.2f} s by {(end - begin) / fps:.2f} s"
    spans = {"video": (edit.frames.start / fps, edit.frames.stop / fps), "audio": edit.seconds}
    retaken = [f"{name} {start:.2f} to {stop:.2f} s" for name, (start, stop) in spans.items() if start < stop]
    part = len(video.frames) - shown >= COMPRESSION
    seen = f"; it sees {edit.first / fps:.2f} to {(edit.first + shown) / fps:.2f} s" if part else ""
    asked = f"{video.path}: asked {begin / fps:.2f} to {end / fps:.2f} s"
    return f"{asked}, whole latents regenerate {', '.join(retaken)}{seen}"
