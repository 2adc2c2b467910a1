"""The record of a clip: all that making it again needs, and how circumstances have changed since."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2_cli.cli.inspect import SHORT, ClipInfo, RecordInfo, inspect, short_hash
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import RunSpec, Streams

if TYPE_CHECKING:
    from ltx2_cli.core.provenance import Provenance
    from ltx2_cli.diffusion.fingerprints import Fingerprint
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan.resolve import Plan

NAMES = "name an mp4, its record (.yaml) or latents that ltx2 made"
SIZE = ("height", "width", "num_frames", "fps")
WEIGHTS = {
    "model",
    "checkpoint",
    "text_encoder",
    "lora",
    "recipe",
    "second_stage.upsampler",
    "second_stage.lora",
    "initial_noise",
}


@dataclass(frozen=True)
class RecordedClip:
    """A clip, a record or latents, by the record."""

    path: Path
    record: Mapping[str, Any]
    provenance: "Provenance"
    stage: str  # the last one
    latents: "Mapping[str, Streams[Fingerprint]]"  # after each stage, as far as that is known
    video: Path | None  # the mp4

    @property
    def is_draft(self) -> bool:
        """Whether a second stage was to follow."""
        from ltx2_cli.core.provenance import FIRST

        return self.stage == FIRST

    def request(self, given: Mapping[str, object], settings: list[str]) -> RunSpec:
        """The recorded request, changed by what is `given`; on other devices, for those."""
        from ltx2_cli.core.provenance import devices
        from ltx2_cli.request.layers import ConfigLayer
        from ltx2_cli.request.profiles import AUTO, read_spec

        elsewhere = self.provenance.devices not in (None, devices())
        hardware = {"sharding": AUTO, "vae_memory_gb": None} if elsewhere else {}
        config = ConfigLayer(f"the record in {self.path}: ", dict(self.record))
        return read_spec({**hardware, **given}, config=config, dotlist=settings)


def read_clip(path: Path) -> RecordedClip:
    """The record in or beside `path`. Raises `UsageError` where there is none, or it is damaged."""
    from ltx2_cli.core.provenance import FINAL, read_provenance
    from ltx2_cli.diffusion.fingerprints import fingerprint
    from ltx2_cli.diffusion.latents import open_latents

    info = inspect(path)
    if not isinstance(info, RecordInfo | ClipInfo):
        raise UsageError(f"{path} is no clip", NAMES)
    if info.record is None:
        raise UsageError(f"{path} does not say what made it: another program wrote or changed it", NAMES)
    provenance = read_provenance(info.record, str(path))
    stage = (info.stage if isinstance(info, ClipInfo) else None) or (list(provenance.latents) or [FINAL])[-1]
    if info.kind == "latents":
        latents = {**provenance.latents, stage: Streams(*map(fingerprint, open_latents(path).read()))}
        return RecordedClip(path, info.record, provenance, stage, latents, None)
    video = path.with_suffix(".mp4") if isinstance(info, RecordInfo) else path
    return RecordedClip(path, info.record, provenance, stage, provenance.latents, video if video.exists() else None)


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


def find_source(clip: RecordedClip, moved: Path | None) -> "tuple[LatentsFile, float] | None":
    """The latents that a clip was upsampled from and their frames per second; None if it began as noise. `moved` is
    where they are now. Raises `UsageError` where they are gone or changed."""
    from ltx2_cli.core.provenance import UPSAMPLED
    from ltx2_cli.diffusion.latents import open_latents
    from ltx2_cli.files import refuse_special
    from ltx2_cli.weights.digests import digest

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


def weight_changes(clip: RecordedClip, plan: "Plan", changed: Collection[str], any_weights: bool) -> list[str]:
    """Sentences on files that are not those of the record. Raises `UsageError` with them, unless `changed` keys ask for
    other files, or any will do."""
    from ltx2_cli.core.provenance import input_files
    from ltx2_cli.weights.digests import HEADER, digests, header_digest

    recorded, files = clip.provenance.files, input_files(plan)
    has_contents = any(not digest.startswith(HEADER) for digest in recorded.values())
    contents, headers = digests(files) if has_contents else {}, digests(files, header_digest)
    changes = []
    for name, digest in recorded.items():
        current = headers if digest.startswith(HEADER) else contents
        if digest not in current.values():
            changes.append(f"{name} was {short_hash(digest)}, is {short_hash(current.get(name, 'not used'))}")
    if changes and not (any_weights or WEIGHTS & set(changed)):
        raise UsageError(
            f"{clip.path} was made of other files: {'; '.join(changes)}",
            "--any-weights goes on with those that are here; --model, --lora and others name others",
        )
    return changes


def environment_changes(recorded: "Provenance", plan: "Plan") -> Iterator[str]:
    """Sentences on versions, devices and batches that are not those of the record."""
    from ltx2_cli.core.provenance import provenance, versions
    from ltx2_cli.weights.digests import HEADER

    current = provenance(plan, {}, {})
    if unread := [name for name, digest in recorded.files.items() if digest.startswith(HEADER)]:
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
