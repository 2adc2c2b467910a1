"""Given tokens: their noise level, what they begin with, and where they end."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.diffusion.conditions import Conditions, ConditionTokens, initial_latents, merge_conditions
from ltx2_cli.diffusion.denoise import GuidanceWeights, StepPasses, denoise
from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.request.spec import Streams

TOKENS, CHANNELS = 7, 4
SHAPES = Streams((TOKENS, CHANNELS), (TOKENS, CHANNELS))
MADE = Streams(False, False)  # neither stream is frozen
DISTILLED = np.asarray([1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0], np.float32)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def conditions(strengths: tuple[float, ...], rule: Any = "token") -> Conditions:
    """The first two tokens, and the last, one after the other."""
    places = zip((0, 6), (2, 1), strengths, strict=False)
    pictures = [ConditionTokens(normal(tokens, CHANNELS), strength, start) for start, tokens, strength in places]
    held = merge_conditions(Streams(pictures, ()), SHAPES, rule, "gate", MADE)
    assert held.video is not None
    assert held.audio is None
    return held.video


def ends(held: Conditions, clean: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Where the distilled steps end with a model that knows the true velocity."""
    weights, streams = GuidanceWeights(np.ones(1, np.float32), np.float32(0)), Streams(noise, noise)
    latents = initial_latents(None, streams, np.float32(1), Streams(held, None))

    def velocity(latents: Streams, sigma: Any) -> Streams:
        return Streams(*(jnp.asarray(noise - values)[None] for values in (clean, clean)))

    steps = len(DISTILLED) - 1
    sets, schedule = [StepPasses(velocity, Streams(weights, weights))], (jnp.asarray(DISTILLED), jnp.zeros(steps, int))
    sampling = find_sampler("euler"), lambda number: pytest.fail("it draws noise"), jnp.float32(1)
    bounds = jnp.int32(0), jnp.int32(steps)
    return np.asarray(denoise(sets, latents, *schedule, *bounds, *sampling, Streams(held, None)).video)


@pytest.mark.parametrize("strengths", [(0.3, 0.7), (1.0, 0.0), (0.95, 1.0)])
def test_any_strength_ends_on_the_clean_values(strengths: tuple[float, float]) -> None:
    held = conditions(strengths)
    clean, noise = normal(1, TOKENS, CHANNELS), normal(2, TOKENS, CHANNELS)[:1]
    clean[:, held.level > 0] = held.clean[held.level > 0]
    assert np.abs(ends(held, clean, noise) - clean).max() < 1e-5


def test_the_noise_level_of_the_stream_ends_elsewhere() -> None:
    held = conditions((0.7,), "stream")
    clean, noise = normal(1, TOKENS, CHANNELS), normal(2, TOKENS, CHANNELS)[:1]
    clean[:, held.level > 0] = held.clean[held.level > 0]
    assert np.abs(ends(held, clean, noise) - clean)[:, :2].max() > 0.05
    assert np.abs(ends(conditions((1.0,), "stream"), clean, noise) - clean).max() < 1e-5


def test_a_full_strength_never_moves_a_token() -> None:
    held, noise = conditions((1.0, 1.0)), normal(2, TOKENS, CHANNELS)[:1]
    np.testing.assert_array_equal(ends(held, noise * 9, noise)[0, held.level > 0], held.clean[held.level > 0])


@pytest.mark.parametrize(
    ("rule", "cross", "gate"),
    [("gate", [1, 0.75], [1, 1]), ("always", [1, 1], [1, 1])],
)
def test_where_the_other_streams_noise_level_is_read(rule: Any, cross: list[float], gate: list[float]) -> None:
    held, none = merge_conditions(
        Streams([ConditionTokens(normal(2, CHANNELS), 0.25, 3)], ()), SHAPES, "token", rule, MADE
    )
    assert held is not None
    assert held.level.tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert [held.self_scale.tolist(), held.x0_scale.tolist()] == [[1, 0.75]] * 2
    assert (held.cross_scale.tolist(), held.gate_scale.tolist()) == (cross, gate)
    assert held.text_scale == 1
    assert none is None


@pytest.mark.parametrize(
    ("rule", "cross", "gate"),
    [
        ("gate", ([1], [1, 0]), ([0], [1, 1])),
        ("always", ([0], [1, 1]), ([0], [1, 1])),
    ],
)
def test_a_frozen_sound_is_clean_for_the_picture(rule: Any, cross: Any, gate: Any) -> None:
    """The text and the picture read no noise of it; it reads that of the picture."""
    whole = ConditionTokens(normal(TOKENS, CHANNELS), 1.0, 0)
    video, audio = merge_conditions(Streams((), [whole]), SHAPES, "token", rule, Streams(False, True))
    assert video is not None
    assert audio is not None
    assert (video.level.any(), video.self_scale.tolist(), video.text_scale) == (False, [1], 1)
    assert (audio.self_scale.tolist(), audio.text_scale) == ([1, 0], 0)
    assert (video.cross_scale.tolist(), audio.cross_scale.tolist()) == cross
    assert (video.gate_scale.tolist(), audio.gate_scale.tolist()) == gate


@pytest.mark.parametrize(("tokens", "strength"), [(TOKENS - 1, 1.0), (TOKENS, 0.9)])
def test_a_part_of_a_sound_leaves_the_rest_noisy(tokens: int, strength: float) -> None:
    """The later one over the former where they meet."""
    parts = [ConditionTokens(normal(tokens, CHANNELS), strength, 0), ConditionTokens(normal(2, CHANNELS), strength, 3)]
    video, audio = merge_conditions(Streams((), parts), SHAPES, "token", "gate", MADE)
    assert video is None
    assert audio is not None
    assert audio.level.tolist() == [1, 1, 1, 2, 2, 1, int(tokens == TOKENS)]
    assert audio.text_scale == 1
    np.testing.assert_array_equal(audio.clean[3:5], parts[1].latents)


def test_given_tokens_begin_at_their_own_noise_level() -> None:
    """Upsampled latents of five tokens, and two behind them, of which one is given."""
    held, noise, upsampled = conditions((0.5, 1.0)), normal(2, TOKENS, CHANNELS), normal(2, 5, CHANNELS)
    latents = initial_latents(Streams(upsampled, upsampled), Streams(noise, noise[:, :5]), 0.8, Streams(held, None))
    np.testing.assert_allclose(latents.audio, 0.2 * upsampled + 0.8 * noise[:, :5], rtol=1e-5)
    np.testing.assert_allclose(latents.video[:, 2:5], latents.audio[:, 2:], rtol=1e-5)
    np.testing.assert_allclose(latents.video[:, :2], 0.6 * held.clean[:2] + 0.4 * noise[:, :2], rtol=1e-5)
    np.testing.assert_array_equal(latents.video[:, 6], held.clean[[6, 6]])
