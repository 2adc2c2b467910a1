"""`ltx2 upsample`: from saved latents to larger ones, refined, and to their video."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.carry_out import carry_out
from ltx2_cli.cli.flaws import Strict, refuse_flaws
from ltx2_cli.cli.from_latents import check_source, request, together
from ltx2_cli.cli.memory import OF_LATENTS, fitting_plan
from ltx2_cli.cli.options import CONTENT, FILES, KEEP_EVERY, STEPS, option
from ltx2_cli.cli.telling import report_for, say_end
from ltx2_cli.cli.together import asked, begin, found, held, in_step
from ltx2_cli.core.report import Report
from ltx2_cli.outputs import Ends, check_distinct, check_outputs, outputs, read_files, run_file
from ltx2_cli.platforms import find_devices
from ltx2_cli.spec import RunSpec, SpecError
from ltx2_cli.writing import hold

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.hosts import Hosts

SEED = re.compile(r"-s\d+$")  # what tells the files of several drafts apart
UPSAMPLE_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --recipe two_stage --prompt "a fox" --stop-after stage1 --save-latents fox.safetensors
ltx2 upsample fox.safetensors -o fox.mp4
ltx2 upsample drafts-s3.safetensors drafts-s7.safetensors
ltx2 upsample fox.safetensors --no-refine --latents-only --save-latents large.safetensors"""


def upsample(
    context: typer.Context,
    latents: Annotated[
        list[Path],
        typer.Argument(metavar="LATENTS...", help="Safetensors files, as --save-latents writes.", show_default=False),
    ],
    prompt: Annotated[
        options.Text, option(CONTENT, "What to show and to hear, where it is not what the file says.")
    ] = None,
    upsampler: options.Upsampler = None,
    no_refine: Annotated[bool, option(STEPS, "Upsample and denoise no more.", "--no-refine")] = False,
    adain: Annotated[
        options.Real,
        option(STEPS, "How far upsampled latents return to the statistics they had, 0 to 1.", metavar="SHARE"),
    ] = None,
    tone_map: Annotated[
        options.Real, option(STEPS, "How far the range of upsampled latents is compressed, 0 to 1.", metavar="SHARE")
    ] = None,
    lengthen: Annotated[
        bool | None,
        option(STEPS, "Where time is upsampled, twice as long instead of twice the frames a second.", "--lengthen"),
    ] = None,
    seed: Annotated[options.Count, option(STEPS, "Of the noise; without it the file's.")] = None,
    model: options.ModelInstead = None,
    text_encoder: options.TextEncoder = None,
    lora: options.Loras = None,
    dtype: options.Precision = None,
    sharding: options.Sharding = None,
    fps: options.Rate = None,
    output: Annotated[
        Path | None, option(FILES, "The mp4; without it named after LATENTS.", "--output", "-o", metavar="FILE")
    ] = None,
    save_latents: Annotated[Path | None, option(FILES, "Safetensors file for the upsampled latents.")] = None,
    latents_only: Annotated[bool, option(FILES, "Make no video.", "--latents-only")] = False,
    force: options.Force = False,
    strict: Strict = False,
    resumable: options.Resumable = None,
    keep_every: options.KeepEvery = KEEP_EVERY,
    config: options.Config = None,
    settings: options.Settings = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    initialization_timeout: options.InitializationTimeout = 300,
) -> None:
    """Upsample saved latents and refine them at their new size; the path of the video or latents is printed."""
    from ltx2_cli.diffusion.latents import open_latents

    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    report = report_for(context, hosts.first)
    with in_step(hosts) as facts:
        given = options.overrides(context.params)
        files = [open_latents(each.expanduser()) for each in latents]
        if latents_only and not save_latents:
            raise SpecError("--latents-only writes latents, and no file is named for them", "--save-latents FILE")
        for file in files:
            if not (prompt or no_refine or config or "record" in file.metadata):
                raise SpecError(f"{file.path} does not say what it shows", '--prompt "...", or --no-refine')
        ends = Ends.latents if latents_only else Ends.clips
        groups = _runs(files, bool(output) or latents_only, bool(save_latents))
        runs = [(group, _spec(group, given, config, settings or [], no_refine)) for group in groups]
        written = [file for _, spec in runs for file in (*outputs(spec, ends), run_file(spec))]
        for group, spec in runs:
            facts |= {f"{group[0].path.name}: {key}": value for key, value in asked(spec).items()}
        facts |= {**held(file.path for file in files), "latents_only": str(latents_only)}
        if hosts.first:
            reads = [*(file.path for file in files), *([config] if config else []), *read_files(runs[0][1])]
            check_outputs(written, reads, force)
            context.with_resource(hold(written))
    report.note("starting …")
    flaws = [_go_on(hosts, report, group, spec, ends, resumable, keep_every) for group, spec in runs]
    refuse_flaws([flaw for of_run in flaws for flaw in of_run], strict)


