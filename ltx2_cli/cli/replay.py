"""`ltx2 replay`: a clip made again by its record, and from where on it differs from the first, and by how much."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ltx2_cli.cli.execute import OF_LATENTS, OF_RECORD, agreed_plan, report_flaws
from ltx2_cli.cli.generate import overrides
from ltx2_cli.cli.inspect import SHORT, inspect, short_hash
from ltx2_cli.cli.latents import check_source
from ltx2_cli.cli.options import Replay
from ltx2_cli.cli.session import Session, file_facts, request_facts, synchronized
from ltx2_cli.console import columns, print_out
from ltx2_cli.core.provenance import (
    FINAL,
    FIRST,
    UPSAMPLED,
    Provenance,
    devices,
    input_files,
    provenance,
    read_provenance,
    source_history,
    versions,
)
from ltx2_cli.core.run import START, load, state_from_latents, write
from ltx2_cli.devices import find_devices
from ltx2_cli.diffusion.fingerprints import Fingerprint, fingerprint
from ltx2_cli.diffusion.latents import LatentsFile, open_latents
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.estimate.requests import Request
from ltx2_cli.files import refuse_special
from ltx2_cli.media.video_file import STREAMS, video_differences
from ltx2_cli.outputs import Product, check_outputs, outputs, read_files
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.layers import ConfigLayer
from ltx2_cli.request.profiles import AUTO, read_spec
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.weights.digests import HEADER, digest, digests, header_digest

NAMES = "name an mp4, its record (.yaml) or latents that ltx2 made"
SIZE = ("height", "width", "num_frames", "fps")
WEIGHTS = {
    *("model", "checkpoint", "text_encoder", "lora", "recipe", "initial_noise"),
    *("second_stage.upsampler", "second_stage.lora"),
}
SAME = "identical"
LEAST = 1e-7  # the smallest relative error that a sketch shows
Source = tuple[LatentsFile, float]  # latents that a clip went on from, of so many frames a second


@dataclass(frozen=True)
class RecordedClip:
    """A clip, a record or latents, by the record."""

    path: Path
    record: Mapping[str, Any]
    provenance: Provenance
    stage: str  # the last one
    latents: Mapping[str, Streams[Fingerprint]]  # after each stage, as far as that is known
    video: Path | None  # the mp4

    @property
    def is_draft(self) -> bool:
        """Whether a second stage was to follow."""
        return self.stage == FIRST

    def request(self, given: Mapping[str, object], settings: list[str]) -> RunSpec:
        """The recorded request, changed by what is `given`; on other devices, for those."""
        elsewhere = self.provenance.devices not in (None, devices())
        hardware = {"sharding": AUTO, "vae_memory_gb": None} if elsewhere else {}
        config = ConfigLayer(f"the record in {self.path}: ", dict(self.record))
        return read_spec({**hardware, **given}, config=config, dotlist=settings)


def replay(options: Replay, session: Session) -> None:
    """Make the clip, print its path or whether it is the same."""
    with synchronized(session.hosts) as facts:
        given, settings = overrides(options), options.settings or []
        changed = frozenset({*given, *(setting.partition("=")[0] for setting in settings)})
        kept = not options.verify or bool({"output", "save_latents"} & given.keys())
        clip = read_clip(options.clip.expanduser())
        check_overrides(clip, changed)
        source = find_source(clip, options.latents)
        folder = clip.path.parent if kept else Path(session.resources.enter_context(TemporaryDirectory()))
        name = folder / f"{clip.path.stem}-replay"
        places = {"output": f"{name}.mp4", "save_latents": f"{name}.safetensors" if clip.is_draft else None}
        spec = clip.request({**places, **given}, settings)
        for sentence in check_comparable(clip, spec) if options.verify else ():
            session.report.note(sentence)
        files = outputs(spec, product := Product.latents if clip.is_draft else Product.clips)
        if session.hosts.first:
            reads = [clip.path, clip.video, source and source[0].path, *read_files(spec)]
            check_outputs(files, [path for path in reads if path], options.force)
            session.reserve(files)
        facts |= request_facts(replace(spec, output=None, save_latents=None)) | {"stage": clip.stage}
        facts |= file_facts([source[0].path] if source else [])
    session.start()
    plan, changes = _plan(options, session, clip, spec, source, changed)
    flaws = list[str]()
    start = state_from_latents([source[0].read()], (source_history(*source),)) if source else START
    for path, findings in write(plan, load(plan), session.report, product, start):
        if kept:
            print_out(str(path))
            flaws += report_flaws(path, findings, session.report)
        if options.verify:
            print_out(check_identical(clip, read_clip(path), changes))
    session.finish(files if kept else [], flaws)


def _plan(
    options: Replay,
    session: Session,
    clip: RecordedClip,
    spec: RunSpec,
    source: Source | None,
    changed: Collection[str],
) -> tuple[Plan, list[str]]:
    """The plan, and sentences on what is not as it was the first time; those that nobody asked for are reported."""
    changes = list[str]()

    def check(plan: Plan) -> None:
        if source:
            check_source(source[0], plan, source[1])
        if session.hosts.first:
            with session.report.stage("compare the weights"):
                changes.extend(weight_changes(clip, plan, changed, options.any_weights))
            changes.extend(environment_changes(clip.provenance, plan))
            for change in changes:
                session.report.note(change)
            changes.extend(f"another {key} is asked for" for key in sorted({*changed} - {"output", "save_latents"}))

    begin = InitialLatents(source[0].shapes, source[1]) if source else None
    product, fixed = Product.drafts if clip.is_draft else Product.clips, OF_LATENTS if source else OF_RECORD
    return agreed_plan(session, Request(spec, find_devices(), begin, product, fixed=fixed), check), changes


def read_clip(path: Path) -> RecordedClip:
    """The record in or beside `path`. Raises `UsageError` where there is none, or it is damaged."""
    facts = inspect(path)
    if "record" not in facts:
        raise UsageError(f"{path} is no clip", NAMES)
    if (record := facts["record"]) is None:
        raise UsageError(f"{path} does not say what made it: another program wrote or changed it", NAMES)
    provenance = read_provenance(record, str(path))
    stage = facts.get("stage") or (list(provenance.latents) or [FINAL])[-1]
    if facts["kind"] == "latents":
        latents = {**provenance.latents, stage: Streams(*map(fingerprint, open_latents(path).read()))}
        return RecordedClip(path, record, provenance, stage, latents, None)
    video = path if facts["kind"] == "video" else path.with_suffix(".mp4")
    return RecordedClip(path, record, provenance, stage, provenance.latents, video if video.exists() else None)


def check_overrides(clip: RecordedClip, changed: Collection[str]) -> None:
    """Raise `UsageError` for keys that cannot be changed."""
    for key in SIZE if clip.provenance.source else ():
        if key in changed:
            raise UsageError(
                f"{clip.path} went on from latents, and {key} follows from theirs",
                f"leave --{key.replace('_', '-')} out, or make another first stage: ltx2 generate --stop-after stage1",
            )
    if clip.is_draft and "output" in changed:
        raise UsageError(f"{clip.path} is a draft: its latents are made again, no clip", "--save-latents FILE")


def find_source(clip: RecordedClip, moved: Path | None) -> Source | None:
    """The latents that a clip was upsampled from; None if it began as noise. `moved` is where they are now. Raises
    `UsageError` where they are gone or changed."""
    recorded, hint = clip.provenance.source, "--latents FILE says where they are now"
    place = moved.expanduser() if moved else None if recorded is None else recorded.file
    if place is None:
        if clip.stage == UPSAMPLED:
            raise UsageError(f"{clip.path} went on from latents that its record does not name", hint)
        return None
    if not place.exists():
        raise UsageError(f"the latents that {clip.path} went on from are gone: there is no {place}", hint)
    refuse_special(place, hint)
    file = open_latents(place)
    # an older record has the hash of the whole file
    if recorded and recorded.sha256 not in (sha256 := file.sha256(), digest(place)):
        raise UsageError(
            f"{clip.path} went on from other latents: {place} is {sha256[:SHORT]}, they were {recorded.sha256[:SHORT]}",
            f"--latents FILE names those; `ltx2 upsample {place}` goes on from others",
        )
    return file, recorded.fps if recorded else file.fps or clip.record["fps"]


def weight_changes(clip: RecordedClip, plan: Plan, changed: Collection[str], any_weights: bool) -> list[str]:
    """Sentences on files that are not those of the record. Raises `UsageError` with them, unless `changed` keys ask for
    other files, or any will do."""
    recorded, files = clip.provenance.files, input_files(plan)
    has_contents = any(not content.startswith(HEADER) for content in recorded.values())
    contents, headers = digests(files) if has_contents else {}, digests(files, header_digest)
    changes = []
    for name, content in recorded.items():
        current = headers if content.startswith(HEADER) else contents
        if content not in current.values():
            changes.append(f"{name} was {short_hash(content)}, is {short_hash(current.get(name, 'not used'))}")
    if changes and not (any_weights or WEIGHTS & set(changed)):
        raise UsageError(
            f"{clip.path} was made of other files: {'; '.join(changes)}",
            "--any-weights goes on with those that are here; --model, --lora and others name others",
        )
    return changes


def environment_changes(recorded: Provenance, plan: Plan) -> Iterator[str]:
    """Sentences on versions, devices and batches that are not those of the record."""
    current = provenance(plan, {}, {})
    if unread := [name for name, content in recorded.files.items() if content.startswith(HEADER)]:
        yield f"of {', '.join(unread)} the header alone was compared: the rest had not been hashed when it was made"
    for package, version in versions().items():
        if (before := recorded.versions.get(package, version)) != version:
            yield f"{package} was {before}, is {version}"
    if recorded.devices not in (None, current["devices"]):
        yield f"devices were {recorded.devices}, are {current['devices']}"
    for stage, mesh in current["meshes"].items():
        if (before := recorded.meshes.get(stage, mesh)) != mesh:
            yield f"the mesh of {stage} was {before}, is {mesh}"
    if recorded.at_once != current["at_once"]:
        yield f"it was one of {recorded.at_once} videos made at once, which may change its last bits"


# Comparison


def check_comparable(clip: RecordedClip, spec: RunSpec) -> list[str]:
    """Sentences on what of a clip cannot be compared. Raises `UsageError` where nothing can, or where `spec` asks for
    several clips."""
    if len(spec.seeds) > 1:
        raise UsageError(f"--verify compares one clip, {len(spec.seeds)} are asked for", "--seed N")
    no_hashes = f"the record in {clip.path} has no hashes of latents, an older version wrote it"
    if not clip.latents and not clip.video:
        raise UsageError(
            f"{no_hashes}; and {clip.path.with_suffix('.mp4')} is not there", "without --verify it is made again"
        )
    if not clip.latents:
        return [f"{no_hashes}: only picture and sound are compared"]
    if clip.video and not clip.is_draft:
        return []
    return [f"only latents are compared: {'it is a draft' if clip.is_draft else 'there is no mp4'}"]


def check_identical(first: RecordedClip, second: RecordedClip, changes: list[str]) -> str:
    """The line to print where both clips are the same. Raises `RunError` after printing where they differ; `changes`
    are the reasons."""
    rows = list(_comparisons(first, second))
    different = next((name for name, comparison in rows if comparison != SAME), None)
    if different is None:
        return SAME
    print_out("\n".join(columns(rows)))
    raise RunError(
        f"what was made again is not {first.path}: {different} is the first that differs",
        "; ".join(changes) or "request, weights, versions and devices are the same: something here computes by chance",
    )


def _comparisons(first: RecordedClip, second: RecordedClip) -> Iterator[tuple[str, str]]:
    """The latents after each stage, then picture and sound."""
    for stage, latents in first.latents.items():
        if stage not in second.latents:
            yield stage, "was not made"
            continue
        streams = Streams(*map(_comparison, latents, second.latents[stage]))
        same = streams == Streams(SAME, SAME)
        yield stage, SAME if same else ", ".join(f"{name} {text}" for name, text in streams._asdict().items())
    if first.video and second.video:
        differences = video_differences(first.video, second.video)
        yield from ((name, differences.get(name, SAME)) for name in STREAMS.values())


def _comparison(first: Fingerprint, second: Fingerprint) -> str:
    """How far apart two arrays are."""
    if first.sha256 == second.sha256:
        return SAME
    if first.size != second.size:
        return "of another size"
    if not (len(first.sketch) and len(second.sketch)):
        return "differs"
    error = first.error(second)
    return f"differs by about {error:.2g}" if error >= LEAST else f"differs by less than {LEAST:g}"
