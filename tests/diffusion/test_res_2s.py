"""The sampler of the HQ pipeline: numbers of sglang's, the published loop in float64, tokens that are given, and how
often the model runs."""

import math
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.diffusion.conditions import ConditionTokens, initial_latents, merge_conditions
from ltx2_cli.diffusion.denoise import GuidanceWeights, StepPasses, denoise
from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.diffusion.samplers.res_2s import coefficients, exchange_noise
from ltx2_cli.request.spec import Streams

# printed by sglang 0.5.23, in float64: `_ltx2_get_res2s_coefficients_scalar`
COEFFICIENTS = {
    0.00628: (0.49921582098875306, -0.001043386313693495, 0.9979099490735948),
    0.07: (0.4913511963204791, -0.011266776594500039, 0.9770693493666675),
    0.3: (0.4643067452498073, -0.04313230631056886, 0.9070715707048427),
    0.54: (0.4381861215984201, -0.06920631354572615, 0.8418947350753749),
    0.99: (0.39437282091281894, -0.1030653057401455, 0.7378363249097963),
    1.9: (0.3227678823923678, -0.13388299583608776, 0.5814784594031219),
    5.9495: (0.15949908438389435, -0.11216419287513787, 0.2798073320020474),
}
# likewise sample, denoised sample, σ, σ', noise and eta as float32, and the result of `_ltx2_res2s_sde_step`
EXCHANGED = [
    (0.7, 0.4, 0.9, 0.8, -1.2, 0.5, -0.18717971480615253),
    (-1.3, -0.2, 1.0, 0.99375, 0.3, 0.5, 0.12214092035174454),
    (0.25, 0.1, 0.42, 0.0011, 2.0, 0.5, 0.10103255123871294),
    (0.9, 0.7, 0.6, 0.3, 0.5, 0.25, 0.7263860325516057),
]
SCHEDULES = {  # h above and below a half, and levels below 0.03
    "distilled": [1.0, 0.99375, 0.9875, 0.98125, 0.975, 0.909375, 0.725, 0.421875, 0.0],
    "refining": [0.909375, 0.725, 0.421875, 0.0],
    "low": [0.3, 0.028, 0.025, 0.0],
    "part": [1.0, 0.8, 0.6],
    "lowest": [0.0011, 0.0],
}
SHAPES = Streams((2, 5, 3), (2, 4, 6))
UNIT = Streams(*[GuidanceWeights(np.ones(1, np.float32), np.float32(0))] * 2)
UNHELD = Streams(None, None)


def clean_of(x: np.ndarray, sigma: float, module: object = np) -> np.ndarray:
    """The clean value that a model predicts."""
    return x - sigma * module.sin(2 * x + sigma)


def published(begin: np.ndarray, draws: np.ndarray, sigmas: list[float], eta: float, hold: Callable) -> np.ndarray:
    """The published loop of one stream in float64; `draws` are [steps, middle or end, ...]."""
    x, levels = begin.astype(np.float64), [*sigmas]
    if levels[-1] == 0:
        levels[-1:] = [0.0011] if levels[-2] > 0.0011 else []
    phi = {
        1: lambda z: (math.exp(z) - 1) / z,
        2: lambda z: (math.exp(z) - 1 - z) / z**2,
    }

    def exchange(s: np.ndarray, p: np.ndarray, before: float, after: float, noise: np.ndarray) -> np.ndarray:
        axes = tuple(range(1, noise.ndim))
        noise = (noise - noise.mean(axes, keepdims=True)) / noise.std(axes, ddof=1, keepdims=True)
        up = min(eta / 2, 0.9999) * after
        kept = math.sqrt(after**2 - up**2)
        alpha = 1 - after + kept
        e = (s - p) / (before - after)
        return alpha * (s - before * e + kept / alpha * e) + up * noise

    for step, (sigma, after) in enumerate(pairwise(levels)):
        h, between = math.log(sigma / after), math.sqrt(sigma * after)
        a21, b2 = 0.5 * phi[1](-h / 2), 2 * phi[2](-h)
        b1, anchor = phi[1](-h) - b2, x
        first = hold(clean_of(x, sigma))
        lead = first - anchor
        middle = exchange(anchor, anchor + h * a21 * lead, sigma, between, draws[step, 0])
        if h < 0.5 and sigma > 0.03:
            for _ in range(100):
                anchor = middle - h * a21 * lead
                lead = first - anchor
        second = hold(clean_of(hold(middle), between)) - anchor
        x = hold(exchange(anchor, anchor + h * (b1 * lead + b2 * second), sigma, after, draws[step, 1]))
    return hold(clean_of(x, levels[-1])) if sigmas[-1] == 0 else x


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("h", COEFFICIENTS)
def test_coefficients_equal_the_published_ones(h: float) -> None:
    np.testing.assert_allclose(coefficients(jnp.float32(h)), COEFFICIENTS[h], rtol=2e-6, atol=3e-7)


