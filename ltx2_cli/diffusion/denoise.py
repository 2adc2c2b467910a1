"""The denoising loop of rectified flow: noise levels, guidance at each, the steps.

Noise levels fall from 1 to 0, a shifted line with a fixed last level above zero, as LTX-2 uses. Guidance is one
weighted sum of predictions, then a rescale: classifier-free (arXiv:2207.12598), spatio-temporal (arXiv:2411.18664), and
modality guidance (arXiv:2601.03233):

g = c + (s_cfg − 1)(c − u) + s_stg (c − p) + (s_mod − 1)(c − m), which is Σ w[pass]·x0[pass]; then
g ← g·(r·std(c)/std(g) + 1 − r).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, reduce
from operator import sub
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ltx2_cli.diffusion.conditions import UNCONDITIONED, Conditions
from ltx2_cli.diffusion.sampler import Levels, Sampler
from ltx2_cli.request.spec import Guidance, Streams
from ltx2_cli.request.validation import MAX_STEPS


@dataclass(frozen=True)
class Schedule:
    """Spacing of a checkpoint's noise levels; names and defaults as in its scheduler's config."""

    use_dynamic_shifting: bool = False
    shift: float = 1.0  # where shifting is not dynamic
    base_shift: float = 0.5
    max_shift: float = 1.15
    base_image_seq_len: int = 256
    max_image_seq_len: int = 4096
    shift_terminal: float | None = None

    def shift_factor(self, tokens: int) -> float:
        """The shift for a number of tokens: e^μ, with μ on a line through the two anchors, not clamped."""
        if not self.use_dynamic_shifting:
            return self.shift
        slope = (self.max_shift - self.base_shift) / (self.max_image_seq_len - self.base_image_seq_len)
        return float(np.exp(self.base_shift + slope * (tokens - self.base_image_seq_len)))

    def sigmas(self, steps: int, tokens: int) -> np.ndarray:
        """Noise levels float32 [steps + 1], from 1 to 0: s' = shift / (shift + 1/s − 1), then 1 − s' is scaled so that
        the last s' above zero is `shift_terminal`."""
        line = np.linspace(1, 1 / steps, steps)
        shift = self.shift_factor(tokens)
        sigmas = shift / (shift + 1 / line - 1)
        if self.shift_terminal and sigmas[-1] < 1:  # 0 means none, as in the reference
            sigmas = 1 - (1 - sigmas) * (1 - self.shift_terminal) / (1 - sigmas[-1])
        return np.append(sigmas, 0).astype(np.float32)


def pad_steps(values: np.ndarray) -> np.ndarray:
    """Values of the steps, padded to a fixed length: another number of steps needs no other program."""
    return np.pad(values, (0, MAX_STEPS + 1 - len(values)))


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
    """The arrays that `guide` takes, for one stream in a step of these passes, the conditional one first. Those left
    out have no weight."""
    others = [pass_weights(guidance)[name] for name in passes[1:]]
    weights = [reduce(sub, others, 1.0), *others]
    return GuidanceWeights(np.asarray(weights, np.float32), np.asarray(guidance.guidance_rescale, np.float32))


def guide(
    predictions: Float[jax.Array, "passes videos tokens channels"], weights: GuidanceWeights
) -> Float[jax.Array, "videos tokens channels"]:
    """The weighted sum of all passes' predictions, float32 [passes, videos, tokens, channels], the conditional first.
    The rescale compares standard deviations over the tokens and channels of one video."""
    guided = jnp.tensordot(weights.passes, predictions, axes=1, precision="highest")
    deviation = jnp.std(predictions[0], axis=(1, 2), keepdims=True)
    ratio = deviation / jnp.maximum(jnp.std(guided, axis=(1, 2), keepdims=True), SMALLEST_STD)
    return guided * (weights.rescale * ratio + 1 - weights.rescale)


Velocity = Callable[[Streams[jax.Array], jax.Array], Streams[jax.Array]]


class StepPasses(NamedTuple):
    """The passes of a step: `velocity(latents, sigma)` is noise minus clean for each, [passes, videos, tokens,
    channels], and their weights."""

    velocity: Velocity
    weights: Streams[GuidanceWeights]


class WholeStep(NamedTuple):
    """The last step in which no video skipped layers: a run that goes on from it makes the same."""

    latents: Streams[jax.Array]  # before it
    number: jax.Array  # int32
    skipped: jax.Array  # int32 [videos], the forwards before it


class StepCache(NamedTuple):
    """What steps leave to those after them, which may skip layers."""

    layers: Any  # of the denoiser
    whole: WholeStep
    skipped: jax.Array  # int32 [videos], forwards


CachedVelocity = Callable[[Streams[jax.Array], jax.Array, Any], tuple[Streams[jax.Array], Any, jax.Array]]


