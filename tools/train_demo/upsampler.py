"""The course of the latent upsampler: latents of a clip to those of the same clip at twice its size."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.models.upsampler import LatentUpsampler, upsample_latents
from ltx2_cli.models.video_vae import LatentStatistics
from ltx2_cli.weights.declare import Scope
from tools.train_demo.arch import UPSAMPLER_ARCH
from tools.train_demo.clips import Clips
from tools.train_demo.initial import initial
from tools.train_demo.training import Course, train

CLIPS = 16
NOISE = 0.1  # a first stage's latents are not quite those of a clip


def draw(small: Clips, large: Clips, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """The latents of some clips at both sizes."""
    chosen = rng.integers(len(large.scenes), size=CLIPS)
    return small.video[chosen].astype(np.float32), large.video[chosen].astype(np.float32)


def loss(
    statistics: LatentStatistics,
    upsampler: LatentUpsampler,
    batch: tuple[jax.Array, jax.Array],
    key: jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """How far normalised latents are from those of the large clip, squared."""
    small, large = batch
    made = upsample_latents(upsampler, statistics, small + NOISE * jax.random.normal(key, small.shape))
    return jnp.mean(jnp.square(made - large)), {}


def trained(course: Course, statistics: LatentStatistics, small: Clips, large: Clips, out: Path) -> LatentUpsampler:
    """The upsampler at the end of its course."""
    upsampler = initial(LatentUpsampler(Scope("float32"), UPSAMPLER_ARCH), seed=6)
    return train(course, upsampler, partial(loss, statistics), partial(draw, small, large), out)
