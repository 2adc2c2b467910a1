"""Checks of a finished clip: black, frozen, silent, clipped, or of unequal lengths."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.media.clip import Frames, Media

SIDE = 64  # about the number of rows and columns of a frame that are checked
SPECK = 1e-3  # the fraction of a frame's values that may differ: 20x20 pixels of 768x512
DARK = 16  # levels of 255: less than a four-hundredth of white's light
FLAT = 6  # levels around a frame's mean: hardly visible, and light falls off by more on any wall
STILL = 3  # levels between frames: less than grain, breath or wind cause
SILENT_LEVEL = 1e-3  # of full scale, -60 dB: under the noise of a quiet room
FULL_SCALE = 32767 / 32768  # the largest sample of 16 bits; decoding clips to full scale
CLIPPED = 1e-2  # of the samples: a pure tone that just reaches full scale does so in 0.005 of them
MAX_DIFFERENCE = 0.1  # of lengths, in seconds: audio of whole latents, less 0.03 s, may be 0.05 s short


def clip_flaws(media: Media) -> list[str]:
    """A sentence for each flaw of `media`. An empty stream is no flaw."""
    video, audio = len(media.frames) / media.fps, len(media.waveform) / media.sample_rate
    differ = video and audio and abs(video - audio) > MAX_DIFFERENCE
    lengths = [f"video and audio differ in length: {video:.2f} s and {audio:.2f} s"] if differ else []
    return [*_video_flaws(media.frames), *_audio_flaws(media.waveform), *lengths]


def _video_flaws(frames: Frames) -> Iterator[str]:
    """The gravest flaw of black, one colour and frozen: each implies the next. The first frames mostly decide."""
    if not frames.size:
        return
    step = max(1, min(frames.shape[1:3]) // SIDE)
    sampled = [frame.astype(np.int16) for frame in frames[:, ::step, ::step]]
    if all(_rare(frame > DARK) for frame in sampled):
        yield "the video is black"
    elif all(_rare(np.abs(frame - frame.mean((0, 1))) > FLAT) for frame in sampled):
        yield "every frame of the video is a single colour"
    elif sampled[1:] and all(_rare(np.abs(frame - sampled[0]) > STILL) for frame in sampled[1:]):
        yield "the video is frozen: every frame is like the first"


def _rare(values: NDArray[np.bool_]) -> bool:
    """Whether at most a speck is true."""
    return bool(np.count_nonzero(values) <= SPECK * values.size)


def _audio_flaws(waveform: NDArray[np.float32]) -> Iterator[str]:
    if not len(waveform):
        return
    if all(np.ptp(channel) <= 2 * SILENT_LEVEL for channel in waveform.T):  # a constant is not heard either
        yield "the audio is silent"
    elif (fraction := np.count_nonzero(np.abs(waveform) >= FULL_SCALE) / waveform.size) > CLIPPED:
        yield f"the audio is clipped: {100 * fraction:.0f} % of it is at full scale"
