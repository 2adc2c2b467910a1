"""A plan carried out: encode, generate, decode; and everything about it written to files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ltx2_cli.artifacts.outputs import Product, latents_paths, output_paths, record_path, sheet_path, single_specs
from ltx2_cli.core.components import Components
from ltx2_cli.core.decode import decode, media_programs
from ltx2_cli.core.edit import finished_clips
from ltx2_cli.core.encode import encode, text_programs
from ltx2_cli.core.generate import generate, latent_programs
from ltx2_cli.core.preview import learn_colours
from ltx2_cli.core.programs import Program, agree_on_programs, enable_compilation_cache
from ltx2_cli.core.provenance import History, extend_history, input_files, network_files, provenance, without_sketches
from ltx2_cli.core.report import WRITE, Report
from ltx2_cli.core.run_state import (
    OnProgress,
    RunState,
    all_latents,
    clean_videos,
    latents_of,
    missing_contexts,
    no_checkpoint,
)
from ltx2_cli.diffusion.latents import SIZE, pack, save_latents, unpack
from ltx2_cli.media.checks import clip_flaws
from ltx2_cli.media.clip import Media
from ltx2_cli.media.contact_sheet import write_contact_sheet
from ltx2_cli.media.packets import write_clip
from ltx2_cli.media.write import write_record
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.hosts import device_error
from ltx2_cli.plan.edit import pieces
from ltx2_cli.plan.resolve import Plan, kept_networks
from ltx2_cli.request.profiles import to_yaml
from ltx2_cli.request.spec import BOTH, RunSpec, Streams
from ltx2_cli.weights.digests import digests, hash_later, quick_digest

SILENT = Report()
START = RunState()

DECODED = {Product.clips: BOTH, Product.latents: Streams(False, False), Product.drafts: Streams(True, False)}


def load(plan: Plan) -> Components:
    """The plan's networks, each loaded when it is first needed. From here on this process keeps its compiled programs
    where the request says. Raises `UsageError` where it cannot."""
    enable_compilation_cache(plan.compile_cache)
    return Components(plan)


def traced(folder: Path | None) -> AbstractContextManager[None]:
    """While the body runs, write what host and devices do into `folder`, for xprof; nothing if None."""
    return nullcontext() if folder is None else jax.profiler.trace(str(folder))


@contextmanager
def _running(plan: Plan, components: Components, report: Report, compiled: Iterable[Program]) -> Iterator[None]:
    """Warn, then compile these programs beside the body. Of several hosts, a lost one is reported in a sentence."""
    for warning in plan.warnings:
        report.note(warning)
    agree_on_programs(report)
    try:
        with components.compiling(compiled):
            yield
    except jax.errors.JaxRuntimeError as error:
        raise (device_error(error) if jax.process_count() > 1 else error) from error


def programs(plan: Plan, product: Product = Product.clips, start: RunState = START) -> Iterator[Program]:
    """Every program that a run of the plan compiles, in the order of their use."""
    return chain(latent_programs(plan, start), media_programs(plan, DECODED[product]))


def run(plan: Plan, components: Components, report: Report = SILENT) -> Iterator[Media]:
    """The media of each video, one after the other."""
    with _running(plan, components, report, programs(plan)):
        *_, state = generate(plan, START, components, report)
        yield from finished_clips(plan, state, range(len(plan.seeds)), components, report)


def read_text(plan: Plan, components: Components, start: RunState, report: Report = SILENT) -> RunState:
    """The state `start` with the contexts of the text, on the host."""
    if not (names := missing_contexts(plan, start)):
        return start
    with _running(plan, components, report, text_programs(plan, names)):
        contexts = encode(plan, names, components, report)
    on_host = {name: Streams[Any](*map(to_host, streams)) for name, streams in contexts.items()}
    return replace(start, contexts={**start.contexts, **on_host})


def advance(
    plan: Plan, components: Components, start: RunState, phase: int, report: Report, on_progress: OnProgress
) -> RunState:
    """The state before this phase; where `start` is behind it, `start`."""
    with _running(plan, components, report, latent_programs(plan, start)):
        *_, state = generate(plan, start, components, report, on_progress, end=phase)
    return state


def warm_up(plan: Plan, components: Components, report: Report = SILENT) -> None:
    """Load and run everything once, with a single step, so that the next run finds all compiled."""
    stages = tuple(replace(stage, sigmas=stage.sigmas[[0, -1]][: len(stage.sigmas)]) for stage in plan.stages)
    first_batch = replace(plan, seeds=plan.batches[0], stages=stages)  # other batches are alike
    for _ in run(first_batch, components, report):
        pass


def state_from_latents(latents: Iterable[Streams[np.ndarray]], history: History = ()) -> RunState:
    """The state in which a second stage starts from each video's latents, in the files' layout."""
    return RunState(latents=Streams(*map(np.concatenate, zip(*map(pack, latents), strict=True))), history=history)


def write(
    plan: Plan,
    components: Components,
    report: Report = SILENT,
    product: Product = Product.clips,
    start: RunState = START,
    on_progress: OnProgress = no_checkpoint,
) -> Iterator[tuple[Path, list[str]]]:
    """Carry out the plan; yield the path of each video when it and its record are written, by the first host, and what
    is wrong with the clip; without clips, the paths of latents. `start` is what an earlier run left, and `on_progress`
    is told how far this one is."""
    first, written = jax.process_index() == 0, start.written
    if first:  # hashed for later runs at least: the pages of a network's files are in memory once it is loaded
        components.after_load = lambda network: hash_later(network_files(plan, network))
    requests, videos, saved = single_specs(plan.spec), output_paths(plan.spec), latents_paths(plan.spec)
    kept = kept_networks(plan) if product is Product.clips else ()
    decode_early = bool(kept) and pieces(plan.spec) == 1

    def keep_written(progress: RunState) -> None:
        on_progress(replace(progress, written=written))

    running = _running(plan, components, report, programs(plan, product, start))
    batches = generate(plan, start, components, report, keep_written, pausing=decode_early)
    with components.keeping(kept), running, closing(batches):
        for state in batches:
            rows = range(written, clean_videos(plan, state.phase, state.batch))
            records = dict(zip(rows, _records(plan, report, state, requests, rows), strict=True)) if first else {}
            for row in records if saved else ():
                latents = unpack(latents_of(state, range(row, row + 1)), plan.latent_shapes)
                save_latents(latents, saved[row], records[row][0])
                if product is not Product.clips:
                    yield saved[row], []
            if product is Product.drafts:
                yield from _write_sheet(plan, state, components, report)
            make_clips = rows and product is Product.clips
            clips = finished_clips(plan, state, rows, components, report) if make_clips else ()
            for clip, row in zip(clips, rows, strict=False):
                written = row + 1
                if first:
                    metadata, page = records[row]
                    with report.stage(WRITE):
                        remark = write_clip(clip, videos[row], metadata)
                        write_record(record_path(videos[row]), page)
                    if remark:
                        report.note(f"{videos[row]}: {remark}")
                    if clip.original is None:
                        learn_colours(plan, all_latents(state).video[row], clip.frames)
                keep_written(state)
                if first:
                    yield videos[row], clip_flaws(clip)


def _write_sheet(
    plan: Plan, state: RunState, components: Components, report: Report
) -> Iterator[tuple[Path, list[str]]]:
    media = decode(plan, all_latents(state), components, report, DECODED[Product.drafts])
    clips = ((f"seed {seed}: {plan.prompts[0]}", clip) for seed, clip in zip(plan.seeds, media, strict=True))
    if jax.process_index() == 0:
        write_contact_sheet(clips, path := sheet_path(plan.spec))
        yield path, []
    for _ in clips:  # the other hosts decode with the first
        pass


def _records(
    plan: Plan, report: Report, state: RunState, requests: Sequence[RunSpec], rows: range
) -> Iterator[tuple[Mapping[str, str], str]]:
    """Of each video the metadata, from which it can be decoded, continued or repeated, and the record beside it."""
    files: Mapping[str, str] = {}
    try:
        files = digests(input_files(plan), quick_digest)  # those that are known by now: no clip waits for others
    except OSError as error:  # no reason to lose the clip
        report.note(f"the record will not say which weights these are: {error}")
    last, history = plan.stages[-1], state.history[rows.start : rows.stop]
    if state.phase < len(plan.phases):  # the others of the stage are not done
        history = extend_history(history, last, latents_of(state, rows))
    facts = {"model_version": plan.arch.model_version, "fps": str(last.geometry.fps), "stage": last.name}
    size = plan.arch.compression.clip_size(last.geometry.frames, last.geometry.height, last.geometry.width)
    size = size if plan.spec.running.video else (plan.spec.num_frames, *size[1:])
    facts |= dict(zip(SIZE, map(str, size), strict=True))
    for spec, past in zip(requests[rows.start : rows.stop], history, strict=True):
        record, page = (to_yaml(spec, provenance(plan, files, text)) for text in (past, without_sketches(past)))
        yield {**facts, "record": record}, page


def decode_file(
    plan: Plan,
    latents: Streams[np.ndarray],
    components: Components,
    report: Report = SILENT,
    wanted: Streams[bool] = BOTH,
) -> Media:
    """The media of one video's latents in the files' layout; what is not wanted is empty."""
    with _running(plan, components, report, media_programs(plan, wanted)):
        return next(decode(plan, pack(latents), components, report, wanted))
