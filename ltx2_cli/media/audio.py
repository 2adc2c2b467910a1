"""Read input audio within limits."""

import hashlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import UsageError
from ltx2_cli.media.decode import decode_samples
from ltx2_cli.media.file_cache import FileCache
from ltx2_cli.request.spelling import option_name

READABLE_AUDIO = "audio that ffmpeg reads: WAV, FLAC, MP3, …, or a video with audio"
MAX_AUDIO_BYTES = 2**31  # of the samples that are read
AUDIO_MARGIN = 0.2  # seconds that are read beyond a clip: a spectrogram hears them, and they tell that it is longer
UNSAID = 0.01  # seconds that audio may be longer or shorter, and nothing is said: times have two decimals
LEAST_RATE = 1000  # samples a second
CHANNELS = 2
UNMIXED_LAYOUTS = {"mono": 1, "1 channels": 1, "stereo": 2, "2 channels": 2}  # other channels are mixed
_recent = FileCache["Audio"](2**28, READABLE_AUDIO)


@dataclass(frozen=True)
class Audio:
    """The first seconds of an audio file, and remarks on its conversion."""

    path: Path
    sha256: str  # of the file
    waveform: NDArray[np.float32]  # [samples, CHANNELS]
    sample_rate: int
    remarks: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its samples."""
        return self.waveform.nbytes

    def lasting(self, seconds: float) -> NDArray[np.float32]:
        """The waveform cut or padded with silence to this number of seconds."""
        return fitted(self.waveform, round(seconds * self.sample_rate))

    def heard(self, seconds: float) -> str:
        """A sentence on the part that a clip of this length uses; empty for all."""
        length = len(self.waveform) / self.sample_rate
        heard = [f"its first {seconds:.2f} s are heard"] if length > seconds + UNSAID else []
        heard += [f"it lasts {length:.2f} s, silence follows it"] if length < seconds - UNSAID else []
        return "; ".join([*heard, *self.remarks])


def fitted(waveform: NDArray[np.float32], samples: int) -> NDArray[np.float32]:
    """Cut a waveform [samples, channels], or pad it with silence."""
    return np.pad(waveform[:samples], ((0, max(samples - len(waveform), 0)), (0, 0)))


def read_audio(path: Path, seconds: float) -> Audio:
    """Read the first audio stream of a file, a little longer than the clip. Raises `UsageError` for a file that is
    without audio, damaged or huge."""
    return _recent.get(path, seconds, partial(_read, path, seconds))


def _read(path: Path, seconds: float) -> Audio:
    waveform, rate, layout = decode_samples(
        path, seconds + AUDIO_MARGIN, partial(_check_rate, path, seconds), READABLE_AUDIO
    )
    remarks = [] if layout in UNMIXED_LAYOUTS else [f"its {layout} channels are mixed to {CHANNELS}"]
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return Audio(path, sha256, np.repeat(waveform, CHANNELS // waveform.shape[1], axis=1), rate, tuple(remarks))


def _check_rate(path: Path, seconds: float, rate: int) -> None:
    if rate < LEAST_RATE:
        raise UsageError(f"{path} has {rate} samples a second", "audio of 8000 or more")
    if rate * (seconds + AUDIO_MARGIN) * CHANNELS * np.dtype(np.float32).itemsize > MAX_AUDIO_BYTES:
        sentence = f"{seconds:.2f} s of {path} have {rate} samples a second, more than is read at once"
        raise UsageError(sentence, f"make it smaller first, or a shorter clip: {option_name('num_frames')}")
