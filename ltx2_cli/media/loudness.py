"""The loudness of a clip by ITU-R BS.1770, as ffmpeg measures it, and the gain that brings a clip to another."""

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from subprocess import run
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import RunError
from ltx2_cli.media.ffmpeg import own_input, program, untrusted_input

MOST_PEAK = -1.0  # dB of full scale between the samples, above which lossy encoders clip
MEASURED = re.compile(r"\{[^{}]*\"input_i\"[^{}]*\}")


class Loudness(NamedTuple):
    """A measurement."""

    integrated: float | None  # LUFS; None: silence, or audio below 0.4 s
    peak: float | None  # dB of full scale, between the samples too; None: silence


def file_loudness(path: Path) -> Loudness:
    """The loudness of an untrusted file's first audio stream. Raises `RunError` where ffmpeg cannot measure it."""
    return _measured([*untrusted_input(path), "-map", "0:a:0"])


def loudness(waveform: NDArray[np.float32], rate: int) -> Loudness:
    """The loudness of [samples, channels] at `rate` samples a second. Raises as `file_loudness`."""
    shape = ("-ar", str(rate), "-ac", str(waveform.shape[1]))
    return _measured(own_input("f32le", None, *shape), waveform.astype("<f4").tobytes())


def normalise_loudness(waveform: NDArray[np.float32], rate: int, target: float) -> tuple[NDArray[np.float32], str]:
    """The waveform at `target` LUFS, or as near as its peaks allow; and a sentence if it is not there. Raises as
    `file_loudness`."""
    found = loudness(waveform, rate)
    if found.integrated is None or found.peak is None:
        return waveform, "the audio is silent or below 0.4 s, and has no loudness: it stays as it is"
    gain = min(target - found.integrated, MOST_PEAK - found.peak)
    short = target - found.integrated - gain
    sentence = f"the audio is at {target - short:.1f} LUFS, not at {target:g}: more would clip" if short > 0.05 else ""
    return waveform * np.float32(10 ** (gain / 20)), sentence


def _measured(source: Sequence[str], content: bytes = b"") -> Loudness:
    command = program(*source, "-af", "loudnorm=print_format=json", "-f", "null", "-", level="info")
    log = run(command, input=content, capture_output=True, check=False).stderr.decode(errors="replace")
    if not (measured := MEASURED.search(log)):
        raise RunError("ffmpeg cannot measure the loudness", log.strip().splitlines()[-1] if log.strip() else "")
    facts = json.loads(measured[0])
    values = (float(facts[name]) for name in ("input_i", "input_tp"))
    return Loudness(*(value if math.isfinite(value) else None for value in values))
