"""`ltx2 upsample`: from saved latents to larger ones, refined, and to their video."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.execute import Session, execute, open_session
from ltx2_cli.cli.multihost import file_facts, request_facts
from ltx2_cli.cli.options import CONTENT, FILES, STEPS, Count, DType, Real, Text, Texts, command, option, overrides
from ltx2_cli.cli.preflight import OF_LATENTS
from ltx2_cli.cli.saved_latents import check_source, latents_request, merged_request
from ltx2_cli.devices import find_devices
from ltx2_cli.errors import UsageError
from ltx2_cli.outputs import Ends, check_distinct, check_outputs, outputs, read_files, run_file
from ltx2_cli.request.spec import RunSpec

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan.resolve import Plan

SEED = re.compile(r"-s\d+$")  # what tells the files of several drafts apart
UPSAMPLE_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --recipe two_stage --prompt "a fox" --stop-after stage1 --save-latents fox.safetensors
ltx2 upsample fox.safetensors -o fox.mp4
ltx2 upsample drafts-s3.safetensors drafts-s7.safetensors
ltx2 upsample fox.safetensors --no-refine --latents-only --save-latents large.safetensors"""


@dataclass(frozen=True)
class UpsampleOptions:
    """The second stage."""

    prompt: Text = option(CONTENT, "What to show and to hear, where it is not what the file says.")
    upsampler: Text = options.upsampler()
    no_refine: bool = option(STEPS, "Upsample and denoise no more.", "--no-refine", default=False)
    adain: Real = option(STEPS, "How far upsampled latents return to the statistics they had, 0 to 1.", metavar="SHARE")
    tone_map: Real = option(STEPS, "How far the range of upsampled latents is compressed, 0 to 1.", metavar="SHARE")
    temporal_upsample: Literal["fps", "duration"] | None = option(
        STEPS, "What a temporal upsampler doubles; duration stretches the sound."
    )
    seed: Count = option(STEPS, "Of the noise; without it the file's.")


@dataclass(frozen=True)
class FileOptions:
    """Hardware, and the files that are written."""

    lora: Texts = options.lora()
    dtype: DType = options.dtype()
    sharding: Text = options.sharding()
    fps: Real = options.fps()
    output: Path | None = option(FILES, "The mp4; without it named after LATENTS.", "--output", "-o", metavar="FILE")
    save_latents: Path | None = option(FILES, "Safetensors file for the upsampled latents.")
    latents_only: bool = option(FILES, "Make no video.", "--latents-only", default=False)
    force: bool = options.force()
    strict: bool = options.strict()


@dataclass(frozen=True)
class Job:
    """Latents that are upsampled in one run, and its request."""

    files: "Sequence[LatentsFile]"
    spec: RunSpec
    ends: Ends


@command
def upsample(
    latents: Annotated[
        list[Path],
        typer.Argument(metavar="LATENTS...", help="Safetensors files, as --save-latents writes.", show_default=False),
    ],
    *,
    second_stage: UpsampleOptions,
    model: options.SavedModelOptions,
    files: FileOptions,
    resuming: options.ResumeOptions,
    page: options.ConfigOptions,
    session: options.SessionOptions,
) -> None:
    """Upsample saved latents and refine them at their new size; the path of the video or latents is printed."""
    from ltx2_cli.diffusion.latents import open_latents

    with open_session(session) as opened:
        with opened.synchronized() as facts:
            sources = [open_latents(path.expanduser()) for path in latents]
            if files.latents_only and not files.save_latents:
                raise UsageError("--latents-only writes latents, and no file is named for them", "--save-latents FILE")
            for source in sources:
                if not (second_stage.prompt or second_stage.no_refine or page.config or "record" in source.metadata):
                    raise UsageError(f"{source.path} does not say what it shows", '--prompt "...", or --no-refine')
            given = overrides(second_stage, model, files)
            ends = Ends.latents if files.latents_only else Ends.clips
            jobs = [
                Job(group, _spec(group, given, page, second_stage.no_refine), ends)
                for group in _groups(sources, bool(files.output) or files.latents_only, bool(files.save_latents))
            ]
            for job in jobs:
                facts |= {f"{job.files[0].path.name}: {key}": value for key, value in request_facts(job.spec).items()}
            facts |= {**file_facts(source.path for source in sources), "latents_only": str(files.latents_only)}
            if opened.hosts.first:
                reads = [*(source.path for source in sources), *read_files(jobs[0].spec)]
                written = [file for job in jobs for file in (*outputs(job.spec, ends), run_file(job.spec))]
                check_outputs(written, [*reads, *([page.config] if page.config else [])], files.force)
                opened.reserve(written)
        count = opened.start()
        flaws = [flaw for job in jobs for flaw in _execute(opened, job, resuming)]
        opened.finish([path for job in jobs for path, _ in outputs(job.spec, ends)], count, flaws, files.strict)


