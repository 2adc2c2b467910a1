"""`ltx2 generate`: from a prompt to a video with sound."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.execute import Session, execute, open_session
from ltx2_cli.cli.inspect import config_page
from ltx2_cli.cli.multihost import request_facts, with_common_seed
from ltx2_cli.cli.options import COMPILING, FILES, SIZE, STEPS, Count, Text, command, option, overrides
from ltx2_cli.cli.preflight import check_published, download_lines, dry_run_lines
from ltx2_cli.console import print_out, visible
from ltx2_cli.devices import find_devices
from ltx2_cli.errors import UsageError
from ltx2_cli.files import Output
from ltx2_cli.outputs import (
    Ends,
    check_distinct,
    check_folder,
    check_outputs,
    outputs,
    read_files,
    run_file,
    with_free_names,
)
from ltx2_cli.request.spec import NO_CACHE, RunSpec

if TYPE_CHECKING:
    from ltx2_cli.estimate.requests import Request
    from ltx2_cli.plan.resolve import Plan

EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --model demo "a red ball bounces" -o out/demo.mp4
ltx2 generate "a fox yawns at dawn, birdsong" --seed 7
ltx2 generate "waves at night" --width 1280 --height 704 --fps 25
ltx2 generate "a choir" --model ~/LTX-2 --sharding trillium
ltx2 generate "a street" --guidance-scale 4 --audio-stg-scale 0
ltx2 generate --config out/fox.yaml --seed 8 -o out/fox8.mp4 --set fps=30"""

ANYTHING = "a"  # the prompt of a warm-up; every text encoder knows it


@dataclass(frozen=True)
class SamplingOptions:
    """How many videos, of which noise, in how many steps."""

    num_videos: Count = option(SIZE, "Videos at once: the seeds that follow each other.")
    num_inference_steps: Count = options.steps()
    seed: Text = option(
        STEPS, "As many as wanted: 7, 1 2 3 or 0..15; without it a random one, said.", metavar="N [N...]"
    )


@dataclass(frozen=True)
class FileOptions:
    """The files that are read and written."""

    output: Path | None = option(FILES, "The mp4; without it named after prompt, model, seed.", "--output", "-o")
    force: bool = options.force()
    strict: bool = options.strict()
    noise: Path | None = options.noise()
    save_latents: Path | None = options.save_latents()
    stop_after: Literal["stage1"] | None = option(
        FILES, "Make drafts: latents of a first stage, which `ltx2 upsample` goes on from, and a PNG of all."
    )


@dataclass(frozen=True)
class RunOptions:
    """How a request is carried out; nothing of it changes a clip."""

    compile_cache: Text = options.compile_cache()
    no_compile: bool = option(COMPILING, "Fail where a program is not in the cache yet.", "--no-compile", default=False)
    warmup: bool = option(
        COMPILING, "Compile, load and run all with one step; make no clip.", "--warmup", default=False
    )
    perf_dump: Path | None = option(COMPILING, "JSON file for how long each stage and step took.", metavar="FILE")
    profile: Path | None = option(COMPILING, "Folder for a trace that xprof reads.", metavar="FOLDER")
    dry_run: bool = option(FILES, "Print what would be downloaded and done; do nothing.", "--dry-run", default=False)


@dataclass(frozen=True)
class Job:
    """A request on this host, with all that decides what is done."""

    spec: RunSpec
    ends: Ends
    options: RunOptions
    session: Session

    @property
    def request(self) -> "Request":
        """The request of this machine's devices."""
        from ltx2_cli.estimate.requests import Request

        return Request(self.spec, find_devices(), ends=self.ends)

    @property
    def files(self) -> list[Output]:
        """All files that this host writes."""
        dump = [Output(self.options.perf_dump, "--perf-dump")] if self.options.perf_dump else []
        clips = [] if self.options.warmup else [*outputs(self.spec, self.ends), run_file(self.spec)]
        return [*clips, *dump] if self.session.hosts.first else []


