"""What is wrong with a finished clip, as far as numbers tell: a picture or a sound that cannot have been meant."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.media import Frames, Media

SIDE = 64  # about so many rows and columns of a frame are looked at: they show whatever fills it
FEW = 1e-3  # of a frame's values may be otherwise: a speck, 20x20 pixels of 768x512
DARK = 16  # levels of 255: less than a four-hundredth of white's light
FLAT = 6  # levels around a frame's mean: hardly to be seen, and light falls off by more on any wall
STILL = 3  # levels between frames: less than grain, breath or wind make
SILENT = 1e-3  # of full scale, -60 dB: under the noise of a quiet room
FULL = 32767 / 32768  # the largest sample of 16 bits; decoding cuts off what is beyond full scale
CLIPPED = 1e-2  # of the samples: a pure tone that just reaches full scale is there for 0.005 of them
APART = 0.1  # seconds: sound is as long as whole latents of 0.04 s but for 0.03 s, so that it may be 0.05 s short


def findings(media: Media) -> list[str]:
    """A sentence for each thing that is wrong with `media`. A picture or a sound that was left out is not wrong."""
    picture, sound = len(media.frames) / media.fps, len(media.waveform) / media.sample_rate
    differ = picture and sound and abs(picture - sound) > APART
    lengths = [f"picture and sound differ in length: {picture:.2f} s and {sound:.2f} s"] if differ else []
    return [*_picture_findings(media.frames), *_sound_findings(media.waveform), *lengths]


def _picture_findings(frames: Frames) -> Iterator[str]:
    """The gravest of black, one colour and frozen: the former imply the latter. The first frames mostly decide."""
    if not frames.size:
        return
    step = max(1, min(frames.shape[1:3]) // SIDE)
    seen = [frame.astype(np.int16) for frame in frames[:, ::step, ::step]]
    if all(_rare(frame > DARK) for frame in seen):
        yield "the picture is black"
    elif all(_rare(np.abs(frame - frame.mean((0, 1))) > FLAT) for frame in seen):
        yield "every frame of the picture is a single colour"
    elif seen[1:] and all(_rare(np.abs(frame - seen[0]) > STILL) for frame in seen[1:]):
        yield "the picture is frozen: every frame is like the first"


def _rare(values: NDArray[np.bool_]) -> bool:
    """Whether a few at most are true."""
    return bool(np.count_nonzero(values) <= FEW * values.size)


def _sound_findings(waveform: NDArray[np.float32]) -> Iterator[str]:
    if not len(waveform):
        return
    if all(np.ptp(channel) <= 2 * SILENT for channel in waveform.T):  # a constant is not heard either
        yield "the sound is silent"
    elif (share := np.count_nonzero(np.abs(waveform) >= FULL) / waveform.size) > CLIPPED:
        yield f"the sound is clipped: {100 * share:.0f} % of it is at full scale"
