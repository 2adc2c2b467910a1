"""`ltx2 replay`: make a clip again from its record, and find the first stage that differs."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ltx2_cli.artifacts.files import refuse_special, user_path
from ltx2_cli.artifacts.outputs import Product, check_distinct, check_outputs, outputs, read_files
from ltx2_cli.console import columns, print_out
from ltx2_cli.core import provenance
from ltx2_cli.core.provenance import Fingerprint, Provenance, fingerprint
from ltx2_cli.core.report import Report
from ltx2_cli.diffusion.latents import FINAL, FIRST, UPSAMPLED, LatentsFile, open_latents
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.media.compare import STREAM_NAMES, video_differences
from ltx2_cli.media.probe import open_video
from ltx2_cli.media.write import MASTERS
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.request.layers import ConfigLayer
from ltx2_cli.request.profiles import AUTO, RequestLayers, merge_layers, validated_spec
from ltx2_cli.request.spec import RunSpec, Streams
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.request.validation import CLIP_TYPES
from ltx2_cli.runs.inspect import inspect
from ltx2_cli.runs.latents import check_source
from ltx2_cli.runs.session import Session, file_facts, request_facts, synchronized
from ltx2_cli.runs.trust import check_trust
from ltx2_cli.weights.digests import HEADER, SHORT, digest, digests, header_digest, short_hash

if TYPE_CHECKING:
    from ltx2_cli.plan.resolve import Plan

NAME_A_CLIP = "name an mp4 or WAV, its record (.yaml) or latents that ltx2 made"
SIZE_AND_RATE = ("height", "width", "num_frames", "fps")
WEIGHTS_KEYS = {
    *("model", "checkpoint", "text_encoder", "transformer", "lora", "recipe", "initial_noise"),
    *("second_stage.upsampler", "second_stage.lora"),
}
SAME = "identical"
SourceFile = tuple[LatentsFile, float]  # latents that a clip was upsampled from, and their frames per second


@dataclass(frozen=True)
class RecordedClip:
    """The record of a clip, of latents, or in a file."""

    path: Path
    record: Mapping[str, Any]
    provenance: Provenance
    stage: str  # the last one
    latents: Mapping[str, Streams[Fingerprint]]  # after each stage, if known
    video: Path | None  # the mp4
    keyframes: Fingerprint | None = None  # generated ones beside latents

    @property
    def config(self) -> ConfigLayer:
        """The recorded request."""
        return ConfigLayer(f"the record in {self.path}: ", dict(self.record))

    def places(self, folder: Path, given: Mapping[str, object]) -> dict[str, str | None]:
        """The output paths in a folder, of the clip or of a draft's latents."""
        name, alone = folder / f"{self.path.stem}-replay", {**self.record, **given}.get("streams") == "audio"
        latents = f"{name}.safetensors" if self.stage == FIRST else None
        return {"output": f"{name}.{CLIP_TYPES[not alone]}", "save_latents": latents}

    def asked(self, given: Mapping[str, object], settings: list[str]) -> RequestLayers:
        """The recorded request, with the `given` values; adapted to other devices."""
        elsewhere = self.provenance.devices not in (None, provenance.devices())
        hardware = {"sharding": AUTO, "vae_memory_gb": None} if elsewhere else {}
        return merge_layers({**hardware, **given}, self.config, settings)


