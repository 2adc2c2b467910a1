"""The compiled programs of a stage: its noise, what it reads of the text, its steps; and a step that is looked into."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.diffusion.denoise import denoise
from ltx2_cli.diffusion.guidance import Weights
from ltx2_cli.diffusion.latents import Shape, noise, pack
from ltx2_cli.models.block import Ropes, Switches
from ltx2_cli.models.transformer import TextContext, Transformer
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV


@jax.jit
def mixed(latents: AV[jax.Array], noise: AV[jax.Array], sigma: jax.Array) -> AV[jax.Array]:
    """Latents at noise level σ: (1 − σ)·x + σ·noise."""
    return AV(*((1 - sigma) * clean + sigma * pure for clean, pure in zip(latents, noise, strict=True)))


@partial(jax.jit, static_argnames=("shapes", "stage", "sharding"))
def pure_noise(seeds: jax.Array | np.ndarray, shapes: AV[Shape], stage: int, sharding: ShardingPlan) -> AV[jax.Array]:
    """Tokens of standard normal noise, a video for each of the seeds uint32 [videos]."""
    videos = jax.vmap(lambda seed: pack(noise(seed, shapes, stage)))(seeds)
    tokens = AV(*(stream[:, 0] for stream in videos))
    return jax.lax.with_sharding_constraint(tokens, sharding.replicated)


@partial(jax.jit, static_argnames="sharding")
def text_context(transformer: Transformer, contexts: AV[jax.Array], sharding: ShardingPlan) -> TextContext:
    """The connectors' output as the layers want it, once for all steps."""
    with activate(sharding):
        text = transformer.text_context(contexts)
    return text._replace(tokens=jax.lax.with_sharding_constraint(text.tokens, sharding.replicated))


def _velocity(
    transformer: Transformer,
    latents: AV[jax.Array],
    text: TextContext,
    contexts: jax.Array,
    ropes: AV[Ropes],
    switches: Switches,
    sigma: jax.Array,
) -> AV[jax.Array]:
    """Noise minus clean of latents [videos, tokens, channels] in every pass, [passes, videos, tokens, channels]."""
    passes = len(contexts) // len(latents.video)
    velocities = transformer(_rows(transformer, latents, passes), sigma, text, contexts, ropes, switches)
    return AV(*(stream.reshape(passes, -1, *stream.shape[1:]) for stream in velocities))


def _rows(transformer: Transformer, latents: AV[jax.Array], passes: int) -> AV[jax.Array]:
    """The latents once for each pass, as the transformer takes them."""
    dtype = transformer.video.proj_in.kernel.dtype
    return AV(*(jnp.tile(stream.astype(dtype), (passes, 1, 1)) for stream in latents))


@partial(jax.jit, static_argnames="sharding")
def forward(
    transformer: Transformer,
    latents: AV[jax.Array],
    text: TextContext,
    contexts: jax.Array,
    ropes: AV[Ropes],
    switches: Switches,
    sigma: jax.Array,
    sharding: ShardingPlan,
) -> AV[jax.Array]:
    """The velocities of all passes at one noise level, [passes, videos, tokens, channels]."""
    with activate(sharding):
        return _velocity(transformer, latents, text, contexts, ropes, switches, sigma)


@partial(jax.jit, static_argnames="sharding", donate_argnames="latents")
def denoise_steps(
    transformer: Transformer,
    latents: AV[jax.Array],
    text: TextContext,
    contexts: jax.Array,
    ropes: AV[Ropes],
    switches: Switches,
    sigmas: jax.Array,
    guidance: AV[Weights],
    start: jax.Array,
    stop: jax.Array,
    sharding: ShardingPlan,
) -> tuple[AV[jax.Array], AV[jax.Array]]:
    """The latents after these steps, laid out as before them, and whether each stream is finite."""

    def velocity(latents: AV[jax.Array], sigma: jax.Array) -> AV[jax.Array]:
        return _velocity(transformer, latents, text, contexts, ropes, switches, sigma)

    with activate(sharding):
        latents = denoise(velocity, latents, sigmas, guidance, start, stop)
    finite = AV(*(jnp.isfinite(stream).all() for stream in latents))
    return jax.lax.with_sharding_constraint(latents, sharding.replicated), finite


@partial(jax.jit, static_argnames="sharding")
def finite_parts(
    transformer: Transformer,
    latents: AV[jax.Array],
    text: TextContext,
    contexts: jax.Array,
    ropes: AV[Ropes],
    switches: Switches,
    sigma: jax.Array,
    sharding: ShardingPlan,
) -> jax.Array:
    """What of a forward is finite, bool [layers + 3]: the text, what enters the first layer, what leaves each layer,
    the velocities. No run compiles it unless its latents are not finite."""

    def finite(x: AV[jax.Array]) -> jax.Array:
        ours = (stream[:, : each.shape[1]] for stream, each in zip(x, latents, strict=True))
        return _all_finite(AV(*ours))

    rows = _rows(transformer, latents, len(contexts) // len(latents.video))
    with activate(sharding):
        velocities, (entering, leaving) = transformer.observed(rows, sigma, text, contexts, ropes, switches, finite)
    parts = _all_finite(text.tokens), entering, leaving, _all_finite(velocities)
    return jax.lax.with_sharding_constraint(jnp.hstack(parts), sharding.replicated)


def _all_finite(x: AV[jax.Array]) -> jax.Array:
    return jnp.isfinite(x.video).all() & jnp.isfinite(x.audio).all()
