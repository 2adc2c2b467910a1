"""Conditions: tokens of a clip that an input image, video or audio fixes. Each has a clean value, a strength, and a
noise level of its own, (1 − strength)·σ where the stream's is σ. They replace tokens of the grid, or are appended and
cut off at the end. A clip has few levels: values that depend on them are computed once for each level and selected for
each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.request.spec import Streams

Array = jax.Array | np.ndarray
X0Sigma = Literal["token", "stream"]
CrossTimestep = Literal["gate", "always"]


class ConditionTokens(NamedTuple):
    """The tokens of one input image, video or audio."""

    latents: np.ndarray  # [tokens, channels], or of each video [videos, tokens, channels]; normalised
    strength: float
    start: int  # the first token


@partial(jax.tree_util.register_dataclass, data_fields=["key_weights"], meta_fields=["counts"])
@dataclass(frozen=True)
class References:
    """Weights of the self-attention between a clip and its references, where it is not full. References attend neither
    to each other nor to keyframes behind the grid."""

    counts: tuple[int, ...]  # tokens of the grid, of keyframes behind it, of each reference
    key_weights: Array  # float32 [tokens]: factors of the exponential of a score between a reference and the grid


class Conditions(NamedTuple):
    """The condition tokens of one stream; all others have level 0. All fields are traced: other values, places and
    strengths compile nothing. Scales are factors of the step's noise level σ, float32 [levels]."""

    level: Array  # int32 [tokens]
    clean: Array  # float32 [tokens, channels] or [videos, tokens, channels]; zeros at level 0
    strength: Array  # float32 [levels]
    self_scale: Array  # for a token's own modulation, and its noise at the start
    x0_scale: Array  # for the prediction of its clean value
    cross_scale: Array  # for its modulation before the attention between the streams
    gate_scale: Array  # for the gate of its attention to the other stream
    text_scale: Array  # for the text's modulation in the whole stream, a scalar
    references: References | None = None  # None: tokens attend to all tokens alike

    def level_values(self, values: Array) -> jax.Array:
        """The value of each token's level, [tokens, 1], of values [levels]."""
        return jnp.asarray(values)[self.level][:, None]


UNCONDITIONED: Streams[Conditions | None] = Streams(None, None)


def merge_conditions(
    tokens: Streams[Sequence[ConditionTokens]],
    shapes: Streams[tuple[int, int]],
    x0_sigma: X0Sigma,
    cross_timestep: CrossTimestep,
    frozen: Streams[bool],
) -> Streams[Conditions | None]:
    """The conditions of each stream, from the tokens of its inputs; None for a stream whose tokens all have the step's
    noise level. Where inputs overlap, the last one counts. `shapes` are [tokens, channels]. `x0_sigma`: the noise
    level, the token's or the stream's, that predicts the clean value. `cross_timestep`: "always", or for the "gate"
    alone, the attention between the streams uses the other stream's noise level instead of a token's own. A stream's
    level is σ, or 0 if it is `frozen`: it is not generated, and clean for the other stream too. A one-frame clip whose
    frame is an input still uses the step's σ, as diffusers does."""
    level = Streams(*(0.0 if still else 1.0 for still in frozen))  # in σ
    pairs = zip(tokens, shapes, level, level[::-1], strict=True)
    return Streams(*(_merge_stream(*pair, x0_sigma, cross_timestep) for pair in pairs))


def _merge_stream(
    inputs: Sequence[ConditionTokens],
    shape: tuple[int, int],
    level_of_stream: float,
    level_of_other: float,
    x0: str,
    cross: str,
) -> Conditions | None:
    if not inputs and level_of_other == 1:
        return None
    videos = max((latents.shape[:-2] for latents, _, _ in inputs), default=(), key=len)
    level, clean = np.zeros(shape[0], np.int32), np.zeros((*videos, *shape), np.float32)
    for number, (latents, _, start) in enumerate(inputs, 1):
        part = slice(start, start + latents.shape[-2])
        level[part], clean[..., part, :] = number, latents
    strength = np.asarray([0, *(condition.strength for condition in inputs)], np.float32)
    own, other = 1 - strength, np.full_like(strength, level_of_other)
    return Conditions(
        level,
        clean,
        strength,
        own,
        x0_scale=own if x0 == "token" else np.ones_like(strength),
        cross_scale=other if cross == "always" else own,
        gate_scale=other,
        text_scale=np.asarray(level_of_stream, np.float32),
    )


def initial_latents(
    clean: Streams[jax.Array] | None,
    noise: Streams[jax.Array],
    sigma: jax.Array,
    conditions: Streams[Conditions | None] = UNCONDITIONED,
) -> Streams[jax.Array]:
    """Latents [videos, tokens, channels] at noise level σ, (1 − σ)·x + σ·noise; condition tokens at their own level,
    from their clean value. Without `clean` all other tokens are noise."""
    streams = zip(clean or (None, None), noise, conditions, strict=True)
    return Streams(*(_initial(*stream, sigma) for stream in streams))


def _initial(clean: jax.Array | None, noise: jax.Array, conditions: Conditions | None, sigma: jax.Array) -> jax.Array:
    if clean is None:
        clean, sigma = jnp.zeros_like(noise), jnp.ones_like(sigma)
    clean = jnp.pad(clean, ((0, 0), (0, noise.shape[1] - clean.shape[1]), (0, 0)))  # 0 behind the grid
    if conditions is not None:
        clean = jnp.where(conditions.level[:, None] > 0, conditions.clean, clean)
        sigma = sigma * conditions.level_values(conditions.self_scale)
    return (1 - sigma) * clean + sigma * noise
