"""Latents as tokens and as files, and initial noise.

Tokens are float32 [videos, tokens, channels]; files hold video [1, channels, frames, height, width] and audio
[1, channels, frames, mel], normalised, as the denoiser sees them; that of a draft also the keyframes beside its clip.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ltx2_cli.artifacts.tensor_file import CHECKSUM, misfits, open_tensors, read_tensors, write_tensors
from ltx2_cli.diffusion.geometry import SIZE_KEYS, Geometry, VAECompression
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.validation import MAX_FPS, MAX_FRAMES, MAX_SIDE

if TYPE_CHECKING:
    import jax

A = TypeVar("A", "jax.Array", np.ndarray)  # arrays on the host need no compiled program
LatentShape = tuple[int, ...]
KEYFRAMES = "keyframes"  # a file's tensor of frames that were generated beside the clip
STREAMS_OF_STAGES = 4  # whose noise is drawn by numbers below this
STEP_DRAWS = 6  # the number by which the noise of steps is drawn, above those of tokens behind the grid
PIXELS_DRAW = 7  # that of a decoder's pixels
MIN_NOISE_STD = 0.1  # that of noise is 1
FIRST, UPSAMPLED, FINAL = STAGES = ("stage1", "upsampled", "final")  # of which a file holds the latents
SIZE_LIMITS = {**dict(zip(SIZE_KEYS, (MAX_FRAMES, MAX_SIDE, MAX_SIDE), strict=True)), "fps": MAX_FPS}
DIGITS, DECIMAL = re.compile("[0-9]{1,9}"), re.compile(r"[0-9]{1,9}(\.[0-9]{1,20})?")
PUBLISHED_COMPRESSION = VAECompression(frames=8, pixels=32, audio_rate=25.0)
CHANGED = "it was changed after it was written"
LATENTS_FILE = "a safetensors file of `video` (1, C, F, H, W) and `audio` (1, C, A, M), as `ltx2 generate` saves"
NOISE_FILE = "a safetensors file of float32 `video` (1, C, F, H, W) and `audio` (1, C, A, M), or no noise file at all"


def noise(
    seed: "int | jax.Array", shapes: Streams[LatentShape], stage: int = 0, draw: "jax.Array | None" = None
) -> "Streams[jax.Array]":
    """Standard normal noise of one video's stage in the files' layout; the same on any number of devices. It is that of
    the beginning, or with the number of a `draw` that of its steps."""
    import jax

    key = _key(seed, draw)
    keys = (jax.random.fold_in(key, 2 * stage + stream) for stream in range(2))
    return Streams(*(jax.random.normal(*drawn, np.float32) for drawn in zip(keys, shapes, strict=True)))


def noise_behind(seed: "jax.Array", shape: LatentShape, stage: int, draw: "jax.Array | None" = None) -> "jax.Array":
    """Standard normal noise of the tokens behind the grid, of one video's stage, as of `noise`."""
    import jax

    return jax.random.normal(jax.random.fold_in(_key(seed, draw), STREAMS_OF_STAGES + stage), shape, np.float32)


def pixel_noise_key(seed: "jax.Array") -> "jax.Array":
    """The key of the noise of one video's pixels, which a diffusion decoder denoises."""
    import jax

    return jax.random.fold_in(_key(seed, None), PIXELS_DRAW)


def _key(seed: "int | jax.Array", draw: "jax.Array | None") -> "jax.Array":
    import jax

    key = jax.random.key(jax.numpy.uint32(seed))
    return key if draw is None else jax.random.fold_in(jax.random.fold_in(key, STEP_DRAWS), draw)


