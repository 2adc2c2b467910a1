"""Numbers of latents of a clip, their positions in time and space, and their upsampling."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple, Self

import numpy as np

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.spelling import typed
from ltx2_cli.request.validation import RANGES

NONE_BEFORE = Streams(0, 0)
USUAL_FPS, FAST_FPS = 30, 60.0  # LTX-2.5 was trained at rates up to the first, and at the second
SIZE_KEYS = ("num_frames", "height", "width")  # of a clip, in a request and in a file's metadata


@dataclass(frozen=True)
class VAECompression:
    """Compression of the autoencoders: frames and pixels per video latent, audio latents per second."""

    frames: int
    pixels: int
    audio_rate: float

    def latents(self, num_frames: int) -> int:
        """Number of latents of `num_frames` frames."""
        return (num_frames - 1) // self.frames + 1

    def clip_size(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """Frames, height and width in pixels of the decoded clip."""
        return (frames - 1) * self.frames + 1, height * self.pixels, width * self.pixels


@dataclass(frozen=True)
class LatentScale:
    """Extent of one latent for the denoiser: frames, pixels, and steps of the mel spectrogram. The first latent covers
    `causal_offset` frames (mel steps), the others `time` (`mel`)."""

    time: int
    height: int
    width: int
    mel: int
    mel_hop: int  # samples
    sampling_rate: int
    causal_offset: int


class ReferenceScale(NamedTuple):
    """Scale of references: factors by which they are smaller than the clip."""

    downscale: int  # in height and width
    temporal: int  # in frames a second


class ReferenceGrid(NamedTuple):
    """Latents of one reference: their number, and their scale relative to the clip's."""

    frames: int
    scale: ReferenceScale


