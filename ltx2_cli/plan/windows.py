"""Windows of a clip that is longer than what is denoised at once: parts of its latents, one after the other, each with
the end of the one before it as a condition."""

from dataclasses import replace
from math import ceil
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.keyframe_windows import SegmentWindow, segment_windows
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.spelling import typed


class ClipWindow(NamedTuple):
    """A part of a clip's latents."""

    latents: Streams[slice]  # of the clip
    overlap: Streams[int]  # the first of them, which the window before makes
    segments: SegmentWindow | None = None  # between keyframes; None: the overlap is a condition, made before

    def geometry(self, clip: Geometry) -> Geometry:
        """The geometry of the window. Times count from its first latent, between keyframes from its first frame."""
        if (inside := self.segments) is None:
            return clip.window(self.latents)
        first, own = self.first_frame(clip), [clip.keyframes[number] for number in inside.keyframes]
        return replace(
            clip,
            frames=self.latents.video.stop - self.latents.video.start,
            audio_frames=len(inside.audio),
            keyframes=tuple((begin - first, end - first) for begin, end in own),
            generated=inside.generated,
        )

    def first_frame(self, clip: Geometry) -> int:
        """The frame of the clip that is the window's first, where latents end."""
        return self.latents.video.start * clip.scales.time


def plan_windows(spec: RunSpec, geometry: Geometry) -> tuple[ClipWindow, ...]:
    """The windows of a clip: all of one size, so that they have one program, and spread evenly. They overlap by at
    least `window_overlap` seconds of video; the audio of each ends with its video. Raises `UsageError` for more windows
    than the clip has room for."""
    frames, overlap = geometry.frames, _overlap(spec, geometry)
    if spec.windows > (most := _most_windows(frames, overlap, spec.windows)):
        sentence = f"{spec.windows} windows that overlap by {spec.window_overlap:g} s do not fit into {spec.num_frames}"
        raise UsageError(f"{sentence} frames", f"nearest: {typed('windows', most)}")
    size = _window_size(frames, overlap, spec.windows)
    starts = np.rint(np.linspace(0, frames - size, spec.windows)).astype(int).tolist()
    ends = [*(geometry.audio_until(start + size) for start in starts[:-1]), geometry.audio_frames]
    windows, before = list[ClipWindow](), Streams(0, 0)
    for start, end in zip(starts, ends, strict=True):
        latents = Streams(slice(start, start + size), slice(end - ends[0], end))
        overlap_of = Streams(*(max(end - part.start, 0) for end, part in zip(before, latents, strict=True)))
        windows.append(ClipWindow(latents, overlap_of))
        before = Streams(*(part.stop for part in latents))
    return tuple(windows)


def plan_keyframe_windows(spec: RunSpec, geometry: Geometry) -> tuple[ClipWindow, ...]:
    """The windows of a clip that is refined between keyframes."""
    return tuple(ClipWindow(*window) for window in segment_windows(geometry, spec.second_stage.keyframe_windows or 1))


def fewest_windows(spec: RunSpec, geometry: Geometry, longest: int) -> int | None:
    """The least number of windows of at most `longest` frames each; None if overlaps leave no room in that."""
    frames, overlap, most = geometry.frames, _overlap(spec, geometry), (longest - 1) // geometry.scales.time + 1
    return ceil((frames - overlap) / (most - overlap)) if most > overlap else None


def _overlap(spec: RunSpec, geometry: Geometry) -> int:
    return ceil(spec.window_overlap * geometry.fps / geometry.scales.time)


def _window_size(frames: int, overlap: int, windows: int) -> int:
    """The least number of latents of so many windows, with an overlap between each two."""
    return ceil((frames + (windows - 1) * overlap) / windows)


def _most_windows(frames: int, overlap: int, windows: int) -> int:
    """The largest number of windows up to `windows` of which each adds latents to the clip."""
    fit = (count for count in range(windows, 1, -1) if frames - _window_size(frames, overlap, count) >= count - 1)
    return next(fit, 1)
