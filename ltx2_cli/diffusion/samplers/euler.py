"""Euler: a straight line towards the prediction, x + (σ' − σ)·(x − x0)/σ."""

from collections.abc import Sequence

import jax
from jaxtyping import Float

from ltx2_cli.diffusion.sampler import Latents, Levels, Predict, Sampler
from ltx2_cli.request.spec import Streams


def euler(latents: Latents, predict: Predict, levels: Levels, draws: Sequence[Latents]) -> Latents:
    """One Euler step of both streams."""
    streams = zip(latents, predict(latents, levels.sigma), strict=True)
    return Streams(*(_step(noisy, clean, levels.sigma, levels.following) for noisy, clean in streams))


def _step(
    noisy: Float[jax.Array, "videos tokens channels"],
    clean: Float[jax.Array, "videos tokens channels"],
    sigma: jax.Array,
    following: jax.Array,
) -> Float[jax.Array, "videos tokens channels"]:
    return noisy + (following - sigma) / sigma * (noisy - clean)


SAMPLER = Sampler(euler)
