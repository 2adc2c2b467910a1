"""Guidance, and the denoising loop: rectified flow, Euler steps.

Guidance is one weighted sum of predictions, then a rescale: classifier-free (arXiv:2207.12598), spatio-temporal
(arXiv:2411.18664), and modality guidance (arXiv:2601.03233):

g = c + (s_cfg − 1)(c − u) + s_stg (c − p) + (s_mod − 1)(c − m), which is Σ w[pass]·x0[pass]; then
g ← g·(r·std(c)/std(g) + 1 − r).
"""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.request.spec import Guidance, Streams

SMALLEST_STD = 1e-12


class Pass(Enum):
    """One evaluation of the model within a step, by its inputs."""

    COND = "the prompt"
    UNCOND = "the negative prompt"
    PERTURBED = "the prompt, with some self-attention switched off"
    ISOLATED = "the prompt, with video and audio apart"


class GuidanceWeights(NamedTuple):
    """Traced arrays: the weight of each pass [passes], and the strength of the rescale to the conditional spread."""

    passes: jax.Array | np.ndarray
    rescale: jax.Array | np.ndarray


def pass_weights(guidance: Guidance) -> dict[Pass, float]:
    """The weight of each pass for one stream; they add up to 1."""
    uncond, perturbed, isolated = guidance.guidance_scale - 1, guidance.stg_scale, guidance.modality_scale - 1
    return {
        Pass.COND: 1 + uncond + perturbed + isolated,
        Pass.UNCOND: -uncond,
        Pass.PERTURBED: -perturbed,
        Pass.ISOLATED: -isolated,
    }


def needed_passes(guidance: Streams[Guidance]) -> tuple[Pass, ...]:
    """The passes that either stream needs, the conditional one first."""
    streams = [pass_weights(stream) for stream in guidance]
    return tuple(name for name in Pass if name is Pass.COND or any(weights[name] for weights in streams))


def traced_weights(guidance: Guidance, passes: tuple[Pass, ...]) -> GuidanceWeights:
    """The arrays that `guide` takes, for one stream."""
    weights = [pass_weights(guidance)[name] for name in passes]
    return GuidanceWeights(np.asarray(weights, np.float32), np.asarray(guidance.guidance_rescale, np.float32))


def guide(predictions: jax.Array, weights: GuidanceWeights) -> jax.Array:
    """The weighted sum of all passes' predictions, float32 [passes, videos, tokens, channels], the conditional first.
    The rescale compares standard deviations over the tokens and channels of one video."""
    guided = jnp.tensordot(weights.passes, predictions, axes=1, precision="highest")
    deviation = jnp.std(predictions[0], axis=(1, 2), keepdims=True)
    ratio = deviation / jnp.maximum(jnp.std(guided, axis=(1, 2), keepdims=True), SMALLEST_STD)
    return guided * (weights.rescale * ratio + 1 - weights.rescale)


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
