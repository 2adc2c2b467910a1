"""The stochastic exponential Runge-Kutta method of second order of LTX-2.3's HQ pipeline, two forwards a step.

With h = ln(σ/σ'), σm = √(σσ'), the clean values D1 at (x, σ) and D2 at (xm, σm), and the anchor A = x:

xm = S(A, A + h·a21·(D1 − A), σ → σm); x' = S(A, A + h·(b1·(D1 − A) + b2·(D2 − A)), σ → σ'),
a21 = φ1(−h/2)/2, b2 = 2·φ2(−h), b1 = φ1(−h) − b2; φ1(z) = (e^z − 1)/z, φ2(z) = (e^z − 1 − z)/z².

Where h < 0.5 and σ > 0.03, A is moved after xm to where the first half of the step ends in xm. The published code
repeats A ← xm − h·a21·(D1 − A) a hundred times; its limit is A = D1 + e^(h/2)·(xm − D1).

S exchanges a part δ of the noise at σ' for fresh noise n of spread u = η·σ'/2; the noise at (s, σ) on the line to p is
s + (1 − σ)·e, with e = (s − p)/(σ − σ'):
S(s, p, σ → σ') = p − δ·(s + (1 − σ)·e) + u·n, δ = σ' − √(σ'² − u²). The published code computes the same from its
root r as (1 − σ' + r)·(s − σ·e) + r·e + u·n.

The last step ends at level 0.0011, and one forward more there gives the result: 2n + 1 forwards in n steps. A stage
that begins at or below that level is this forward alone.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Float

from ltx2_cli.diffusion.sampler import Latents, Levels, Predict, Sampler
from ltx2_cli.request.spec import Streams

LAST_LEVEL = 0.0011
LONGEST_REFINED, LOWEST_REFINED = 0.5, 0.03  # the h and σ that bound the move of the anchor
TERMS = 12  # of the series of φ2: below 1e-7 of the first for h up to 1

StreamLatents = Float[jax.Array, "videos tokens channels"]
Move = Callable[
    [StreamLatents, StreamLatents, StreamLatents, StreamLatents, StreamLatents],
    tuple[StreamLatents, StreamLatents, StreamLatents],
]


def res_2s(latents: Latents, predict: Predict, levels: Levels, draws: Sequence[Latents]) -> Latents:
    """One step of both streams, with a draw of noise for its middle and one for its end."""
    sigma = levels.sigma
    target = jnp.where(levels.following == 0, jnp.minimum(sigma, LAST_LEVEL), levels.following)
    h = jnp.log(sigma / target)
    middle, spread = jnp.sqrt(sigma * target), levels.eta / 2
    a21, b1, b2 = coefficients(h)
    substep, step = (Streams(*map(_standardised, draw)) for draw in draws)
    moved = (h < LONGEST_REFINED) & (sigma > LOWEST_REFINED)

    def first(
        point: StreamLatents, _: StreamLatents, __: StreamLatents, clean: StreamLatents, noise: StreamLatents
    ) -> tuple[StreamLatents, StreamLatents, StreamLatents]:
        halfway = exchange_noise(point, point + h * a21 * (clean - point), sigma, middle, spread, noise)
        anchor = jnp.where(moved, clean + jnp.exp(h / 2) * (halfway - clean), point)
        return halfway, anchor, clean

    def second(
        _: StreamLatents, anchor: StreamLatents, before: StreamLatents, clean: StreamLatents, noise: StreamLatents
    ) -> tuple[StreamLatents, StreamLatents, StreamLatents]:
        ahead = anchor + h * (b1 * (before - anchor) + b2 * (clean - anchor))
        return exchange_noise(anchor, ahead, sigma, target, spread, noise), anchor, clean

    def forward(number: jax.Array, state: tuple[Latents, Latents, Latents]) -> tuple[Latents, Latents, Latents]:
        clean = predict(state[0], jnp.stack([sigma, middle, target])[number])

        def moves(move: Move, noise: Latents) -> tuple[Latents, Latents, Latents]:
            ends = [move(*stream) for stream in zip(*state, clean, noise, strict=True)]
            points, anchors, cleans = (Streams(*parts) for parts in zip(*ends, strict=True))
            return levels.hold(points), anchors, cleans

        ways = [lambda: moves(first, substep), lambda: moves(second, step), lambda: (clean, clean, clean)]
        return jax.lax.switch(number, ways)

    begin = jnp.where(target < sigma, 0, 2)
    end = jnp.where(levels.following == 0, 3, 2)
    return jax.lax.fori_loop(begin, end, forward, (latents, latents, latents))[0]


def coefficients(h: Float[jax.Array, ""]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """a21, b1 and b2 of a step of length h."""
    b2 = 2 * _phi2(-h)
    return _phi1(-h / 2) / 2, _phi1(-h) - b2, b2


def _phi1(z: jax.Array) -> jax.Array:
    return jnp.where(z == 0, 1.0, jnp.expm1(z) / jnp.where(z == 0, 1.0, z))


def _phi2(z: jax.Array) -> jax.Array:
    """By its series where the difference of the formula would lose digits."""
    short = jnp.where(jnp.abs(z) < 1, z, 0.0)
    series = sum(short**k * (1 / math.factorial(k + 2)) for k in range(TERMS))
    long = jnp.where(jnp.abs(z) < 1, 1.0, z)
    return jnp.where(jnp.abs(z) < 1, series, (jnp.expm1(long) - long) / long**2)


def exchange_noise(
    start: StreamLatents,
    end: StreamLatents,
    sigma: jax.Array,
    following: jax.Array,
    spread: jax.Array,
    noise: StreamLatents,
) -> StreamLatents:
    """`end`, at the level `following` of a step from `start` at `sigma`, with fresh noise in place of a part of its
    own, of `spread` times the level."""
    fresh = jnp.minimum(spread, 0.9999) * following
    replaced = fresh**2 / (following + jnp.sqrt(following**2 - fresh**2))
    slope = (start - end) / jnp.where(sigma == following, 1.0, sigma - following)
    return end - replaced * (start + (1 - sigma) * slope) + fresh * noise


def _standardised(noise: StreamLatents) -> StreamLatents:
    """Each video's noise, with mean 0 and spread 1."""
    spread = jnp.std(noise, axis=(1, 2), keepdims=True, ddof=1)
    return (noise - jnp.mean(noise, axis=(1, 2), keepdims=True)) / spread


SAMPLER = Sampler(res_2s, draws=2, forwards=2, at_end=1)
