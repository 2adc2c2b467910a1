"""Text contexts to latents: the noise, the passes of a step as one batch, the loop, and what lies outside it."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.programs import Program, abstract, results
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.denoise import denoise
from ltx2_cli.diffusion.guidance import Pass, Weights, traced_weights
from ltx2_cli.diffusion.latents import Shape, noise, pack, read_noise
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


def initial_latents(plan: Plan, report: Report) -> AV[jax.Array]:
    """Pure noise: that of the given file, or of each video's seed."""
    if plan.spec.noise is not None:
        return jax.device_put(pack(read_noise(plan.spec.noise, plan.latent_shapes)), plan.sharding.replicated)
    with report.stage("compile noise"):  # jax remembers it
        _trace_noise(plan).lower().compile()
    return _noise(np.asarray(plan.seeds, np.uint32), plan.latent_shapes, plan.sharding)


def programs(plan: Plan) -> Iterator[Program]:
    """Those that `initial_latents` and `generate` run."""
    if plan.spec.noise is None:
        yield Program("noise", None, lambda: _trace_noise(plan).lower())
    for number, stage in enumerate(plan.stages):
        which = f" {number + 1}" if len(plan.stages) > 1 else ""
        yield Program(f"text context{which}", "transformer", partial(_lower_text_context, plan))
        yield Program(f"denoise{which}", "transformer", partial(_lower_denoise, plan, stage))


def abstract_latents(plan: Plan) -> AV[jax.ShapeDtypeStruct]:
    """The latents of every video, before and after denoising, without their values."""
    latents: AV[jax.ShapeDtypeStruct] = results(_trace_noise(plan))
    return latents


def forward(plan: Plan, stage: Stage) -> Program:
    """What the loop evaluates at every step, by itself: one forward over all rows. No run compiles it."""
    sigma = jax.ShapeDtypeStruct((), np.float32)

    def lower() -> jax.stages.Lowered:
        return _forward.lower(*_abstract_inputs(plan, stage), sigma, plan.sharding)

    return Program("forward", "transformer", lower)


def _trace_noise(plan: Plan) -> jax.stages.Traced:
    seeds = jax.ShapeDtypeStruct((len(plan.seeds),), np.uint32)
    return _noise.trace(seeds, plan.latent_shapes, plan.sharding)


def _trace_text_context(plan: Plan) -> jax.stages.Traced:
    return _text_context.trace(abstract_network(plan, "transformer"), abstract_contexts(plan), plan.sharding)


def _lower_text_context(plan: Plan) -> jax.stages.Lowered:
    return _trace_text_context(plan).lower()


def _lower_denoise(plan: Plan, stage: Stage) -> jax.stages.Lowered:
    course = abstract(_course(stage), plan.sharding.replicated)
    step = jax.ShapeDtypeStruct((), np.int32)
    return _denoise.lower(*_abstract_inputs(plan, stage), *course, step, step, plan.sharding)


def _abstract_inputs(plan: Plan, stage: Stage) -> tuple[Any, ...]:
    """The transformer, latents, text and rows that a forward takes, abstract."""
    text = results(_trace_text_context(plan))
    rows = abstract(_rows(plan, stage), plan.sharding.replicated)
    return abstract_network(plan, "transformer"), abstract_latents(plan), text, *rows


def _run_stage(
    plan: Plan, stage: Stage, transformer: Transformer, contexts: AV[jax.Array], latents: AV[jax.Array], report: Report
) -> AV[jax.Array]:
    steps, done, chunk = len(stage.sigmas) - 1, 0, 1
    text = jax.block_until_ready(_text_context(transformer, contexts, plan.sharding))
    fixed = jax.device_put((*_rows(plan, stage), *_course(stage)), plan.sharding.replicated)
    with report.steps(steps) as progress:
        while done < steps:
            began, end = time.monotonic(), min(done + chunk, steps)
            latents, finite = _denoise(transformer, latents, text, *fixed, np.int32(done), np.int32(end), plan.sharding)
            _check_finite(finite, end, plan)
            seconds = (time.monotonic() - began) / (end - done)
            progress.advance(end - done)
            # The first call may have compiled: its time says nothing about a step.
            # Several hosts, which must run the same programs, go step by step: their clocks differ.
            chunk = max(1, int(SECONDS_BETWEEN_REPORTS / seconds)) if done and jax.process_count() == 1 else 1
            done = end
    return latents


