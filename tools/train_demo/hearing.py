"""What is to be heard in a clip of the small world: a tone's pitch, level and place, and the times of clicks.

Waveforms are float [samples, 2] here, times seconds, frequencies Hz.
"""

import numpy as np
from scipy import ndimage, signal

from tools.train_demo.world import RUNG

TONE = (80, 2500)
CLICKS = 3000  # and above
EDGE = 0.05  # seconds at either end
SILENCE = 0.003  # amplitude
TONAL = 0.3  # of the energy lies within a semitone of the pitch, or there is none
SEMITONE = 2 ** (1 / 12)
FAINTEST = 0.03  # click's amplitude, and how far it must stand out from what is heard all the time
STANDS_OUT = 6
WINDOW = 0.05  # seconds over which the place is heard
ENDS = 0.04  # seconds left out around a change of pitch


def stereo(waveform: np.ndarray) -> np.ndarray:
    """Two channels of finite numbers, whatever there is."""
    if not np.size(waveform):
        return np.zeros((0, 2))
    samples = np.reshape(waveform, (len(waveform), -1))[:, [0, -1]].astype(np.float64)
    return np.nan_to_num(samples, posinf=0, neginf=0)


def tone_of(sound: np.ndarray, rate: int) -> np.ndarray:
    """The part of a sound that is neither rumble nor noise."""
    return _band(sound, rate, *TONE)


def level(tone: np.ndarray) -> float:
    """A tone's amplitude, wherever between the channels it is."""
    return float(np.sqrt(np.square(tone).sum(-1).mean())) if len(tone) else 0.0


def pitches(sound: np.ndarray, rate: int) -> tuple[float | None, ...]:
    """The pitch in each third, None where there is no tone."""
    edges = [(third * RUNG + ENDS, (third + 1) * RUNG - ENDS) for third in range(3)]
    return tuple(_pitch(sound[round(begin * rate) : round(end * rate)], rate) for begin, end in edges)


def _pitch(sound: np.ndarray, rate: int) -> float | None:
    """The strongest frequency, between the spectrum's lines by a parabola through three of them."""
    if len(sound) < 0.2 * rate:
        return None
    window = np.hanning(len(sound))[:, None]
    power = np.square(np.abs(np.fft.rfft(sound * window, 2 * len(sound), axis=0))).sum(-1)
    line = rate / (2 * len(sound))
    frequencies = np.arange(len(power)) * line
    power = np.where((frequencies > TONE[0]) & (frequencies < TONE[1]), power, 0)
    amplitude = np.sqrt(power.sum() / np.square(window).sum() / len(sound))  # Parseval; half of the spectrum
    if amplitude < SILENCE:
        return None
    peak = int(np.argmax(power))
    near = (frequencies > frequencies[peak] / SEMITONE) & (frequencies < frequencies[peak] * SEMITONE)
    if power[near].sum() < TONAL * power.sum():
        return None
    below, at, above = np.log(power[peak - 1 : peak + 2] + 1e-12 * power[peak])
    return float((peak + (below - above) / (2 * (below - 2 * at + above))) * line)


def places(tone: np.ndarray, rate: int, times: np.ndarray) -> np.ndarray:
    """Where a tone is around each time: the angle whose cosine is left and whose sine is right; NaN in silence."""
    energy = np.cumsum(np.pad(np.square(tone), ((1, 0), (0, 0))), axis=0)
    begin, end = (
        np.clip(np.round((times + side) * rate).astype(int), 0, len(tone)) for side in (-WINDOW / 2, WINDOW / 2)
    )
    left, right = np.sqrt(np.maximum(energy[end] - energy[begin], 0)).T
    heard = np.hypot(left, right) > SILENCE * np.sqrt(np.maximum(end - begin, 1))
    return np.where(heard, np.arctan2(right, left), np.nan)


def clicks(sound: np.ndarray, rate: int) -> tuple[float, ...]:
    """When a short noise begins; where the sound itself begins or ends is none."""
    fade, edge = round(0.005 * rate), round(EDGE * rate)
    if len(sound) < 3 * edge or rate < 3 * CLICKS:
        return ()
    ramp = np.minimum(1, np.minimum(np.arange(len(sound)), np.arange(len(sound))[::-1]) / fade)[:, None]
    high = np.square(_band(sound * ramp, rate, CLICKS, rate)).sum(-1)
    envelope = np.sqrt(ndimage.uniform_filter1d(high, round(0.003 * rate), mode="constant"))
    envelope[:edge] = envelope[-edge:] = 0
    threshold = max(FAINTEST, STANDS_OUT * np.median(envelope), 0.25 * envelope.max())
    peaks, _ = signal.find_peaks(envelope, height=threshold, distance=round(0.1 * rate))
    return tuple(_onset(envelope, int(peak), round(0.02 * rate)) / rate for peak in peaks)


def _onset(envelope: np.ndarray, peak: int, reach: int) -> int:
    """The last sample before a peak that is below half of it."""
    before = envelope[max(0, peak - reach) : peak]
    low = np.flatnonzero(before < envelope[peak] / 2)
    return peak - len(before) + int(low[-1]) if len(low) else peak


def _band(sound: np.ndarray, rate: int, lowest: float, highest: float) -> np.ndarray:
    """The part of a sound between two frequencies."""
    if not len(sound):
        return sound
    spectrum = np.fft.rfft(sound, axis=0)
    frequencies = np.fft.rfftfreq(len(sound), 1 / rate)
    spectrum[(frequencies < lowest) | (frequencies > highest)] = 0
    return np.fft.irfft(spectrum, len(sound), axis=0)
