"""The compiled programs of a stage: its noise, what it reads of the text, its steps; and which step is not finite."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from ltx2_cli.core.components import abstract_network, in_float32
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.programs import UNDIAGNOSABLE, Program, as_abstract, jitted
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.denoise import denoise
from ltx2_cli.diffusion.guidance import GuidanceWeights, Pass, traced_weights
from ltx2_cli.diffusion.latents import Shape, noise, pack
from ltx2_cli.diffusion.schedule import pad_sigmas
from ltx2_cli.distributed import to_devices, to_host
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.models.block import PassMasks, Ropes
from ltx2_cli.models.transformer import (
    DenoiserInputs,
    TextContext,
    Transformer,
    abstract_rope_tables,
)
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Phase, Stage
from ltx2_cli.request.spec import Streams
from ltx2_cli.weights.load import not_finite

KEYS_VALUES = (None, None, None, "heads", None)  # the logical axes of a text context's keys and values


@jax.jit
def add_noise(latents: Streams[jax.Array], noise: Streams[jax.Array], sigma: jax.Array) -> Streams[jax.Array]:
    """Latents at noise level σ: (1 − σ)·x + σ·noise."""
    return Streams(*((1 - sigma) * clean + sigma * pure for clean, pure in zip(latents, noise, strict=True)))


def noise_program(plan: Plan, number: int) -> Program:
    """Seeds uint32 [videos] to tokens of standard normal noise; each of the two stages draws its own."""
    stage = plan.stages[number]
    function = jitted(_noise, stage.sharding.replicated, shapes=stage.shapes, stage=int(stage.source is not None))
    seeds = jax.ShapeDtypeStruct((plan.batch_size,), np.uint32)
    return Program(_name(plan, "noise", number), None, function, lambda: (seeds,), number)


def text_program(plan: Plan, number: int) -> Program:
    """Connectors' output to what the layers read of it, once for all steps."""
    stage, heads = plan.stages[number], plan.arch.transformer.num_attention_heads
    whole = stage.sharding.replicated
    split = NamedSharding(stage.sharding.mesh, stage.sharding.activation(KEYS_VALUES, (1, 1, 1, heads, 1)))
    shardings: tuple[Any, Any] = (whole, split)
    function = jitted(Transformer.text_context, TextContext(*shardings), stage.sharding)

    def arguments() -> tuple[Any, ...]:
        return abstract_network(plan, stage.network), as_abstract(abstract_contexts(plan), whole)

    return Program(_name(plan, "text context", number), stage.network, function, arguments, number)


def steps_program(plan: Plan, number: int) -> Program:
    """Latents, the denoiser's inputs, sigmas, guidance and two bounds to the latents after these steps, and whether
    each stream is finite."""
    stage = plan.stages[number]
    function = jitted(_denoise_steps, stage.sharding.replicated, stage.sharding, ("latents",))

    def arguments() -> tuple[Any, ...]:
        schedule, step = (
            as_abstract(stage_schedule(stage), stage.sharding.replicated),
            jax.ShapeDtypeStruct((), np.int32),
        )
        return *_forward_arguments(plan, number), *schedule, step, step

    return Program(_name(plan, "denoise", number), stage.network, function, arguments, number)


def forward_program(plan: Plan, number: int) -> Program:
    """What the loop evaluates at every step, by itself: one forward over all rows. No run compiles it."""
    stage, sigma = plan.stages[number], jax.ShapeDtypeStruct((), np.float32)
    function = jitted(_velocity, None, stage.sharding)
    return Program("forward", stage.network, function, lambda: (*_forward_arguments(plan, number), sigma), number)


def finite_program(plan: Plan, number: int) -> Program:
    """What of a forward is finite. No run compiles it unless its latents are not finite."""
    sharding = plan.stages[number].sharding
    return replace(forward_program(plan, number), function=jitted(_finite_parts, sharding.replicated, sharding))


def _name(plan: Plan, name: str, number: int) -> str:
    return f"{name} {number + 1}" if len(plan.stages) > 1 else name


