"""`ltx2 decode`: from saved latents to a video, frames or sound."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.execute import open_session, report_flaws
from ltx2_cli.cli.multihost import file_facts, request_facts
from ltx2_cli.cli.options import FILES, DType, Real, Text, Texts, command, option, overrides
from ltx2_cli.cli.preflight import OF_LATENTS
from ltx2_cli.cli.saved_latents import check_shapes, latents_request
from ltx2_cli.console import print_out
from ltx2_cli.devices import find_devices
from ltx2_cli.errors import UsageError
from ltx2_cli.files import Output
from ltx2_cli.outputs import check_frames, check_outputs, read_files
from ltx2_cli.request.spec import Streams

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


@dataclass(frozen=True)
class FileOptions:
    """The files that are written."""

    output: Texts = option(
        FILES, "FILE.mp4, FILE.wav, FILE.png (some frames) or FOLDER/ (all); repeatable.", "--output", "-o"
    )
    silent: bool = option(FILES, "The mp4 without sound.", "--silent", default=False)
    force: bool = options.force()
    strict: bool = options.strict()


@dataclass(frozen=True)
class HardwareOptions:
    """Arithmetic and devices, and the frame rate."""

    dtype: DType = options.dtype()
    sharding: Text = options.sharding()
    fps: Real = options.fps()


@command
def decode(
    latents: Annotated[
        Path, typer.Argument(metavar="LATENTS", help="Safetensors file, as --save-latents writes.", show_default=False)
    ],
    files: FileOptions,
    model: options.SavedModelOptions,
    hardware: HardwareOptions,
    page: options.ConfigOptions,
    session: options.SessionOptions,
) -> None:
    """Decode saved latents to video, frames or sound; their paths are printed. Nothing is denoised."""
    from ltx2_cli.diffusion.latents import open_latents

    with open_session(session) as opened:
        with opened.synchronized() as facts:
            file = open_latents(latents.expanduser())
            kinds = _kinds(files.output or [str(file.path.with_suffix(".mp4"))])
            given = overrides(model, hardware)
            spec = latents_request(file, given, page, {"lora": [], "second_stage.sigmas": []})
            facts |= {
                **request_facts(spec),
                **file_facts([file.path]),
                "output": str(kinds),
                "silent": str(files.silent),
            }
            if opened.hosts.first:
                _check_outputs(
                    kinds, [file.path, *([page.config] if page.config else []), *read_files(spec)], files.force
                )
                opened.reserve(Output(path, "-o") for path in kinds)
        count = opened.start()
        from ltx2_cli.core.run import decode_file, load
        from ltx2_cli.estimate.phases import DECODE, PHASES
        from ltx2_cli.estimate.requests import Request
        from ltx2_cli.media.checks import findings

        plan = opened.plan(
            Request(spec, find_devices(), skipped=frozenset(PHASES) - {DECODE}, fixed=OF_LATENTS),
            lambda plan: check_shapes(file, plan, plan.latent_shapes, spec.fps),
        )
        sound = ".wav" in kinds.values() or (".mp4" in kinds.values() and not files.silent)
        streams = Streams({*kinds.values()} != {".wav"}, sound)
        media = decode_file(plan, file.read(), load(plan), opened.report, streams)
        if not opened.hosts.first:
            return
        for path, kind in kinds.items():
            with opened.report.stage("write"):
                shown = replace(media, waveform=media.waveform[:0]) if files.silent and kind == ".mp4" else media
                _write(shown, path, kind, file, spec.prompt)
            print_out(str(path))
        flaws = report_flaws(next(iter(kinds)), findings(media), opened.report)
        opened.finish(kinds, count, flaws, files.strict)


def _kinds(names: list[str]) -> dict[Path, str]:
    """The kind of each file that is named; `FRAMES` for a folder. Raises `UsageError` for a name of no kind."""
    kinds: dict[Path, str] = {}
    for name in names:
        path, kind = Path(name), _kind(name)
        if path in kinds:
            raise UsageError(f"{path} is named twice", "name each file once")
        kinds[path] = kind
    for folder in (path for path, kind in kinds.items() if kind == FRAMES):
        if inside := [path for path in kinds if folder in path.parents]:
            raise UsageError(f"{inside[0]} lies in {folder}, which holds frames alone", "name another place: -o FILE")
    return kinds


def _check_outputs(kinds: dict[Path, str], reads: list[Path], force: bool) -> None:
    """Raise `UsageError` for what cannot be written."""
    folders = [Output(path, "-o") for path, kind in kinds.items() if kind == FRAMES]
    check_outputs([Output(path, "-o") for path, kind in kinds.items() if kind != FRAMES], reads, force, folders=folders)
    for folder in folders:
        check_frames(*folder, force)


def _kind(name: str) -> str:
    """The ending in small letters, or `FRAMES`."""
    path = Path(name)
    ending = path.suffix.lower()
    if name == "-":
        raise UsageError("output - is no file: stdout carries the paths of files", KINDS)
    if name.endswith("/") or not ending or (ending not in ENDINGS and path.is_dir()):
        return FRAMES
    if ending not in ENDINGS:
        raise UsageError(f"output {path} is no kind of file that is written", KINDS)
    return ending


def _write(media: "Media", path: Path, kind: str, latents: "LatentsFile", caption: str) -> None:
    """Write one kind of file; an mp4 says of itself what its latents do."""
    from ltx2_cli.media import write_frames, write_mp4, write_wav
    from ltx2_cli.media.contact_sheet import row, write_contact_sheet

    match kind:
        case ".mp4":
            write_mp4(media, path, latents.metadata)
        case ".wav":
            write_wav(media, path)
        case ".png":
            write_contact_sheet([row(caption, media)], path)
        case _:
            write_frames(media, path)
