"""Prompts to latents, stage by stage, batch by batch, a few steps at a time, upsampled between two stages."""

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.components import DENOISE, UPSAMPLE, Components, check_finite, memory_for, network_program
from ltx2_cli.core.condition import condition_programs, encode_conditions
from ltx2_cli.core.denoising import NOTHING_GIVEN, StageRun, check_stage, locate, stage_programs
from ltx2_cli.core.encode import encode, text_programs
from ltx2_cli.core.programs import Program, jitted
from ltx2_cli.core.provenance import extend_history
from ltx2_cli.core.report import Advance, Report
from ltx2_cli.core.run_state import OnProgress, RunState, all_latents, later_steps, missing_contexts, no_checkpoint
from ltx2_cli.diffusion.conditions import initial_latents
from ltx2_cli.diffusion.latents import pack, read_noise
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.models.upsampler import upsample as upsample_latents
from ltx2_cli.models.video_vae import LatentStatistics
from ltx2_cli.parallel.arrays import to_devices, to_host
from ltx2_cli.plan.decoding import Extent
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Phase, Stage
from ltx2_cli.request.spec import Streams

SECONDS_BETWEEN_REPORTS = 1.0


def upsample(
    plan: Plan, stage: Stage, latents: Streams[np.ndarray], components: Components, report: Report
) -> Streams[np.ndarray]:
    """The tokens float32 [videos, tokens, channels] that `stage` begins with: the picture upsampled, video by video,
    and the sound with the length of the clip."""
    run, strengths = upsampling_program(plan, stage), (np.float32(stage.adain), np.float32(stage.tone_map))
    with memory_for(UPSAMPLE, plan), ExitStack() as loaded:
        names = ("statistics", "upsampler")
        statistics, upsampler = (loaded.enter_context(components.use(name, report)) for name in names)
        loaded.enter_context(report.stage("upsample"))
        videos = [
            to_host(run(statistics, upsampler, picture, *strengths))
            for picture in to_devices([video[None] for video in latents.video], plan.sharding.replicated)
        ]
        video = np.concatenate(videos)
        check_finite(np.isfinite(video), "the upsampled latents are", plan)
    return Streams(video, _lasting(latents.audio, stage.geometry.audio_frames))


def upsampling_program(plan: Plan, stage: Stage) -> Program:
    """The statistics, the upsampler, one video's tokens and two strengths to the tokens that the stage begins with."""
    assert stage.source is not None
    (_, channels, *size), where = stage.source.video, plan.sharding.replicated
    tokens = jax.ShapeDtypeStruct((1, prod(size), channels), np.float32, sharding=where)
    strength = jax.ShapeDtypeStruct((), np.float32)
    function = jitted(_upsampled, where, plan.sharding, convolves=True, size=tuple(size))
    return network_program(plan, "upsample", ["statistics", "upsampler"], function, tokens, strength, strength)


def _lasting(sound: np.ndarray, length: int) -> np.ndarray:
    """`sound` [videos, tokens, channels] cut or padded to this length if that is rounding; else stretched linearly."""
    tokens = sound.shape[1]
    if abs(length - tokens) <= 1:
        return np.pad(sound[:, :length], ((0, 0), (0, max(length - tokens, 0)), (0, 0)), mode="edge")
    places = np.clip((np.arange(length) + 0.5) * tokens / length - 0.5, 0, tokens - 1)
    below = places.astype(int)
    part = (places - below).astype(np.float32)[:, None]
    return sound[:, below] * (1 - part) + sound[:, np.minimum(below + 1, tokens - 1)] * part


def _upsampled(
    statistics: LatentStatistics, upsampler: LatentUpsampler, tokens: jax.Array, *strengths: jax.Array, size: Extent
) -> jax.Array:
    large = upsample_latents(upsampler, statistics, tokens.reshape(len(tokens), *size, -1), *strengths)
    return large.reshape(len(tokens), -1, large.shape[-1])


def latent_programs(plan: Plan, start: RunState) -> Iterator[Program]:
    """The programs that `generate` runs."""
    yield from condition_programs(plan, plan.phases[start.phase :])
    if names := missing_contexts(plan, start):
        yield from text_programs(plan, names)
    for phase in plan.phases[start.phase :]:
        if phase.upsamples:
            yield upsampling_program(plan, phase.stage)
            continue
        stage = stage_programs(plan, phase.number)
        yield from (*([stage.noise] if phase.stage.draws_noise else []), stage.text, stage.steps)


