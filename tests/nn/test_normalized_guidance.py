"""Guidance of attention away from another context (NAG), beside its definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from ltx2_cli.nn.attention import NormalizedGuidance, guide_away


def defined(own: np.ndarray, other: np.ndarray, scale: float, tau: float, alpha: float) -> np.ndarray:
    """The formula, token by token."""
    result = np.zeros_like(own)
    for place in np.ndindex(own.shape[:2]):
        plus, minus = own[place], other[place]
        away = plus * scale - minus * (scale - 1)
        ratio = np.abs(away).sum() / np.abs(plus).sum()
        if ratio > tau:
            away = away / ratio * tau
        result[place] = away * alpha + plus * (1 - alpha)
    return result


@pytest.mark.parametrize("nag", [(11.0, 2.5, 0.25), (1.5, 1.0, 0.9), (3.0, 40.0, 1.0)])
def test_it_equals_the_definition(nag: tuple[float, float, float]) -> None:
    own, other = np.random.default_rng(3).standard_normal((2, 3, 5, 24))
    other[:, ::2] = own[:, ::2] + 0.01 * other[:, ::2]  # of some tokens, too near to be brought back
    guided = guide_away(jnp.float32(own), jnp.float32(other), NormalizedGuidance(*map(np.float32, nag)))
    np.testing.assert_allclose(guided, defined(own, other, *nag), rtol=2e-5, atol=1e-5)


def test_no_scale_and_the_same_context_change_nothing() -> None:
    own, other = np.random.default_rng(4).standard_normal((2, 2, 3, 8)).astype(np.float32)
    for nag, away in ((NormalizedGuidance(1.0, 2.5, 0.25), other), (NormalizedGuidance(11.0, 2.5, 0.25), own)):
        guided = guide_away(jnp.asarray(own), jnp.asarray(away), NormalizedGuidance(*map(np.float32, nag)))
        np.testing.assert_allclose(guided, own, rtol=1e-5, atol=1e-5)
