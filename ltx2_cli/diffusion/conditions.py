"""Tokens that are given to a clip, such as those of a picture or of a sound: each has a clean value, a strength, and a
noise level of its own, (1 − strength)·σ where that of the stream is σ. They take the place of tokens of the grid, or
are appended and cut off at the end. A clip has few levels: what they decide is computed for each, and picked by token.
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
    """Tokens of a stream that one picture or sound gives."""

    latents: np.ndarray  # [tokens, channels], normalised
    strength: float
    start: int  # the first token


@partial(jax.tree_util.register_dataclass, data_fields=["shares"], meta_fields=["counts"])
@dataclass(frozen=True)
class References:
    """How much self-attention there is between a clip and its references, where it is not all. References see neither
    each other nor pictures behind the grid."""

    counts: tuple[int, ...]  # tokens of the grid, of pictures behind it, of each reference
    shares: Array  # float32 [tokens]: factor of the exponential of a score of a reference's token with one of the grid


class Conditions(NamedTuple):
    """The given tokens of one stream. All is traced: other values, places and strengths compile nothing. Level 0 is
    that of tokens that are not given. Factors are of the noise level σ of the step, [levels]."""

    level: Array  # int32 [tokens]
    clean: Array  # float32 [tokens, channels]; zeros where nothing is given
    strength: Array  # float32 [levels]
    own: Array  # factor of a token's own noise level
    x0: Array  # factor with which its clean value is predicted
    cross: Array  # factor that modulates what it shows the other stream
    gate: Array  # factor that modulates what it takes from the other stream
    text: Array  # factor that modulates the text for the whole stream, a scalar
    references: References | None = None  # None: tokens attend to all tokens alike

    def by_token(self, values: Array) -> jax.Array:
        """Values [levels] as [tokens, 1]."""
        return jnp.asarray(values)[self.level][:, None]


UNCONDITIONED: Streams[Conditions | None] = Streams(None, None)


def conditions(
    given: Streams[Sequence[ConditionTokens]],
    shapes: Streams[tuple[int, int]],
    x0_sigma: X0Sigma,
    cross_timestep: CrossTimestep,
    frozen: Streams[bool],
) -> Streams[Conditions | None]:
    """The given tokens among all of each stream, of these shapes [tokens, channels]; None for a stream whose tokens all
    have the step's noise level. Of two that are given for one token the later holds. `x0_sigma`: whose noise level
    predicts the clean value. `cross_timestep`: where the other stream's noise level replaces a token's own in the
    attention between the streams. That of a stream is σ, but 0 of one that is `frozen`: nothing of it is made, and it
    is clean for the other too. A picture that fills a clip of one frame freezes nothing: diffusers keep σ."""
    level = Streams(*(0.0 if still else 1.0 for still in frozen))  # in σ
    pairs = zip(given, shapes, level, level[::-1], strict=True)
    return Streams(*(_of_stream(*pair, x0_sigma, cross_timestep) for pair in pairs))


def _of_stream(
    given: Sequence[ConditionTokens],
    shape: tuple[int, int],
    level_of_stream: float,
    level_of_other: float,
    x0: str,
    cross: str,
) -> Conditions | None:
    if not given and level_of_other == 1:
        return None
    level, clean = np.zeros(shape[0], np.int32), np.zeros(shape, np.float32)
    for number, (latents, _, start) in enumerate(given, 1):
        level[start : start + len(latents)] = number
        clean[start : start + len(latents)] = latents
    strength = np.asarray([0, *(condition.strength for condition in given)], np.float32)
    own, other = 1 - strength, np.full_like(strength, level_of_other)
    return Conditions(
        level,
        clean,
        strength,
        own,
        x0=own if x0 == "token" else np.ones_like(strength),
        cross=other if cross == "always" else own,
        gate=other,
        text=np.asarray(level_of_stream, np.float32),
    )


def initial_latents(
    clean: Streams[jax.Array] | None,
    noise: Streams[jax.Array],
    sigma: jax.Array,
    given: Streams[Conditions | None] = UNCONDITIONED,
) -> Streams[jax.Array]:
    """Latents [videos, tokens, channels] at noise level σ, (1 − σ)·x + σ·noise, each given token at its own of its
    clean value. Without `clean`: noise, but for the given tokens."""
    streams = zip(clean or (None, None), noise, given, strict=True)
    return Streams(*(_initial(*stream, sigma) for stream in streams))


def _initial(clean: jax.Array | None, noise: jax.Array, given: Conditions | None, sigma: jax.Array) -> jax.Array:
    if clean is None:
        clean, sigma = jnp.zeros_like(noise), jnp.ones_like(sigma)
    if given is not None:
        clean = jnp.pad(clean, ((0, 0), (0, noise.shape[1] - clean.shape[1]), (0, 0)))
        clean = jnp.where(given.level[:, None] > 0, given.clean, clean)
        sigma = sigma * given.by_token(given.own)
    return (1 - sigma) * clean + sigma * noise
