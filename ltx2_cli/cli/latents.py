"""`ltx2 upsample` and `ltx2 decode`: from saved latents to larger ones, refined, to a video, to frames or sound."""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import (
    Product,
    check_distinct,
    check_frames,
    check_outputs,
    outputs,
    read_files,
    run_file,
)
from ltx2_cli.cli.options import LatentsOptions
from ltx2_cli.cli.values import layers, overrides
from ltx2_cli.core.provenance import input_files, source_history
from ltx2_cli.diffusion.geometry import clip_geometry
from ltx2_cli.diffusion.latents import SIZE, LatentsFile, open_latents
from ltx2_cli.errors import UsageError
from ltx2_cli.media.checks import clip_flaws
from ltx2_cli.media.contact_sheet import write_contact_sheet
from ltx2_cli.media.write import WAV, write_frames, write_mp4, write_wav
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.request.layers import ConfigLayer, read_text
from ltx2_cli.request.profiles import AUTO, SECTION, checked_spec, read_asked
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.validation import validate
from ltx2_cli.runs.asked import configured_spec, note_environment
from ltx2_cli.runs.session import Session, file_facts, request_facts, synchronized
from ltx2_cli.runs.trust import check_trust
from ltx2_cli.weights.checkpoint import shape_text

if TYPE_CHECKING:
    from ltx2_cli.plan.resolve import Plan

SEED = re.compile(r"-s\d+$")  # what tells the files of several drafts apart
ENDINGS = (".mp4", ".wav", ".png")
FRAMES = "frames"
UNDENOISED: dict[str, object] = {  # what decoding needs nothing of
    "lora": [],
    "second_stage.sigmas": [],
    "conditions": [],
    "reference_strength": 1.0,
    "audio": None,
}
OUTPUTS = "FILE.mp4, FILE.wav, FILE.png for some frames, or FOLDER/ for all as PNGs"


def upsample(
    options: LatentsOptions,
    session: Session,
    paths: Sequence[Path],
    product: Product,
    *,
    refine: bool,
    keep: tuple[bool | None, float],
) -> None:
    """Make the clips, or only their latents, and print the paths. `keep`: whether an unfinished run is kept, and each
    so many seconds."""
    given = overrides(options)
    with synchronized(session.hosts) as facts:
        files = [open_latents(user_path(path)) for path in paths]
        if product is Product.latents and "save_latents" not in given:
            raise UsageError("--latents-only writes latents, and no file is named for them", "--save-latents FILE")
        if any("record" not in file.metadata for file in files):
            note_environment(session.report, overrides(options), options.settings or ())
        for file in files:
            if not all(file.shapes.video):
                raise UsageError(f"{file.path} holds no picture to upsample", "`ltx2 decode` writes its sound")
            if not ("prompt" in given or not refine or options.config or "record" in file.metadata):
                raise UsageError(f"{file.path} does not say what it shows", '--prompt "...", or --no-refine')
        jobs = [(group, _spec(group, given, options, refine)) for group in _groups(files, given, product)]
        specs = [spec for _, spec in jobs]
        for (first, *_), spec in jobs:
            facts |= {f"{first.path.name}: {key}": value for key, value in request_facts(spec).items()}
        facts |= {**file_facts(file.path for file in files), "product": product.value}
        if session.hosts.first:
            written = [file for spec in specs for file in (*outputs(spec, product), run_file(spec))]
            reads = read_files(specs[0], options.config, *(file.path for file in files))
            check_outputs(written, reads, options.force)
            session.reserve(written)
    session.start()
    for group, spec in jobs:
        _execute(session, group, spec, product, keep)
    if not options.dry_run:
        written = [file for spec in specs for file in outputs(spec, product)]
        session.finish(written, {"seeds": [seed for spec in specs for seed in spec.seeds]})


def _groups(files: Sequence[LatentsFile], given: Collection[str], product: Product) -> list[list[LatentsFile]]:
    """The files that each run goes on from: all, if what is made has one name, else those that differ in the seed.
    Raises `UsageError` where a file is named twice, or where latents of several runs are saved under one name."""
    named: dict[Path, list[LatentsFile]] = {}
    for file in files:
        named.setdefault(file.path.with_stem(SEED.sub("", file.path.stem)), []).append(file)
    for file in [file for group in named.values() for file in group]:
        if sum(os.path.samefile(file.path, other.path) for other in files) > 1:
            raise UsageError(f"{file.path} is named twice", "name each file once")
    if "output" in given or product is Product.latents:
        return [list(files)]
    if "save_latents" in given and len(named) > 1:
        raise UsageError(
            f"--save-latents is one name, and {', '.join(str(file.path) for file in files)} have several",
            "-o FILE too, to name all by their seeds; or upsample them one by one",
        )
    return list(named.values())


