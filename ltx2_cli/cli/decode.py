"""`ltx2 decode`: from saved latents to a video, frames or sound."""

from dataclasses import replace
from pathlib import Path

from ltx2_cli.cli.execute import OF_LATENTS, agreed_plan, report_flaws
from ltx2_cli.cli.options import Decode
from ltx2_cli.cli.requests import check_shapes, latents_request, overrides
from ltx2_cli.cli.session import Session, file_facts, request_facts, synchronized
from ltx2_cli.console import print_out
from ltx2_cli.core.run import decode_file, load
from ltx2_cli.devices import find_devices
from ltx2_cli.diffusion.latents import LatentsFile, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.phases import DECODE, PHASES
from ltx2_cli.estimate.requests import Request
from ltx2_cli.files import Output
from ltx2_cli.media import Media, write_frames, write_mp4, write_wav
from ltx2_cli.media.checks import findings
from ltx2_cli.media.contact_sheet import row, write_contact_sheet
from ltx2_cli.outputs import check_frames, check_outputs, read_files
from ltx2_cli.request.spec import Streams

ENDINGS = (".mp4", ".wav", ".png")
FRAMES = "frames"
KINDS = "FILE.mp4, FILE.wav, FILE.png for some frames, or FOLDER/ for all as PNGs"


def decode(options: Decode, session: Session) -> None:
    """Write the files and print their paths."""
    with synchronized(session.hosts) as facts:
        file = open_latents(options.latents.expanduser())
        kinds = _kinds(options.files or [str(file.path.with_suffix(".mp4"))])
        spec = latents_request(file, overrides(options), options, {"lora": [], "second_stage.sigmas": []})
        facts |= {**request_facts(spec), **file_facts([file.path])}
        facts |= {"output": str(kinds), "silent": str(options.silent)}
        outputs = [Output(path, "-o") for path in kinds]
        if session.hosts.first:
            reads = [file.path, *([options.config] if options.config else []), *read_files(spec)]
            folders = [output for output in outputs if kinds[output.path] == FRAMES]
            check_outputs([file for file in outputs if file not in folders], reads, options.force, folders=folders)
            for folder in folders:
                check_frames(*folder, options.force)
            session.reserve(outputs)
    session.start()
    request = Request(spec, find_devices(), skipped=frozenset(PHASES) - {DECODE}, fixed=OF_LATENTS)
    plan = agreed_plan(session, request, lambda plan: check_shapes(file, plan, plan.latent_shapes, spec.fps))
    sound = ".wav" in kinds.values() or (".mp4" in kinds.values() and not options.silent)
    streams = Streams({*kinds.values()} != {".wav"}, sound)
    media = decode_file(plan, file.read(), load(plan), session.report, streams)
    if not session.hosts.first:
        return
    for path, kind in kinds.items():
        with session.report.stage("write"):
            shown = replace(media, waveform=media.waveform[:0]) if options.silent and kind == ".mp4" else media
            _write(shown, path, kind, file, spec.prompt)
        print_out(str(path))
    session.finish(outputs, report_flaws(outputs[0].path, findings(media), session.report))


def _kinds(names: list[str]) -> dict[Path, str]:
    """The kind of each file that is named: its ending in small letters, or `FRAMES` for a folder. Raises `UsageError`
    for a name of no kind."""
    kinds: dict[Path, str] = {}
    for name in names:
        path = Path(name)
        ending = path.suffix.lower()
        if name == "-":
            raise UsageError("output - is no file: stdout carries the paths of files", KINDS)
        folder = name.endswith("/") or not ending or (ending not in ENDINGS and path.is_dir())
        if not folder and ending not in ENDINGS:
            raise UsageError(f"output {path} is no kind of file that is written", KINDS)
        if path in kinds:
            raise UsageError(f"{path} is named twice", "name each file once")
        kinds[path] = FRAMES if folder else ending
    for place in (path for path, kind in kinds.items() if kind == FRAMES):
        if inside := [path for path in kinds if place in path.parents]:
            raise UsageError(f"{inside[0]} lies in {place}, which holds frames alone", "name another place: -o FILE")
    return kinds


def _write(media: Media, path: Path, kind: str, latents: LatentsFile, caption: str) -> None:
    """Write one kind of file; an mp4 says of itself what its latents do."""
    match kind:
        case ".mp4":
            write_mp4(media, path, latents.metadata)
        case ".wav":
            write_wav(media, path)
        case ".png":
            write_contact_sheet([row(caption, media)], path)
        case _:
            write_frames(media, path)
