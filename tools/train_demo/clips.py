"""Clips as the denoiser learns them: latents that are made once and kept, captions that are drawn each time."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.models.audio_vae import AudioVAE, mel_to_tokens
from ltx2_cli.models.video_vae import VideoVAE
from ltx2_cli.weights.declare import Weight, map_weights
from tools.train_demo.audio import LATENTS, spectrograms
from tools.train_demo.training import OPTIONS
from tools.train_demo.world import DURATION, NUM_FRAMES, Scene, draw_frames, draw_scene, plain, record_sound

V = TypeVar("V", VideoVAE, AudioVAE)
PIXELS = 128
MEASURED = 128  # clips whose latents' mean and spread are measured
TRAINING_CLIPS = {PIXELS: 6000, 2 * PIXELS: 600}  # how many of each size
LONG = 1200  # how many clips of twice the length
AT_ONCE = 4
KEEP_EVERY = 200  # batches


class Length(NamedTuple):
    """The length of clips: frames, the sound's seconds, and its latents."""

    frames: int = NUM_FRAMES
    seconds: float = DURATION  # of the sound, in whole instants
    latents: int = LATENTS  # of the sound


USUAL_LENGTH, TWICE = Length(), Length(97, 4.01, 101)


class Clips(NamedTuple):
    """Scenes and their normalised latents: video [clips, frames, rows, columns, channels], audio [clips, tokens, c]."""

    scenes: list[Scene]
    video: np.ndarray
    audio: np.ndarray


def with_statistics(vae: VideoVAE, audio_vae: AudioVAE, count: int) -> tuple[VideoVAE, AudioVAE]:
    """The autoencoders with the mean and the spread of what they make of some clips."""
    compiled = partial(jax.jit, compiler_options=OPTIONS.get(jax.default_backend()))
    to_video = compiled(lambda vae, x: vae.encoder(x))
    to_audio = compiled(lambda audio_vae, x: mel_to_tokens(audio_vae.encoder(spectrograms(x))))
    video, audio = [], []
    for number in range(count):
        scene = scene_of(9, number)
        video.append(np.asarray(to_video(vae, draw_frames(scene, PIXELS)[None])))
        audio.append(np.asarray(to_audio(audio_vae, record_sound(scene)[None])))
    return _measured(vae, np.concatenate(video)), _measured(audio_vae, np.concatenate(audio))


def _measured(vae: V, latents: np.ndarray) -> V:
    features = latents.reshape(-1, latents.shape[-1])
    found = {"latents_mean": features.mean(axis=0), "latents_std": features.std(axis=0)}

    def filled(weight: Weight) -> Weight:
        name = weight.source.rsplit(".", 1)[-1]
        return weight.with_value(jnp.asarray(found[name])) if name in found else weight

    return map_weights(filled, vae)


def scene_of(seed: int, number: int, held_out: bool = False) -> Scene:
    """The scene of a clip's number."""
    return draw_scene(np.random.default_rng([seed, number]), held_out)


def training_scene(number: int) -> Scene:
    """The scene of a training clip: every second one is plain, so that a short caption states all of it."""
    scene = scene_of(5, number)
    return plain(scene) if number % 2 else scene


def moving_scene(number: int) -> Scene:
    """The scene of a long training clip: every second one begins within a motion."""
    late = np.random.default_rng([6, number]).integers(200) / 100 if number // 2 % 2 else 0.0
    return replace(training_scene(number), start=late)


def usual_clips(share: float, pixels: int, vae: VideoVAE, audio_vae: AudioVAE, out: Path) -> Clips:
    """This share of the training clips of a size and of the usual length."""
    return clips(max(1, round(share * TRAINING_CLIPS[pixels])), pixels, vae, audio_vae, out)


def long_clips(share: float, vae: VideoVAE, audio_vae: AudioVAE, out: Path) -> Clips:
    """This share of the small training clips of twice the length."""
    return clips(max(1, round(share * LONG)), PIXELS, vae, audio_vae, out, TWICE)


def clips(
    count: int, pixels: int, vae: VideoVAE, audio_vae: AudioVAE, out: Path, length: Length = USUAL_LENGTH
) -> Clips:
    """The first `count` clips of the world at a size; those that `out` keeps are not made again."""
    path = out / f"clips_{pixels}_{length.frames}.npz"
    video, audio = _kept(path)
    compiled = partial(jax.jit, compiler_options=OPTIONS.get(jax.default_backend()))
    to_video = compiled(lambda vae, x: vae.encode(x))
    to_audio = compiled(lambda audio_vae, x: audio_vae.encode(spectrograms(x, length.latents)))
    scene_at = training_scene if length == USUAL_LENGTH else moving_scene
    for first in range(len(video), count, AT_ONCE):
        scenes = [scene_at(number) for number in range(first, first + AT_ONCE)]
        frames = np.stack([draw_frames(scene, pixels, slice(length.frames)) for scene in scenes])
        sounds = np.stack([record_sound(scene, length.seconds) for scene in scenes])
        video.extend(np.asarray(to_video(vae, frames), np.float16))
        audio.extend(np.asarray(to_audio(audio_vae, sounds), np.float16))
        if first // AT_ONCE % KEEP_EVERY == KEEP_EVERY - 1 or first + AT_ONCE >= count:
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, video=np.stack(video), audio=np.stack(audio))
            print(f"{len(video)} clips of {pixels} pixels", flush=True)
    scenes = [scene_at(number) for number in range(count)]
    return Clips(scenes, np.stack(video[:count]), np.stack(audio[:count]))


def _kept(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    if not path.exists():
        return [], []
    with np.load(path) as kept:
        return list(kept["video"]), list(kept["audio"])