def _runs(files: "Sequence[LatentsFile]", one_name: bool, saving: bool) -> "list[list[LatentsFile]]":
    """The files that each run goes on from: all, if `one_name` is given to what is made, else those that differ in
    the seed alone.

    Raises `SpecError` where a file is named twice, or where `saving` the latents of several runs under one name.
    """
    named: dict[Path, list[LatentsFile]] = {}
    for file in files:
        named.setdefault(file.path.with_stem(SEED.sub("", file.path.stem)), []).append(file)
    for group in named.values():
        for file in group:
            if sum(os.path.samefile(file.path, other.path) for other in files) > 1:
                raise SpecError(f"{file.path} is named twice", "name each file once")
    if one_name:
        return [list(files)]
    if saving and len(named) > 1:
        raise SpecError(
            f"--save-latents is one name, and {', '.join(str(file.path) for file in files)} have several",
            "-o FILE too, to name all by their seeds; or upsample them one by one",
        )
    return list(named.values())


def _spec(
    files: "Sequence[LatentsFile]",
    given: Mapping[str, object],
    config: Path | None,
    settings: list[str],
    no_refine: bool,
) -> RunSpec:
    """What is asked of one run; without -o its clips are named after their latents."""
    from ltx2_cli.profiles import AUTO

    path = files[0].path
    stem = SEED.sub("", path.stem) if len(files) > 1 else path.stem
    instead = {"output": str(path.with_name(f"{stem}-upsampled.mp4")), "recipe": AUTO, "num_videos": 1}
    spec = together(files, [request(file, given, config, settings, instead) for file in files])
    return replace(spec, refinement=replace(spec.refinement, sigmas=(), lora=())) if no_refine else spec


def _go_on(
    hosts: "Hosts",
    report: Report,
    files: "Sequence[LatentsFile]",
    spec: RunSpec,
    ends: Ends,
    resumable: bool | None,
    keep_every: float,
) -> list[str]:
    """Make the clips that begin with these latents, or only their latents, and print the paths; the clips' flaws."""
    from ltx2_cli.core.compiling import counted, keep_programs
    from ltx2_cli.core.journal import Journal
    from ltx2_cli.core.record import begun, input_files
    from ltx2_cli.core.run import going_on, load
    from ltx2_cli.core.unfinished import Errand
    from ltx2_cli.forecast.requests import Request
    from ltx2_cli.stages import Source

    source = Source(files[0].shapes, spec.fps)
    with counted() as count:
        with in_step(hosts) as facts:
            keep_programs(spec.compile_cache)
            errand = Errand(ends, source)
            plan = fitting_plan(Request(spec, find_devices(), source, ends, fixed=OF_LATENTS))
            check_distinct(outputs(spec, ends), input_files(plan))
            for file in files:
                check_source(file, plan, spec.fps)
            facts |= found(plan) if hosts.count > 1 else {}
        flaws = carry_out(
            Journal(run_file(plan.spec).path, plan, errand, report, resumable, keep_every),
            load(plan),
            going_on([file.read() for file in files], tuple(begun(file, spec.fps) for file in files)),
        )
    say_end(report, [path for path, _ in outputs(spec, ends)], count)
    return flaws
