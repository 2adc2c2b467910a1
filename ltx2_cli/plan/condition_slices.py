"""Slices of a stage's condition latents: the tokens that they replace, or append behind the grid."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry, VAECompression
from ltx2_cli.plan.edit import Edit
from ltx2_cli.plan.positions import PlacedVideo
from ltx2_cli.request.spec import Streams

HELD = -1  # the source of tokens that are the clip's own, made before


class ConditionSlice(NamedTuple):
    """Consecutive tokens of a condition's latents, and their place in a stream."""

    source: int  # number of the placed video or audio condition in the stage
    part: slice  # of the tokens of its latents
    start: int  # the first token in the stream
    strength: float


def condition_slices(
    placed_videos: Sequence[PlacedVideo],
    audio_strengths: Sequence[float],
    geometry: Geometry,
    compression: VAECompression,
    edit: Edit | None,
) -> Streams[tuple[ConditionSlice, ...]]:
    """The conditions of each stream of a stage; an edited clip's leave out its new latents."""
    video, audio = list[ConditionSlice](), list[ConditionSlice]()
    keyframes, references = geometry.grid_tokens, sum(geometry.token_counts[:2])  # the next ones
    for source, placed in enumerate(placed_videos):
        size = prod(placed.latent_size(geometry))
        count = compression.latents(placed.num_frames) * size
        start = (references if placed.reference else keyframes) if placed.behind else 0
        whole = ConditionSlice(source, slice(0, count), start, placed.strength)
        references += count if placed.reference else 0
        keyframes += count if placed.behind and not placed.reference else 0
        video += _around(edit.latents.video, whole, size) if edit and placed.number == edit.number else [whole]
    for source, strength in enumerate(audio_strengths):
        whole = ConditionSlice(source, slice(0, geometry.audio_frames), 0, strength)
        audio += _around(edit.latents.audio, whole) if edit else [whole]
    return Streams(tuple(video), tuple(audio))


def _around(new: slice, whole: ConditionSlice, size: int = 1) -> list[ConditionSlice]:
    """The tokens before and behind the new latents, which have `size` tokens each."""
    before, after = slice(0, new.start * size), slice(new.stop * size, whole.part.stop)
    return [whole._replace(part=before), whole._replace(part=after, start=after.start)]


def window_slices(
    slices: Streams[tuple[ConditionSlice, ...]], tokens: Streams[slice], held: Streams[int]
) -> Streams[tuple[ConditionSlice, ...]]:
    """The conditions of a window, the tokens `tokens` of a clip with these conditions. The last one, `HELD`, is the end
    of the window before: its source is the clip itself."""
    return Streams(
        *(
            (*(_cut(each, part) for each in of), ConditionSlice(HELD, slice(part.start, part.start + count), 0, 1.0))
            for of, part, count in zip(slices, tokens, held, strict=True)
        )
    )


def _cut(whole: ConditionSlice, tokens: slice) -> ConditionSlice:
    """What a condition has of these tokens, maybe nothing: all windows have as many conditions."""
    begin = min(max(whole.start, tokens.start), tokens.stop)
    end = max(min(whole.start + whole.part.stop - whole.part.start, tokens.stop), begin)
    first = whole.part.start + begin - whole.start
    return whole._replace(part=slice(first, first + end - begin), start=begin - tokens.start)


def fully_conditioned(slices: Sequence[ConditionSlice], tokens: int) -> bool:
    """Whether all `tokens` tokens of a stream are conditions at full strength."""
    clean = np.zeros(tokens, bool)
    for _, part, start, strength in slices:
        clean[start : start + part.stop - part.start] = strength == 1
    return bool(slices) and bool(clean.all())
