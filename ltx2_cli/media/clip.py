"""A finished clip in memory: video frames and an audio waveform."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Frames = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.float32]  # [frames, height, width, RGB]; float: light
# of a clip without video, or without audio
NO_FRAMES, NO_AUDIO = np.empty((0, 0, 0, 3), np.uint8), np.empty((0, 2), np.float32)


@dataclass(frozen=True)
class Original:
    """The unchanged part of the file that a clip was edited from."""

    path: Path
    sha256: str  # of the file, as it was read
    frames: int  # unchanged leading frames
    audio: bool  # whether all audio is unchanged


@dataclass(frozen=True)
class Media:
    """A finished clip. Video and audio differ in length by less than one latent frame; either may be empty."""

    frames: Frames  # [frames, height, width, RGB]
    waveform: NDArray[np.float32]  # [samples, channels] in −1 … 1
    fps: float
    sample_rate: int
    original: Original | None = None  # None: the whole clip is new

    @property
    def in_8_bits(self) -> "Media":
        """The same clip, with frames of 8 bits."""
        if self.frames.dtype == np.uint8:
            return self
        return replace(self, frames=((self.frames.astype(np.uint32) + 128) // 257).astype(np.uint8))
