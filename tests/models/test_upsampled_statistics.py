"""What is done to upsampled latents, against diffusers and against numbers worked by hand."""

import math

import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2LatentUpsamplePipeline

from ltx2_cli.models.upsampler import adain, tone_map


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def channels_first(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))


@pytest.mark.parametrize("factor", [0.3, 1.0, -2.0])
def test_adain_equals_the_reference(factor):
    latents, reference = normal(1, 2, 3, 4, 6, 5), 3 * normal(2, 2, 2, 2, 3, 5) + 1
    pipeline = LTX2LatentUpsamplePipeline
    wanted = pipeline.adain_filter_latent(None, channels_first(latents), channels_first(reference), factor)
    np.testing.assert_allclose(np.moveaxis(adain(latents, reference, factor), -1, 1), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("compression", [0.2, 1.0])
def test_tone_mapping_equals_the_reference(compression):
    latents = 3 * normal(1, 2, 3, 4, 6, 5)
    wanted = LTX2LatentUpsamplePipeline.tone_map_latents(None, torch.from_numpy(latents), compression)
    np.testing.assert_allclose(tone_map(latents, compression), wanted, rtol=0, atol=1e-6)


def test_adain_gives_the_mean_and_deviation_of_its_reference():
    latents = np.float32([1, 3]).reshape(1, 2, 1, 1, 1)
    reference = np.float32([10, 20]).reshape(1, 1, 2, 1, 1)  # mean 15, and five times as far from it
    assert np.ravel(adain(latents, reference, 1.0)).tolist() == [10, 20]
    assert np.ravel(adain(latents, reference, 0.5)).tolist() == [5.5, 11.5]


def test_constant_channels_get_the_mean_of_the_reference():
    flat, image = np.ones((1, 1, 2, 2, 1)), np.full((1, 1, 1, 1, 1), 7.0)
    assert np.ravel(adain(flat, image, 1.0)).tolist() == [7] * 4
    assert np.ravel(adain(image, np.float32([1, 5]).reshape(1, 2, 1, 1, 1), 1.0)).tolist() == [3]


def test_tone_mapping_reduces_large_latents_most():
    kept = np.ravel(tone_map(np.float32([0, 1, 1000, -1000]).reshape(1, 4, 1, 1, 1), 1.0))
    np.testing.assert_allclose(kept, [0, 1 - 0.6 / 2, 400, -400], rtol=1e-6)
    small = float(tone_map(np.float32([0.01]), 1.0)[0])
    assert small == pytest.approx(0.01 * (1 - 0.6 / (1 + math.exp(3 * 0.99))), rel=1e-6)


def test_zero_strength_changes_nothing():
    latents, reference = normal(1, 1, 2, 3, 3, 4), np.ones((1, 1, 1, 1, 4))
    np.testing.assert_array_equal(adain(latents, reference, 0.0), latents)
    np.testing.assert_array_equal(tone_map(latents, 0.0), latents)
