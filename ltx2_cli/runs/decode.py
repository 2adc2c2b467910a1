"""`ltx2 decode`: decode saved latents to a video, frames or audio."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import check_frames, check_outputs, read_files
from ltx2_cli.diffusion.latents import LatentsFile, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.media.checks import clip_flaws
from ltx2_cli.media.clip import Media
from ltx2_cli.media.contact_sheet import write_contact_sheet
from ltx2_cli.media.transfer_functions import logc3_to_light, srgb_to_light
from ltx2_cli.media.write import (
    MASTERS,
    OF_HLG,
    WAV,
    write_frames,
    write_hlg,
    write_linear_frames,
    write_master,
    write_mp4,
    write_wav,
)
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.request.profiles import SECTION
from ltx2_cli.request.spec import ComputeType, DType, Streams
from ltx2_cli.request.spelling import typed
from ltx2_cli.runs.build_request import Layers, note_environment
from ltx2_cli.runs.latents import check_shapes, latents_request
from ltx2_cli.runs.session import Session, file_facts, request_facts, synchronized

OUTPUT_ENDINGS = (".mp4", ".wav", ".png", *MASTERS)
FRAMES = "frames"
LINEAR = "%05d.exr"  # the name of frames of linear light in their folder
FOLDERS = (FRAMES, LINEAR)
DEEP = {*MASTERS, LINEAR}  # kinds of 16 bits
UNDENOISED: dict[str, object] = {  # values that decoding does not use
    "transformer": None,
    "text_encoder": None,
    "lora": [],
    "second_stage.sigmas": [],
    "second_stage.lora": [],
    "conditions": [],
    "reference_strength": 1.0,
    "audio": None,
    "compute": ComputeType.weights.value,
}
OUTPUTS = (
    "FILE.mp4, FILE.mov or .mkv (masters), FILE.wav, FILE.png for some frames, FOLDER/ for all as PNGs, or"
    f" FOLDER/{LINEAR} for all as OpenEXR"
)


def decode_clips(
    session: Session,
    path: Path,
    given: Mapping[str, object],
    layers: Layers,
    *,
    names: Sequence[str],
    silent: bool,
    hdr: bool,
) -> None:
    """Decode the latents of a file into files of these names and print their paths. `given`: values of the request by
    key. `hdr`: the decoder's frames are in LogC3, and files show their light."""
    with synchronized(session.hosts) as facts:
        file = open_latents(user_path(path))
        kinds = _kinds_of(file, names, hdr)
        if "record" not in file.metadata:
            note_environment(session.report, given, layers.settings)
        spec = latents_request(file, given, layers, UNDENOISED, session)
        # A record's values for denoising are not reported as unused.
        spec = replace(spec, asked=tuple(key for key in spec.asked if key.startswith(SECTION)))
        facts |= {**request_facts(spec), **file_facts([file.path])}
        facts |= {"output": str(kinds), "silent": str(silent), "hdr": str(hdr)}
        files = [Output(path, "-o") for path in kinds]
        if session.hosts.first:
            reads = read_files(spec, layers.file, file.path)
            folders = [output for output in files if kinds[output.path] in FOLDERS]
            check_outputs([output for output in files if output not in folders], reads, session.force, folders=folders)
            for folder in folders:
                check_frames(*folder, session.force)
            session.reserve(files)
    session.start()
    from ltx2_cli.core.report import DECODE
    from ltx2_cli.core.run import decode_file, open_components
    from ltx2_cli.estimate.alternatives import Request
    from ltx2_cli.estimate.phases import PHASES
    from ltx2_cli.runs.preflight import FIXED_BY_LATENTS, agreed_plan

    request = Request(spec, find_devices(), deep=hdr or not DEEP.isdisjoint(kinds.values()), fixed=FIXED_BY_LATENTS)
    request = replace(request, skipped=frozenset(PHASES) - {DECODE}, networks=PHASES[DECODE])
    with agreed_plan(session, request) as plan:
        check_shapes(file, plan, plan.latent_shapes, spec.fps)
    if session.dry_run:
        return
    report = session.measuring()
    audio = WAV in kinds.values() or (not silent and not {".mp4", *MASTERS}.isdisjoint(kinds.values()))
    if request.deep and plan.dtype is not DType.float32:
        hint = f"{typed('dtype', 'float32')} makes more levels"
        report.note(f"a decoder in {plan.dtype.value} makes about 8 bits of a colour: {hint}")
    streams = Streams({*kinds.values()} != {".wav"}, audio)
    media = decode_file(plan, file.read(), open_components(plan), report, streams)
    if not session.hosts.first:
        return
    for path, kind in kinds.items():
        with report.activity("write"):
            shown = replace(media, waveform=media.waveform[:0]) if silent and kind != WAV else media
            _write(shown, path, kind, spec.prompt, file.metadata, hdr)
        session.show(path, clip_flaws(media.in_8_bits) if path == files[0].path else ())
    session.finish(files, {"seeds": plan.spec.seeds})


