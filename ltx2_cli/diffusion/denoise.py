"""The denoising loop: rectified flow, Euler steps."""

from collections.abc import Callable

import jax

from ltx2_cli.diffusion.guidance import GuidanceWeights, guide
from ltx2_cli.request.spec import Streams

Velocity = Callable[[Streams[jax.Array], jax.Array], Streams[jax.Array]]


def denoise(
    velocity: Velocity,
    latents: Streams[jax.Array],
    sigmas: jax.Array,
    guidance: Streams[GuidanceWeights],
    start: jax.Array,
    stop: jax.Array,
) -> Streams[jax.Array]:
    """Denoise `latents`, float32 [videos, tokens, channels], from sigmas[start] to sigmas[stop]. The bounds are traced:
    one compiled program runs any range of any schedule. `velocity(latents, sigma)` is noise minus clean for every pass,
    [passes, videos, tokens, channels]."""

    def step(index: jax.Array, latents: Streams[jax.Array]) -> Streams[jax.Array]:
        sigma, following = sigmas[index], sigmas[index + 1]
        velocities = velocity(latents, sigma)
        streams = zip(latents, velocities, guidance, strict=True)
        return Streams(*(euler(*stream, sigma, following) for stream in streams))

    return jax.lax.fori_loop(start, stop, step, latents)


def euler(
    noisy: jax.Array, velocities: jax.Array, weights: GuidanceWeights, sigma: jax.Array, following: jax.Array
) -> jax.Array:
    """One Euler step of one stream: x0 = x − σ·v for every pass, guided, then x + (σ' − σ)·(x − x0)/σ."""
    clean = guide(noisy - sigma * velocities.astype(noisy.dtype), weights)
    return noisy + (following - sigma) / sigma * (noisy - clean)
