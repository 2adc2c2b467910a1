"""The tokens that the pictures, videos and sounds of a stage give: in place of its first latents or behind its grid."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry, VAECompression
from ltx2_cli.plan.edit import Edit
from ltx2_cli.plan.placed import PlacedVideo
from ltx2_cli.request.spec import Streams


class GivenTokens(NamedTuple):
    """Tokens of a stream that are given, and their latents."""

    source: int  # the number of the picture or sound in the stage
    part: slice  # of the tokens of its latents
    start: int  # the first token in the stream
    strength: float


def given_tokens(
    pictures: Sequence[PlacedVideo],
    audio_strengths: Sequence[float],
    geometry: Geometry,
    compression: VAECompression,
    edit: Edit | None,
) -> Streams[tuple[GivenTokens, ...]]:
    """The given tokens of each stream of a stage: of a clip that is edited, all but the new ones."""
    video, sounds, behind = list[GivenTokens](), list[GivenTokens](), geometry.grid_tokens
    for source, placed in enumerate(pictures):
        size = prod(placed.latent_size(geometry))
        count = compression.latents(placed.num_frames) * size
        whole = GivenTokens(source, slice(0, count), behind if placed.behind else 0, placed.strength)
        behind += count if placed.behind else 0
        video += _around(edit.latents.video, whole, size) if edit and placed.number == edit.number else [whole]
    for source, strength in enumerate(audio_strengths):
        whole = GivenTokens(source, slice(0, geometry.audio_frames), 0, strength)
        sounds += _around(edit.latents.audio, whole) if edit else [whole]
    return Streams(tuple(video), tuple(sounds))


def _around(new: slice, whole: GivenTokens, size: int = 1) -> list[GivenTokens]:
    """The tokens before and behind new latents of `size` tokens each."""
    before, after = slice(0, new.start * size), slice(new.stop * size, whole.part.stop)
    return [whole._replace(part=before), whole._replace(part=after, start=after.start)]


def given_whole(given: Sequence[GivenTokens], tokens: int) -> bool:
    """Whether all of this number of tokens are given at full strength."""
    clean = np.zeros(tokens, bool)
    for _, part, start, strength in given:
        clean[start : start + part.stop - part.start] = strength == 1
    return bool(given) and bool(clean.all())
