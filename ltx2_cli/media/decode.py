"""Decode video and audio of files by ffmpeg: one process for frames, one for samples."""

import re
import struct
from collections import deque
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ltx2_cli.errors import UsageError
from ltx2_cli.media.ffmpeg import RETRY, errors_in, read_output, unreadable, untrusted_input
from ltx2_cli.media.probe import VideoFile

PPM = ("-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24")
SEEKABLE = ("mov,", "matroska,")  # containers with a table of their key frames
SPARE = 0.1  # seconds; times are rounded
AU = ("-f", "au", "-c:a", "pcm_f32be")
AU_HEADER = struct.Struct(">4s5I")  # magic, offset of the data, size, encoding, sample rate, channels
AUDIO_STREAM = re.compile(r"^\[info\]   Stream #0:.* Audio: .*?, (\d+) Hz, ([^,\n]+)", re.MULTILINE)
# Silence where a file's audio begins later than its video, or leaves a gap. What is mixed stays below full scale, as
# where ffmpeg mixes whole numbers.
FILTERS = "aresample=async=1:first_pts=0:rematrix_maxval=1,aformat=channel_layouts=mono|stereo"


def decode_frames(path: Path, file: VideoFile, fps: float, most: int, from_end: bool) -> NDArray[np.uint8]:
    """Decode the first or last frames [frames, height, width, RGB] of a file at this rate, upright. Only these are kept
    in memory, and the last frames take little time. Raises `UsageError` for a damaged file."""
    rate, read = f"fps={Fraction(fps).limit_denominator(100_000)}", partial(_last_frames, most)
    end = float(file.packets.starts.max()) - most / fps - SPARE
    if from_end and (begin := _near_end(file, end)):
        # Times stay those of the whole file, so that frames lie at the same multiples of the rate.
        seek = ["-copyts", "-start_at_zero", "-ss", f"{begin:.6f}", *untrusted_input(path)]
        behind = ["-map", "0:v:0", "-vf", f"{rate},trim=start={end:.6f}", "-fps_mode", "passthrough"]
        frames, log, code = read_output([*seek, *behind, *PPM, "-"], read)
        if len(frames) == most and not (code or errors_in(log)):
            return np.stack(frames)
    first = [] if from_end else ["-frames:v", str(most)]
    frames, log, code = read_output([*untrusted_input(path), "-map", "0:v:0", "-vf", rate, *first, *PPM, "-"], read)
    if code or errors_in(log) or not frames:
        raise unreadable(path, errors_in(log), code)
    return np.stack(frames)


def _near_end(file: VideoFile, end: float) -> float | None:
    """The start for decoding the frames from `end` on: before the last but one of the key frames before it, since some
    decoders have a complete frame only at the next. None: the beginning."""
    starts = file.packets.starts
    keys = np.sort(starts[file.packets.keys & (starts < end)])
    if len(keys) < 2 or not file.container.startswith(SEEKABLE):
        return None
    before = starts[starts < keys[-2]]
    return max(0.0, (before.max() + keys[-2]) / 2) if len(before) else None


def _last_frames(most: int, stream: IO[bytes]) -> deque[NDArray[np.uint8]]:
    kept = deque[NDArray[np.uint8]](maxlen=most)
    while stream.readline():
        width, height = map(int, stream.readline().split())
        stream.readline()  # the largest value
        if len(frame := stream.read(3 * width * height)) < 3 * width * height:
            break
        kept.append(np.frombuffer(frame, np.uint8).reshape(height, width, 3))
    return kept


def decode_samples(
    path: Path, seconds: float, check: Callable[[int], None], readable: str
) -> tuple[NDArray[np.float32], int, str]:
    """Decode the first samples [samples, channels] of an audio stream, of one channel or two; its sample rate, which is
    checked before more is read; and the layout of its channels in the file. Raises `UsageError` for a file that is
    damaged or without audio."""
    target = ["-map", "0:a:0", "-t", f"{seconds:.6f}", "-af", FILTERS, *AU, "-"]
    (rate, samples), log, code = read_output([*untrusted_input(path), *target], partial(_samples, check))
    stated = AUDIO_STREAM.search(log)
    if stated is None and "Input #0" in log:
        raise UsageError(f"{path} has no audio", readable)
    if errors_in(log) or code or samples is None or stated is None:
        raise unreadable(path, errors_in(log), code)
    if not samples.size or not np.isfinite(samples).all():
        raise UsageError(f"{path} has {'samples that are no numbers' if samples.size else 'no samples'}", RETRY)
    return samples, rate, stated[2]


def _samples(check: Callable[[int], None], stream: IO[bytes]) -> tuple[int, NDArray[np.float32] | None]:
    """Sample rate and samples [samples, channels]; None if the stream ends within its header."""
    header = stream.read(AU_HEADER.size)
    if len(header) < AU_HEADER.size:
        return 0, None
    _, start, _, _, rate, channels = AU_HEADER.unpack(header)
    check(rate)
    stream.read(start - AU_HEADER.size)
    return rate, np.frombuffer(stream.read(), ">f4").astype(np.float32).reshape(-1, channels)
