"""`ltx2 decode`: from saved latents to a video, frames or sound."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.flaws import Strict, noted, refuse_flaws
from ltx2_cli.cli.from_latents import check_fit, request
from ltx2_cli.cli.memory import OF_LATENTS, fitting_plan
from ltx2_cli.cli.options import FILES, option
from ltx2_cli.cli.telling import report_for, say_end
from ltx2_cli.cli.together import asked, begin, found, held, in_step
from ltx2_cli.console import print_out
from ltx2_cli.outputs import check_frames, check_outputs, read_files
from ltx2_cli.platforms import find_devices
from ltx2_cli.spec import AV, SpecError
from ltx2_cli.writing import Output, hold

if TYPE_CHECKING:
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.media import Media

DECODE_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 decode out/fox.safetensors
ltx2 decode out/fox.safetensors -o fox.mp4 -o fox.wav -o frames/ -o fox.png
ltx2 decode latents.safetensors --model ltx2.3 --fps 25 -o clip.mp4"""

ENDINGS = (".mp4", ".wav", ".png")
FRAMES = "frames"
KINDS = "FILE.mp4, FILE.wav, FILE.png for some frames, or FOLDER/ for all as PNGs"


def decode(
    context: typer.Context,
    latents: Annotated[
        Path, typer.Argument(metavar="LATENTS", help="Safetensors file, as --save-latents writes.", show_default=False)
    ],
    output: Annotated[
        list[str] | None,
        option(FILES, "FILE.mp4, FILE.wav, FILE.png (some frames) or FOLDER/ (all); repeatable.", "--output", "-o"),
    ] = None,
    silent: Annotated[bool, option(FILES, "The mp4 without sound.", "--silent")] = False,
    force: options.Force = False,
    strict: Strict = False,
    model: options.ModelInstead = None,
    text_encoder: options.TextEncoder = None,
    dtype: options.Precision = None,
    sharding: options.Sharding = None,
    fps: options.Rate = None,
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
    """Decode saved latents to video, frames or sound; their paths are printed. Nothing is denoised."""
    from ltx2_cli.diffusion.latents import open_latents

    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    report = report_for(context, hosts.first)
    with in_step(hosts) as facts:
        file = open_latents(latents.expanduser())
        outputs = _outputs(output or [str(file.path.with_suffix(".mp4"))])
        given = options.overrides({**context.params, "output": None})
        spec = request(file, given, config, settings or [], {"lora": [], "refinement.sigmas": []})
        facts |= {**asked(spec), **held([file.path]), "output": str(outputs), "silent": str(silent)}
        if hosts.first:
            _check_outputs(outputs, [file.path, *([config] if config else []), *read_files(spec)], force)
            context.with_resource(hold(Output(path, "-o") for path in outputs))

    report.note("starting …")
    from ltx2_cli.core.compiling import counted, keep_programs
    from ltx2_cli.core.run import decode_file, load
    from ltx2_cli.forecast.phases import DECODE, PHASES
    from ltx2_cli.forecast.requests import Request
    from ltx2_cli.media_checks import findings

    wanted = AV(
        {*outputs.values()} != {".wav"}, ".wav" in outputs.values() or (".mp4" in outputs.values() and not silent)
    )
    with counted() as count:
        with in_step(hosts) as facts:
            keep_programs(spec.compile_cache)
            plan = fitting_plan(Request(spec, find_devices(), skipped=frozenset(PHASES) - {DECODE}, fixed=OF_LATENTS))
            check_fit(file, plan, plan.latent_shapes, spec.fps)
            facts |= found(plan) if hosts.count > 1 else {}
        media = decode_file(plan, file.read(), load(plan), report, wanted)
    if not hosts.first:
        return
    for path, kind in outputs.items():
        with report.stage("write"):
            _write(
                replace(media, waveform=media.waveform[:0]) if silent and kind == ".mp4" else media,
                path,
                kind,
                file,
                spec.prompt,
            )
        print_out(str(path))
    flaws = noted(next(iter(outputs)), findings(media), report)
    say_end(report, list(outputs), count)
    refuse_flaws(flaws, strict)


def _outputs(names: list[str]) -> dict[Path, str]:
    """The kind of each file that is named; `FRAMES` for a folder. Raises `SpecError` for a name that is none."""
    outputs: dict[Path, str] = {}
    for name in names:
        path, kind = Path(name), _kind(name)
        if path in outputs:
            raise SpecError(f"{path} is named twice", "name each file once")
        outputs[path] = kind
    for folder in (path for path, kind in outputs.items() if kind == FRAMES):
        if inside := [path for path in outputs if folder in path.parents]:
            raise SpecError(f"{inside[0]} lies in {folder}, which holds frames alone", "name another place: -o FILE")
    return outputs


def _check_outputs(outputs: dict[Path, str], reads: list[Path], force: bool) -> None:
    """Raise `SpecError` for what cannot be written."""
    folders = [Output(path, "-o") for path, kind in outputs.items() if kind == FRAMES]
    files = [Output(path, "-o") for path, kind in outputs.items() if kind != FRAMES]
    check_outputs(files, reads, force, folders=folders)
    for folder in folders:
        check_frames(*folder, force)


def _kind(name: str) -> str:
    """The ending in small letters, or `FRAMES`."""
    path = Path(name)
    ending = path.suffix.lower()
    if name == "-":
        raise SpecError("output - is no file: stdout carries the paths of files", KINDS)
    if name.endswith("/") or not ending or (ending not in ENDINGS and path.is_dir()):
        return FRAMES
    if ending not in ENDINGS:
        raise SpecError(f"output {path} is no kind of file that is written", KINDS)
    return ending


def _write(media: "Media", path: Path, kind: str, latents: "LatentsFile", caption: str) -> None:
    """Write one kind of file; an mp4 says of itself what its latents do."""
    from ltx2_cli.contact_sheet import row, write_contact_sheet
    from ltx2_cli.media import write_frames, write_mp4, write_wav

    match kind:
        case ".mp4":
            write_mp4(media, path, latents.metadata)
        case ".wav":
            write_wav(media, path)
        case ".png":
            write_contact_sheet([row(caption, media)], path)
        case _:
            write_frames(media, path)