def _spec(files: Sequence[LatentsFile], given: Mapping[str, object], options: LatentsOptions, refine: bool) -> RunSpec:
    """The request of one run; without -o its clips are named after their latents."""
    path = files[0].path
    stem = SEED.sub("", path.stem) if len(files) > 1 else path.stem
    replaced = {"output": str(path.with_name(f"{stem}-upsampled.mp4")), "recipe": AUTO, "num_videos": 1}
    spec = merged_request(files, [latents_request(file, given, options, replaced) for file in files])
    no_stage = replace(spec.second_stage, sigmas=(), lora=())
    return spec if refine else replace(spec, second_stage=no_stage)


def merged_request(files: Sequence[LatentsFile], specs: Sequence[RunSpec]) -> RunSpec:
    """One request for all files, with the seeds of all. Raises `UsageError` where more than seeds differs."""
    first = vars(specs[0])
    for file, spec in zip(files, specs, strict=True):
        if others := ", ".join(sorted(key for key in first if key != "seed" and vars(spec)[key] != first[key])):
            raise UsageError(f"{file.path} was not made like {files[0].path}: {others}", "go on from them one by one")
    if len({spec.seed for spec in specs}) < len(specs):
        raise UsageError("several of these latents have one seed", "upsample them one by one")
    merged = replace(specs[0], seed=tuple(seed for spec in specs for seed in spec.seed or ()))
    validate(merged)
    return merged


def _execute(
    session: Session, files: Sequence[LatentsFile], spec: RunSpec, product: Product, keep: tuple[bool | None, float]
) -> None:
    from ltx2_cli.core.checkpoint import RunCheckpointer
    from ltx2_cli.core.run import load, state_from_latents
    from ltx2_cli.core.saved_run import RunGoal
    from ltx2_cli.estimate.fit import Request
    from ltx2_cli.plan.stages import InitialLatents
    from ltx2_cli.runs.execute import execute, remember_run
    from ltx2_cli.runs.past_times import expected_time
    from ltx2_cli.runs.preflight import OF_LATENTS, agreed_plan

    source = InitialLatents(files[0].shapes, spec.fps)
    with agreed_plan(session, Request(spec, find_devices(), source, product, fixed=OF_LATENTS)) as plan:
        check_distinct(outputs(spec, product), input_files(plan))
        for file in files:
            check_source(file, plan, spec.fps)
    if session.dry_run:
        return
    goal = RunGoal(product, source)
    session.report.note(f"time: {expected_time(plan, product)}")
    timings, first = session.measuring(), not session.shown
    checkpointer = RunCheckpointer(run_file(plan.spec).path, plan, goal, timings, *keep)
    history = tuple(source_history(file, spec.fps) for file in files)
    execute(session, checkpointer, load(plan), state_from_latents([file.read() for file in files], history))
    if first:  # the others find jax imported
        remember_run(session, plan, product, timings)


def decode(options: LatentsOptions, session: Session, path: Path, names: Sequence[str] | None, silent: bool) -> None:
    """Decode the latents in a file, write files of these names and print their paths."""
    with synchronized(session.hosts) as facts:
        file = open_latents(user_path(path))
        made = Streams(*map(all, file.shapes))
        kinds = _kinds(names or [str(file.path.with_suffix(".mp4" if made.video else WAV))])
        if absent := [path for path, kind in kinds.items() if not (made.audio if kind == WAV else made.video)]:
            sentence = f"{file.path} holds {'sound' if made.audio else 'a picture'} alone, which {absent[0]} is not"
            raise UsageError(sentence, "-o FILE.wav" if made.audio else "-o FILE.mp4")
        if "record" not in file.metadata:
            note_environment(session.report, overrides(options), options.settings or ())
        spec = latents_request(file, overrides(options), options, UNDENOISED)
        # What a record asked of denoising is not said to change nothing.
        spec = replace(spec, asked=tuple(key for key in spec.asked if key.startswith(SECTION)))
        facts |= {**request_facts(spec), **file_facts([file.path])}
        facts |= {"output": str(kinds), "silent": str(silent)}
        files = [Output(path, "-o") for path in kinds]
        if session.hosts.first:
            reads = read_files(spec, options.config, file.path)
            folders = [output for output in files if kinds[output.path] == FRAMES]
            check_outputs([output for output in files if output not in folders], reads, options.force, folders=folders)
            for folder in folders:
                check_frames(*folder, options.force)
            session.reserve(files)
    session.start()
    from ltx2_cli.core.run import decode_file, load
    from ltx2_cli.estimate.fit import Request
    from ltx2_cli.estimate.phases import DECODE, PHASES
    from ltx2_cli.runs.preflight import OF_LATENTS, agreed_plan

    request = Request(spec, find_devices(), skipped=frozenset(PHASES) - {DECODE}, fixed=OF_LATENTS)
    with agreed_plan(session, request) as plan:
        check_shapes(file, plan, plan.latent_shapes, spec.fps)
    if options.dry_run:
        return
    report = session.measuring()
    sound = WAV in kinds.values() or (".mp4" in kinds.values() and not silent)
    streams = Streams({*kinds.values()} != {".wav"}, sound)
    media = decode_file(plan, file.read(), load(plan), report, streams)
    if not session.hosts.first:
        return
    for path, kind in kinds.items():
        with report.stage("write"):
            match kind:
                case ".mp4":  # it says of itself what its latents do
                    shown = replace(media, waveform=media.waveform[:0]) if silent else media
                    write_mp4(shown, path, file.metadata)
                case ".wav":
                    write_wav(media, path)
                case ".png":
                    write_contact_sheet([(spec.prompt, media)], path)
                case _:
                    write_frames(media, path)
        session.show(path, clip_flaws(media) if path == files[0].path else ())
    session.finish(files, {"seeds": plan.spec.seeds})