def replay(
    session: Session,
    path: Path,
    given: Mapping[str, object],
    settings: list[str],
    *,
    latents: Path | None,
    any_weights: bool,
    verify: bool,
) -> None:
    """Make the clip of a record again, and print its path or the comparison. Unrequested changes are reported.
    `latents`: the new path of the latents that it was upsampled from."""
    changes = list[str]()  # since the clip was made
    with synchronized(session.hosts) as facts:
        changed = frozenset({*given, *(setting.partition("=")[0] for setting in settings)})
        kept = not verify or bool({"output", "save_latents"} & given.keys())
        clip = read_clip(user_path(path))
        check_overrides(clip, changed)
        source, draft = find_source(clip, latents), clip.stage == FIRST
        folder = clip.path.parent if kept else Path(session.resources.enter_context(TemporaryDirectory()))
        asked = clip.asked({**clip.places(folder, given), **given}, settings)
        spec = validated_spec(check_trust(asked, clip.config, session))
        for sentence in check_comparable(clip, spec) if verify else ():
            session.report.note(sentence)
        files = outputs(spec, product := Product.latents if draft else Product.clips)
        if session.hosts.first:
            reads = read_files(spec, clip.path, clip.video, source[0].path if source else None)
            check_outputs(files, reads, session.force)
            session.reserve(files if kept else [])
        facts |= request_facts(replace(spec, output=None, save_latents=None)) | {"stage": clip.stage}
        facts |= file_facts([source[0].path] if source else [])
    session.start()
    from ltx2_cli.core.run import START, open_components, state_from_latents
    from ltx2_cli.core.write import write
    from ltx2_cli.estimate.alternatives import Request
    from ltx2_cli.plan.stages import InitialLatents
    from ltx2_cli.runs.preflight import FIXED_BY_LATENTS, FIXED_BY_RECORD, agreed_plan

    begin = InitialLatents(source[0].shapes, source[1], source[0].keyframes) if source else None
    phases, fixed = Product.drafts if draft else Product.clips, FIXED_BY_LATENTS if source else FIXED_BY_RECORD
    with agreed_plan(session, Request(spec, find_devices(), begin, phases, fixed=fixed)) as plan:
        check_distinct(files, provenance.input_files(plan))
        if source:
            check_source(source[0], plan, source[1])
        if session.hosts.first:
            changes += told_changes(session.report, clip, plan, changed, any_weights)
    if session.dry_run:
        return
    start, report = START, session.measuring()
    if source:
        history = provenance.source_history(*source)
        keyframes = [source[0].read_keyframes()] if plan.stages[0].source_keyframes else []
        start = state_from_latents([source[0].read()], (history,), keyframes)
    for path, findings in write(plan, open_components(plan), report, product, start):
        if kept:
            session.show(path, findings)
        if verify:
            check_identical(clip, read_clip(path), changes, session.report.note if session.as_json else print_out)
    verified = {"identical": True} if verify else {}
    session.finish(files if kept else [], {"seeds": plan.spec.seeds, **verified})


def told_changes(
    report: Report, clip: RecordedClip, plan: "Plan", changed: Collection[str], any_weights: bool
) -> list[str]:
    """Sentences on changes since the clip was made, which are reported, and on values that are asked otherwise. Raises
    as `weight_changes`."""
    found = list[str]()
    if plan.checkpoint.files:  # a dry run does not fetch them
        with report.activity("compare the weights"):
            found += weight_changes(clip, plan, changed, any_weights)
    found += provenance.environment_changes(clip.provenance, plan)
    for change in found:
        report.note(change)
    return found + [f"another {key} is asked for" for key in sorted({*changed} - {"output", "save_latents"})]


def read_clip(path: Path) -> RecordedClip:
    """The record in or beside `path`. Raises `UsageError` if it is missing or damaged."""
    facts = inspect(path)
    if "record" not in facts:
        raise UsageError(f"{path} is no clip", NAME_A_CLIP)
    if (record := facts["record"]) is None:
        raise UsageError(f"{path} does not say what made it: another program wrote or changed it", NAME_A_CLIP)
    history = provenance.read_provenance(record, str(path))
    stage = facts.get("stage") or [FINAL, *history.latents][-1]
    if facts["kind"] == "latents":
        file = open_latents(path)
        latents = {**history.latents, stage: Streams(*map(fingerprint, file.read()))}
        keyframes = None if (generated := file.read_keyframes()) is None else fingerprint(generated)
        return RecordedClip(path, record, history, stage, latents, None, keyframes)
    video = path if facts["kind"] == "video" else path.with_suffix(".mp4")
    # the frames of a master, and of a video in HDR, are not those of a clip
    compared = video.exists() and video.suffix.lower() not in MASTERS and not open_video(video).hdr
    return RecordedClip(path, record, history, stage, history.latents, video if compared else None)


def check_overrides(clip: RecordedClip, changed: Collection[str]) -> None:
    """Raise `UsageError` for keys that cannot be changed."""
    for key in SIZE_AND_RATE if clip.provenance.source else ():
        if key in changed:
            raise UsageError(
                f"{clip.path} went on from latents, and {key} follows from theirs",
                f"leave --{key.replace('_', '-')} out, or make another first stage: ltx2 generate --draft",
            )
    if clip.stage == FIRST and "output" in changed:
        raise UsageError(f"{clip.path} is a draft: its latents are made again, no clip", typed("save_latents", "FILE"))


