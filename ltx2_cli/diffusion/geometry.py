"""How many latents a clip has, and where each lies in time and space."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Scales:
    """What one latent covers: pixels, frames, and steps of the mel spectrogram.

    `causal_offset` is how many frames (mel steps) the first latent covers; the others cover `time` (`mel`).
    """

    time: int
    height: int
    width: int
    mel: int
    mel_seconds: float
    causal_offset: int


@dataclass(frozen=True)
class Geometry:
    """The latents of a clip: `frames` x `height` x `width` video tokens and `audio_frames` audio tokens."""

    frames: int
    height: int
    width: int
    audio_frames: int
    fps: float
    scales: Scales

    @property
    def video_tokens(self) -> int:
        """Tokens of the video stream."""
        return self.frames * self.height * self.width

    def video_positions(self) -> np.ndarray:
        """Middles of the video tokens: seconds, pixels down, pixels right; float32 [tokens, 3]."""
        cells = np.indices((self.frames, self.height, self.width), dtype=np.float32).reshape(3, -1)
        time = _middle(cells[0], self.scales.time, self.scales.causal_offset, np.float32(self.fps))
        height, width = ((cell + 0.5) * scale for cell, scale in zip(cells[1:], _space(self.scales), strict=True))
        return np.stack([time, height, width], axis=-1).astype(np.float32)

    def audio_positions(self) -> np.ndarray:
        """Middles of the audio tokens in seconds; float32 [tokens, 1]."""
        cells = np.arange(self.audio_frames, dtype=np.float32)
        rate = np.float32(1 / self.scales.mel_seconds)
        return _middle(cells, self.scales.mel, self.scales.causal_offset, rate)[:, None]


def clip_geometry(num_frames: int, height: int, width: int, fps: float, scales: Scales) -> Geometry:
    """The latents of `num_frames` (8k + 1) frames of `height` x `width` pixels, and of as much sound."""
    latents_per_second = 1 / (scales.mel_seconds * scales.mel)
    return Geometry(
        frames=(num_frames - 1) // scales.time + 1,
        height=height // scales.height,
        width=width // scales.width,
        audio_frames=round(num_frames / fps * latents_per_second),
        fps=fps,
        scales=scales,
    )


def _space(scales: Scales) -> tuple[int, int]:
    return scales.height, scales.width


def _middle(cells: np.ndarray, scale: int, offset: int, per_second: np.float32) -> np.ndarray:
    """Seconds at the middle of cells whose first covers `offset` units and the others `scale`."""
    start, end = (np.maximum((cell * scale) + offset - scale, 0) / per_second for cell in (cells, cells + 1))
    return ((start + end) / 2).astype(np.float32)