@pytest.mark.parametrize("numbers", EXCHANGED)
def test_noise_is_exchanged_as_published(numbers: tuple[float, ...]) -> None:
    *numbers, wanted = numbers
    start, end, sigma, following, noise, eta = map(jnp.float32, numbers)
    start, end, noise = (each.reshape(1, 1, 1) for each in (start, end, noise))
    got = exchange_noise(start, end, sigma, following, eta, noise)
    assert got.item() == pytest.approx(wanted, rel=3e-6)


@pytest.mark.parametrize("eta", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_equal_the_published_loop(schedule: str, eta: float) -> None:
    """With tokens that are given in part and in whole in the video; and a run that is cut into its steps."""
    sigmas = SCHEDULES[schedule]
    steps, strength = len(sigmas) - 1, np.asarray([0, 0, 0.3, 1, 0], np.float64)[:, None]
    clean = normal(9, 5, 3)
    inputs = [ConditionTokens(clean[2:3], 0.3, 2), ConditionTokens(clean[3:4], 1.0, 3)]
    shapes = Streams(SHAPES.video[1:], SHAPES.audio[1:])
    given = merge_conditions(Streams(inputs, ()), shapes, "stream", "gate", Streams(False, False)).video
    begin = Streams(normal(1, *SHAPES.video), normal(2, *SHAPES.audio))
    begin = begin._replace(video=np.asarray((1 - strength) * begin.video + strength * clean, np.float32))
    draws = Streams(*(normal(seed, steps, 2, *shape) for seed, shape in zip((3, 4), SHAPES, strict=True)))
    counted = []

    def velocity(x: Streams, sigma: jax.Array) -> Streams:
        jax.debug.callback(lambda: counted.append(1))
        return Streams(*(((each - clean_of(each, sigma, jnp)) / sigma)[None] for each in x))

    def drawn(number: jax.Array) -> Streams:
        return Streams(*(jnp.asarray(each.reshape(-1, *each.shape[2:]))[number] for each in draws))

    @jax.jit
    def run(x: Streams, start: int, stop: int) -> Streams:
        sets, table = [StepPasses(velocity, UNIT)], (jnp.asarray(sigmas, jnp.float32), jnp.zeros(steps, int))
        sampling = find_sampler("res_2s"), drawn, jnp.float32(eta), Streams(given, None)
        return denoise(sets, x, *table, start, stop, *sampling)

    made = run(begin, 0, steps)
    jax.effects_barrier()
    assert len(counted) == (1 if schedule == "lowest" else 2 * steps + (sigmas[-1] == 0))
    holds = (lambda x: (1 - strength) * x + strength * clean), (lambda x: x)
    for got, x, noise, hold in zip(made, begin, draws, holds, strict=True):
        wanted = published(x, noise.astype(np.float64), sigmas, eta, hold)
        assert np.linalg.norm(got - wanted) / np.linalg.norm(wanted) < 2e-5
    cut = begin
    for step in range(steps):
        cut = run(cut, step, step + 1)
    for got, wanted in zip(cut, made, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_known_clean_value_is_reached_in_a_straight_line() -> None:
    """Without fresh noise the latents stay on the line to it, whatever the steps."""
    clean, noise = normal(1, *SHAPES.video), normal(2, *SHAPES.video)
    begin = initial_latents(None, Streams(noise, noise), np.float32(1), UNHELD)
    sigmas = jnp.asarray(SCHEDULES["part"], jnp.float32)

    def velocity(x: Streams, sigma: jax.Array) -> Streams:
        return Streams(*(((each - clean) / sigma)[None] for each in x))

    bounds, sampling = (jnp.int32(0), jnp.int32(2)), (find_sampler("res_2s"), lambda _: begin, jnp.float32(0), UNHELD)
    made = denoise([StepPasses(velocity, UNIT)], begin, sigmas, jnp.zeros(2, int), *bounds, *sampling)
    np.testing.assert_allclose(made.video, 0.6 * noise + 0.4 * clean, atol=1e-5)
