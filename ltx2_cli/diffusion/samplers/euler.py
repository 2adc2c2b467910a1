"""Euler: a straight line towards the prediction, x + (σ' − σ)·(x − x0)/σ."""

from collections.abc import Sequence

from ltx2_cli.diffusion.sampler import Latents, Levels, Predict, Sampler
from ltx2_cli.request.spec import Streams


def euler(latents: Latents, predict: Predict, levels: Levels, draws: Sequence[Latents]) -> Latents:
    """One Euler step of both streams."""
    sigma, following = levels.sigma, levels.following
    streams = zip(latents, predict(latents, sigma), strict=True)
    return Streams(*(noisy + (following - sigma) / sigma * (noisy - clean) for noisy, clean in streams))


SAMPLER = Sampler(euler)
