"""Prompts of parts of a clip: how much each token reads of each prompt."""

import numpy as np

from ltx2_cli.diffusion.geometry import Geometry
from ltx2_cli.request.spec import RunSpec, Streams


def segment_weights(spec: RunSpec, geometry: Geometry) -> Streams[np.ndarray] | None:
    """The weight of each prompt for each token of both streams, float32 [prompts, tokens], by the time of the token's
    centre; they add up to 1. Around the start of a segment its prompt takes over from the one before, in a straight
    line of `segment_fade` seconds. None for one prompt."""
    if not spec.segments:
        return None
    starts, cells = np.asarray([segment.start for segment in spec.segments])[:, None], geometry.height * geometry.width
    (grid, *_), *references = geometry.video_axes()
    video = [
        np.repeat(grid, cells),
        *(np.repeat(seconds, len(down) * len(right)) for seconds, down, right in references),
    ]
    ((audio,),) = geometry.audio_axes()

    def weights(seconds: np.ndarray) -> np.ndarray:
        since = seconds + geometry.begin - starts
        begun = np.clip(since / spec.segment_fade + 0.5, 0, 1) if spec.segment_fade else since >= 0
        begun = np.concatenate([np.ones((1, len(seconds))), begun, np.zeros((1, len(seconds)))])
        return (begun[:-1] - begun[1:]).astype(np.float32)

    return Streams(weights(np.concatenate(video)), weights(audio))