def generate(
    plan: Plan,
    start: RunState,
    components: Components,
    report: Report,
    on_progress: OnProgress = no_checkpoint,
    *,
    pausing: bool = False,
    end: int | None = None,
) -> Generator[RunState, None, None]:
    """Yield the state after all stages, or before the phase `end`, with clean normalised latents of every video, tokens
    float32 [videos, tokens, channels]; with `pausing`, also the state after each batch of the last stage.

    Goes on from `start`, reads the prompts if it lacks their contexts, and tells `on_progress` of every few steps. A
    stage upsamples all videos, then denoises batch by batch, from noise of each video's seed.
    """
    state, phases = start, plan.phases[start.phase : end]
    given = encode_conditions(plan, phases, components, report)
    if names := missing_contexts(plan, start):
        state = replace(start, contexts={**start.contexts, **encode(plan, names, components, report)})
        on_progress(state)
    networks = [phase.stage.network for phase in phases if not phase.upsamples]
    # One that a later stage uses too, or merges its LoRAs into, stays from stage to stage.
    with components.keeping(() if plan.refiner_anew else networks[:-1]):
        for done, phase in enumerate(phases, start.phase + 1):
            history, stage = state.history, phase.stage
            if phase.upsamples:
                latents = upsample(plan, stage, all_latents(state), components, report)
            else:
                pauses, tokens = pausing and done == len(plan.phases), given.get(phase.number, NOTHING_GIVEN)
                batches = _run_stage(plan, phase, state, tokens, components, report, on_progress, pauses)
                for state in batches:
                    if state.batch < len(plan.batches):
                        yield state
                latents = all_latents(state)
            if not phase.upsamples or not stage.steps:
                history = extend_history(history, stage, latents)
            state = RunState(done, latents=latents, contexts=state.contexts, history=history)
            on_progress(state)
    yield state


def _run_stage(
    plan: Plan,
    phase: Phase,
    state: RunState,
    given: Streams[Sequence[np.ndarray]],
    components: Components,
    report: Report,
    on_progress: OnProgress,
    pauses: bool,
) -> Iterator[RunState]:
    """The state when the batches of a stage after `state` are done; if it `pauses`, after each one. The denoiser and
    its inputs are referred to from here alone: they leave the devices when this ends."""
    stage = phase.stage
    with memory_for(DENOISE, plan), components.use(stage.network, report) as denoiser:
        run = StageRun(plan, phase, denoiser, state.contexts[stage.connectors], given)
        if stage.draws_noise:
            with report.stage("compile noise"):
                run.programs.noise.compile()
        while (remaining := len(plan.batches) - state.batch) > 0:
            at_once = 1 if pauses else remaining
            later = later_steps(plan, state.phase) + (remaining - at_once) * stage.steps
            clips = remaining * plan.batch_size if pauses else len(plan.seeds)
            with report.steps(at_once * stage.steps - state.step, later, clips) as advance:
                for _ in range(at_once):
                    state = _run_batch(run, state, advance, report, on_progress)
            yield state


def _run_batch(run: StageRun, state: RunState, advance: Advance, report: Report, on_progress: OnProgress) -> RunState:
    state = state if state.current else replace(state, step=0)
    first, size, source = state.batch * run.plan.batch_size, run.plan.batch_size, None
    if run.phase.stage.source is not None and state.latents is not None:
        source = Streams(*(stream[first : first + size] for stream in state.latents))
    try:
        initial = replace(state, current=_initial_latents(run, state, source))
        video, audio = map(to_host, _run_steps(run, initial, advance, on_progress))
        latents = Streams(video[:, : run.phase.stage.geometry.grid_tokens], audio)
    except NotFiniteError:
        locate(run, state.step, _initial_latents(run, state, source), report)
        raise
    if source and run.phase.stage.keep_audio:
        latents = latents._replace(audio=source.audio)
    if state.latents is not None:  # those of other batches, and before an upsampled one of this
        streams = zip(state.latents, latents, strict=True)
        latents = Streams(*(np.concatenate([old[:first], new, old[first + size :]]) for old, new in streams))
    return replace(state, batch=state.batch + 1, step=0, latents=latents, current=None)


def _initial_latents(run: StageRun, state: RunState, source: Streams[np.ndarray] | None) -> Streams[Any]:
    """What an earlier run left; else noise, mixed into upsampled latents `source` and into given tokens."""
    stage = run.phase.stage
    if state.current is not None:
        return state.current
    noise: Streams[Any] = Streams(None, None)
    if stage.draws_noise:
        noise = run.programs.noise(np.asarray(run.plan.batches[state.batch], np.uint32))
    if stage.noise is not None:
        video, audio = pack(read_noise(stage.noise, stage.shapes))
        behind = [] if noise.video is None else [to_host(noise.video)[:, video.shape[1] :]]
        noise = run.place(Streams(np.concatenate([video, *behind], axis=1), audio))
    if source is None and not (stage.pictures or stage.sounds):
        return noise
    return initial_latents(*run.place((source, noise, stage.sigmas[0])), run.inputs.given)


def _run_steps(run: StageRun, state: RunState, advance: Advance, on_progress: OnProgress) -> Streams[jax.Array]:
    latents = run.place(state.current)
    done, chunk = state.step, 1
    on_progress(state)
    while done < run.phase.stage.steps:
        started, end = time.monotonic(), min(done + chunk, run.phase.stage.steps)
        latents, finite = run.denoise(latents, done, end)
        check_stage(run.plan, run.phase, finite, end)
        seconds = (time.monotonic() - started) / (end - done)
        advance(end - done)
        # The first call may have compiled: its time says nothing about a step.
        # Several hosts, which must run the same programs, go step by step: their clocks differ.
        measured = done > state.step and jax.process_count() == 1
        chunk, done = max(1, int(SECONDS_BETWEEN_REPORTS / seconds)) if measured else 1, end
        on_progress(replace(state, step=done, current=latents))
    return latents
