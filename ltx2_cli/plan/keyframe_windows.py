"""Windows of whole segments between keyframes, which refine a clip of twice as many frames: the rounds of DFR.

Each window begins at a keyframe of the clip before its upsampling, has those up to its last one as conditions, and
generates one in the middle of each segment. The arrangement is that of Lightricks' DFR pipeline, as in diffusers.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry, UpsampleFactors
from ltx2_cli.errors import UsageError
from ltx2_cli.plan.condition_slices import HELD, ConditionSlice
from ltx2_cli.plan.positions import PlacedVideo
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.spelling import typed

KEYFRAME_STRENGTH = 0.95  # of keyframes that are given: they may still settle


class SegmentWindow(NamedTuple):
    """What a window of whole segments has beside its latents. Its times count from its own begin."""

    keyframes: tuple[int, ...]  # of the clip's keyframes, those in it
    generated: int  # the last of them, which are new; those before are given
    kept: int  # the last of these: the window before makes the others
    audio: np.ndarray  # float32 [latents]: their places among the clip's, between which they are interpolated


def check_rounds(spec: RunSpec, by: UpsampleFactors, keyframes: int | None) -> None:
    """Raise `UsageError` for a clip that cannot be refined between keyframes. `keyframes` of the latents that it is
    made from; None: there are no latents yet."""
    if keyframes is None:
        sentence = "a clip is refined between the keyframes of saved latents, and none are given"
        raise UsageError(sentence, f"latents that {typed('recipe', 'dfr')} saves, and then `ltx2 upsample`")
    if by.time != 2 or by.up != by.down:
        hint = f"{typed('second_stage.upsampler', 'FILE')} that doubles the number of frames alone"
        raise UsageError("a clip is refined between keyframes as its frames double, and this upsampler differs", hint)
    if spec.keyframes or not keyframes:
        found = f"the {spec.keyframes} of these latents do not" if spec.keyframes else "these latents have none"
        hint = f"latents that {typed('recipe', 'dfr')} saves"
        raise UsageError(f"a clip is refined between keyframes that end its segments, and {found}", hint)
    if spec.segments:
        raise UsageError("a clip is not refined between keyframes with prompts by segment", typed("segments", []))
    if spec.second_stage.in_tiles:
        keys = [key for key in ("spatial_tiles", "temporal_tiles") if (getattr(spec.second_stage, key) or 1) > 1]
        hint = " ".join(typed(f"second_stage.{key}", 1) for key in keys)
        raise UsageError("a clip is refined between keyframes or in tiles", hint)
    if spec.windows > 1:
        raise UsageError(f"a clip is refined between keyframes or in {spec.windows} windows", typed("windows", 1))
    if (windows := spec.second_stage.keyframe_windows or 1) > keyframes:
        sentence = f"{windows} windows are more than the {keyframes} segments between keyframes"
        raise UsageError(sentence, f"nearest: {typed('second_stage.keyframe_windows', keyframes)}")


def keyframes_of_rounds(num_frames: int, segments: int, compression: int) -> list[tuple[float, float]]:
    """Frames that the keyframes of an upsampled clip span: the last of each segment, then one in the middle of each.
    Raises `UsageError` unless segments end where latents do, before and after the upsampling."""
    ends = segment_ends(num_frames, segments, 2 * compression)
    return [*ends, *((begin - ends[0][0] / 2, end - ends[0][0] / 2) for begin, end in ends)]


def segment_ends(num_frames: int, segments: int, multiple: int) -> list[tuple[float, float]]:
    """Frames that the keyframes at the ends of equal segments span. Raises `UsageError` unless the length of these is a
    multiple of so many frames."""
    length, rest = divmod(num_frames - 1, segments)
    if rest or length % multiple:
        sentence = f"{segments} keyframes do not divide {num_frames} frames into segments of whole latents"
        raise UsageError(sentence, f"latents that {typed('recipe', 'dfr')} saves")
    return [(place, place + 1) for place in range(length, num_frames, length)]


def segment_counts(segments: int, windows: int) -> list[int]:
    """The number of segments of each window without those that it begins before; the first ones have one more."""
    each, more = divmod(segments, windows)
    return [each + (number < more) for number in range(windows)]


def segment_windows(geometry: Geometry, count: int) -> list[tuple[Streams[slice], Streams[int], SegmentWindow]]:
    """The `count` windows of a clip whose last keyframes are one for the end and one for the middle of each segment:
    their latents, the first of these that are left to the window before, and what else they have. Each but the first
    begins a segment early. The last comes first: a window reads latents of the one before it that are not refined yet.
    """
    scale = geometry.scales.time
    length = (geometry.frames - 1) // geometry.generated
    ends = [*accumulate(segment_counts(geometry.generated, count))]
    windows = []
    for before, end in zip([0, *ends], ends, strict=False):
        start = max(before - 1, 0)
        latents = slice(start * length, end * length + 1)
        keyframes = _keyframes_within(geometry, start * length * scale, end * length * scale)
        audio = _audio_places(geometry, latents)
        inside = SegmentWindow(keyframes, end - start, end - before, audio)
        overlap = Streams((length + 1) * (start < before), len(audio))
        windows.append((Streams(latents, slice(0, geometry.audio_frames)), overlap, inside))
    return windows[::-1]


def _keyframes_within(geometry: Geometry, first: int, last: int) -> tuple[int, ...]:
    """The keyframes from frame `first` to `last`: images that are shown behind the first, the ends of segments also
    there."""
    given = len(geometry.keyframes) - 2 * geometry.generated
    frames = [place for place, _ in geometry.keyframes]
    shown = [number for number in range(given) if first < frames[number] <= last]
    return (*shown, *(number for number in range(given, len(frames)) if first <= frames[number] <= last))


def _audio_places(geometry: Geometry, latents: slice) -> np.ndarray:
    """Places of a window's audio latents among the clip's: as many as it would have at the rate of frames that the
    denoiser is told, spread over its time."""
    if not geometry.audio_frames:
        return np.zeros(0, np.float32)
    scales, frames = geometry.scales, (latents.stop - latents.start - 1) * geometry.scales.time + 1
    rate = scales.sampling_rate / scales.mel_hop / scales.mel
    count = round(frames / geometry.told_fps * rate)
    begin, step = latents.start * scales.time / geometry.fps * rate, frames / geometry.fps * rate / count
    return np.clip(begin + step * np.arange(count), 0, geometry.audio_frames - 1).astype(np.float32)


def segment_slices(
    placed_videos: Sequence[PlacedVideo], window: SegmentWindow, geometry: Geometry, first: int, frozen: bool
) -> Streams[tuple[ConditionSlice, ...]]:
    """The conditions of a window with the frame `first` of the clip as its first: images, keyframes at the ends of
    segments, and its audio if that is `frozen`. The latents of the latter two are the window's own."""
    cells, behind = geometry.height * geometry.width, geometry.grid_tokens
    last, video = first + (geometry.frames - 1) * geometry.scales.time, list[ConditionSlice]()
    for number, placed in enumerate(placed_videos):
        if first <= placed.frame <= last:
            start = behind if placed.frame > first else 0
            video.append(ConditionSlice(number, slice(0, cells), start, placed.strength))
            behind += cells if start else 0
    end = geometry.video_tokens - window.generated * cells
    video.append(ConditionSlice(HELD, slice(behind, end), behind, KEYFRAME_STRENGTH))
    audio = ConditionSlice(HELD, slice(0, geometry.audio_frames), 0, 1.0)
    return Streams(tuple(video), (audio,) if frozen else ())
