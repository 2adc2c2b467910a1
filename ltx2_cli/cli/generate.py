"""`ltx2 generate`: from a prompt to a video with sound."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.carry_out import carry_out
from ltx2_cli.cli.describe import config_page
from ltx2_cli.cli.flaws import Strict, refuse_flaws
from ltx2_cli.cli.memory import check_published, fitting_plan
from ltx2_cli.cli.options import COMPILING, FILES, KEEP_EVERY, SIZE, STEPS, option
from ltx2_cli.cli.telling import report_for, say_end
from ltx2_cli.cli.together import asked, begin, found, in_step, with_common_seed
from ltx2_cli.console import print_out, visible
from ltx2_cli.core.report import Report
from ltx2_cli.outputs import Ends, check_distinct, check_folder, check_outputs, named, outputs, read_files, run_file
from ltx2_cli.platforms import find_devices
from ltx2_cli.spec import NO_CACHE, RunSpec, SpecError
from ltx2_cli.writing import Output, hold

if TYPE_CHECKING:
    from ltx2_cli.core.components import Components
    from ltx2_cli.forecast.requests import Request
    from ltx2_cli.hosts import Hosts
    from ltx2_cli.plan import Plan

EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --model demo "a red ball bounces" -o out/demo.mp4
ltx2 generate "a fox yawns at dawn, birdsong" --seed 7
ltx2 generate "waves at night" --width 1280 --height 704 --fps 25
ltx2 generate "a choir" --model ~/LTX-2 --sharding trillium
ltx2 generate "a street" --guidance-scale 4 --audio-stg-scale 0
ltx2 generate --config out/fox.yaml --seed 8 -o out/fox8.mp4 --set fps=30"""

ANYTHING = "a"  # a prompt is wanted, none is shown; every text encoder knows it


@dataclass(frozen=True)
class Manner:
    """How a request is carried out, which changes nothing in its clip."""

    hosts: "Hosts"
    report: Report
    force: bool
    drafts: bool
    warmup: bool
    no_compile: bool
    resumable: bool | None
    keep_every: float
    perf_dump: Path | None
    profile: Path | None

    def request(self, spec: RunSpec) -> "Request":
        """What is asked of this machine's devices."""
        from ltx2_cli.forecast.requests import Request

        return Request(spec, find_devices(), ends=self.ends)

    @property
    def ends(self) -> Ends:
        """The clips, or the drafts that a first stage leaves."""
        return Ends.drafts if self.drafts else Ends.clips

    def files(self, spec: RunSpec) -> list[Output]:
        """All that this host writes."""
        dump = [Output(self.perf_dump, "--perf-dump")] if self.perf_dump else []
        clips = [] if self.warmup else [*outputs(spec, self.ends), run_file(spec)]
        return [*clips, *dump] if self.hosts.first else []


def generate(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="What to show and to hear, as --prompt.", show_default=False),
    ] = None,
    prompt: options.Prompt = None,
    negative_prompt: options.NegativePrompt = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.Frames = None,
    fps: options.Rate = None,
    num_videos: Annotated[options.Count, option(SIZE, "Videos at once: the seeds that follow each other.")] = None,
    num_inference_steps: options.StepCount = None,
    seed: Annotated[
        options.Text,
        option(STEPS, "As many as wanted: 7, 1 2 3 or 0..15; without it a random one, said.", metavar="N [N...]"),
    ] = None,
    guidance_scale: options.GuidanceScale = None,
    stg_scale: options.StgScale = None,
    modality_scale: options.ModalityScale = None,
    guidance_rescale: options.GuidanceRescale = None,
    stg_blocks: options.StgBlocks = None,
    audio_guidance_scale: options.AudioGuidanceScale = None,
    audio_stg_scale: options.AudioStgScale = None,
    audio_modality_scale: options.AudioModalityScale = None,
    audio_guidance_rescale: options.AudioGuidanceRescale = None,
    model: options.Model = None,
    recipe: options.Recipe = None,
    upsampler: options.Upsampler = None,
    lora: options.Loras = None,
    dtype: options.Precision = None,
    text_encoder: options.TextEncoder = None,
    text_encoder_dtype: options.TextPrecision = None,
    sharding: options.Sharding = None,
    output: Annotated[
        Path | None, option(FILES, "The mp4; without it named after prompt, model, seed.", "--output", "-o")
    ] = None,
    force: options.Force = False,
    strict: Strict = False,
    noise: options.Noise = None,
    save_latents: options.SaveLatents = None,
    stop_after: Annotated[
        Literal["stage1"] | None,
        option(FILES, "Make drafts: latents of a first stage, which `ltx2 upsample` goes on from, and a PNG of all."),
    ] = None,
    resumable: options.Resumable = None,
    keep_every: options.KeepEvery = KEEP_EVERY,
    config: options.Config = None,
    settings: options.Settings = None,
    compile_cache: options.CompileCache = None,
    no_compile: Annotated[
        bool, option(COMPILING, "Fail where a program is not in the cache yet.", "--no-compile")
    ] = False,
    warmup: Annotated[
        bool, option(COMPILING, "Compile, load and run all with one step; make no clip.", "--warmup")
    ] = False,
    perf_dump: Annotated[
        Path | None, option(COMPILING, "JSON file for how long each stage and step took.", metavar="FILE")
    ] = None,
    profile: Annotated[Path | None, option(COMPILING, "Folder for a trace that xprof reads.", metavar="FOLDER")] = None,
    dry_run: Annotated[
        bool, option(FILES, "Print what would be downloaded and done; do nothing.", "--dry-run")
    ] = False,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    initialization_timeout: options.InitializationTimeout = 300,
) -> None:
    """Make a video with sound from a prompt; its path is printed, and a record that --config reads lies beside it."""
    from ltx2_cli.profiles import read_spec

    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    report = report_for(context, hosts.first)
    how = Manner(hosts, report, force, bool(stop_after), warmup, no_compile, resumable, keep_every, perf_dump, profile)
    with in_step(hosts) as facts:
        if warmup and no_compile:
            raise SpecError("--warmup compiles what --no-compile forbids", "leave one of them out")
        if stop_after and not save_latents:
            raise SpecError("--stop-after writes latents, and no file is named for them", "--save-latents FILE")
        given = options.overrides({**context.params, **options.prompt_and_seeds(prompt, seed, words or [])})
        spec = read_spec(
            {"prompt": ANYTHING, **given} if warmup else given, config=config_page(config), dotlist=settings or ()
        )
        facts |= asked(spec)
    seeded, random = with_common_seed(spec, hosts), spec.seed is None
    with in_step(hosts):
        seeded = seeded if force or not hosts.first else named(seeded, how.ends)
        traces = [Output(profile, "--profile")] if profile else []
        for folder, flag in traces:
            check_folder(folder, flag)
        if spec.compile_cache not in (None, NO_CACHE):
            check_folder(Path(spec.compile_cache).expanduser(), "--compile-cache")
        reads = [*read_files(spec), *([config] if config else [])]
        check_outputs(how.files(seeded), reads, force, folders=traces)
        context.with_resource(hold(() if dry_run else how.files(seeded)))
    if dry_run:
        _foretell(seeded, random, how)
    else:
        refuse_flaws(_carry_out(seeded, random, how), strict)