def _check_finite(finite: AV[jax.Array], step: int, plan: Plan) -> None:
    for name, good in finite._asdict().items():
        if not bool(good):
            raise NotFiniteError(
                f"the {name} latents are not finite after step {step}",
                "lower the guidance scales" + (" or use --dtype float32" * (plan.spec.dtype.value != "float32")),
            )


def _rows(plan: Plan, stage: Stage) -> tuple[np.ndarray, AV[Ropes], Switches]:
    """Which text context each row reads, the rotary tables, and what each row leaves out; rows run over passes, then
    videos."""
    videos, arch = len(plan.seeds), plan.arch.transformer
    contexts = np.repeat(np.asarray(plan.contexts(stage.passes), np.int32), videos)
    return contexts, rope_tables(stage.geometry, arch), _switches(stage, arch.num_layers, videos)


def _course(stage: Stage) -> tuple[np.ndarray, AV[Weights]]:
    """The noise levels, and the guidance at each."""
    return padded(stage.sigmas), AV(*(traced_weights(stream, stage.passes) for stream in stage.guidance))


def _switches(stage: Stage, layers: int, videos: int) -> Switches:
    """What each pass leaves out, for every layer and row."""
    attending = np.ones((layers, len(stage.passes)), bool)
    for row, each in enumerate(stage.passes):
        if each is Pass.PERTURBED:
            attending[list(stage.stg_blocks), row] = False
    exchanging = np.array([each is not Pass.ISOLATED for each in stage.passes])
    return Switches(attending.repeat(videos, axis=1), exchanging.repeat(videos))


@partial(jax.jit, static_argnames=("shapes", "sharding"))
def _noise(seeds: jax.Array | np.ndarray, shapes: AV[Shape], sharding: ShardingPlan) -> AV[jax.Array]:
    """Tokens of standard normal noise, a video for each of the seeds uint32 [videos]."""
    videos = jax.vmap(lambda seed: pack(noise(seed, shapes)))(seeds)
    tokens = AV(*(stream[:, 0] for stream in videos))
    return jax.lax.with_sharding_constraint(tokens, sharding.replicated)


@partial(jax.jit, static_argnames="sharding")
def _text_context(transformer: Transformer, contexts: AV[jax.Array], sharding: ShardingPlan) -> TextContext:
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
    dtype, passes = transformer.video.proj_in.kernel.dtype, len(contexts) // len(latents.video)
    rows = AV(*(jnp.tile(stream.astype(dtype), (passes, 1, 1)) for stream in latents))
    velocities = transformer(rows, sigma, text, contexts, ropes, switches)
    return AV(*(stream.reshape(passes, -1, *stream.shape[1:]) for stream in velocities))


@partial(jax.jit, static_argnames="sharding")
def _forward(
    transformer: Transformer,
    latents: AV[jax.Array],
    text: TextContext,
    contexts: jax.Array,
    ropes: AV[Ropes],
    switches: Switches,
    sigma: jax.Array,
    sharding: ShardingPlan,
) -> AV[jax.Array]:
    with activate(sharding):
        return _velocity(transformer, latents, text, contexts, ropes, switches, sigma)


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
) -> tuple[AV[jax.Array], AV[jax.Array]]:
    """The latents after these steps, laid out as before them, and whether each stream is finite."""

    def velocity(latents: AV[jax.Array], sigma: jax.Array) -> AV[jax.Array]:
        return _velocity(transformer, latents, text, contexts, ropes, switches, sigma)

    with activate(sharding):
        latents = denoise(velocity, latents, sigmas, guidance, start, stop)
    finite = AV(*(jnp.isfinite(stream).all() for stream in latents))
    return jax.lax.with_sharding_constraint(latents, sharding.replicated), finite
