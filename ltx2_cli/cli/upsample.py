"""`ltx2 upsample`: from saved latents to larger ones, refined, and to their video."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ltx2_cli.cli.execute import OF_LATENTS, agreed_plan, execute
from ltx2_cli.cli.options import Upsample
from ltx2_cli.cli.requests import check_source, latents_request, merged_request, overrides
from ltx2_cli.cli.session import Session, file_facts, request_facts, synchronized
from ltx2_cli.core.provenance import input_files, source_history
from ltx2_cli.core.run import load, state_from_latents
from ltx2_cli.core.run_state import RunCheckpointer, RunGoal
from ltx2_cli.devices import find_devices
from ltx2_cli.diffusion.latents import LatentsFile, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.requests import Request
from ltx2_cli.outputs import Product, check_distinct, check_outputs, outputs, read_files, run_file
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.profiles import AUTO
from ltx2_cli.request.spec import RunSpec

SEED = re.compile(r"-s\d+$")  # what tells the files of several drafts apart


@dataclass(frozen=True)
class Job:
    """Latents that are upsampled in one run, and its request."""

    files: Sequence[LatentsFile]
    spec: RunSpec
    product: Product


def upsample(options: Upsample, session: Session) -> None:
    """Make the clips, or only their latents, and print the paths."""
    product = Product.latents if options.latents_only else Product.clips
    with synchronized(session.hosts) as facts:
        files = [open_latents(path.expanduser()) for path in options.latents]
        if options.latents_only and not options.save_latents:
            raise UsageError("--latents-only writes latents, and no file is named for them", "--save-latents FILE")
        for file in files:
            if not (options.prompt or options.no_refine or options.config or "record" in file.metadata):
                raise UsageError(f"{file.path} does not say what it shows", '--prompt "...", or --no-refine')
        jobs = [Job(group, _spec(group, options), product) for group in _groups(files, options)]
        for job in jobs:
            facts |= {f"{job.files[0].path.name}: {key}": value for key, value in request_facts(job.spec).items()}
        facts |= {**file_facts(file.path for file in files), "latents_only": str(options.latents_only)}
        if session.hosts.first:
            reads = [*(file.path for file in files), *read_files(jobs[0].spec)]
            written = [file for job in jobs for file in (*outputs(job.spec, product), run_file(job.spec))]
            check_outputs(written, [*reads, *([options.config] if options.config else [])], options.force)
            session.reserve(written)
    session.start()
    flaws = [flaw for job in jobs for flaw in _execute(session, job, options)]
    session.finish([file for job in jobs for file in outputs(job.spec, product)], flaws)


def _groups(files: Sequence[LatentsFile], options: Upsample) -> list[list[LatentsFile]]:
    """The files that each run goes on from: all, if what is made has one name, else those that differ in the seed.

    Raises `UsageError` where a file is named twice, or where latents of several runs are saved under one name.
    """
    named: dict[Path, list[LatentsFile]] = {}
    for file in files:
        named.setdefault(file.path.with_stem(SEED.sub("", file.path.stem)), []).append(file)
    for file in [file for group in named.values() for file in group]:
        if sum(os.path.samefile(file.path, other.path) for other in files) > 1:
            raise UsageError(f"{file.path} is named twice", "name each file once")
    if options.output or options.latents_only:
        return [list(files)]
    if options.save_latents and len(named) > 1:
        raise UsageError(
            f"--save-latents is one name, and {', '.join(str(file.path) for file in files)} have several",
            "-o FILE too, to name all by their seeds; or upsample them one by one",
        )
    return list(named.values())


def _spec(files: Sequence[LatentsFile], options: Upsample) -> RunSpec:
    """The request of one run; without -o its clips are named after their latents."""
    path, given = files[0].path, overrides(options)
    stem = SEED.sub("", path.stem) if len(files) > 1 else path.stem
    replaced = {"output": str(path.with_name(f"{stem}-upsampled.mp4")), "recipe": AUTO, "num_videos": 1}
    spec = merged_request(files, [latents_request(file, given, options, replaced) for file in files])
    no_stage = replace(spec.second_stage, sigmas=(), lora=())
    return replace(spec, second_stage=no_stage) if options.no_refine else spec


def _execute(session: Session, job: Job, options: Upsample) -> list[str]:
    """Print the paths of a job's clips, or of their latents; returns the clips' flaws."""

    def check(plan: Plan) -> None:
        check_distinct(outputs(job.spec, job.product), input_files(plan))
        for file in job.files:
            check_source(file, plan, job.spec.fps)

    source = InitialLatents(job.files[0].shapes, job.spec.fps)
    request = Request(job.spec, find_devices(), source, job.product, fixed=OF_LATENTS)
    plan = agreed_plan(session, request, check)
    goal, keep = RunGoal(job.product, source), (options.resumable, options.keep_every)
    checkpointer = RunCheckpointer(run_file(plan.spec).path, plan, goal, session.report, *keep)
    history = tuple(source_history(file, job.spec.fps) for file in job.files)
    return execute(checkpointer, load(plan), state_from_latents([file.read() for file in job.files], history))
