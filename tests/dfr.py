"""Saved latents of DFR's clips with keyframes, for the stages that go on from them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clips import TEXT_TOKENS, Checkpoint
from loras import ORIGINAL, write_lora
from ltx2_cli.request.spec import Streams
from program import run_program

NETWORKS = ("vae", "audio_vae", "text_encoder", "tokenizer", "connectors", "transformer", "vocoder")


def drawn(
    model: Checkpoint, segments: int, size: tuple[int, int], fps: float
) -> tuple[Streams[np.ndarray], np.ndarray]:
    """Normalised latents of a clip of segments of 8 frames, and its keyframes."""
    sound = model.pipeline.audio_vae.config
    rng, audio = np.random.default_rng(3), round((8 * segments + 1) / fps * 25)
    shapes = [
        (1, 8, segments + 1, *size),
        (1, sound.latent_channels, audio, sound.mel_bins // 4),
        (1, 8, segments, *size),
    ]
    video, audio_latents, keyframes = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return Streams(video, audio_latents), keyframes


def as_diffusers(
    model: Checkpoint, clip: Streams[np.ndarray], keyframes: np.ndarray
) -> tuple[Streams[torch.Tensor], torch.Tensor]:
    """The same latents and keyframes, not normalised, as its pipelines take them."""
    pipeline = model.pipeline
    mean, std = (stat.view(1, -1, 1, 1, 1) for stat in (pipeline.vae.latents_mean, pipeline.vae.latents_std))
    packed = pipeline._pack_audio_latents(torch.from_numpy(clip.audio))
    stats = pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std
    packed = pipeline._denormalize_audio_latents(packed, *stats)
    audio = pipeline._unpack_audio_latents(packed, clip.audio.shape[2], num_mel_bins=clip.audio.shape[3])
    video, raw_keyframes = (torch.from_numpy(latents) * std + mean for latents in (clip.video, keyframes))
    return Streams(video, audio), raw_keyframes


def networks(model: Checkpoint) -> dict[str, Any]:
    """The networks that all of its pipelines have."""
    model.pipeline.tokenizer.padding_side = "left"
    return {name: model.pipeline.components[name] for name in NETWORKS}


def save_draft(model: Checkpoint, folder: Path) -> Path:
    """The folder, with saved latents of two clips of two segments each, by the recipe `dfr`."""
    write_lora(folder / "upscaler.safetensors", model.pipeline, ORIGINAL, 3, {"reference_downscale_factor": "2"})
    exact = ["--dtype=float32", "--text-encoder-dtype=float32", "--height=128", "--width=128", "--num-frames=17"]
    short = ["sigmas=[1.0,0.8,0.0]", "keyframe_segments=[8]", f"max_sequence_length={TEXT_TOKENS}"]
    short += [f"second_stage.lora=[{folder / 'upscaler.safetensors'}]"]
    words = [*exact, *(word for setting in short for word in ("--set", setting)), "--recipe=dfr", "--seed=3,4"]
    saved = ["--draft", "--save-latents", str(folder / "draft.safetensors")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_program(patch, "generate", "rain", "--model", str(model.folder), *words, *saved) == 0
    return folder
