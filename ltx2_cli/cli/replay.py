"""`ltx2 replay`: a clip made again by what it says of itself, and whether it is the same."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.flaws import Strict, noted, refuse_flaws
from ltx2_cli.cli.memory import OF_LATENTS, OF_RECORD, fitting_plan
from ltx2_cli.cli.options import FILES, MODEL, STEPS, option
from ltx2_cli.cli.telling import report_for, say_end
from ltx2_cli.cli.together import asked, begin, found, held, in_step
from ltx2_cli.console import print_out
from ltx2_cli.outputs import Ends, check_outputs, outputs, read_files
from ltx2_cli.platforms import find_devices
from ltx2_cli.writing import hold

if TYPE_CHECKING:
    from ltx2_cli.cli.recorded import Begun, Recorded
    from ltx2_cli.core.report import Report
    from ltx2_cli.plan import Plan
    from ltx2_cli.spec import RunSpec

REPLAY_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 replay out/fox.mp4
ltx2 replay --verify out/fox.mp4
ltx2 replay out/fox.mp4 --seed 8 --steps 20 -o out/fox8.mp4"""


def replay(
    context: typer.Context,
    clip: Annotated[
        Path, typer.Argument(metavar="FILE", help="An mp4, its record (.yaml) or latents.", show_default=False)
    ],
    verify: Annotated[
        bool, option(FILES, "Compare with FILE; without -o nothing is kept. Exit code 1 if it differs.", "--verify")
    ] = False,
    prompt: options.Prompt = None,
    negative_prompt: options.NegativePrompt = None,
    height: options.Height = None,
    width: options.Width = None,
    num_frames: options.Frames = None,
    fps: options.Rate = None,
    num_inference_steps: options.StepCount = None,
    seed: Annotated[options.Count, option(STEPS, "0 to 4294967295.")] = None,
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
    any_weights: Annotated[bool, option(MODEL, "Also where weights have changed since.", "--any-weights")] = False,
    dtype: options.Precision = None,
    text_encoder: options.TextEncoder = None,
    text_encoder_dtype: options.TextPrecision = None,
    sharding: options.Sharding = None,
    output: Annotated[
        Path | None, option(FILES, "The mp4; without it named after FILE.", "--output", "-o", metavar="FILE")
    ] = None,
    force: options.Force = False,
    strict: Strict = False,
    noise: options.Noise = None,
    latents: Annotated[Path | None, option(FILES, "Where those are now that `ltx2 upsample` went on from.")] = None,
    save_latents: options.SaveLatents = None,
    settings: options.Settings = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    initialization_timeout: options.InitializationTimeout = 300,
) -> None:
    """Make a clip again by its record; its path is printed, or with --verify whether it is the same."""
    from ltx2_cli.cli.recorded import check_overrides, find_source, recorded
    from ltx2_cli.cli.verdict import check_comparable, verdict

    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    report = report_for(context, hosts.first)
    flaws, kept = list[str](), not verify or bool(output or save_latents)
    with ExitStack() as around:
        with in_step(hosts) as facts:
            then, given = recorded(clip.expanduser()), options.overrides(context.params)
            changed = {*given, *(setting.partition("=")[0] for setting in settings or ())}
            check_overrides(then, changed)
            source = find_source(then, latents)
            folder = then.path.parent if kept else Path(around.enter_context(TemporaryDirectory()))
            spec = then.request({**_files(then, folder), **given}, settings or [])
            for lack in check_comparable(then, spec) if verify else ():
                report.note(lack)
            written = outputs(spec, Ends.latents if then.is_draft else Ends.clips)
            if hosts.first:
                reads = [then.path, then.video, source and source.file.path, *read_files(spec)]
                check_outputs(written, [path for path in reads if path], force)
                around.enter_context(hold(written))
            facts |= asked(replace(spec, output=None, save_latents=None)) | {"stage": then.stage}
            facts |= held([source.file.path] if source else [])

        report.note("starting …")
        from ltx2_cli.core.compiling import counted

        count = around.enter_context(counted())
        with in_step(hosts) as facts:
            plan = _plan(then, spec, source)
            others = _others(then, plan, changed, any_weights, report) if hosts.first else []
            facts |= found(plan) if hosts.count > 1 else {}
        for path, findings in _again(then, plan, source, report):
            if kept:
                print_out(str(path))
                flaws += noted(path, findings, report)
            if verify:
                print_out(verdict(then, recorded(path), others))
    say_end(report, [path for path, _ in written] if kept else [], count)
    refuse_flaws(flaws, strict)


def _files(then: "Recorded", folder: Path) -> dict[str, str | None]:
    """Where what is made again goes: a clip, or of a draft the latents."""
    made = folder / f"{then.path.stem}-replay"
    return {"output": f"{made}.mp4", "save_latents": f"{made}.safetensors" if then.is_draft else None}


def _plan(then: "Recorded", spec: "RunSpec", source: "Begun | None") -> "Plan":
    """What the request means, as far as the first time it was carried out."""
    from ltx2_cli.cli.from_latents import check_source
    from ltx2_cli.forecast.requests import Request
    from ltx2_cli.stages import Source

    begin = Source(source.file.shapes, source.fps) if source else None
    ends, fixed = Ends.drafts if then.is_draft else Ends.clips, OF_LATENTS if source else OF_RECORD
    plan = fitting_plan(Request(spec, find_devices(), begin, ends, fixed=fixed))
    if source:
        check_source(source.file, plan, source.fps)
    return plan


def _others(then: "Recorded", plan: "Plan", asked: set[str], any_weights: bool, report: "Report") -> list[str]:
    """What is not as it was the first time; what nobody asked for is said."""
    from ltx2_cli.cli.recorded import check_weights, circumstances

    with report.stage("compare the weights"):
        changed = check_weights(then, plan, asked, any_weights)
    others = [*changed, *circumstances(then.made, plan)]
    for other in others:
        report.note(other)
    return others + [f"another {key} is asked for" for key in sorted(asked - {"output", "save_latents"})]


def _again(
    then: "Recorded", plan: "Plan", source: "Begun | None", report: "Report"
) -> Iterator[tuple[Path, list[str]]]:
    """Each file when it is finished, and what is wrong with it."""
    from ltx2_cli.core.run import BEGINNING, going_on, load, write

    start = going_on([source.file.read()], (source.begun,)) if source else BEGINNING
    return write(plan, load(plan), report, Ends.latents if then.is_draft else Ends.clips, start)
