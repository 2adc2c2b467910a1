"""Text contexts to latents: the noise, the passes of a step as one batch, the loop, and what lies outside it."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from ltx2_cli.core import loop
from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.encode import abstract_contexts
from ltx2_cli.core.not_finite import check_finite, locate
from ltx2_cli.core.out_of_memory import DENOISE, memory_for
from ltx2_cli.core.programs import Program, abstract, results
from ltx2_cli.core.progress import Keep, Progress, forget, later_steps, phases
from ltx2_cli.core.record import continued
from ltx2_cli.core.report import Report, Steps
from ltx2_cli.core.upsample import upsample, upsampling_program
from ltx2_cli.diffusion.guidance import Pass, Weights, traced_weights
from ltx2_cli.diffusion.latents import pack, read_noise
from ltx2_cli.diffusion.schedule import padded
from ltx2_cli.hosts import fetch, place
from ltx2_cli.models.block import Ropes, Switches
from ltx2_cli.models.transformer import Transformer, abstract_rope_tables, rope_tables
from ltx2_cli.plan import Plan
from ltx2_cli.spec import AV, NotFiniteError
from ltx2_cli.stages import Stage

SECONDS_BETWEEN_REPORTS = 1.0


def generate(
    plan: Plan,
    start: Progress,
    components: Components,
    report: Report,
    keep: Keep = forget,
    noises: Sequence[AV[jax.Array]] = (),
) -> Progress:
    """Clean latents of every video, tokens float32 [videos, tokens, channels], normalised, and what led to them.

    It goes on from `start`, whose contexts are those of the prompts, and tells `keep` of every few steps. A stage
    denoises one batch after the other, and upsamples all before; it begins with noise of its own, that of each video's
    seed, or what `noises` gives instead.
    """
    *_, progress = batches(plan, start, components, report, keep, noises, pausing=False)
    return progress


def batches(
    plan: Plan,
    start: Progress,
    components: Components,
    report: Report,
    keep: Keep,
    noises: Sequence[AV[jax.Array]] = (),
    *,
    pausing: bool,
) -> Generator[Progress, None, None]:
    """`generate`, told at its end, and with `pausing` also between two batches of the last stage."""
    progress = start
    with ExitStack() as loaded:
        network = ""
        denoiser: Any = None
        for done, (_, stage, denoises) in enumerate(phases(plan)[start.phase :], start.phase + 1):
            if denoises:
                with memory_for(DENOISE, plan):
                    if network != stage.network:  # else it is the one that the stage before left
                        loaded.close()
                        denoiser = None  # the last reference: its memory is free before the next is loaded
                        network, denoiser = stage.network, loaded.enter_context(components.use(stage.network, report))
                    pauses = pausing and done == len(phases(plan))
                    for now in _run_stage(plan, stage, denoiser, progress, report, keep, noises, pauses):
                        latents = all_latents(now)
                        if now.batch < len(plan.batches):
                            yield now
            else:
                latents = upsample(plan, stage, all_latents(progress), components, report)
            history = progress.history
            if denoises or len(stage.sigmas) < 2:
                history = continued(history, plan, stage, latents)
            progress = Progress(done, latents=latents, contexts=progress.contexts, history=history)
            keep(progress)
    denoiser = None  # its memory is free while clips are decoded
    yield progress


def _begin(
    plan: Plan, stage: Stage, now: Progress, before: AV[np.ndarray] | None, noises: Sequence[AV[jax.Array]]
) -> AV[Any]:
    """What the steps of a batch begin with: what an earlier run left; or pure noise, or the upsampled latents `before`
    with as much of it as the first noise level says, (1 − σ)·x + σ·noise."""
    if now.current is not None:
        return now.current
    noise = noises[_number(stage)] if noises else _stage_noise(plan, stage, now.batch)
    if before is None:
        return noise
    return loop.mixed(*place((before, noise, stage.sigmas[0]), stage.sharding.replicated))


def _stage_noise(plan: Plan, stage: Stage, batch: int) -> AV[jax.Array]:
    """Pure noise: that of the given file for what begins as noise, else that of each video's seed."""
    if (file := _noise_file(plan, stage)) is not None:
        return place(pack(read_noise(file, stage.shapes)), stage.sharding.replicated)
    return loop.pure_noise(np.asarray(plan.batches[batch], np.uint32), stage.shapes, _number(stage), stage.sharding)


