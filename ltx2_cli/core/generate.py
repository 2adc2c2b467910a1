"""Text contexts to latents: the noise, the passes of a step as one batch, the loop, and what lies outside it."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.denoise import denoise
from ltx2_cli.diffusion.guidance import Pass, Weights, traced_weights
from ltx2_cli.diffusion.latents import noise, pack, read_noise
from ltx2_cli.diffusion.schedule import padded
from ltx2_cli.models.block import Ropes, Switches
from ltx2_cli.models.transformer import TextContext, Transformer, rope_tables
from ltx2_cli.plan import Plan, Stage
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV, NotFiniteError

SECONDS_BETWEEN_REPORTS = 1.0


def generate(
    plan: Plan, latents: AV[jax.Array], contexts: AV[jax.Array], components: Components, report: Report
) -> AV[jax.Array]:
    """Noise to clean latents of every video, tokens float32 [videos, tokens, channels], normalised."""
    (stage,) = plan.stages
    with components.use("transformer", report) as transformer:
        return _run_stage(plan, stage, transformer, contexts, latents, report)


def initial_latents(plan: Plan) -> AV[jax.Array]:
    """Pure noise: that of the given file, or of each video's seed."""
    if plan.spec.noise is not None:
        return pack(read_noise(plan.spec.noise, plan.latent_shapes))
    videos = [pack(noise(seed, plan.latent_shapes)) for seed in plan.seeds]
    return AV(*(jnp.concatenate(rows) for rows in zip(*videos, strict=True)))


def _run_stage(
    plan: Plan, stage: Stage, transformer: Transformer, contexts: AV[jax.Array], latents: AV[jax.Array], report: Report
) -> AV[jax.Array]:
    steps, videos = len(stage.sigmas) - 1, len(plan.seeds)
    whole = partial(jax.device_put, device=plan.sharding.replicated)
    text = _text_context(transformer, contexts, plan.sharding)
    fixed = whole(
        (
            jnp.repeat(np.asarray(plan.contexts(stage.passes), np.int32), videos),
            rope_tables(stage.geometry, plan.arch.transformer),
            _switches(stage, plan.arch.transformer.num_layers, videos),
            padded(stage.sigmas),
            AV(*(traced_weights(stream, stage.passes) for stream in stage.guidance)),
        )
    )
    latents, done, chunk = whole(latents), 0, 1
    with report.steps(steps) as progress:
        while done < steps:
            began, end = time.monotonic(), min(done + chunk, steps)
            latents = _denoise(transformer, latents, text, *fixed, np.int32(done), np.int32(end), plan.sharding)
            _check_finite(latents, end, plan)
            seconds = (time.monotonic() - began) / (end - done)
            progress.advance(end - done)
            # The first call may have compiled: its time says nothing about a step.
            chunk = max(1, int(SECONDS_BETWEEN_REPORTS / seconds)) if done else 1
            done = end
    return latents


def _check_finite(latents: AV[jax.Array], step: int, plan: Plan) -> None:
    for name, stream in latents._asdict().items():
        if not bool(jnp.isfinite(stream).all()):
            raise NotFiniteError(
                f"the {name} latents are not finite after step {step}",
                "lower the guidance scales" + (" or use --dtype float32" * (plan.spec.dtype.value != "float32")),
            )


def _switches(stage: Stage, layers: int, videos: int) -> Switches:
    """What each pass leaves out, for every layer and row; rows run over passes, then videos."""
    attending = np.ones((layers, len(stage.passes)), bool)
    for row, each in enumerate(stage.passes):
        if each is Pass.PERTURBED:
            attending[list(stage.stg_blocks), row] = False
    exchanging = np.array([each is not Pass.ISOLATED for each in stage.passes])
    return Switches(attending.repeat(videos, axis=1), exchanging.repeat(videos))


@partial(jax.jit, static_argnames="sharding")
def _text_context(transformer: Transformer, contexts: AV[jax.Array], sharding: ShardingPlan) -> TextContext:
    with activate(sharding):
        return transformer.text_context(contexts)


@partial(jax.jit, static_argnames="sharding", donate_argnames="latents")
def _denoise(
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
) -> AV[jax.Array]:
    passes = len(guidance.video.passes)
    dtype = transformer.video.proj_in.kernel.dtype

    def velocity(latents: AV[jax.Array], sigma: jax.Array) -> AV[jax.Array]:
        rows = AV(*(jnp.tile(stream.astype(dtype), (passes, 1, 1)) for stream in latents))
        velocities = transformer(rows, sigma, text, contexts, ropes, switches)
        return AV(*(stream.reshape(passes, -1, *stream.shape[1:]) for stream in velocities))

    with activate(sharding):
        return denoise(velocity, latents, sigmas, guidance, start, stop)