def _groups(files: "Sequence[LatentsFile]", one_name: bool, saving: bool) -> "list[list[LatentsFile]]":
    """The files that each run goes on from: all, if `one_name` is given to what is made, else those that differ in
    the seed alone.

    Raises `UsageError` where a file is named twice, or where `saving` the latents of several runs under one name.
    """
    named: dict[Path, list[LatentsFile]] = {}
    for file in files:
        named.setdefault(file.path.with_stem(SEED.sub("", file.path.stem)), []).append(file)
    for group in named.values():
        for file in group:
            if sum(os.path.samefile(file.path, other.path) for other in files) > 1:
                raise UsageError(f"{file.path} is named twice", "name each file once")
    if one_name:
        return [list(files)]
    if saving and len(named) > 1:
        raise UsageError(
            f"--save-latents is one name, and {', '.join(str(file.path) for file in files)} have several",
            "-o FILE too, to name all by their seeds; or upsample them one by one",
        )
    return list(named.values())


def _spec(
    files: "Sequence[LatentsFile]", given: Mapping[str, object], page: options.ConfigOptions, no_refine: bool
) -> RunSpec:
    """The request of one run; without -o its clips are named after their latents."""
    from ltx2_cli.request.profiles import AUTO

    path = files[0].path
    stem = SEED.sub("", path.stem) if len(files) > 1 else path.stem
    replaced = {"output": str(path.with_name(f"{stem}-upsampled.mp4")), "recipe": AUTO, "num_videos": 1}
    spec = merged_request(files, [latents_request(file, given, page, replaced) for file in files])
    return replace(spec, second_stage=replace(spec.second_stage, sigmas=(), lora=())) if no_refine else spec


def _execute(session: Session, job: Job, resuming: options.ResumeOptions) -> list[str]:
    """Make the clips of a job, or only their latents, and print the paths; returns the clips' flaws."""
    from ltx2_cli.core.provenance import input_files, source_history
    from ltx2_cli.core.run import load, state_from_latents
    from ltx2_cli.core.saved_run import RunCheckpointer, RunGoal
    from ltx2_cli.estimate.requests import Request
    from ltx2_cli.plan.stages import InitialLatents

    def check(plan: "Plan") -> None:
        check_distinct(outputs(job.spec, job.ends), input_files(plan))
        for file in job.files:
            check_source(file, plan, job.spec.fps)

    source = InitialLatents(job.files[0].shapes, job.spec.fps)
    plan = session.plan(Request(job.spec, find_devices(), source, job.ends, fixed=OF_LATENTS), check)
    goal, keep = RunGoal(job.ends, source), (resuming.resumable, resuming.keep_every)
    checkpointer = RunCheckpointer(run_file(plan.spec).path, plan, goal, session.report, *keep)
    history = tuple(source_history(file, job.spec.fps) for file in job.files)
    return execute(checkpointer, load(plan), state_from_latents([file.read() for file in job.files], history))
