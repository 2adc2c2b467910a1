"""`ltx2 generate`: from a prompt to a video with sound."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from ltx2_cli.cli.carry_out import carry_out
from ltx2_cli.cli.flaws import Strict, refuse_flaws
from ltx2_cli.cli.interrupts import postponed
from ltx2_cli.cli.options import (
    FILES,
    KEEP_EVERY,
    SIZE,
    STEPS,
    AudioGuidanceRescale,
    AudioGuidanceScale,
    AudioModalityScale,
    AudioStgScale,
    Config,
    CoordinatorAddress,
    Count,
    Debug,
    Force,
    Frames,
    GuidanceRescale,
    GuidanceScale,
    Height,
    InitializationTimeout,
    KeepEvery,
    Loras,
    ModalityScale,
    Model,
    NegativePrompt,
    Noise,
    NumProcesses,
    Precision,
    ProcessId,
    Prompt,
    Rate,
    Recipe,
    Resumable,
    SaveLatents,
    Settings,
    Sharding,
    StepCount,
    StgBlocks,
    StgScale,
    Text,
    TextEncoder,
    TextPrecision,
    Upsampler,
    Width,
    option,
    overrides,
    seeds,
)
from ltx2_cli.cli.together import asked, begin, found, in_step, with_common_seed
from ltx2_cli.console import reporter
from ltx2_cli.spec import SpecError

EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --model demo --prompt "rain on a tin roof" -o out/demo.mp4
ltx2 generate --prompt "a fox yawns at dawn, birdsong" --seed 7
ltx2 generate --prompt "waves at night" --width 1280 --height 704 --fps 25
ltx2 generate --prompt "a choir" --model ~/LTX-2 --sharding trillium
ltx2 generate --prompt "a street" --guidance-scale 4 --audio-stg-scale 0
ltx2 generate --config out/fox.yaml --seed 8 -o out/fox8.mp4 --set fps=30"""

COMPILING = "Compiling and timing"
ANYTHING = "warm-up"  # a prompt is wanted, none is shown


def generate(
    context: typer.Context,
    more_seeds: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    prompt: Prompt = None,
    negative_prompt: NegativePrompt = None,
    height: Height = None,
    width: Width = None,
    num_frames: Frames = None,
    fps: Rate = None,
    num_videos: Annotated[Count, option(SIZE, "Videos at once: the seeds that follow each other.")] = None,
    num_inference_steps: StepCount = None,
    seed: Annotated[
        Text, option(STEPS, "As many as wanted: 7, 1 2 3 or 0..15; without it a random one, said.", metavar="N [N...]")
    ] = None,
    guidance_scale: GuidanceScale = None,
    stg_scale: StgScale = None,
    modality_scale: ModalityScale = None,
    guidance_rescale: GuidanceRescale = None,
    stg_blocks: StgBlocks = None,
    audio_guidance_scale: AudioGuidanceScale = None,
    audio_stg_scale: AudioStgScale = None,
    audio_modality_scale: AudioModalityScale = None,
    audio_guidance_rescale: AudioGuidanceRescale = None,
    model: Model = None,
    recipe: Recipe = None,
    upsampler: Upsampler = None,
    lora: Loras = None,
    dtype: Precision = None,
    text_encoder: TextEncoder = None,
    text_encoder_dtype: TextPrecision = None,
    sharding: Sharding = None,
    output: Annotated[
        Path | None, option(FILES, "The mp4; without it the name says model, seed, size.", "--output", "-o")
    ] = None,
    force: Force = False,
    strict: Strict = False,
    noise: Noise = None,
    save_latents: SaveLatents = None,
    stop_after: Annotated[
        Literal["stage1"] | None,
        option(FILES, "Make drafts: latents of a first stage, which `ltx2 upsample` goes on from, and a PNG of all."),
    ] = None,
    resumable: Resumable = None,
    keep_every: KeepEvery = KEEP_EVERY,
    config: Config = None,
    settings: Settings = None,
    compile_cache: Annotated[
        Text, option(COMPILING, "Where compiled programs are kept; off: nowhere.", metavar="FOLDER")
    ] = None,
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
    debug: Debug = False,
    coordinator_address: CoordinatorAddress = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    initialization_timeout: InitializationTimeout = 300,
) -> None:
    """Make a video with sound from a prompt; its path is printed, and a record that --config reads lies beside it."""
    with postponed():
        from ltx2_cli.media import check_folder, check_output, check_outputs, sheet_path, unfinished_path
        from ltx2_cli.profiles import read_spec

    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    with in_step(hosts) as facts:
        if warmup and no_compile:
            raise SpecError("--warmup compiles what --no-compile forbids", "leave one of them out")
        if stop_after and not save_latents:
            raise SpecError("--stop-after writes latents, and no file is named for them", "--save-latents FILE")
        given = overrides({**context.params, "seed": seeds(seed, more_seeds or [])})
        spec = read_spec({"prompt": ANYTHING, **given} if warmup else given, config=config, dotlist=settings or ())
        facts |= asked(spec)
        if hosts.first and not warmup:
            check_outputs(spec, force)
        if hosts.first and stop_after:
            check_output(sheet_path(spec), "--save-latents", force)
        if hosts.first and perf_dump:
            check_output(perf_dump, "--perf-dump", force)
        if profile:
            check_folder(profile, "--profile")

    with postponed():
        from ltx2_cli.cli.preview import downloading, preview
        from ltx2_cli.core.compiling import counted, keep_programs, none_compiled
        from ltx2_cli.core.journal import Errand, Journal
        from ltx2_cli.core.progress import Ends
        from ltx2_cli.core.report import Silent
        from ltx2_cli.core.run import load, programs, warm_up
        from ltx2_cli.core.timings import Timings, traced
        from ltx2_cli.plan import first_stage, missing, resolve
        from ltx2_cli.weights.hub import check_room

    if dry_run:
        with in_step(hosts):
            for line in preview(spec, force, bool(stop_after)) if hosts.first else ():
                print(line, flush=True)
        return
    report, ends = reporter() if hosts.first else Silent(), Ends.drafts if stop_after else Ends.clips
    seeded, flaws = with_common_seed(spec, hosts), list[str]()
    with ExitStack() as around:
        count = around.enter_context(counted())
        with in_step(hosts) as facts:
            keep_programs(spec.compile_cache)
            absent = missing(spec)
            check_room(absent)
            for line in downloading(absent):
                report.note(line)
            plan = first_stage(resolve(seeded)) if stop_after else resolve(seeded)
            if hosts.count > 1:
                facts |= found(plan)
            if hosts.first and not warmup:
                check_outputs(plan.spec, force)
            components = load(plan)
            if no_compile:
                around.enter_context(none_compiled(programs(plan, ends)))
        if spec.seed is None and not warmup:
            report.note(f"seed: {plan.spec.seeds[0]}")
        around.enter_context(traced(profile))
        timings = Timings(report)
        if warmup:
            warm_up(plan, components, timings)
        else:
            errand = Errand(ends, source=None)
            journal = Journal(
                unfinished_path(plan.spec), plan, errand, timings, resumable if hosts.first else False, keep_every
            )
            flaws = carry_out(journal, components)
        if hosts.first and perf_dump:
            timings.write(perf_dump)
    report.note(str(count))
    refuse_flaws(flaws, strict)
