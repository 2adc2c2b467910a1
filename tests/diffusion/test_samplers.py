"""Samplers against diffusers with the same noise, against the formula in float64, and on tokens that are given."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.schedulers import scheduling_ltx_euler_ancestral_rf as reference

from ltx2_cli.diffusion.conditions import Conditions, ConditionTokens, initial_latents, merge_conditions
from ltx2_cli.diffusion.denoise import GuidanceWeights, StepPasses, denoise
from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.request.spec import Streams
from parity import relative_error

SIGMAS = np.asarray([1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0], np.float32)
STEPS = len(SIGMAS) - 1
WEIGHTS = Streams(*[GuidanceWeights(np.ones(1, np.float32), np.float32(0))] * 2)


def ancestral(
    velocity: Any, begin: Streams, draws: Streams, eta: float, stop: int = STEPS, given: Conditions | None = None
) -> Streams[np.ndarray]:
    """The latents after ancestral Euler steps, with these draws of noise, [steps, videos, tokens, channels]."""
    bounds = jnp.int32(0), jnp.int32(stop)
    sampling = find_sampler("euler_ancestral"), lambda number: Streams(*(each[number] for each in draws)), eta
    sets, always = [StepPasses(velocity, WEIGHTS)], jnp.zeros(STEPS, int)
    made = denoise(sets, begin, jnp.asarray(SIGMAS), always, *bounds, *sampling, Streams(given, None))
    return Streams(*map(np.asarray, made))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("eta", [1.0, 0.5, 0.0])
def test_ancestral_euler_equals_the_reference_and_the_formula(eta: float, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Streams(normal(1, 2, 5, 3), normal(2, 2, 4, 6))
    draws = Streams(*(jnp.asarray(normal(3, STEPS, *each.shape)) for each in begin))
    ours = ancestral(lambda x, sigma: Streams(*(jnp.sin(2 * each + sigma)[None] for each in x)), begin, draws, eta)
    for made, start, noise in zip(ours, begin, draws, strict=True):
        drawing = iter(np.array(noise))
        monkeypatch.setattr(reference, "randn_tensor", lambda *_, each=drawing, **__: torch.from_numpy(next(each)))
        scheduler = reference.LTXEulerAncestralRFScheduler(eta=eta)
        scheduler.set_timesteps(sigmas=torch.from_numpy(SIGMAS))
        theirs, exact = torch.from_numpy(start), start.astype(np.float64)
        for step, (sigma, after) in enumerate(zip(SIGMAS[:-1], map(float, SIGMAS[1:]), strict=True)):
            velocity = torch.sin(2 * theirs + sigma)
            theirs = scheduler.step(velocity, scheduler.timesteps[step], theirs, return_dict=False)[0]
            clean = exact - sigma * np.sin(2 * exact + sigma)
            down = after * (1 + (after / sigma - 1) * eta)
            shrunk = (1 - after) / (1 - down)
            fresh = max(after**2 - (down * shrunk) ** 2, 0) ** 0.5
            exact = shrunk * (clean + down / sigma * (exact - clean)) + fresh * np.asarray(noise[step], np.float64)
        assert max(relative_error(made, wanted) for wanted in (theirs, torch.from_numpy(exact))) <= 1e-5


def test_given_tokens_get_their_share_of_the_noise() -> None:
    """A third of the tokens is free, one given in part, one in whole; the model knows the clean values. Each is as far
    from them as its own level says, and what is given in whole keeps its bytes."""
    tokens, channels, strength = 3, 20_000, 0.3
    clean = normal(1, tokens, channels)
    inputs = [ConditionTokens(clean[1:2], strength, 1), ConditionTokens(clean[2:], 1.0, 2)]
    shapes = Streams((tokens, channels), (1, 1))
    given = merge_conditions(Streams(inputs, ()), shapes, "token", "gate", Streams(False, False)).video
    assert given
    noise, audio = normal(2, 1, tokens, channels), np.zeros((1, 1, 1), np.float32)
    begin = initial_latents(None, Streams(noise, audio), np.float32(1), Streams(given, None))
    draws = Streams(jnp.asarray(normal(3, STEPS, 1, tokens, channels)), jnp.zeros((STEPS, 1, 1, 1)))
    own = np.asarray([1, 1 - strength, 0], np.float32)[:, None]

    def velocity(latents: Streams, sigma: Any) -> Streams:
        return Streams(((latents.video - clean) / jnp.maximum(own * sigma, 1e-6))[None], jnp.zeros((1, 1, 1, 1)))

    for steps in (3, 7):
        made = ancestral(velocity, begin, draws, 1.0, steps, given).video[0]
        levels = own * SIGMAS[steps]
        assert (made - (1 - levels) * clean).std(axis=1) == pytest.approx(levels[:, 0], rel=0.03)
        np.testing.assert_array_equal(made[2], clean[2])
