"""The protocol of samplers: how latents go from one noise level to the next. Each is a file of `samplers` that defines
`SAMPLER`; requests name it as its file is named."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NamedTuple

import jax

from ltx2_cli.request.spec import Streams

Latents = Streams[jax.Array]  # float32 [videos, tokens, channels]
Predict = Callable[[Latents, jax.Array], Latents]  # latents at a noise level to guided clean values: one forward


class Levels(NamedTuple):
    """The noise levels of a step and its fraction of fresh noise, traced, and what conditions fix."""

    sigma: jax.Array  # of the latents
    following: jax.Array  # to which the step leads
    scale: Streams[jax.Array]  # the factor of both for each token, a scalar or [tokens, 1]; 0: of a whole condition
    eta: jax.Array  # 0: no fresh noise, 1: as much as the sampler draws
    hold: Callable[[Latents], Latents]  # draws condition tokens to their clean values by their strength


@dataclass(frozen=True)
class Sampler:
    """A step from latents at `levels.sigma` to those at `levels.following`, for both streams. It calls `predict` once
    for each forward, and gets as many draws of standard normal noise as it says."""

    step: Callable[[Latents, Predict, Levels, Sequence[Latents]], Latents]
    draws: int = 0
    forwards: int = 1  # in a step
    at_end: int = 0  # more of them in the step to level 0


def find_sampler(name: str) -> Sampler:
    """The sampler of a known name."""
    sampler: Sampler = import_module(f"{__package__}.samplers.{name}").SAMPLER
    return sampler
