"""The whole way from a prompt to latents, frames and sound, against diffusers from the same folder and noise."""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import LTX2Pipeline

from clips import ALL_ON, CASES, Checkpoint, final_latents, plan_of, reference
from ltx2_cli import load, run
from parity import relative_error
from tiny import tiny_pipeline


def normalised(pipeline: LTX2Pipeline, video: torch.Tensor, audio: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """diffusers' latents as its denoiser left them."""
    mean, std = (stat.view(1, -1, 1, 1, 1) for stat in (pipeline.vae.latents_mean, pipeline.vae.latents_std))
    packed = pipeline._pack_audio_latents(audio)
    packed = pipeline._normalize_audio_latents(packed, pipeline.audio_vae.latents_mean, pipeline.audio_vae.latents_std)
    mels = pipeline.audio_vae.config.mel_bins // 4
    return (video - mean) / std, pipeline._unpack_audio_latents(packed, audio.shape[2], num_mel_bins=mels)


@pytest.mark.parametrize("name", CASES)
def test_latents_equal_the_reference(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours = final_latents(plan_of(checkpoint, case, seed=5, noise=tmp_path / "noise.safetensors"))
    theirs = normalised(checkpoint.pipeline, *reference(checkpoint.pipeline, case, 5, "latent"))
    for got, wanted in zip(ours, theirs, strict=True):
        assert relative_error(got, wanted) <= 2e-4


def test_frames_and_sound_equal_the_reference(checkpoint: Checkpoint, tmp_path: Path) -> None:
    plan = plan_of(checkpoint, ALL_ON, seed=6, noise=tmp_path / "noise.safetensors")
    (media,) = run(plan, load(plan))
    frames, waveform = reference(checkpoint.pipeline, ALL_ON, 6, "pt")
    assert media.frames.shape == (17, 64, 96, 3)
    wanted = (frames[0].movedim(1, -1) * 255).round().numpy()
    assert np.abs(media.frames - wanted).max() <= 1  # a level of 255 may round the other way
    assert relative_error(media.waveform.T, waveform[0]) <= 1e-3
    assert media.sample_rate == 24000
    latent_frame = 8 / ALL_ON.size.fps
    assert abs(len(media.waveform) / media.sample_rate - len(media.frames) / media.fps) < latent_frame


def test_guidance_that_the_config_does_not_allow(tmp_path: Path) -> None:
    """diffusers perturbs nothing unless the config says so; ours does, unless it is told to take that side."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint = Checkpoint(folder, tiny_pipeline(folder, seed=20, perturbed_attn=False, num_layers=2))
    noise = tmp_path / "noise.safetensors"
    theirs = normalised(checkpoint.pipeline, *reference(checkpoint.pipeline, ALL_ON, 7, "latent"))
    ours = final_latents(plan_of(checkpoint, ALL_ON, 7, noise))
    always = final_latents(plan_of(checkpoint, ALL_ON, 7, noise, stg_rule="always"))
    for got, disturbed, wanted in zip(ours, always, theirs, strict=True):
        assert relative_error(got, wanted) <= 2e-4
        assert relative_error(disturbed, wanted) > 1e-2


def test_bfloat16_is_finite_and_within_its_rounding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    noise = tmp_path / "noise.safetensors"
    whole = final_latents(plan_of(checkpoint, ALL_ON, 8, noise))
    half = final_latents(plan_of(checkpoint, ALL_ON, 8, noise, dtype="bfloat16", text_encoder_dtype="bfloat16"))
    errors = [relative_error(got, torch.tensor(wanted)) for got, wanted in zip(half, whole, strict=True)]
    assert max(errors) <= 0.1, errors


def test_the_published_sides_differ_in_their_schedule(checkpoint: Checkpoint) -> None:
    sigmas = {
        side: plan_of(checkpoint, ALL_ON, 1, reference=side).stages[0].sigmas for side in ("ltx-core", "diffusers")
    }
    tokens = ALL_ON.size.height // 32 * ALL_ON.size.width // 32 * 3
    scheduler = plan_of(checkpoint, ALL_ON, 1).arch.scheduler
    np.testing.assert_array_equal(sigmas["ltx-core"], scheduler.sigmas(ALL_ON.steps, 4096))
    np.testing.assert_array_equal(sigmas["diffusers"], scheduler.sigmas(ALL_ON.steps, tokens))
