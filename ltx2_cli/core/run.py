"""A plan carried out in phases: encode, denoise, upsample, denoise, decode."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.components import Components
from ltx2_cli.core.conditions import condition_programs, encode_conditions
from ltx2_cli.core.context_cache import missing_in_cache
from ltx2_cli.core.decode import decode, media_programs
from ltx2_cli.core.denoise import denoise_stage
from ltx2_cli.core.encode import encode, text_programs
from ltx2_cli.core.join import finished_clips, with_loudness
from ltx2_cli.core.programs import Program, agree_on_programs, enable_compilation_cache
from ltx2_cli.core.provenance import History, extend_history
from ltx2_cli.core.report import Report
from ltx2_cli.core.stage_programs import NO_CONDITION_LATENTS, stage_programs
from ltx2_cli.core.state import (
    OnProgress,
    RunState,
    all_latents,
    ignore_progress,
    missing_contexts,
)
from ltx2_cli.core.upsample import upsample_stage, upsampling_programs
from ltx2_cli.diffusion.latents import to_tokens
from ltx2_cli.media.clip import Media
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.hosts import device_error
from ltx2_cli.plan.phases import Denoise, Upsample
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import BOTH, Streams

SILENT = Report()
START = RunState()
DECODED = {Product.clips: BOTH, Product.latents: Streams(False, False), Product.drafts: Streams(True, False)}


def open_components(plan: Plan) -> Components:
    """The networks of a plan, each loaded at its first use. Also sets this process's compilation cache to the
    request's. Raises `UsageError` if the cache cannot be written."""
    enable_compilation_cache(plan.compile_cache)
    return Components(plan)


def traced(folder: Path | None) -> AbstractContextManager[None]:
    """Profile the body into `folder`, for xprof; None: no profile."""
    return nullcontext() if folder is None else jax.profiler.trace(str(folder))


@contextmanager
def _running(plan: Plan, components: Components, report: Report, compiled: Iterable[Program]) -> Iterator[None]:
    """Print the plan's warnings and compile programs in the background of the body. On several hosts, the loss of one
    is reported in a sentence."""
    for warning in plan.warnings:
        report.note(warning)
    agree_on_programs(report)
    try:
        with components.compiling(compiled):
            yield
    except jax.errors.JaxRuntimeError as error:
        raise (device_error(error) if jax.process_count() > 1 else error) from error


def programs(plan: Plan, product: Product = Product.clips, start: RunState = START) -> Iterator[Program]:
    """All programs of a run, in the order of their use."""
    return chain(latent_programs(plan, start), media_programs(plan, DECODED[product]))


def run(plan: Plan, components: Components, report: Report = SILENT) -> Iterator[Media]:
    """Yield the media of each video."""
    with _running(plan, components, report, programs(plan)):
        *_, state = run_phases(plan, START, components, report)
        yield from finished_clips(plan, all_latents(state), plan.seeds, components, report)


def with_contexts(plan: Plan, components: Components, start: RunState, report: Report = SILENT) -> RunState:
    """The state `start` with the contexts of the text, on the host."""
    if not (names := missing_contexts(plan, start)):
        return start
    with _running(plan, components, report, text_programs(plan, missing_in_cache(plan, names))):
        contexts = encode(plan, names, components, report)
    on_host = {name: Streams[Any](*map(to_host, streams)) for name, streams in contexts.items()}
    return replace(start, contexts={**start.contexts, **on_host})


def advance(
    plan: Plan, components: Components, start: RunState, phase: int, report: Report, on_progress: OnProgress
) -> RunState:
    """Run up to `phase` and return the state before it; `start` if that is already behind it."""
    with _running(plan, components, report, latent_programs(plan, start)):
        *_, state = run_phases(plan, start, components, report, on_progress, end=phase)
    return state


def warm_up(plan: Plan, components: Components, report: Report = SILENT) -> None:
    """Load all networks and run all programs once, with a single step, so that the next run compiles nothing."""
    stages = tuple(replace(stage, sigmas=stage.sigmas[[0, -1]][: len(stage.sigmas)]) for stage in plan.stages)
    first_batch = replace(plan, seeds=plan.batches[0], stages=stages)  # other batches are alike
    for program in text_programs(plan, missing_contexts(plan, START)):  # also of a prompt that was encoded before
        program.compile()
    for _ in run(first_batch, components, report):
        pass


