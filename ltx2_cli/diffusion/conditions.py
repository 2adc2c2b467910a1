"""Tokens that are given to a clip, such as those of a picture: each has a clean value, a strength, and a noise level of
its own, (1 − strength)·σ where that of the stream is σ. They take the place of tokens of the grid, or are appended and
cut off at the end. A clip has few levels: what they decide is computed for each, and picked by token."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.request.spec import Streams

Array = jax.Array | np.ndarray
CrossTimestep = Literal["gate", "always", "never"]


class Given(NamedTuple):
    """What one picture gives."""

    latents: np.ndarray  # [tokens, channels], normalised
    strength: float
    start: int  # the first token


class Conditions(NamedTuple):
    """The given tokens of one stream. All is traced: other values, places and strengths compile nothing. Level 0 is
    that of tokens that are not given. Factors are of the stream's noise level, [levels]."""

    level: Array  # int32 [tokens]
    clean: Array  # float32 [tokens, channels]; zeros where nothing is given
    strength: Array  # float32 [levels]
    own: Array  # factor of a token's own noise level
    x0: Array  # factor with which its clean value is predicted
    cross: Array  # factor that modulates what it shows the other stream
    gate: Array  # factor that modulates what it takes from the other stream

    def by_token(self, values: Array) -> jax.Array:
        """Values [levels] as [tokens, 1]."""
        return jnp.asarray(values)[self.level][:, None]


UNCONDITIONED: Streams[Conditions | None] = Streams(None, None)


def conditions(
    given: Sequence[Given], tokens: int, x0_sigma: Literal["token", "stream"], cross_timestep: CrossTimestep
) -> Conditions | None:
    """The given tokens among all `tokens` of a stream; None where nothing is given. `x0_sigma`: whose noise level
    predicts the clean value. `cross_timestep`: where the other stream's, which here is undisturbed, replaces a token's
    own in the attention between the streams."""
    if not given:
        return None
    level, clean = np.zeros(tokens, np.int32), np.zeros((tokens, given[0].latents.shape[1]), np.float32)
    for number, (latents, _, start) in enumerate(given, 1):
        level[start : start + len(latents)] = number
        clean[start : start + len(latents)] = latents
    strength = np.asarray([0, *(condition.strength for condition in given)], np.float32)
    own, stream = 1 - strength, np.ones_like(strength)
    return Conditions(
        level,
        clean,
        strength,
        own,
        x0=own if x0_sigma == "token" else stream,
        cross=stream if cross_timestep == "always" else own,
        gate=own if cross_timestep == "never" else stream,
    )


@jax.jit
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