def _noise_file(plan: Plan, stage: Stage) -> str | None:
    return plan.spec.noise if stage.source is None else None


def _number(stage: Stage) -> int:
    """Each stage has noise of its own."""
    return 0 if stage.source is None else 1


def programs(plan: Plan, start: Progress) -> Iterator[Program]:
    """Those that `generate` runs."""
    for number, stage, denoises in phases(plan)[start.phase :]:
        which = f" {number + 1}" if len(plan.stages) > 1 else ""
        if not denoises:
            yield upsampling_program(plan, stage)
            continue
        if _noise_file(plan, stage) is None:
            yield Program(f"noise{which}", None, partial(_lower_noise, plan, stage))
        yield Program(f"text context{which}", stage.network, partial(_lower_text_context, plan, stage), number)
        yield Program(f"denoise{which}", stage.network, partial(_lower_denoise, plan, stage), number)


def abstract_latents(plan: Plan, stage: Stage) -> AV[jax.ShapeDtypeStruct]:
    """The latents of every video, before and after denoising, without their values."""
    latents: AV[jax.ShapeDtypeStruct] = results(_trace_noise(plan, stage))
    return latents


def forward(plan: Plan, stage: Stage) -> Program:
    """What the loop evaluates at every step, by itself: one forward over all rows. No run compiles it."""
    sigma = jax.ShapeDtypeStruct((), np.float32)

    def lower() -> jax.stages.Lowered:
        return loop.forward.lower(*_abstract_inputs(plan, stage), sigma, stage.sharding)

    return Program("forward", stage.network, lower)


def _trace_noise(plan: Plan, stage: Stage) -> jax.stages.Traced:
    seeds = jax.ShapeDtypeStruct((plan.spec.num_videos,), np.uint32)
    return loop.pure_noise.trace(seeds, stage.shapes, _number(stage), stage.sharding)


def _lower_noise(plan: Plan, stage: Stage) -> jax.stages.Lowered:
    return _trace_noise(plan, stage).lower()


def _trace_text_context(plan: Plan, stage: Stage) -> jax.stages.Traced:
    contexts = abstract(abstract_contexts(plan), stage.sharding.replicated)
    return loop.text_context.trace(abstract_network(plan, stage.network), contexts, stage.sharding)


def _lower_text_context(plan: Plan, stage: Stage) -> jax.stages.Lowered:
    return _trace_text_context(plan, stage).lower()


def _lower_denoise(plan: Plan, stage: Stage) -> jax.stages.Lowered:
    course = abstract(_course(stage), stage.sharding.replicated)
    step = jax.ShapeDtypeStruct((), np.int32)
    return loop.denoise_steps.lower(*_abstract_inputs(plan, stage), *course, step, step, stage.sharding)


def _abstract_inputs(plan: Plan, stage: Stage) -> tuple[Any, ...]:
    """The transformer, latents, text and rows that a forward takes, abstract."""
    text = results(_trace_text_context(plan, stage))
    ropes = abstract_rope_tables(stage.geometry, plan.arch.transformer)
    rows = abstract(_rows(plan, stage, ropes), stage.sharding.replicated)
    return abstract_network(plan, stage.network), abstract_latents(plan, stage), text, *rows


