"""The whole way from a prompt to latents, frames and sound, against diffusers from the same folder and noise."""

from pathlib import Path

import numpy as np
import pytest
import torch

from clips import (
    ALL_ON,
    CASES,
    UNUSUAL_CASE,
    Checkpoint,
    check_latents,
    check_media,
    final_latents,
    plan_of,
    reference_latents,
)
from parity import relative_error
from tiny import LTX2_5, UNUSUAL, tiny_pipeline


@pytest.mark.parametrize("name", CASES)
def test_latents_equal_the_reference(checkpoint: Checkpoint, name: str, tmp_path: Path) -> None:
    check_latents(checkpoint, CASES[name], tmp_path)


def test_frames_and_sound_equal_the_reference(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_media(checkpoint, ALL_ON, 24000, tmp_path)


@pytest.mark.slow
def test_latents_equal_the_reference_with_random_constants(tmp_path: Path) -> None:
    """A checkpoint in which every constant is another one than usual, with some weights in bfloat16 on disk."""
    pipeline = tiny_pipeline(tmp_path / "checkpoint", 30, UNUSUAL, halved=("text_encoder", "transformer", "vae"))
    checkpoint = Checkpoint(tmp_path / "checkpoint", pipeline)
    check_latents(checkpoint, UNUSUAL_CASE, tmp_path)
    check_media(checkpoint, UNUSUAL_CASE, 6300, tmp_path)


@pytest.mark.slow
def test_the_newer_model_equals_the_reference(tmp_path: Path) -> None:
    """LTX-2.5: gates, text modulated by the noise level, features by stream, another decoder, sound at 48 kHz, as in
    LTX-2.3; and another text encoder, and no biases in the video's feed-forward."""
    checkpoint = Checkpoint(tmp_path / "checkpoint", tiny_pipeline(tmp_path / "checkpoint", 40, LTX2_5))
    check_latents(checkpoint, ALL_ON, tmp_path)
    check_media(checkpoint, ALL_ON, 48000, tmp_path)


def test_stg_follows_the_config_only_as_in_diffusers(tmp_path: Path) -> None:
    """diffusers perturbs nothing unless the config says so; ours does, unless it is told to take that side."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    checkpoint = Checkpoint(
        folder, tiny_pipeline(folder, 20, {"transformer": {"perturbed_attn": False, "num_layers": 2}})
    )
    noise = tmp_path / "noise.safetensors"
    theirs = reference_latents(checkpoint.pipeline, ALL_ON, 7)
    ours = final_latents(plan_of(checkpoint, ALL_ON, 7, noise))
    schedule = plan_of(checkpoint, ALL_ON, 7).stages[0].sigmas.tolist()  # ltx-core has another
    always = final_latents(plan_of(checkpoint, ALL_ON, 7, noise, compat="ltx-core", sigmas=schedule))
    for got, disturbed, wanted in zip(ours, always, theirs, strict=True):
        assert relative_error(got, wanted) <= 2e-4
        assert relative_error(disturbed, wanted) > 1e-2


def test_bfloat16_is_finite_and_within_its_rounding(checkpoint: Checkpoint, tmp_path: Path) -> None:
    noise = tmp_path / "noise.safetensors"
    whole = final_latents(plan_of(checkpoint, ALL_ON, 8, noise))
    half = final_latents(plan_of(checkpoint, ALL_ON, 8, noise, dtype="bfloat16", text_encoder_dtype="bfloat16"))
    errors = [relative_error(got, torch.tensor(wanted)) for got, wanted in zip(half, whole, strict=True)]
    assert max(errors) <= 0.06, errors


def test_ltx_core_and_diffusers_differ_in_their_schedule(checkpoint: Checkpoint) -> None:
    sigmas = {side: plan_of(checkpoint, ALL_ON, 1, compat=side).stages[0].sigmas for side in ("ltx-core", "diffusers")}
    tokens = ALL_ON.size.height // 32 * ALL_ON.size.width // 32 * 3
    scheduler = plan_of(checkpoint, ALL_ON, 1).arch.scheduler
    np.testing.assert_array_equal(sigmas["ltx-core"], scheduler.sigmas(ALL_ON.steps, 4096))
    np.testing.assert_array_equal(sigmas["diffusers"], scheduler.sigmas(ALL_ON.steps, tokens))
