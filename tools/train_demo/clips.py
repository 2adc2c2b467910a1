"""Clips as the denoiser learns them: latents that are made once and kept, captions that are drawn each time."""

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
from tools.train_demo.audio import spectrograms
from tools.train_demo.training import OPTIONS
from tools.train_demo.world import Scene, draw_frames, draw_scene, plain, record_sound

V = TypeVar("V", VideoVAE, AudioVAE)
PIXELS = 128
MEASURED = 128  # clips whose latents' mean and spread are measured
TRAINING_CLIPS = {PIXELS: 6000, 2 * PIXELS: 600}  # how many of each size
AT_ONCE = 4
KEEP_EVERY = 200  # batches


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


def of_both_sizes(share: float, vae: VideoVAE, audio_vae: AudioVAE, out: Path) -> tuple[Clips, Clips]:
    """This share of the small and of the large training clips."""
    small, large = (
        clips(max(1, round(share * count)), pixels, vae, audio_vae, out) for pixels, count in TRAINING_CLIPS.items()
    )
    return small, large


def clips(count: int, pixels: int, vae: VideoVAE, audio_vae: AudioVAE, out: Path) -> Clips:
    """The first `count` clips of the world at a size; those that `out` keeps are not made again."""
    path = out / f"clips_{pixels}.npz"
    video, audio = _kept(path)
    compiled = partial(jax.jit, compiler_options=OPTIONS.get(jax.default_backend()))
    to_video = compiled(lambda vae, x: vae.encode(x))
    to_audio = compiled(lambda audio_vae, x: audio_vae.encode(spectrograms(x)))
    for first in range(len(video), count, AT_ONCE):
        scenes = [training_scene(number) for number in range(first, first + AT_ONCE)]
        video.extend(np.asarray(to_video(vae, np.stack([draw_frames(scene, pixels) for scene in scenes])), np.float16))
        audio.extend(np.asarray(to_audio(audio_vae, np.stack([record_sound(scene) for scene in scenes])), np.float16))
        if first // AT_ONCE % KEEP_EVERY == KEEP_EVERY - 1 or first + AT_ONCE >= count:
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.savez(file, video=np.stack(video), audio=np.stack(audio))
            print(f"{len(video)} clips of {pixels} pixels", flush=True)
    scenes = [training_scene(number) for number in range(count)]
    return Clips(scenes, np.stack(video[:count]), np.stack(audio[:count]))


def _kept(path: Path) -> tuple[list[np.ndarray], list[np.ndarray]]:
    if not path.exists():
        return [], []
    with np.load(path) as kept:
        return list(kept["video"]), list(kept["audio"])
