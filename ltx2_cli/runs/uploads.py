"""Images and videos that are uploaded to a server: the values of a line of jobs that begins with one, restyles it or
goes on from it."""

from collections.abc import Callable, Mapping
from math import floor
from pathlib import Path
from typing import Any

from ltx2_cli.errors import UsageError
from ltx2_cli.media.images import READABLE_IMAGES, is_image, read_image
from ltx2_cli.media.probe import READABLE_VIDEOS, VideoFile, is_video, open_video
from ltx2_cli.media.videos import COMPRESSION
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
    clip = _opened(path)
    frames = (clip.num_frames - 1) // COMPRESSION * COMPRESSION + 1
    if frames > (most := longest_clip(clip.fps)):
        sentence = f"`{EDITED}` lasts {clip.seconds:.4g} s, and {most / clip.fps:.4g} s are made at once"
        raise UsageError(sentence, "a part of it")
    return _clip_values(path, clip, frames, {"regenerate": [0, frames], "noise_level": noise_level})


def extended(path: Path, seconds: float, usual: int) -> dict[str, Any]:
    """The values of a line that goes on from a clip; the `usual` one has so many frames. Raises `UsageError` for more
    than is made at once."""
    clip = _opened(path)
    count, most, added = clip.num_frames, longest_clip(clip.fps), round(seconds * clip.fps)
    if not added:
        raise UsageError(f"`seconds` {seconds:g} are less than a frame", f"{1 / clip.fps:.2f}")
    shown, frames = extension(count, added, min(usual, most))
    if frames > most:
        sentence = f"`seconds` {seconds:g} are more than one clip has room for, behind the {shown / clip.fps:.2f} s"
        nearest = f"extend twice; at most {floor(100 * (most - shown) / clip.fps) / 100:.2f}"
        raise UsageError(f"{sentence} that it begins with", nearest)
    return _clip_values(path, clip, frames, {"regenerate": [count, count + added], "num_frames": shown})


def _opened(path: Path) -> VideoFile:
    """The clip of an edit."""
    if not is_video(path):
        raise UsageError(f"`{EDITED}` is no video", READABLE_VIDEOS)
    return open_video(path)


def _clip_values(path: Path, clip: VideoFile, frames: int, part: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a line for an edit of a clip that makes so many frames."""
    step = RANGES["height"].step
    size = {"width": clip.width // step * step, "height": clip.height // step * step, "num_frames": frames}
    edited = {"kind": "clip", "path": str(path), **part}
    return {**size, "fps": clip.fps, "windows": 1, "keyframes": 0, "conditions": [edited]}


def written_frames(spec: RunSpec) -> int:
    """The number of frames of the written clip. A resized one ends with its last whole latent."""
    if (number := edited(spec)) is None:
        return spec.num_frames
    clip, (_, end) = open_video(Path(spec.conditions[number].path)), spec.conditions[number].regenerate
    is_resized = (clip.width, clip.height) != (spec.width, spec.height)
    return end if is_resized or end > clip.num_frames else clip.num_frames