@dataclass(frozen=True)
class Geometry:
    """The latents of a clip: `frames` x `height` x `width` video tokens and `audio_frames` audio tokens. Behind the
    former lie those of images and videos, `height` x `width` for each of the `keyframes`: the frames of the clip
    where it begins and ends, which need not be whole; the last of these are `generated`. Behind these lie those of the
    `references`."""

    frames: int
    height: int
    width: int
    audio_frames: int
    fps: float
    scales: LatentScale
    keyframes: tuple[tuple[float, float], ...] = ()
    references: tuple[ReferenceGrid, ...] = ()
    generated: int = 0
    first: Streams[int] = NONE_BEFORE  # latents of a longer clip before these, which are a window of it
    by_segments: bool = False  # of DFR: frames faster than the denoiser was trained at have times of 60 a second

    @property
    def told_fps(self) -> float:
        """The frames a second by which the denoiser is told the times of video."""
        return FAST_FPS if self.by_segments and self.fps > USUAL_FPS else self.fps

    def window(self, latents: Streams[slice]) -> Self:
        """The geometry of these latents of the clip. Times count from its first latent of video."""
        frames, audio_frames = (part.stop - part.start for part in latents)
        first = Streams(*(part.start for part in latents))
        return replace(self, frames=frames, audio_frames=audio_frames, first=first)

    @property
    def begin(self) -> float:
        """Seconds of the clip before its first latent of video."""
        return float(self._edges(1, self.scales.time, 1, self.told_fps, first=self.first.video)[0, 0])

    def audio_until(self, frames: int) -> int:
        """The number of audio latents beside so many of video, from the begin of a clip with audio; else 0."""
        scales, pixels = self.scales, (frames - 1) * self.scales.time + 1
        return round(pixels / self.fps * scales.sampling_rate / scales.mel_hop / scales.mel) if self.audio_frames else 0

    @property
    def grid_tokens(self) -> int:
        """Tokens of the clip itself in the video stream."""
        return self.frames * self.height * self.width

    @property
    def video_tokens(self) -> int:
        """Tokens of the video stream, with those behind the grid."""
        return sum(self.token_counts)

    @property
    def token_counts(self) -> tuple[int, ...]:
        """Video tokens of the grid, of the keyframes, of each reference."""
        cells = self.height * self.width
        references = (frames * (cells // scale.downscale**2) for frames, scale in self.references)
        return (self.grid_tokens, len(self.keyframes) * cells, *references)

    @property
    def single_frames(self) -> np.ndarray:
        """Which video tokens are of a latent frame that is one frame of pixels: the clip's first one, and the generated
        keyframes; bool [tokens]."""
        cells, tokens = self.height * self.width, np.arange(self.video_tokens)
        last = sum(self.token_counts[:2])
        begins = min(self.grid_tokens, cells) if self.first.video == 0 else 0
        return (tokens < begins) | ((tokens >= last - self.generated * cells) & (tokens < last))

    def video_axes(self) -> list[tuple[np.ndarray, ...]]:
        """Centres of latents along time in seconds, height and width in pixels, each float32 [latents]: of the grid
        with its keyframes, and of each reference."""
        edges = np.asarray(self.keyframes, np.float32).reshape(-1, 2) / np.float32(self.told_fps)
        keyframes = (edges[:, 0] + edges[:, 1]) / 2
        grids = [(np.concatenate([self.edges.video.sum(axis=0) / 2, keyframes]), 1)]
        grids += [(self._reference_seconds(*reference), reference.scale.downscale) for reference in self.references]
        return [(seconds, *self._pixels(downscale)) for seconds, downscale in grids]

    def audio_axes(self) -> list[tuple[np.ndarray, ...]]:
        """Centres of the audio tokens in seconds; float32 [tokens]."""
        return [(self.edges.audio.sum(axis=0) / 2,)]

    def _reference_seconds(self, frames: int, scale: ReferenceScale) -> np.ndarray:
        """Centres in seconds of a reference's latents."""
        return self._edges(frames, self.scales.time, 1, self.told_fps, scale.temporal).sum(axis=0) / 2

    def _pixels(self, downscale: int) -> tuple[np.ndarray, np.ndarray]:
        """Centres of latents along height and width, for the clip's size divided by `downscale`."""
        sides = (self.height, self.scales.height), (self.width, self.scales.width)
        down, right = (
            (np.arange(side // downscale, dtype=np.float32) + 0.5) * np.float32(pixels) * downscale
            for side, pixels in sides
        )
        return down, right

    @property
    def edges(self) -> Streams[np.ndarray]:
        """Begin and end of each latent of both streams, in seconds from the begin of the first one of video; float32
        [2, latents]."""
        scales, (first, heard) = self.scales, self.first
        video = self._edges(self.frames, scales.time, 1, self.told_fps, first=first)
        audio = self._edges(self.audio_frames, scales.mel, scales.mel_hop, scales.sampling_rate, first=heard)
        return Streams(video - np.float32(self.begin), audio - np.float32(self.begin))

    def _edges(self, latents: int, scale: int, hop: int, rate: float, stretch: int = 1, first: int = 0) -> np.ndarray:
        """Begin and end of latents of `scale` steps of hop / rate seconds, behind `first` others; float32 throughout.
        With `stretch` > 1 (a reference of a lower frame rate) the first latent still covers one frame."""
        numbers = np.arange(first, first + latents + 1, dtype=np.float32)
        edges = np.maximum(numbers * scale + self.scales.causal_offset - scale, 0)
        seconds = np.maximum(edges * stretch - (stretch - 1), 0) * np.float32(hop) / np.float32(rate)
        return np.stack([seconds[:-1], seconds[1:]])


def clip_geometry(
    num_frames: int,
    height: int,
    width: int,
    fps: float,
    compression: VAECompression,
    scales: LatentScale,
    keyframes: tuple[tuple[float, float], ...] = (),
    references: tuple[ReferenceGrid, ...] = (),
    generated: int = 0,
) -> Geometry:
    """The latents of `num_frames` (8k + 1) frames of `height` x `width` pixels, of images behind them at `keyframes`,
    the last of which are `generated`, of `references`, and of audio of that length."""
    return Geometry(
        frames=compression.latents(num_frames),
        height=height // compression.pixels,
        width=width // compression.pixels,
        audio_frames=round(num_frames / fps * compression.audio_rate),
        fps=fps,
        scales=scales,
        keyframes=keyframes,
        references=references,
        generated=generated,
    )


@dataclass(frozen=True)
class UpsampleFactors:
    """Factors of the upsampling of latents: `time` along time, except the first latent; `up` / `down` in height and
    width."""

    time: int
    up: int
    down: int

    def upsampled(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """The size of upsampled latents; height and width are rounded up."""
        return self.time * (frames - 1) + 1, -(-height * self.up // self.down), -(-width * self.up // self.down)


SAME_SIZE = UpsampleFactors(1, 1, 1)


def clip_lengths(compression: VAECompression, by: UpsampleFactors = SAME_SIZE) -> dict[str, list[int]]:
    """Legal numbers of frames and pixels of a clip, ascending, by key of the request; for one stage, or for two with an
    upsampler of factors `by`. The nth number has n latents in the first stage."""
    most = int(max(RANGES[key].highest for key in SIZE_KEYS))
    sizes = [
        compression.clip_size(*by.upsampled(side, side, side)) for side in range(1, most // compression.frames + 2)
    ]
    axes = {key: [size[axis] for size in sizes] for axis, key in enumerate(SIZE_KEYS)}
    return {key: lengths[: bisect_right(lengths, RANGES[key].highest)] for key, lengths in axes.items()}


def stage1_size(
    num_frames: int, height: int, width: int, by: UpsampleFactors, compression: VAECompression
) -> tuple[int, int, int]:
    """Frames, height and width of the first stage's clip, for a second stage of this size; in frames and pixels. Raises
    `UsageError` with the nearest possible numbers for impossible ones."""
    legal, wrong, latents = clip_lengths(compression, by), [], []
    times, whole = Fraction(by.up, by.down), by.up % by.down == 0
    sides = f"a multiple of {times * compression.pixels}" if whole else f"{times} of a first stage's side"
    rules = {"num_frames": f"{by.time * compression.frames}k + 1", "height": sides, "width": sides}
    for key, value in zip(SIZE_KEYS, (num_frames, height, width), strict=True):
        place = bisect_left(legal[key], value)
        latents.append(place + 1)
        if value not in (nearest := legal[key][max(place - 1, 0) : place + 1]):
            numbers = typed(key, " or ".join(map(str, nearest)))
            wrong.append(f"{key} {value} is not {rules[key]}, as two stages need; nearest: {numbers}")
    if wrong:
        raise UsageError(wrong, "")
    return compression.clip_size(*latents)
