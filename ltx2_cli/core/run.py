"""A plan carried out: encode, generate, decode; and everything about it written to files."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from ltx2_cli.contact_sheet import row, write_contact_sheet
from ltx2_cli.core import decode, encode, generate
from ltx2_cli.core.compiling import agree_on_programs, keep_programs
from ltx2_cli.core.components import Components
from ltx2_cli.core.decode import BOTH
from ltx2_cli.core.programs import Program
from ltx2_cli.core.progress import Keep, Progress, clean_videos, forget, phases, unread
from ltx2_cli.core.record import History, continued, input_files, made_with, network_files, stage_name, without_sketches
from ltx2_cli.core.report import WRITE, Report, Silent
from ltx2_cli.diffusion.geometry import clip_size
from ltx2_cli.diffusion.latents import SIZE, pack, save_latents, unpack
from ltx2_cli.hosts import lost
from ltx2_cli.media import Media, write_mp4, write_record
from ltx2_cli.media_checks import findings
from ltx2_cli.outputs import Ends, latents_paths, output_paths, record_path, sheet_path, single_specs
from ltx2_cli.plan import DECODERS, Plan, decodes_beside
from ltx2_cli.profiles import to_yaml
from ltx2_cli.spec import AV
from ltx2_cli.weights.digests import hash_later, quick_digests

SILENT = Silent()
BEGINNING = Progress()

DECODED = {Ends.clips: BOTH, Ends.latents: AV(False, False), Ends.drafts: AV(True, False)}


class _Provenance(NamedTuple):
    """What a video says of itself: all that decoding it, going on from it or making it again needs."""

    metadata: Mapping[str, str]  # of its latents and its mp4
    page: str  # the record beside it


def load(plan: Plan) -> Components:
    """The plan's networks, each loaded when it is first needed; kept where the request says `keep_resident`.

    From here on this process keeps its compiled programs where the request says. Raises `SpecError` where it cannot.
    """
    keep_programs(plan.spec.compile_cache)
    return Components(plan)


@contextmanager
def _other_hosts() -> Iterator[None]:
    """Say in a sentence that another host is gone."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise (lost(error) if jax.process_count() > 1 else error) from error


def programs(plan: Plan, ends: Ends = Ends.clips, start: Progress = BEGINNING) -> Iterator[Program]:
    """Every program that a run of the plan compiles, in the order of their use."""
    read = encode.programs(plan, names) if (names := unread(plan, start)) else ()
    return chain(read, generate.programs(plan, start), decode.programs(plan, DECODED[ends]))


def run(plan: Plan, components: Components, report: Report = SILENT) -> Iterator[Media]:
    """The media of each video, one after the other."""
    agree_on_programs(report)
    with _other_hosts(), components.compiling(programs(plan)):
        yield from decode.decode(plan, make_latents(plan, components, report), components, report)


def warm_up(plan: Plan, components: Components, report: Report = SILENT) -> None:
    """Load and run everything once, with a single step, so that the next run finds all compiled."""
    stages = tuple(replace(stage, sigmas=stage.sigmas[[0, -1]][: len(stage.sigmas)]) for stage in plan.stages)
    spec = replace(plan.spec, seed=(plan.spec.seeds[0],))  # other batches are alike
    for _ in run(replace(plan, spec=spec, stages=stages), components, report):
        pass


def make_latents(
    plan: Plan, components: Components, report: Report = SILENT, start: Progress = BEGINNING, keep: Keep = forget
) -> AV[np.ndarray]:
    """The clean latents of every video, as tokens float32 [videos, tokens, channels].

    `start` is what an earlier run left to go on from, and `keep` is told how far this one is.
    """
    return generate.all_latents(
        generate.generate(plan, _with_text(plan, components, report, start, keep), components, report, keep)
    )


def _with_text(plan: Plan, components: Components, report: Report, start: Progress, keep: Keep) -> Progress:
    """`start` when the text is read."""
    _warn(plan, report)
    if names := unread(plan, start):
        start = replace(start, contexts={**start.contexts, **encode.encode(plan, names, components, report)})
        keep(start)
    return start


def _warn(plan: Plan, report: Report) -> None:
    for warning in plan.warnings:
        report.note(warning)


def going_on(latents: Iterable[AV[np.ndarray]], history: History = ()) -> Progress:
    """What a plan goes on from that begins with its second stage: each video's latents, in the files' layout."""
    return Progress(latents=AV(*map(np.concatenate, zip(*map(pack, latents), strict=True))), history=history)


