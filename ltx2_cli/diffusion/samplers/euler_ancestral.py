"""Ancestral Euler for rectified flow: an Euler step to a level σ_d below the next one, σ', and fresh noise up to σ'.

With α = 1 − σ and σ_d = σ'·(1 + (σ'/σ − 1)·η), the step is

x' = α'/α_d·(x + (σ_d/σ − 1)·(x − x0)) + √(σ'² − (σ_d·α'/α_d)²)·n,

as diffusers' `LTXEulerAncestralRFScheduler` has it. The root is computed as √((σ' − σ_d)·(σ'·α_d + σ_d·α'))/α_d, which
is equal and loses no digits. Both levels of a condition token are scaled; one of strength 1 has level 0 and keeps its
value exactly.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ltx2_cli.diffusion.sampler import Latents, Levels, Predict, Sampler
from ltx2_cli.request.spec import Streams


def euler_ancestral(latents: Latents, predict: Predict, levels: Levels, draws: Sequence[Latents]) -> Latents:
    """One ancestral Euler step of both streams."""
    clean, (noise,) = predict(latents, levels.sigma), draws
    streams = zip(latents, clean, noise, levels.scale, strict=True)
    return Streams(*(_step(*stream, levels) for stream in streams))


def _step(
    noisy: Float[jax.Array, "videos tokens channels"],
    clean: Float[jax.Array, "videos tokens channels"],
    noise: Float[jax.Array, "videos tokens channels"],
    scale: jax.Array,
    levels: Levels,
) -> Float[jax.Array, "videos tokens channels"]:
    ratio, following = levels.following / levels.sigma, scale * levels.following
    removed = following * (1 - ratio) * levels.eta
    down = following - removed
    alpha, alpha_down = 1 - following, 1 - down
    fresh = jnp.sqrt(removed * (following * alpha_down + down * alpha)) / alpha_down
    kept = ratio * (1 - (1 - ratio) * levels.eta)  # σ_d/σ
    return alpha / alpha_down * (noisy + (kept - 1) * (noisy - clean)) + fresh * noise


SAMPLER = Sampler(euler_ancestral, draws=1)
