"""The sound that a clip is given, read by ffmpeg as data and within limits."""

import hashlib
import re
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, run

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.artifacts.files import refuse_special
from ltx2_cli.errors import UsageError
from ltx2_cli.media.ffmpeg import RETRY, described, given, program, read_facts, unreadable
from ltx2_cli.media.recent import Recent
from ltx2_cli.request.spelling import option

READABLE = "a sound that ffmpeg reads: WAV, FLAC, MP3, …, or a video with sound"
MAX_BYTES = 2**31  # of the samples that are read
MARGIN = 0.2  # seconds that are read beyond a clip: a spectrogram hears them, and they tell that it is longer
UNSAID = 0.01  # seconds that a sound may be longer or shorter, and nothing is said: times have two decimals
LEAST_RATE = 1000  # samples a second
CHANNELS = 2
ALONE = {"mono": 1, "1 channels": 1, "stereo": 2, "2 channels": 2}  # other channels are mixed
# Silence where a video's sound begins later than its picture, or leaves a gap. What is mixed stays below full scale, as
# where ffmpeg mixes whole numbers.
FILTERS = "aresample=async=1:first_pts=0:rematrix_maxval=1,aformat=channel_layouts=mono|stereo"
_recent = Recent["Audio"](2**28)
AU_HEADER = struct.Struct(">4s5I")  # magic, offset of the data, size, encoding, sample rate, channels


@dataclass(frozen=True)
class Audio:
    """The beginning of a sound, and what was done to read it."""

    path: Path
    sha256: str  # of the file
    waveform: NDArray[np.float32]  # [samples, CHANNELS]
    sample_rate: int
    remarks: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Of its samples."""
        return self.waveform.nbytes

    def lasting(self, seconds: float) -> NDArray[np.float32]:
        """The samples of so many seconds; silence follows a shorter sound."""
        return fitted(self.waveform, round(seconds * self.sample_rate))

    def heard(self, seconds: float) -> str:
        """What of it is heard in a clip of so many seconds, in words."""
        length = len(self.waveform) / self.sample_rate
        heard = [f"its first {seconds:.2f} s are heard"] if length > seconds + UNSAID else []
        heard += [f"it lasts {length:.2f} s, silence follows it"] if length < seconds - UNSAID else []
        return "; ".join([*heard, *self.remarks])


def fitted(waveform: NDArray[np.float32], samples: int) -> NDArray[np.float32]:
    """The first samples of a waveform [samples, channels], and silence after a shorter one."""
    return np.pad(waveform[:samples], ((0, max(samples - len(waveform), 0)), (0, 0)))


def read_audio(path: Path, seconds: float) -> Audio:
    """The first sound in a file, as long as the clip and a little longer. Raises `UsageError` for a file without sound,
    a damaged or a huge one."""
    refuse_special(path, READABLE)
    try:
        stat = path.stat()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check the path") from None
    if not stat.st_size:
        raise UsageError(f"{path} is empty", READABLE)
    return _recent.get((path, seconds, stat.st_mtime_ns, stat.st_size), partial(_read, path, seconds))


def _read(path: Path, seconds: float) -> Audio:
    rate, layout = _described(path)
    if rate < LEAST_RATE:
        raise UsageError(f"{path} has {rate} samples a second", "a sound of 8000 or more")
    if rate * (seconds + MARGIN) * CHANNELS * np.dtype(np.float32).itemsize > MAX_BYTES:
        sentence = f"{seconds:.2f} s of {path} have {rate} samples a second, more than is read at once"
        raise UsageError(sentence, f"make it smaller first, or a shorter clip: {option('num_frames')}")
    waveform, rate = _decode(path, seconds + MARGIN)
    remarks = [] if layout in ALONE else [f"its {layout} channels are mixed to {CHANNELS}"]
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    return Audio(path, sha256, waveform, rate, tuple(remarks))


def _described(path: Path) -> tuple[int, str]:
    """Samples a second and the names of the channels, as the file states them."""
    log = described(*given(path))
    if stated := re.search(r"Stream #0:.* Audio: .*?, (\d+) Hz, ([^,\n]+)", log):
        return int(stated[1]), stated[2]
    if "Input #0" not in log:
        read_facts(path, "-f", "null", "-")  # which says why
    raise UsageError(f"{path} has no sound", READABLE)


def _decode(path: Path, seconds: float) -> tuple[NDArray[np.float32], int]:
    """The first samples [samples, CHANNELS], and how many a second has."""
    target = ["-map", "0:a:0", "-t", f"{seconds:.6f}", "-af", FILTERS, "-f", "au", "-c:a", "pcm_f32be", "-"]
    done = run(program(*given(path), *target), stdin=DEVNULL, capture_output=True, check=False)
    output = done.stdout
    if done.stderr or done.returncode or len(output) < AU_HEADER.size:
        raise unreadable(path, done.stderr.decode(errors="replace"), done.returncode)
    _, start, _, _, rate, channels = AU_HEADER.unpack_from(output)
    waveform = np.frombuffer(output, ">f4", offset=start).astype(np.float32).reshape(-1, channels)
    if not waveform.size or not np.isfinite(waveform).all():
        raise UsageError(f"{path} has {'samples that are no numbers' if waveform.size else 'no samples'}", RETRY)
    return np.repeat(waveform, CHANNELS // channels, axis=1), rate