def _foretell(spec: RunSpec, random: bool, how: Manner) -> None:
    """Print what would be done."""
    from ltx2_cli.cli.preview import preview

    with in_step(how.hosts):
        lines = list(preview(how.request(spec), random, how.files(spec))) if how.hosts.first else []
        if lines:
            print_out("\n".join(map(visible, lines)))


def _carry_out(spec: RunSpec, random: bool, how: Manner) -> list[str]:
    """Make the clips and print their paths; their flaws."""
    report = how.report
    report.note("starting …")
    from ltx2_cli.core.compiling import counted
    from ltx2_cli.core.timings import Timings, traced

    with ExitStack() as around:
        count = around.enter_context(counted())
        plan, components = _ready(spec, how, report, around)
        if random and not how.warmup:
            report.note(f"seed: {plan.spec.seeds[0]}")
        around.enter_context(traced(how.profile))
        timings = Timings(report)
        flaws = _make(plan, components, timings, how)
        if how.hosts.first and how.perf_dump:
            timings.write(how.perf_dump)
    written = [] if how.warmup else [path for path, _ in outputs(plan.spec, how.ends)]
    say_end(report, written, count)
    return flaws


def _ready(spec: RunSpec, how: Manner, report: Report, around: ExitStack) -> "tuple[Plan, Components]":
    """What the request means, all hosts agreed, and its networks, of which no weight is read yet; no program is
    compiled `around` what follows, where that is asked."""
    from ltx2_cli.cli.preview import downloading
    from ltx2_cli.core.compiling import keep_programs, none_compiled
    from ltx2_cli.core.record import input_files
    from ltx2_cli.core.run import load, programs
    from ltx2_cli.plan import missing
    from ltx2_cli.weights.hub import check_room

    with in_step(how.hosts) as facts:
        keep_programs(spec.compile_cache)
        request = how.request(spec)
        check_published(request)
        absent = missing(spec)
        check_room(absent)
        for line in downloading(absent):
            report.note(line)
        plan = fitting_plan(request)
        if how.hosts.count > 1:
            facts |= found(plan)
        check_distinct(how.files(spec), input_files(plan))
        components = load(plan)
        if how.no_compile:
            around.enter_context(none_compiled(programs(plan, how.ends)))
    return plan, components


def _make(plan: "Plan", components: "Components", report: Report, how: Manner) -> list[str]:
    """Carry out the plan, or only warm up for it; the flaws of what was made."""
    from ltx2_cli.core.journal import Journal
    from ltx2_cli.core.run import warm_up
    from ltx2_cli.core.unfinished import Errand

    if how.warmup:
        warm_up(plan, components, report)
        return []
    errand = Errand(how.ends, source=None)
    return carry_out(Journal(run_file(plan.spec).path, plan, errand, report, how.resumable, how.keep_every), components)