def _write(media: Media, path: Path, kind: str, prompt: str, metadata: Mapping[str, str], hdr: bool) -> None:
    """Write a file of one of the kinds, of videos with the metadata of the latents; if `hdr`, the light of frames in
    LogC3."""
    match kind:
        case ".mp4" | ".mov" | ".mkv" if hdr:
            write_hlg(media, path, metadata)
        case ".mp4":
            write_mp4(media.in_8_bits, path, metadata)
        case ".mov" | ".mkv":
            write_master(media, path, metadata)
        case ".wav":
            write_wav(media, path)
        case "%05d.exr":
            write_linear_frames(media, path, logc3_to_light if hdr else srgb_to_light)
        case ".png":
            write_contact_sheet([(prompt, media.in_8_bits)], path)
        case _:
            write_frames(media.in_8_bits, path)


def _kinds_of(file: LatentsFile, names: Sequence[str], hdr: bool) -> dict[Path, str]:
    """The kind of each file. Raises `UsageError` for those that the latents do not have, and that have too few bits for
    HDR."""
    made = Streams(*map(all, file.shapes))
    kinds = _kinds(names or [str(file.path.with_suffix(".mp4" if made.video else WAV))])
    if absent := [path for path, kind in kinds.items() if not (made.audio if kind == WAV else made.video)]:
        sentence = f"{file.path} holds {'audio' if made.audio else 'video'} alone, which {absent[0]} is not"
        raise UsageError(sentence, "-o FILE.wav" if made.audio else "-o FILE.mp4")
    if hdr and (dim := [path for path, kind in kinds.items() if kind not in (*OF_HLG, LINEAR, WAV)]):
        sentence = f"{dim[0]} would be of 8 bits, too few for HDR"
        raise UsageError(sentence, f"-o FILE.mp4, FILE.mov, FILE.mkv or FOLDER/{LINEAR}")
    if hdr and {*kinds.values()} == {WAV}:
        raise UsageError("audio has no HDR", "no --hdr, or a video too: -o FILE.mp4")
    return kinds


def _kinds(names: Sequence[str]) -> dict[Path, str]:
    """The kind of each file: its ending in small letters, `FRAMES` of a folder. Raises `UsageError` for no kind."""
    kinds: dict[Path, str] = {}
    for name in names:
        path = Path(name)
        ending = path.suffix.lower()
        if name == "-":
            raise UsageError("output - is no file: stdout carries the paths of files", OUTPUTS)
        if path.name == LINEAR:
            path, ending = path.parent, LINEAR
        folder = name.endswith("/") or not ending or (ending not in OUTPUT_ENDINGS and path.is_dir())
        if not folder and ending not in (*OUTPUT_ENDINGS, LINEAR):
            raise UsageError(f"output {path} is no kind of file that is written", OUTPUTS)
        if path in kinds:
            raise UsageError(f"{path} is named twice", "name each file once")
        kinds[path] = FRAMES if folder else ending
    for place in (path for path, kind in kinds.items() if kind in FOLDERS):
        if inside := [path for path in kinds if place in path.parents]:
            raise UsageError(f"{inside[0]} lies in {place}, which holds frames alone", "name another place: -o FILE")
    return kinds