def _forward_arguments(plan: Plan, number: int) -> tuple[Any, ...]:
    """The transformer, latents and inputs of a forward, abstract."""
    stage = plan.stages[number]
    rows = stage_rows(plan, stage, abstract_rope_tables(stage.geometry, plan.arch.transformer))
    inputs = DenoiserInputs(text_program(plan, number).outputs(), *as_abstract(rows, stage.sharding.replicated))
    return abstract_network(plan, stage.network), noise_program(plan, number).outputs(), inputs


def stage_rows(plan: Plan, stage: Stage, tables: Streams[Ropes]) -> tuple[np.ndarray, Streams[Ropes], PassMasks]:
    """What `DenoiserInputs` holds besides the text, on the host."""
    videos, passes = plan.batch_size, stage.passes
    self_attention = np.ones((plan.arch.transformer.num_layers, len(passes)), bool)
    if Pass.PERTURBED in passes:
        self_attention[list(stage.stg_blocks), passes.index(Pass.PERTURBED)] = False
    cross_modal = np.array([guidance_pass is not Pass.ISOLATED for guidance_pass in passes])
    masks = PassMasks(self_attention.repeat(videos, axis=1), cross_modal.repeat(videos))
    contexts = [len(plan.prompts) - 1 if guidance_pass is Pass.UNCOND else 0 for guidance_pass in passes]
    return np.repeat(np.asarray(contexts, np.int32), videos), tables, masks


def stage_schedule(stage: Stage) -> tuple[np.ndarray, Streams[GuidanceWeights]]:
    """The noise levels, and the guidance at each."""
    return pad_sigmas(stage.sigmas), Streams(*(traced_weights(stream, stage.passes) for stream in stage.guidance))


@dataclass(frozen=True)
class StageRun:
    """A stage whose denoiser is on the devices: everything about it but latents."""

    plan: Plan
    phase: Phase
    transformer: Transformer
    inputs: DenoiserInputs
    schedule: tuple[Any, ...]  # noise levels and guidance
    noises: Sequence[Streams[jax.Array]] = ()  # of each stage, instead of those of the seeds

    def denoise(self, latents: Streams[jax.Array], start: int, stop: int) -> tuple[Streams[jax.Array], Streams[Any]]:
        """The latents after these steps, and whether each stream is finite."""
        run, bounds = steps_program(self.plan, self.phase.number), (np.int32(start), np.int32(stop))
        latents, finite = run(self.transformer, latents, self.inputs, *self.schedule, *bounds)
        return latents, finite

    def place(self, arrays: Any) -> Any:
        """Arrays of the host, whole on each device."""
        return to_devices(arrays, self.phase.stage.sharding.replicated)


# The functions


def _noise(seeds: jax.Array, shapes: Streams[Shape], stage: int) -> Streams[jax.Array]:
    videos = jax.vmap(lambda seed: pack(noise(seed, shapes, stage)))(seeds)
    return Streams(*(stream[:, 0] for stream in videos))


def _velocity(
    transformer: Transformer, latents: Streams[jax.Array], inputs: DenoiserInputs, sigma: jax.Array
) -> Streams[jax.Array]:
    """Noise minus clean of latents [videos, tokens, channels] in every pass, [passes, videos, tokens, channels]."""
    rows = _latent_rows(transformer, latents, inputs)
    passes = len(inputs.contexts) // len(latents.video)
    return Streams(*(stream.reshape(passes, -1, *stream.shape[1:]) for stream in transformer(rows, sigma, inputs)))


def _latent_rows(transformer: Transformer, latents: Streams[jax.Array], inputs: DenoiserInputs) -> Streams[jax.Array]:
    """The latents once for each pass, as the transformer takes them."""
    dtype, passes = transformer.video.proj_in.kernel.dtype, len(inputs.contexts) // len(latents.video)
    return Streams(*(jnp.tile(stream.astype(dtype), (passes, 1, 1)) for stream in latents))


