"""The loop from noise to latents: rectified flow, Euler steps."""

from collections.abc import Callable

import jax

from ltx2_cli.diffusion.guidance import Weights, guide
from ltx2_cli.spec import AV

Velocity = Callable[[AV[jax.Array], jax.Array], AV[jax.Array]]


def denoise(
    velocity: Velocity,
    latents: AV[jax.Array],
    sigmas: jax.Array,
    guidance: AV[Weights],
    start: jax.Array,
    stop: jax.Array,
) -> AV[jax.Array]:
    """`latents`, float32 [videos, tokens, channels] at sigmas[start], taken to sigmas[stop].

    `velocity(latents, sigma)` gives noise minus clean for every pass, [passes, videos, tokens, channels]. The bounds
    are traced: any range of any schedule runs in one compiled program.
    """

    def step(index: jax.Array, latents: AV[jax.Array]) -> AV[jax.Array]:
        sigma, following = sigmas[index], sigmas[index + 1]
        velocities = velocity(latents, sigma)
        return AV(*(euler(*each, sigma, following) for each in zip(latents, velocities, guidance, strict=True)))

    return jax.lax.fori_loop(start, stop, step, latents)


def euler(
    noisy: jax.Array, velocities: jax.Array, weights: Weights, sigma: jax.Array, following: jax.Array
) -> jax.Array:
    """One stream one step on: x0 = x − σ·v for every pass, guided, then x + (σ' − σ)·(x − x0)/σ."""
    clean = guide(noisy - sigma * velocities.astype(noisy.dtype), weights)
    return noisy + (following - sigma) / sigma * (noisy - clean)