def find_source(clip: RecordedClip, moved: Path | None) -> SourceFile | None:
    """The latents that a clip was upsampled from; None if it began as noise. `moved` is their new path. Raises
    `UsageError` if they are missing or changed."""
    recorded, hint = clip.provenance.source, "--latents FILE says where they are now"
    place = user_path(moved) if moved else None if recorded is None else recorded.file
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


def weight_changes(clip: RecordedClip, plan: "Plan", changed: Collection[str], any_weights: bool) -> list[str]:
    """Sentences on changed files. Raises `UsageError` unless `changed` keys name others, or any will do."""
    recorded, files = clip.provenance.files, provenance.input_files(plan)
    has_contents = any(not content.startswith(HEADER) for content in recorded.values())
    contents, headers = digests(files) if has_contents else {}, digests(files, header_digest)
    changes = []
    for name, content in recorded.items():
        current = headers if content.startswith(HEADER) else contents
        if content not in current.values():
            changes.append(f"{name} was {short_hash(content)}, is {short_hash(current.get(name, 'not used'))}")
    if changes and not (any_weights or WEIGHTS_KEYS & set(changed)):
        others = f"{option_name('model')}, {option_name('lora')} and others name others"
        hint = f"--any-weights goes on with those that are here; {others}"
        raise UsageError(f"{clip.path} was made of other files: {'; '.join(changes)}", hint)
    if unread := [name for name, content in recorded.items() if content.startswith(HEADER)]:
        compared = "the header alone was compared: the rest had not been hashed when it was made"
        changes.append(f"of {', '.join(unread)} {compared}")
    return changes


def check_comparable(clip: RecordedClip, spec: RunSpec) -> list[str]:
    """Sentences on parts that cannot be compared. Raises `UsageError` if none can, or for several clips."""
    if len(spec.seeds) > 1:
        raise UsageError(f"--verify compares one clip, {len(spec.seeds)} are asked for", typed("seed", "N"))
    no_hashes = f"the record in {clip.path} has no hashes of latents, an older version wrote it"
    if not clip.latents and not clip.video:
        video = clip.path.with_suffix(".mp4")
        raise UsageError(f"{no_hashes}; and {video} is not there", "without --verify it is made again")
    if not clip.latents:
        return [f"{no_hashes}: only video and audio are compared"]
    if clip.video and clip.stage != FIRST:
        return []
    return [f"only latents are compared: {'it is a draft' if clip.stage == FIRST else 'there is no mp4'}"]


def check_identical(first: RecordedClip, second: RecordedClip, changes: list[str], tell: Callable[[str], None]) -> None:
    """Report whether both clips are equal: latents after each stage, keyframes, video and audio. Raises `RunError`
    afterwards if they differ; `changes` are the reasons."""
    rows = list[tuple[str, str]]()
    for stage, latents in first.latents.items():
        text = "was not made"
        if stage in second.latents:
            streams = Streams(*map(_comparison, latents, second.latents[stage]))
            text = ", ".join(f"{name} {comparison}" for name, comparison in streams._asdict().items())
            text = SAME if {*streams} == {SAME} else text
        rows.append((stage, text))
    if first.keyframes and second.keyframes:
        rows.append(("keyframes", _comparison(first.keyframes, second.keyframes)))
    if first.video and second.video:
        differences = video_differences(first.video, second.video)
        rows += [(name, differences.get(name, SAME)) for name in STREAM_NAMES.values()]
    different = next((name for name, comparison in rows if comparison != SAME), None)
    tell(SAME if different is None else "\n".join(columns(rows)))
    if different is None:
        return
    raise RunError(
        f"the clip made again differs from {first.path}: {different} is the first that differs",
        "; ".join(changes) or "request, weights, versions and devices are the same: something here computes by chance",
    )


def _comparison(first: Fingerprint, second: Fingerprint) -> str:
    if first == second:
        return SAME
    return "differs" if first.size == second.size else "of another size"