def _denoise_steps(
    transformer: Transformer,
    latents: Streams[jax.Array],
    inputs: DenoiserInputs,
    sigmas: jax.Array,
    guidance: Streams[GuidanceWeights],
    start: jax.Array,
    stop: jax.Array,
) -> tuple[Streams[jax.Array], Streams[jax.Array]]:
    def velocity(latents: Streams[jax.Array], sigma: jax.Array) -> Streams[jax.Array]:
        return _velocity(transformer, latents, inputs, sigma)

    latents = denoise(velocity, latents, sigmas, guidance, start, stop)
    return latents, Streams(*(jnp.isfinite(stream).all() for stream in latents))


def _finite_parts(
    transformer: Transformer, latents: Streams[jax.Array], inputs: DenoiserInputs, sigma: jax.Array
) -> jax.Array:
    """What of a forward is finite, bool [layers + 3]: the text, what enters the first layer, what leaves each layer,
    the velocities."""

    def finite(x: Streams[jax.Array]) -> jax.Array:  # without the tokens that fill up the devices
        own = [stream[:, : tokens.shape[1]] for stream, tokens in zip(x, latents, strict=True)]
        return jnp.isfinite(own[0]).all() & jnp.isfinite(own[1]).all()

    rows = _latent_rows(transformer, latents, inputs)
    velocities, (before, after) = transformer.forward_with_intermediates(rows, sigma, inputs, finite)
    text = jnp.isfinite(inputs.text.tokens.video).all() & jnp.isfinite(inputs.text.tokens.audio).all()
    return jnp.hstack((text, before, after, finite(velocities)))


# What is not finite: in which step, and in which part of the denoiser, found by running again


def check_finite(plan: Plan, phase: Phase, finite: Streams[jax.Array], step: int, where: str = "") -> None:
    """Raise `NotFiniteError` unless both streams are finite after `step` steps of a stage."""
    for name, is_finite in finite._asdict().items():
        if not bool(is_finite):
            lower = "lower the guidance scales, or " if len(phase.stage.passes) > 1 else ""
            raise NotFiniteError(
                f"the {name} latents of stage {phase.number + 1} are not finite after step {step} of"
                f" {phase.stage.steps}{where}",
                lower + in_float32(plan),
            )


def locate(run: StageRun, start: int, latents: Streams[Any], report: Report) -> None:
    """After steps that did not end finite, raise the `NotFiniteError` that names the first such step and what in it was
    first; as much of that as can be found.

    The steps from `start` run again on the latents that they began with, one at a time, by the program that ran before:
    an ordinary run keeps nothing for this, and compiles nothing.
    """
    with report.stage("find what is not finite"), suppress(*UNDIAGNOSABLE):
        if not_finite(run.transformer):  # no step is to blame
            return
        latents = run.place(latents)
        for step in range(start, run.phase.stage.steps):
            before = Streams(*(np.array(to_host(stream)) for stream in latents))
            latents, finite = run.denoise(latents, step, step + 1)
            if not all(map(bool, finite)):
                check_finite(run.plan, run.phase, finite, step + 1, _first_part(run, before, step))


def _first_part(run: StageRun, before: Streams[np.ndarray], step: int) -> str:
    """Of a step from these latents, what is the first that is not finite, in words; nothing where it cannot be told."""
    layers = run.plan.arch.transformer.num_layers
    latents, sigma = run.place((before, run.phase.stage.sigmas[step]))
    parts = (
        "the text that the denoiser reads is not finite",
        "what enters its first block is not finite",
        *(f"block {block} of {layers} is the first whose output is not" for block in range(1, layers + 1)),
        "the output of every block is finite, what the denoiser makes of it is not",
        "what the denoiser makes is finite, what guidance and the step make of it is not",
    )
    with suppress(*UNDIAGNOSABLE):
        finite = to_host(finite_program(run.plan, run.phase.number)(run.transformer, latents, run.inputs, sigma))
        return f": {parts[int(np.argmin([*finite, False]))]}"
    return ""
