"""Positions of a request's images, videos and references in a stage."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.conditions import References
from ltx2_cli.diffusion.geometry import Geometry, ReferenceGrid, ReferenceScale, VAECompression
from ltx2_cli.errors import UsageError
from ltx2_cli.media.images import mean_light
from ltx2_cli.media.videos import Video
from ltx2_cli.plan.edit import first_shown
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import typed
from ltx2_cli.request.validation import SHOWN

LEAST_BIAS = -10_000  # of a score, where the strength is 0 and the bias linear


class PlacedVideo(NamedTuple):
    """An image or video in a stage: shown at a frame, or followed as a reference."""

    number: int  # of the plan's input video
    frame: float  # first frame in the stage's clip; 0: it replaces the first latents, else it is behind the grid
    strength: float
    num_frames: int
    reference: ReferenceGrid | None = None  # its tokens are behind all others
    skipped: int = 0  # frames of the file before the first that is encoded
    crf: int | None = None  # of the compression before it is encoded; None: it is not compressed

    @property
    def behind(self) -> bool:
        """Whether its tokens lie behind the grid."""
        return bool(self.frame or self.reference)

    def keyframes(self, compression: int) -> list[tuple[float, float]]:
        """Frames of the clip that each latent behind the grid spans; the latent of a single frame spans one."""
        if not self.frame:
            return []
        latents, length = (self.num_frames - 1) // compression + 1, compression if self.num_frames > 1 else 1
        return [(self.frame + compression * i, self.frame + compression * i + length) for i in range(latents)]

    def latent_size(self, geometry: Geometry) -> tuple[int, int]:
        """Height and width of its latents in a stage of this geometry."""
        downscale = self.reference.scale.downscale if self.reference else 1
        return geometry.height // downscale, geometry.width // downscale


def place_videos(
    spec: RunSpec, videos: Sequence[Video], compression: VAECompression, num_frames: int, last: bool
) -> tuple[PlacedVideo, ...]:
    """The videos of a stage of `num_frames` frames, at the same times as in the requested clip, then its references.
    The `last` of two stages has no references."""
    rate, shown = (num_frames - 1) / max(spec.num_frames - 1, 1), list[PlacedVideo]()
    references = list[PlacedVideo]()
    for number, (condition, video) in enumerate(zip(spec.conditions, videos, strict=True)):
        frame, count = condition.frame, condition.num_frames or 1
        strength = condition.strength
        if strength is None:
            usual = spec.image_strength if condition.kind == "image" and not last else None
            strength = 1.0 if usual is None else usual
        if condition.kind == "reference" and not last:
            scale = ReferenceScale(condition.downscale or 1, condition.temporal_scale or 1)
            grid = ReferenceGrid(compression.latents(count), scale)
            references.append(PlacedVideo(number, 0, strength, count, grid))
        elif condition.kind in SHOWN:
            start = frame if frame >= 0 else max(spec.num_frames + frame - count + 1, 0)
            skipped = first_shown(condition, len(video.frames)) if condition.kind == "clip" else 0
            crf = spec.image_crf if condition.kind == "image" else None
            shown.append(PlacedVideo(number, start * rate, strength, count, None, skipped, crf))
    return (*shown, *references)


def generated_keyframes(spec: RunSpec, num_frames: int) -> list[tuple[float, float]]:
    """Frames that the keyframes span which are generated beside a stage's clip of `num_frames`: the last of each
    segment, or evenly spaced between the first and the last of the clip. Raises `UsageError` for more than there are
    between these, and for a clip of no whole segments."""
    segments = spec.keyframe_segments or ()
    if not (spec.keyframes or segments) or not spec.running.video:
        return []
    if spec.keyframes and segments:
        sentence = f"{spec.keyframes} keyframes are asked for, and one at the end of each segment"
        raise UsageError(sentence, f"{typed('keyframes', 0)}, or {typed('keyframe_segments', [])}")
    if spec.keyframes > (between := max(num_frames - 2, 0)):
        sentence = f"{spec.keyframes} keyframes do not fit between the first and the last of {num_frames} frames"
        raise UsageError(sentence, f"nearest: {typed('keyframes', between)}")
    if segments:
        count = (spec.num_frames - 1) // _checked_segment(spec.num_frames, segments)
        places = np.linspace(0, num_frames - 1, count + 1)[1:]
    else:
        places = np.round(np.linspace(0, num_frames - 1, spec.keyframes + 2))[1:-1]  # halves to even
    return [(place, place + 1) for place in places.tolist()]


def _checked_segment(num_frames: int, lengths: Sequence[int]) -> int:
    """The length of the segments of a clip. Raises `UsageError` for one that is not one frame and whole segments."""
    if length := segment_length(num_frames, lengths):
        return length
    known, nearest = (" or ".join(map(str, each)) for each in (lengths, _nearest_segmented(num_frames, lengths)))
    sentence = f"num_frames {num_frames} is not one frame and whole segments of {known}"
    raise UsageError(sentence, f"nearest: {typed('num_frames', nearest)}")


def segment_length(num_frames: int, lengths: Sequence[int]) -> int:
    """The largest of these lengths that divides a clip behind its first frame; 0 if there is none."""
    return max((length for length in lengths if num_frames > 1 and (num_frames - 1) % length == 0), default=0)


def _nearest_segmented(num_frames: int, lengths: Sequence[int]) -> list[int]:
    """The nearest lengths of a clip, not longer and not shorter, that a whole number of segments makes."""
    counts = {length: (num_frames - 1) / length for length in lengths}
    below = max((int(count) * length for length, count in counts.items()), default=0)
    above = min(max(ceil(count), 1) * length for length, count in counts.items())
    return sorted({frames + 1 for frames in (below, above) if frames})


def weights_references(spec: RunSpec) -> bool:
    """Whether attention between a clip and its references is weighted."""
    kinds = {condition.kind for condition in spec.conditions}
    return "reference" in kinds and (spec.reference_strength < 1 or "mask" in kinds)


def reference_weights(
    spec: RunSpec, videos: Sequence[Video], placed: Sequence[PlacedVideo], geometry: Geometry
) -> References | None:
    """The attention between a stage's clip and its references; None unless a strength or a mask weights it."""
    if not weights_references(spec) or not any(video.reference for video in placed):
        return None
    read = zip(videos, spec.conditions, strict=True)
    masks = [video.frames for video, condition in read if condition.kind == "mask"]
    grid, shown, *counts = geometry.token_counts
    strengths: list[np.ndarray] = [np.ones(grid + shown)]
    for video, count in zip((video for video in placed if video.reference), counts, strict=True):
        height, width = video.latent_size(geometry)
        size = count // (height * width), height, width
        light = mean_light(masks[0][: video.num_frames], *size) if masks else np.ones(size)
        strengths.append(spec.reference_strength * light.ravel())
    strength = np.concatenate(strengths)
    key_weights = np.exp(LEAST_BIAS * (1 - strength)) if spec.follows_diffusers else strength
    return References(geometry.token_counts, key_weights.astype(np.float32))