def _kinds(names: Sequence[str]) -> dict[Path, str]:
    """The kind of each file: its ending in small letters, `FRAMES` of a folder. Raises `UsageError` for no kind."""
    kinds: dict[Path, str] = {}
    for name in names:
        path = Path(name)
        ending = path.suffix.lower()
        if name == "-":
            raise UsageError("output - is no file: stdout carries the paths of files", OUTPUTS)
        folder = name.endswith("/") or not ending or (ending not in ENDINGS and path.is_dir())
        if not folder and ending not in ENDINGS:
            raise UsageError(f"output {path} is no kind of file that is written", OUTPUTS)
        if path in kinds:
            raise UsageError(f"{path} is named twice", "name each file once")
        kinds[path] = FRAMES if folder else ending
    for place in (path for path, kind in kinds.items() if kind == FRAMES):
        if inside := [path for path in kinds if place in path.parents]:
            raise UsageError(f"{inside[0]} lies in {place}, which holds frames alone", "name another place: -o FILE")
    return kinds


def latents_request(
    file: LatentsFile, given: Mapping[str, object], options: LatentsOptions, replaced: Mapping[str, object]
) -> RunSpec:
    """The request that made the latents, or for a file without a record one of their size; for the devices found here.
    `replaced` takes the place of what the record says, `given` of both."""
    settings = options.settings or []
    size = dict(zip(SIZE, file.size, strict=True))
    if sized := {setting.partition("=")[0] for setting in settings} & size.keys():
        raise UsageError(f"{file.path} has a size of its own", f"leave --set {min(sized)} out")
    files = dict.fromkeys(("initial_noise", "save_latents", "output", "compile_cache"))
    rate = {} if file.fps is None else {"fps": file.fps}
    values = {"sharding": AUTO, "vae_memory_gb": None, **size, **rate, **files, **replaced, **given}
    if record := file.metadata.get("record"):
        if options.config:
            raise UsageError(
                f"{file.path} has a record of its own", "leave --config out; flags and --set change values"
            )
        page = read_text(record, f"the record in {file.path}")
        asked = read_asked({**without_references(page), **values}, page, settings)
        return checked_spec(check_trust(asked, page, options))
    if "model" not in given and options.config is None:
        raise UsageError(f"{file.path} does not say which model made it", "--model NAME and, unless it is 24, --fps N")
    return configured_spec({"prompt": "a", "seed": 0, **values}, layers(options), options)


def without_references(record: ConfigLayer) -> dict[str, object]:
    """What takes the place of a record's values where it has references, which a first stage alone follows."""
    shown = record.values.get("conditions")
    if not isinstance(shown, list):
        return {}
    kept = [item for item in shown if not (isinstance(item, dict) and item.get("kind") in ("reference", "mask"))]
    return {} if kept == shown else {"conditions": kept, "reference_strength": 1.0}


def check_source(file: LatentsFile, plan: "Plan", fps: float) -> None:
    """Raise `UsageError` for latents of a clip of `fps` frames a second that the plan's model cannot begin with."""
    arch, (video, audio) = plan.arch, plan.latent_shapes
    clip = clip_geometry(*file.size, fps, arch.compression, arch.transformer.scales)
    size = clip.frames, clip.height, clip.width
    check_shapes(file, plan, Streams((*video[:2], *size), (*audio[:2], clip.audio_frames, *audio[3:])), fps)


def check_shapes(file: LatentsFile, plan: "Plan", expected: Streams[tuple[int, ...]], fps: float) -> None:
    """Raise `UsageError` for latents of another model, or of other shapes than expected."""
    model_version = file.metadata.get("model_version")
    if model_version not in (None, plan.arch.model_version):
        raise UsageError(
            f"{file.path} was made by {model_version}, and {plan.spec.model} is of {plan.arch.model_version}",
            f"--model {model_version}",
        )
    for name, actual, shape in zip(Streams._fields, file.shapes, expected, strict=True):
        if actual != shape:
            raise UsageError(
                f"the {name} latents in {file.path} are {shape_text(actual)}; {plan.spec.model} at {fps:g} frames a"
                f" second has {shape_text(shape)}",
                "another --model, or the --fps that they were made with",
            )
