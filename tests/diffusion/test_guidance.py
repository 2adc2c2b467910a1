"""The weighted sum against the formula written out, and the loop against a flow known in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.diffusion.denoise import (
    GuidanceWeights,
    Pass,
    StepPasses,
    denoise,
    guide,
    needed_passes,
    pass_weights,
    traced_weights,
)
from ltx2_cli.diffusion.sampler import find_sampler
from ltx2_cli.request.spec import Guidance, Streams

OFF = Guidance(1.0, 0.0, 1.0, 0.0)
ALWAYS = jnp.zeros(3, int)  # the first set of passes in every step


def test_pass_weights_equal_the_published_ones() -> None:
    weights = pass_weights(Guidance(3.0, 1.0, 3.0, 0.7))
    assert weights == {Pass.COND: 6, Pass.UNCOND: -2, Pass.PERTURBED: -1, Pass.ISOLATED: -2}


def test_a_pass_runs_if_either_stream_needs_it() -> None:
    assert needed_passes(Streams(OFF, OFF)) == (Pass.COND,)
    assert needed_passes(Streams(OFF, Guidance(7.0, 0.0, 1.0, 0.7))) == (Pass.COND, Pass.UNCOND)
    assert needed_passes(Streams(Guidance(1.0, 0.5, 2.0, 0.0), OFF)) == (Pass.COND, Pass.PERTURBED, Pass.ISOLATED)
    assert len(needed_passes(Streams(Guidance(3.0, 1.0, 3.0, 0.7), OFF))) == 4


@pytest.mark.parametrize("guidance", [Guidance(3.0, 1.0, 3.0, 0.7), Guidance(7.0, 0.4, 1.5, 1.0), OFF])
def test_guide_equals_the_formula(guidance: Guidance) -> None:
    c, u, p, m = predictions = np.random.default_rng(0).standard_normal((4, 2, 5, 3))
    wanted = (
        c
        + (guidance.guidance_scale - 1) * (c - u)
        + guidance.stg_scale * (c - p)
        + (guidance.modality_scale - 1) * (c - m)
    )
    for row in range(2):
        ratio = c[row].std(ddof=1) / wanted[row].std(ddof=1)
        wanted[row] *= guidance.guidance_rescale * ratio + 1 - guidance.guidance_rescale
    got = guide(jnp.asarray(predictions, jnp.float32), traced_weights(guidance, tuple(Pass)))
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_constant_prediction_stays_finite(dtype: jnp.dtype) -> None:
    flat = jnp.zeros((2, 1, 5, 3), dtype)
    assert bool(jnp.isfinite(guide(flat, GuidanceWeights(jnp.array([3.0, -2.0]), jnp.float32(0.7)))).all())


def test_euler_steps_equal_the_flow_in_any_ranges() -> None:
    """Towards a fixed clean value the path is a straight line, whatever the steps and wherever they are cut."""
    random = np.random.default_rng(1)
    noise = Streams(*(jnp.asarray(random.standard_normal((2, n, 3)), jnp.float32) for n in (5, 4)))
    clean = Streams(*(jnp.asarray(random.standard_normal(x.shape), jnp.float32) for x in noise))
    weights = Streams(*(GuidanceWeights(jnp.ones(1), jnp.float32(0)) for _ in "va"))
    sigmas = jnp.asarray([1.0, 0.8, 0.3, 0.0])

    def velocity(latents: Streams, sigma: jax.Array) -> Streams:
        return jax.tree.map(lambda x, x0: ((x - x0) / sigma)[None], latents, clean)

    def steps(latents: Streams, start: int, stop: int) -> Streams:
        sampling = find_sampler("euler"), lambda number: pytest.fail("it draws noise"), jnp.float32(1)
        bounds = jnp.int32(start), jnp.int32(stop)
        return denoise([StepPasses(velocity, weights)], latents, sigmas, ALWAYS, *bounds, *sampling)

    half = steps(noise, 0, 2)
    for got, start, end in zip(half, noise, clean, strict=True):
        np.testing.assert_allclose(got, 0.3 * start + 0.7 * end, atol=1e-6)
    for got, end in zip(steps(half, 2, 3), clean, strict=True):
        np.testing.assert_allclose(got, end, atol=1e-6)