def denoise(
    choices: Sequence[StepPasses],
    latents: Streams[jax.Array],
    sigmas: jax.Array,
    chosen: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sampler: Sampler,
    draw: Callable[[jax.Array], Streams[jax.Array]],
    eta: jax.Array,
    conditions: Streams[Conditions | None] = UNCONDITIONED,
) -> Streams[jax.Array]:
    """Denoise `latents`, float32 [videos, tokens, channels], from sigmas[start] to sigmas[stop]. The bounds are traced:
    one compiled program runs any range of any schedule. Step i runs the passes choices[chosen[i]], which know the noise
    levels of `conditions`. `draw(number)` is standard normal noise of the latents' shapes, by the number of the draw
    since step 0."""
    levels_at = _levels(sigmas, eta, conditions)

    def predict(passes: StepPasses, latents: Streams[jax.Array], sigma: jax.Array) -> Streams[jax.Array]:
        return _clean(latents, passes.velocity(latents, sigma), passes.weights, conditions, sigma)

    def step(index: jax.Array, latents: Streams[jax.Array]) -> Streams[jax.Array]:
        levels, draws = levels_at(index), [draw(index * sampler.draws + number) for number in range(sampler.draws)]
        if len(choices) == 1:
            return sampler.step(latents, partial(predict, choices[0]), levels, draws)
        # Loops of one turn or none: libtpu 0.0.42 had not compiled branches in 15 minutes, of `--offload layers`.
        for number, passes in enumerate(choices):
            guided = partial(predict, passes)
            turns = jnp.int32(chosen[index] == number)
            latents = jax.lax.fori_loop(0, turns, lambda _, x, by=guided: sampler.step(x, by, levels, draws), latents)
        return latents

    return jax.lax.fori_loop(start, stop, step, latents)


def denoise_with_cache(
    velocity: CachedVelocity,
    weights: Streams[GuidanceWeights],
    cache: StepCache,
    latents: Streams[jax.Array],
    sigmas: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    sampler: Sampler,
    draw: Callable[[jax.Array], Streams[jax.Array]],
    eta: jax.Array,
    conditions: Streams[Conditions | None] = UNCONDITIONED,
) -> tuple[Streams[jax.Array], StepCache]:
    """As `denoise`, with one set of passes and a sampler of one forward a step. `velocity` takes a cache of layers too,
    and also returns the next one, and which videos skipped layers, bool [videos]."""
    levels_at = _levels(sigmas, eta, conditions)

    def step(index: jax.Array, state: tuple[Streams[jax.Array], StepCache]) -> tuple[Streams[jax.Array], StepCache]:
        (latents, cache), levels = state, levels_at(index)
        velocities, layers, skips = velocity(latents, levels.sigma, cache.layers)
        clean = _clean(latents, velocities, weights, conditions, levels.sigma)
        now = WholeStep(latents, index, cache.skipped)
        whole = jax.tree.map(lambda before, now: jnp.where(skips.any(), before, now), cache.whole, now)
        draws = [draw(index * sampler.draws + number) for number in range(sampler.draws)]
        latents = sampler.step(latents, lambda *_: clean, levels, draws)
        return latents, StepCache(layers, whole, cache.skipped + skips)

    return jax.lax.fori_loop(start, stop, step, (latents, cache))


def _levels(sigmas: jax.Array, eta: jax.Array, conditions: Streams[Conditions | None]) -> Callable[[jax.Array], Levels]:
    """The noise levels of each step, by its number."""
    own = (jnp.float32(1) if each is None else each.level_values(each.self_scale) for each in conditions)
    scale = Streams(*own)

    def hold(latents: Streams[jax.Array]) -> Streams[jax.Array]:
        return Streams(*(held(*stream) for stream in zip(latents, conditions, strict=True)))

    return lambda index: Levels(sigmas[index], sigmas[index + 1], scale, eta, hold)


def _clean(
    latents: Streams[jax.Array],
    velocities: Streams[jax.Array],
    weights: Streams[GuidanceWeights],
    conditions: Streams[Conditions | None],
    sigma: jax.Array,
) -> Streams[jax.Array]:
    streams = zip(latents, velocities, weights, conditions, strict=True)
    return Streams(*(guided_clean(*stream, sigma) for stream in streams))


def guided_clean(
    noisy: Float[jax.Array, "videos tokens channels"],
    velocities: Float[jax.Array, "passes videos tokens channels"],
    weights: GuidanceWeights,
    conditions: Conditions | None,
    sigma: Float[jax.Array, ""],
) -> Float[jax.Array, "videos tokens channels"]:
    """The clean value of one stream: x0 = x − σ·v for every pass, guided. The x0 of a condition token is drawn to its
    clean value by its strength; with its own σ in x0 it stays on the way there."""
    own_sigma = sigma if conditions is None else sigma * conditions.level_values(conditions.x0_scale)
    return held(guide(noisy - own_sigma * velocities.astype(noisy.dtype), weights), conditions)


def held(
    values: Float[jax.Array, "videos tokens channels"], conditions: Conditions | None
) -> Float[jax.Array, "videos tokens channels"]:
    """`values` with condition tokens drawn to their clean values by their strength."""
    if conditions is None:
        return values
    strength = conditions.level_values(conditions.strength)
    return (1 - strength) * values + strength * conditions.clean