def write(
    plan: Plan,
    components: Components,
    report: Report = SILENT,
    ends: Ends = Ends.clips,
    start: Progress = BEGINNING,
    keep: Keep = forget,
) -> Iterator[tuple[Path, list[str]]]:
    """Carry out the plan; the path of each video when it and the record beside it are written, by the first host, and
    what is wrong with the clip.

    `start` and `keep` as in `make_latents`. Where no clips are made, the paths are those of latents.
    """
    first, written = jax.process_index() == 0, start.written
    if first:
        components.after_load = partial(_hash_files, plan)
    agree_on_programs(report)

    def keep_written(progress: Progress) -> None:
        keep(replace(progress, written=written))

    beside = ends is Ends.clips and decodes_beside(plan)
    with _other_hosts(), components.compiling(programs(plan, ends, start)), ExitStack() as around:
        around.enter_context(components.keeping(DECODERS if beside else ()))
        begun = _with_text(plan, components, report, start, keep)
        batches = generate.batches(plan, begun, components, report, keep_written, pausing=beside)
        for done in around.enter_context(closing(batches)):
            rows = range(written, clean_videos(plan, done.phase, done.batch))
            said = list(_provenance(plan, _known_digests(plan, report), done, rows)) if first else []
            for number, file in list(enumerate(latents_paths(plan.spec)))[rows.start : rows.stop] if first else ():
                metadata = said[number - rows.start].metadata
                save_latents(unpack(_some(done, range(number, number + 1)), plan.latent_shapes), file, metadata)
                if ends is not Ends.clips:
                    yield file, []
            if ends is Ends.drafts:
                yield from _write_sheet(plan, done, components, report)
            clips = decode.decode(plan, _some(done, rows), components, report) if rows and ends is Ends.clips else ()
            for written, clip in enumerate(clips, rows.start + 1):
                path = output_paths(plan.spec)[written - 1]
                if first:
                    with report.stage(WRITE):
                        _write(clip, path, said[written - 1 - rows.start])
                keep_written(done)
                if first:
                    yield path, findings(clip)


def _write(clip: Media, path: Path, said: _Provenance) -> None:
    write_mp4(clip, path, said.metadata)
    write_record(record_path(path), said.page)


def _some(done: Progress, rows: range) -> AV[np.ndarray]:
    """The latents of these videos."""
    return AV(*(stream[rows.start : rows.stop] for stream in generate.all_latents(done)))


def _hash_files(plan: Plan, network: str) -> None:
    """Have the files of a loaded network hashed, for later runs at least: their pages are in memory now."""
    hash_later(network_files(plan, network))


def _known_digests(plan: Plan, report: Report) -> dict[str, str]:
    """What is known by now of the files that clips are made of; no clip waits for what is not."""
    try:
        return quick_digests(input_files(plan))
    except OSError as error:  # no reason to lose the clip
        report.note(f"the record will not say which weights these are: {error}")
        return {}


def _write_sheet(
    plan: Plan, done: Progress, components: Components, report: Report
) -> Iterator[tuple[Path, list[str]]]:
    media = decode.decode(plan, generate.all_latents(done), components, report, DECODED[Ends.drafts])
    first, clips = jax.process_index() == 0, zip(plan.spec.seeds, media, strict=True)
    rows = [row(f"seed {seed}: {plan.spec.prompt}", clip) for seed, clip in clips if first]
    if first:
        write_contact_sheet(rows, path := sheet_path(plan.spec))
        yield path, []


def _provenance(plan: Plan, files: Mapping[str, str], done: Progress, rows: range) -> Iterator[_Provenance]:
    """Of the videos `rows`, whose latents are clean."""
    history = done.history[rows.start : rows.stop]
    if done.phase < len(phases(plan)):  # the others of the stage are not done
        history = continued(history, plan, plan.stages[-1], _some(done, rows))
    facts = {
        "generation": plan.arch.generation,
        "fps": str(plan.stages[-1].geometry.fps),
        "stage": stage_name(plan, plan.stages[-1]),
        **dict(zip(SIZE, map(str, clip_size(plan.stages[-1].geometry, plan.arch.compression)), strict=True)),
    }
    for spec, past in zip(single_specs(plan.spec)[rows.start : rows.stop], history, strict=True):
        record, page = (to_yaml(spec, made_with(plan, files, each)) for each in (past, without_sketches(past)))
        yield _Provenance({**facts, "record": record}, page)


def decode_file(
    plan: Plan, latents: AV[np.ndarray], components: Components, report: Report = SILENT, wanted: AV[bool] = BOTH
) -> Media:
    """The media of one video's latents in the files' layout; what is not wanted is empty."""
    _warn(plan, report)
    agree_on_programs(report)
    with _other_hosts(), components.compiling(decode.programs(plan, wanted)):
        return next(decode.decode(plan, pack(latents), components, report, wanted))
