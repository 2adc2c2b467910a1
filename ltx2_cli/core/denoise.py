"""The steps of a stage, batch by batch, a few steps for each call of its program."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.advice import memory_for
from ltx2_cli.core.components import Components
from ltx2_cli.core.denoise_memory import decodes_beside
from ltx2_cli.core.not_finite import check_stage, locate_not_finite
from ltx2_cli.core.report import DENOISE, Advance, Report
from ltx2_cli.core.stage_programs import StageRun
from ltx2_cli.core.state import OnProgress, RunState, later_steps
from ltx2_cli.diffusion.conditions import UNCONDITIONED, initial_latents
from ltx2_cli.diffusion.latents import read_noise, to_tokens, token_shapes
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.phases import Denoise, name_among
from ltx2_cli.plan.resolve import DECODERS, Plan
from ltx2_cli.request.spec import Streams

SECONDS_BETWEEN_REPORTS = 1.0


def denoise_stage(
    plan: Plan,
    phase: Denoise,
    state: RunState,
    condition_latents: Streams[Sequence[np.ndarray]],
    components: Components,
    report: Report,
    on_progress: OnProgress,
    pauses: bool,
) -> Iterator[RunState]:
    """Yield the state when the remaining batches of a stage are done; if it `pauses`, after each batch. No other
    reference to the denoiser and its inputs exists: they leave the devices when this ends."""
    stage = phase.stage
    with memory_for(DENOISE, plan), components.use(stage.network, report) as denoiser:
        if state.phase + 1 == len(plan.phases) and decodes_beside(plan):
            components.send_ahead(DECODERS)
        run = StageRun(plan, phase, denoiser, state.contexts[stage.connectors], condition_latents)
        if stage.draws_noise:
            with report.activity("compile noise"):
                run.programs.noise.compile()
        while (remaining := len(plan.batches) - state.batch) > 0:
            at_once = 1 if pauses else remaining
            later = later_steps(plan, state.phase) + (remaining - at_once) * stage.steps
            clips = remaining * plan.batch_size if pauses else len(plan.seeds)
            name = name_among(plan.phases, phase)
            with report.steps(at_once * stage.steps - state.step, later, clips, name) as advance:
                for _ in range(at_once):
                    state = _run_batch(run, state, advance, report, on_progress)
            yield state
        if phase.is_last and stage.first_block_cache is not None:
            layers, forwards = plan.arch.transformer.num_layers, len(plan.seeds) * stage.steps * len(stage.windows)
            report.note(f"{sum(state.skipped)} of {forwards} forwards ran the first of {layers} blocks alone")


def _run_batch(run: StageRun, state: RunState, advance: Advance, report: Report, on_progress: OnProgress) -> RunState:
    state = state if state.current else replace(state, step=0)
    first, size, phase = state.batch * run.plan.batch_size, run.plan.batch_size, run.phase
    rows = slice(first, first + size)
    clip = _clip_so_far(run, state, rows)
    source = phase.within(clip) if phase.stage.source is not None and state.latents is not None else None
    if source and phase.stage.begins_behind and state.behind is not None:
        behind = phase.behind(state.behind[rows])
        source = source._replace(video=np.concatenate([source.video, behind], axis=1))
    run.hold(source if source and phase.stage.begins_behind else clip)
    try:
        initial = replace(state, current=_initial_latents(run, state, source))
        video, audio = map(to_host, _run_steps(run, initial, advance, on_progress))
    except NotFiniteError:
        locate_not_finite(run, state.batch, state.step, _initial_latents(run, state, source), report)
        raise
    part = phase.new(phase.within(clip))  # views of the clip's tokens
    made = phase.new(Streams(video[:, : phase.stage.geometry.grid_tokens], audio))
    part.video[...] = made.video
    if not (source and phase.stage.keep_audio):
        part.audio[...] = made.audio
    if state.latents is not None:  # latents of other batches, or upsampled ones
        streams = zip(state.latents, clip, strict=True)
        clip = Streams(*(np.concatenate([old[:first], new, old[first + size :]]) for old, new in streams))
    skipped = _skipped(run, state, run.cache.skipped) if run.cache else state.skipped
    behind = _behind_so_far(run, state, rows, video)
    return replace(state, batch=state.batch + 1, step=0, latents=clip, current=None, skipped=skipped, behind=behind)


def _behind_so_far(run: StageRun, state: RunState, rows: slice, video: np.ndarray) -> np.ndarray | None:
    """The tokens behind the grids of all clips up to a batch, with the keyframes among the `video` tokens that it
    made."""
    stage, phase = run.phase.stage, run.phase
    if not phase.clip.kept_keyframes:
        return state.behind
    made = video[:, stage.generated_tokens]
    if not stage.begins_behind:
        return made if state.behind is None else np.concatenate([state.behind[: rows.start], made])
    assert state.behind is not None
    behind = np.array(state.behind)
    new = phase.new_behind
    behind[rows, new] = made[:, made.shape[1] - len(new) :]
    return behind


def _clip_so_far(run: StageRun, state: RunState, rows: slice) -> Streams[np.ndarray]:
    """The tokens of whole clips of a batch: upsampled, or of earlier windows; zeros where there are none yet."""
    latents = state.latents and Streams(*(np.array(stream[rows]) for stream in state.latents))
    if latents and len(latents.video):
        return latents
    return Streams(*(np.zeros(shape, np.float32) for shape in token_shapes(run.plan.batch_size, run.phase.clip.shapes)))


def _initial_latents(run: StageRun, state: RunState, source: Streams[np.ndarray] | None) -> Streams[Any]:
    """Latents of an interrupted run; else noise, mixed into the upsampled latents `source`, into those of
    an edited clip, and into the conditions."""
    stage = run.phase.stage
    if state.current is not None:
        return state.current
    noise: Streams[Any] = Streams(None, None)
    if stage.draws_noise:
        noise = run.programs.noise(run.seeds(state.batch))
    if stage.noise is not None:
        video, audio = run.phase.within(to_tokens(read_noise(stage.noise, run.phase.clip.shapes)))
        behind = [] if noise.video is None else [to_host(noise.video)[:, video.shape[1] :]]
        noise = run.place(Streams(np.concatenate([video, *behind], axis=1), audio))
    source = source or run.begin
    if source is None and run.inputs.conditions == UNCONDITIONED:
        return noise
    return jitted(initial_latents, None)(*run.place((source, noise, stage.sigmas[0])), run.inputs.conditions)


def _run_steps(run: StageRun, state: RunState, advance: Advance, on_progress: OnProgress) -> Streams[jax.Array]:
    latents = run.place(state.current)
    done, chunk = state.step, 1
    run.forget(latents)
    on_progress(state)
    while done < run.phase.stage.steps:
        started, end = time.monotonic(), min(done + chunk, run.phase.stage.steps)
        latents, finite = run.denoise(latents, state.batch, done, end)
        check_stage(run.plan, run.phase, finite, end)
        seconds = (time.monotonic() - started) / (end - done)
        advance(end - done)
        # The first call may have compiled: its time says nothing about a step.
        # Several hosts, which must run the same programs, go step by step: their clocks differ.
        measured = done > state.step and jax.process_count() == 1
        chunk, done = max(1, int(SECONDS_BETWEEN_REPORTS / seconds)) if measured else 1, end
        on_progress(_after_steps(run, state, done, latents))
    return latents


def _after_steps(run: StageRun, start: RunState, done: int, latents: Streams[jax.Array]) -> RunState:
    """The state after the steps of a batch; where steps skip layers, before the last that did not: to go on from there
    needs nothing of what is skipped."""
    if run.cache is None:
        return replace(start, step=done, current=latents)
    whole = run.cache.whole
    return replace(start, step=int(whole.number), current=whole.latents, skipped=_skipped(run, start, whole.skipped))


def _skipped(run: StageRun, start: RunState, since: jax.Array) -> tuple[int, ...]:
    """The forwards of all videos that skipped layers; `since` the start, those of its batch."""
    first, counts = start.batch * run.plan.batch_size, np.zeros(len(run.plan.seeds), int)
    counts[first : first + run.plan.batch_size] = to_host(since)
    return tuple((counts + np.asarray(start.skipped or 0)).tolist())