def state_from_latents(
    latents: Iterable[Streams[np.ndarray]], history: History = (), keyframes: Iterable[np.ndarray | None] = ()
) -> RunState:
    """The initial state of a second stage, from the latents of each video in the files' layout, and the keyframes that
    were generated beside it, in that of a video."""
    tokens = [each.transpose(0, 2, 3, 4, 1).reshape(1, -1, each.shape[1]) for each in keyframes if each is not None]
    clips = Streams(*map(np.concatenate, zip(*map(to_tokens, latents), strict=True)))
    return RunState(latents=clips, history=history, behind=np.concatenate(tokens) if tokens else None)


def decode_file(
    plan: Plan,
    latents: Streams[np.ndarray],
    components: Components,
    report: Report = SILENT,
    wanted: Streams[bool] = BOTH,
) -> Media:
    """Decode the latents of one video, in the files' layout; a stream that is not wanted is empty."""
    with _running(plan, components, report, media_programs(plan, wanted)):
        return with_loudness(
            plan, next(decode(plan, to_tokens(latents), plan.seeds, components, report, wanted)), report
        )


def latent_programs(plan: Plan, start: RunState) -> Iterator[Program]:
    """The programs of `run_phases`, in the order of their use."""
    yield from condition_programs(plan, plan.phases[start.phase :])
    yield from text_programs(plan, missing_in_cache(plan, missing_contexts(plan, start)))
    known = set[tuple[int, int]]()
    for phase in plan.phases[start.phase :]:
        if isinstance(phase, Upsample):
            yield from upsampling_programs(plan, phase.stage)
            continue
        which = phase.number, phase.clip.first_alike(phase.window)
        if which in known:  # another window
            continue
        known.add(which)
        stage = stage_programs(plan, *which)
        yield from ([stage.noise] if phase.stage.draws_noise else [])
        yield from filter(None, (stage.text, stage.cache, stage.steps))


def _kept_behind(plan: Plan, phase: Denoise, state: RunState) -> np.ndarray | None:
    """The tokens behind the grid that are still read: by a next window or stage, or a file of latents."""
    later = plan.stages[phase.number + 1 :]
    return state.behind if phase.clip.kept_keyframes and all(stage.source_keyframes for stage in later) else None


def run_phases(
    plan: Plan,
    start: RunState,
    components: Components,
    report: Report,
    on_progress: OnProgress = ignore_progress,
    *,
    pausing: bool = False,
    end: int | None = None,
) -> Generator[RunState, None, None]:
    """Run the phases from `start` on and yield the state after the last, or before the phase `end`. With `pausing`,
    also yield the state after each batch of the last stage.

    The state has the clean normalised latents of all videos, tokens float32 [videos, tokens, channels]. Prompts are
    encoded if `start` lacks their contexts. A stage upsamples all videos, then denoises batch by batch, from noise of
    each video's seed. `on_progress` is called every few steps.
    """
    state, phases = start, plan.phases[start.phase : end]
    condition_latents = encode_conditions(plan, phases, components, report)
    if names := missing_contexts(plan, start):
        state = replace(start, contexts={**start.contexts, **encode(plan, names, components, report)})
        on_progress(state)
    networks = [phase.stage.network for phase in phases if isinstance(phase, Denoise)]
    # A denoiser stays loaded if a later window or stage uses it, or merges LoRAs into it.
    again = [name for name, later in pairwise(networks) if name == later or not plan.reload_stage2]
    with components.keeping(again):
        for done, phase in enumerate(phases, start.phase + 1):
            history = state.history
            if isinstance(phase, Upsample):
                latents, behind = upsample_stage(plan, phase.stage, state, components, report)
            else:
                pauses = pausing and done == len(plan.phases)
                tokens = condition_latents.get(phase.number, NO_CONDITION_LATENTS)
                batches = denoise_stage(plan, phase, state, tokens, components, report, on_progress, pauses)
                for state in batches:
                    if state.batch < len(plan.batches):
                        yield state
                latents, behind = all_latents(state), _kept_behind(plan, phase, state)
            if phase.is_last if isinstance(phase, Denoise) else not phase.stage.steps:
                history = extend_history(history, plan.stages[phase.number], latents)
            made = RunState(done, latents=latents, behind=behind, history=history)
            state = replace(made, contexts=state.contexts, skipped=state.skipped)
            on_progress(state)
    yield state
