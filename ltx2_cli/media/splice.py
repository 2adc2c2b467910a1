"""Join the regenerated part of a clip with the rest, in memory."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.media.clip import Media

FADE = 0.05  # seconds


def joined(kept: Media, made: Media, first: int, frames: slice, seconds: tuple[float, float]) -> Media:
    """`kept` with the `frames` and the audio between `seconds` of `made`, which begins at its frame `first`. What is
    outside is that of `kept` to the bit; its audio fades into the new one inside."""
    new = made.frames[frames.start - first : frames.stop - first]
    video = np.concatenate([kept.frames[: frames.start], new, kept.frames[frames.stop :]])
    audio = _joined_audio(kept, made, first / kept.fps, seconds)
    return replace(kept, frames=video, waveform=audio)


def _joined_audio(kept: Media, made: Media, offset: float, seconds: tuple[float, float]) -> NDArray[np.float32]:
    """The waveform of both; `made` begins at `offset` seconds of `kept`."""
    rate, old = kept.sample_rate, kept.waveform
    start, stop, shift = (round(second * rate) for second in (*seconds, offset))
    fade = round(FADE * rate)
    new = made.waveform[start - shift : stop - shift]
    if not (len(old) and len(new)):
        return old
    end, fade = start + len(new), min(fade, len(new) // 2)
    rise, weight = np.sin(np.pi / 2 * (np.arange(fade) + 0.5) / max(fade, 1)) ** 2, np.ones(len(new))
    weight[:fade] = rise if start else 1
    weight[len(new) - fade :] = rise[::-1] if len(old) > end else 1
    under = np.pad(old[start:end], ((0, len(new) - len(old[start:end])), (0, 0)))
    mixed = under + weight[:, None] * (new - under)
    return np.concatenate([old[:start], mixed.astype(np.float32), old[end:]])
