"""Images and videos that are uploaded to a server: the values of a line of jobs that begins with one, restyles it or
goes on from it."""

from collections.abc import Callable, Mapping
from math import floor
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.media.images import READABLE_IMAGES, is_image, read_image
from ltx2_cli.media.probe import READABLE_VIDEOS, is_video, open_video
from ltx2_cli.media.videos import COMPRESSION, in_whole_latents, read_whole_video
from ltx2_cli.plan.edit import edited, extension
from ltx2_cli.request.size import longest_clip
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.validation import RANGES

REFERENCE = "input_reference"  # an image or a video, with which a clip begins
EDITED = "video"  # an uploaded video, or that of {"id": …}, which is edited
UploadValues = Callable[[Path], dict[str, Any]]  # from a file to values of a line


def shown_upload(path: Path) -> dict[str, Any]:
    """The values of a line for a clip that begins with an uploaded file. Raises `UsageError` if it is neither an image
    nor a video."""
    if is_image(path):
        read_image(path)
        return {"conditions": [{"kind": "image", "path": str(path)}]}
    if is_video(path):
        open_video(path)
        return {"conditions": [{"kind": "video", "path": str(path)}]}
    raise UsageError(f"`{REFERENCE}` is neither an image nor a video", f"{READABLE_IMAGES}; {READABLE_VIDEOS}")


def restyled(path: Path, noise_level: float) -> dict[str, Any]:
    """The values of a line that makes all of a clip anew from this noise level. Raises `UsageError` for a clip that is
    longer than what is made at once."""
    fps = _fps(path)
    if open_video(path).num_frames >= (most := longest_clip(fps)) + COMPRESSION:
        sentence = f"`{EDITED}` lasts {open_video(path).seconds:.4g} s, and {most / fps:.4g} s are made at once"
        raise UsageError(sentence, "a part of it")
    frames = in_whole_latents(len(read_whole_video(path).frames))
    return _clip_values(path, frames, {"regenerate": [0, frames], "noise_level": noise_level})


def extended(path: Path, seconds: float, usual: int) -> dict[str, Any]:
    """The values of a line that goes on from a clip; the `usual` one has so many frames. Raises `UsageError` for more
    than is made at once."""
    fps = _fps(path)
    count, most, added = len(read_whole_video(path).frames), longest_clip(fps), round(seconds * fps)
    if not added:
        raise UsageError(f"`seconds` {seconds:g} are less than a frame", f"{1 / fps:.2f}")
    shown, frames = extension(count, added, min(usual, most))
    if frames > most:
        sentence = f"`seconds` {seconds:g} are more than one clip has room for, behind the {shown / fps:.2f} s"
        nearest = f"extend twice; at most {floor(100 * (most - shown) / fps) / 100:.2f}"
        raise UsageError(f"{sentence} that it begins with", nearest)
    return _clip_values(path, frames, {"regenerate": [count, count + added], "num_frames": shown})


def _fps(path: Path) -> float:
    """The frame rate of a clip. Raises `UsageError` for a file without video."""
    if not is_video(path):
        raise UsageError(f"`{EDITED}` is no video", READABLE_VIDEOS)
    return open_video(path).fps


def _clip_values(path: Path, frames: int, part: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line for an edit of a clip that makes so many frames."""
    clip, step = open_video(path), RANGES["height"].step
    size = {"width": clip.width // step * step, "height": clip.height // step * step, "num_frames": frames}
    condition = {"kind": "clip", "path": str(path), **part}
    return {**size, "fps": clip.fps, "windows": 1, "keyframes": 0, "conditions": [condition]}


def written_frames(spec: RunSpec) -> int:
    """The number of frames of the written clip. A resized one ends with its last whole latent."""
    if (number := edited(spec)) is None:
        return spec.num_frames
    frames, (_, end) = read_whole_video(Path(spec.conditions[number].path)).frames, spec.conditions[number].regenerate
    return end if frames.shape[1:3] != (spec.height, spec.width) else max(end, len(frames))