def file_shapes(geometry: Geometry, channels: Streams[int], audio_latent_mels: int) -> Streams[LatentShape]:
    """Shapes of one video's latents in a file, the leading 1 included; `channels` are those of a token."""
    video = (1, channels.video, geometry.frames, geometry.height, geometry.width)
    return Streams(video, (1, channels.audio // audio_latent_mels, geometry.audio_frames, audio_latent_mels))


def to_tokens(latents: Streams[A]) -> Streams[A]:
    """Files' layout to tokens: video tokens in the order frame, row, column; audio features channel, mel."""
    video, audio = latents
    return Streams(
        video.transpose(0, 2, 3, 4, 1).reshape(video.shape[0], prod(video.shape[2:]), video.shape[1]),
        audio.transpose(0, 2, 1, 3).reshape(audio.shape[0], audio.shape[2], audio.shape[1] * audio.shape[3]),
    )


def token_shapes(videos: int, shapes: Streams[LatentShape]) -> Streams[LatentShape]:
    """Shapes of the tokens of `videos` videos, given the shapes of one in a file."""
    _, channels, frames, height, width = shapes.video
    _, audio_channels, audio_frames, mels = shapes.audio
    return Streams((videos, frames * height * width, channels), (videos, audio_frames, audio_channels * mels))


def from_tokens(tokens: Streams[A], shapes: Streams[LatentShape]) -> Streams[A]:
    """Tokens to the files' layout, one row per video."""
    _, channels, frames, height, width = shapes.video
    videos = len(tokens.video)
    video = tokens.video.reshape(videos, frames, height, width, channels)
    _, channels, frames, mels = shapes.audio
    audio = tokens.audio.reshape(videos, frames, channels, mels)
    return Streams(video.transpose(0, 4, 1, 2, 3), audio.transpose(0, 2, 1, 3))


def interpolated(tokens: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Tokens [videos, tokens, channels] at places between them, linearly."""
    below = places.astype(int)
    part = (places - below).astype(np.float32)[:, None]
    return tokens[:, below] * (1 - part) + tokens[:, np.minimum(below + 1, tokens.shape[1] - 1)] * part


def read_noise(path: str, shapes: Streams[LatentShape]) -> Streams[np.ndarray]:
    """The noise in a safetensors file of `video` and `audio`; raises `UsageError` unless they have these shapes."""
    tensors, metadata = read_tensors(Path(path).expanduser(), "noise", NOISE_FILE)
    if "stage" in metadata:
        hint = f"{NOISE_FILE}; `ltx2 upsample` goes on from latents"
        raise UsageError(f"{path} holds the latents of a clip, no noise", hint)
    if problems := [*misfits(tensors, shapes._asdict())]:
        raise UsageError(f"the noise file {path} does not fit this clip: {'; '.join(problems)}", NOISE_FILE)
    for name in Streams._fields:
        if tensors[name].std() < MIN_NOISE_STD:
            raise UsageError(
                f"the `{name}` of the noise file {path} is nearly the same everywhere, no noise", NOISE_FILE
            )
    return Streams(tensors["video"], tensors["audio"])


@dataclass(frozen=True)
class LatentsFile:
    """The header of a file of one video's latents."""

    path: Path
    shapes: Streams[LatentShape]  # a stream that was not made has no frames
    metadata: Mapping[str, str]  # as given to `save_latents`; empty in a file of another program
    keyframes: int  # single frames that were generated beside the clip, of its height and width
    fps: float | None  # frames a second; None where the file does not say it
    size: tuple[int, int, int]  # frames, height and width of the clip; not said: as the published autoencoders decode

    def read(self) -> Streams[np.ndarray]:
        """The latents, float32 in the files' layout. Raises `UsageError` if they are not finite or damaged."""
        return Streams(*self._read(*Streams._fields))

    def read_keyframes(self) -> np.ndarray | None:
        """The generated keyframes, float32 in the layout of the video; None if it has none. Raises as `read`."""
        return self._read(KEYFRAMES)[0] if self.keyframes else None

    def _read(self, *names: str) -> list[np.ndarray]:
        tensors, _ = read_tensors(self.path, "a clip's latents", LATENTS_FILE)
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite
            latents = [tensors[name].astype(np.float32) for name in names]
        if not all(np.isfinite(stream).all() for stream in latents):
            raise UsageError(f"the latents in {self.path} are not finite", "make them again")
        return latents

    def sha256(self) -> str:
        """Hash of the values alone: equal latents have the same one, whatever the metadata."""
        names = [*Streams._fields, *([KEYFRAMES] if self.keyframes else [])]
        return sha256(b"".join(stream.tobytes() for stream in self._read(*names))).hexdigest()


def open_latents(path: Path) -> LatentsFile:
    """The header of the latents in `path`. Raises `UsageError` for a file without latents or with wrong metadata."""
    with open_tensors(path, "latents", LATENTS_FILE) as file:
        names, metadata = file.keys(), file.metadata() or {}
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
    streams = Streams(*(shapes.get(name, ()) for name in Streams._fields))
    # One may have no token.
    is_filled = any(map(all, streams)) and all(all((*shape[:2], *shape[3:])) for shape in streams)
    if [(len(shape), *shape[:1]) for shape in streams] != [(5, 1), (4, 1)] or not is_filled:
        content = ", ".join(f"`{name}` {'x'.join(map(str, shape))}" for name, shape in list(shapes.items())[:4])
        raise UsageError(f"{path} holds no latents of one video but {content or 'nothing'}", LATENTS_FILE)
    beside = shapes.get(KEYFRAMES, ())
    if KEYFRAMES in shapes and (beside[:2] + beside[3:] != streams.video[:2] + streams.video[3:] or not all(beside)):
        raise UsageError(f"{path} has keyframes of another size than its clip: {'x'.join(map(str, beside))}", CHANGED)
    for name, text in metadata.items():
        is_number = (DECIMAL if name == "fps" else DIGITS).fullmatch(text)
        is_wrong = name in SIZE_LIMITS and not (is_number and 1 <= float(text) <= SIZE_LIMITS[name])
        if is_wrong or (name == "stage" and text not in STAGES):
            raise UsageError(f"{path} says that its {name} is {text!r}", CHANGED)
    frames, height, width = PUBLISHED_COMPRESSION.clip_size(max(streams.video[2], 1), *streams.video[3:])
    if all(name in metadata for name in SIZE_KEYS):
        frames, height, width = (int(metadata[name]) for name in SIZE_KEYS)
    if height * streams.video[4] != width * streams.video[3]:
        raise UsageError(
            f"{path} says that its clip is {width}x{height}, and its latents are of another shape", CHANGED
        )
    stated = {key: text for key, text in metadata.items() if key != CHECKSUM}
    fps = float(metadata["fps"]) if "fps" in metadata else None
    keyframes = beside[2] if beside else 0
    return LatentsFile(path, streams, stated, keyframes, fps, (frames, height, width))


def save_latents(
    latents: "Streams[jax.Array | np.ndarray]",
    path: Path,
    metadata: Mapping[str, str],
    keyframes: np.ndarray | None = None,
) -> None:
    """Write one video's latents as float32 `video` and `audio`, and those of generated keyframes in the layout of the
    video, under a temporary name until complete. Raises `RunError` if they cannot be written."""
    tensors = {name: np.asarray(stream) for name, stream in latents._asdict().items()}
    write_tensors(path, tensors if keyframes is None else {**tensors, KEYFRAMES: keyframes}, metadata)