@command
def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="What to show and to hear, as --prompt.", show_default=False),
    ] = None,
    *,
    clip: options.ClipOptions,
    sampling: SamplingOptions,
    guidance: options.GuidanceOptions,
    models: options.ModelOptions,
    hardware: options.HardwareOptions,
    files: FileOptions,
    resuming: options.ResumeOptions,
    page: options.ConfigOptions,
    run: RunOptions,
    session: options.SessionOptions,
) -> None:
    """Make a video with sound from a prompt; its path is printed, and a record that --config reads lies beside it."""
    from ltx2_cli.request.profiles import read_spec

    with open_session(session) as opened:
        with opened.synchronized() as facts:
            if run.warmup and run.no_compile:
                raise UsageError("--warmup compiles what --no-compile forbids", "leave one of them out")
            if files.stop_after and not files.save_latents:
                raise UsageError("--stop-after writes latents, and no file is named for them", "--save-latents FILE")
            text = options.prompt_and_seeds(clip.prompt, sampling.seed, words or [])
            given = overrides(clip, sampling, guidance, models, hardware, files, run, **text)
            anything = {"prompt": ANYTHING} if run.warmup else {}
            spec = read_spec({**anything, **given}, config=config_page(page.config), dotlist=page.settings or ())
            facts |= request_facts(spec)
        ends = Ends.drafts if files.stop_after else Ends.clips
        job = Job(with_common_seed(spec, opened.hosts), ends, run, opened)
        job = _reserved(job, files.force, [page.config] if page.config else [])
        if run.dry_run:
            _dry_run(job, spec.seed is None)
        else:
            _execute(job, spec.seed is None, resuming, files.strict)


def _reserved(job: Job, force: bool, reads: list[Path]) -> Job:
    """The job under names that are free, its files kept from other processes."""
    with job.session.synchronized():
        if job.session.hosts.first and not force:
            job = replace(job, spec=with_free_names(job.spec, job.ends))
        spec, traces = job.spec, [Output(job.options.profile, "--profile")] if job.options.profile else []
        for folder, flag in traces:
            check_folder(folder, flag)
        if spec.compile_cache not in (None, NO_CACHE):
            check_folder(Path(spec.compile_cache).expanduser(), "--compile-cache")
        check_outputs(job.files, [*read_files(spec), *reads], force, folders=traces)
        if not job.options.dry_run:
            job.session.reserve(job.files)
    return job


def _dry_run(job: Job, random: bool) -> None:
    """Print what would be done; `random`: another seed will be drawn."""
    with job.session.synchronized():
        lines = list(dry_run_lines(job.request, random, job.files)) if job.session.hosts.first else []
        if lines:
            print_out("\n".join(map(visible, lines)))


def _execute(job: Job, random: bool, resuming: options.ResumeOptions, strict: bool) -> None:
    """Make the clips and print their paths; or only warm up."""
    count = job.session.start()
    from ltx2_cli.core.run import load, warm_up
    from ltx2_cli.core.saved_run import RunCheckpointer, RunGoal
    from ltx2_cli.core.timings import Timings, traced

    session, run = job.session, job.options
    plan = _agreed_plan(job)
    components, flaws = load(plan), list[str]()
    if random and not run.warmup:
        session.report.note(f"seed: {plan.spec.seeds[0]}")
    with traced(run.profile):
        timings = Timings(session.report)
        if run.warmup:
            warm_up(plan, components, timings)
        else:
            goal, keep = RunGoal(job.ends, source=None), (resuming.resumable, resuming.keep_every)
            flaws = execute(RunCheckpointer(run_file(plan.spec).path, plan, goal, timings, *keep), components)
        if session.hosts.first and run.perf_dump:
            timings.write(run.perf_dump)
    session.finish([] if run.warmup else [path for path, _ in outputs(plan.spec, job.ends)], count, flaws, strict)


def _agreed_plan(job: Job) -> "Plan":
    """The plan, after what has to be downloaded was said; from then on nothing is compiled, with --no-compile."""
    from ltx2_cli.core.compiling import forbid_compilation
    from ltx2_cli.core.provenance import input_files
    from ltx2_cli.core.run import programs
    from ltx2_cli.plan.resolve import missing_downloads
    from ltx2_cli.weights.hub import check_disk_space

    def check(plan: "Plan") -> None:
        check_distinct(job.files, input_files(plan))
        if job.options.no_compile:
            job.session.resources.enter_context(forbid_compilation(programs(plan, job.ends)))

    request = job.request
    with job.session.synchronized():
        check_published(request)
        absent = missing_downloads(job.spec)
        check_disk_space(absent)
        for line in download_lines(absent):
            job.session.report.note(line)
    return job.session.plan(request, check)