def _run_stage(
    plan: Plan,
    stage: Stage,
    transformer: Transformer,
    progress: Progress,
    report: Report,
    keep: Keep,
    noises: Sequence[AV[jax.Array]],
    pauses: bool,
) -> Iterator[Progress]:
    """How far it is when all batches of a stage are done, of which `progress` may be a part; if it `pauses`, also
    after each one."""
    contexts = place(progress.contexts[stage.connectors], stage.sharding.replicated)
    text = jax.block_until_ready(loop.text_context(transformer, contexts, stage.sharding))
    ropes = rope_tables(stage.geometry, plan.arch.transformer)
    fixed = place((*_rows(plan, stage, ropes), *_course(stage)), stage.sharding.replicated)
    inputs = transformer, text, *fixed
    if _noise_file(plan, stage) is None:
        with report.stage("compile noise"):  # jax remembers it
            _lower_noise(plan, stage).compile()
    while (todo := len(plan.batches) - progress.batch) > 0:
        stage_steps, at_once = len(stage.sigmas) - 1, 1 if pauses else todo
        later = later_steps(plan, progress.phase) + (todo - at_once) * stage_steps
        clips = todo * plan.spec.num_videos if pauses else len(plan.spec.seeds)
        with report.steps(at_once * stage_steps - progress.step, later, clips) as steps:
            for _ in range(at_once):
                progress = _run_batch(plan, stage, inputs, progress, steps, report, keep, noises)
        yield progress


def _run_batch(
    plan: Plan,
    stage: Stage,
    inputs: tuple[Any, ...],
    now: Progress,
    steps: Steps,
    report: Report,
    keep: Keep,
    noises: Sequence[AV[jax.Array]],
) -> Progress:
    """How far it is when the batch is done that `now` is at."""
    first, size = now.batch * plan.spec.num_videos, plan.spec.num_videos
    now = now if now.current else replace(now, step=0)
    before = None if stage.source is None or now.latents is None else _some(now.latents, first, size)
    begin = partial(_begin, plan, stage, now, before, noises)
    try:
        made = AV(*map(fetch, _run_steps(plan, stage, inputs, replace(now, current=begin()), steps, keep)))
    except NotFiniteError:
        locate(plan, now, begin, inputs, report)
        raise
    if before and plan.spec.refinement.keep_audio:
        made = made._replace(audio=before.audio)
    latents = made if now.latents is None else _put(now.latents, first, made)
    return replace(now, batch=now.batch + 1, step=0, latents=latents, current=None)


def all_latents(progress: Progress) -> AV[np.ndarray]:
    """Those that are there."""
    assert progress.latents is not None
    return progress.latents


def _some(latents: AV[np.ndarray], first: int, number: int) -> AV[np.ndarray]:
    return AV(*(stream[first : first + number] for stream in latents))


def _put(latents: AV[np.ndarray], first: int, made: AV[np.ndarray]) -> AV[np.ndarray]:
    """`latents` with the videos from `first` on replaced by those that are made, or longer by them."""
    rest = first + len(made.video)
    return AV(*(np.concatenate([old[:first], new, old[rest:]]) for old, new in zip(latents, made, strict=True)))


def _run_steps(
    plan: Plan, stage: Stage, inputs: tuple[Any, ...], now: Progress, progress: Steps, keep: Keep
) -> AV[jax.Array]:
    """The latents of a batch after all steps."""
    transformer, *fixed = inputs
    latents = place(now.current, stage.sharding.replicated)
    steps, done, chunk = len(stage.sigmas) - 1, now.step, 1
    keep(now)
    while done < steps:
        began, end = time.monotonic(), min(done + chunk, steps)
        bounds = np.int32(done), np.int32(end)
        latents, finite = loop.denoise_steps(transformer, latents, *fixed, *bounds, stage.sharding)
        check_finite(plan, now, finite, end)
        seconds = (time.monotonic() - began) / (end - done)
        progress.advance(end - done)
        # The first call may have compiled: its time says nothing about a step.
        # Several hosts, which must run the same programs, go step by step: their clocks differ.
        measured = done > now.step and jax.process_count() == 1
        chunk, done = max(1, int(SECONDS_BETWEEN_REPORTS / seconds)) if measured else 1, end
        keep(replace(now, step=done, current=latents))
    return latents


def _rows(plan: Plan, stage: Stage, ropes: AV[Ropes]) -> tuple[np.ndarray, AV[Ropes], Switches]:
    """Which text context each row reads, the rotary tables, and what each row leaves out; rows run over passes, then
    videos."""
    videos, arch = plan.spec.num_videos, plan.arch.transformer
    contexts = np.repeat(np.asarray(plan.contexts(stage.passes), np.int32), videos)
    return contexts, ropes, _switches(stage, arch.num_layers, videos)


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
