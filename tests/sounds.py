"""Sounds of tests: files, and tones in them."""

import wave
from pathlib import Path

import numpy as np

FULL_SCALE = 2**15


def tone(seconds: float, rate: int, hertz: float = 440) -> np.ndarray:
    """A tone on the left and its fifth on the right, [samples, channels] of 16 bits, at half of full scale."""
    time = np.arange(round(seconds * rate))[:, None] / rate
    exact = 0.5 * np.sin(2 * np.pi * hertz * np.array([1, 1.5]) * time)
    return (np.round(exact * FULL_SCALE) / FULL_SCALE).astype(np.float32)


def write_tone(path: Path, waveform: np.ndarray, rate: int) -> Path:
    """A WAV file of 16 bits, which has these samples exactly."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(waveform.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((waveform * FULL_SCALE).astype("<i2").tobytes())
    return path
