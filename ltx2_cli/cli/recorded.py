"""What a file says of how it was made: all that making it again needs, and all that is compared then."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ltx2_cli.cli.describe import SHORT, Clip, Record, describe, shortened
from ltx2_cli.spec import AV, RunSpec, SpecError

if TYPE_CHECKING:
    from ltx2_cli.core.made_with import MadeWith
    from ltx2_cli.diffusion.fingerprints import Fingerprint
    from ltx2_cli.diffusion.latents import LatentsFile
    from ltx2_cli.plan import Plan

NAMES = "name an mp4, its record (.yaml) or latents that ltx2 made"
SIZE = ("height", "width", "num_frames", "fps")
WEIGHTS = {
    "model",
    "checkpoint",
    "text_encoder",
    "lora",
    "recipe",
    "refinement.upsampler",
    "refinement.lora",
    "noise",
}


@dataclass(frozen=True)
class Begun:
    """Latents that a clip goes on from."""

    file: "LatentsFile"
    fps: float

    @property
    def begun(self) -> Mapping[str, Any]:
        """What the clip's record says of them."""
        from ltx2_cli.core.record import begun

        return begun(self.file, self.fps)


@dataclass(frozen=True)
class Recorded:
    """A clip, a record or latents, by what made them."""

    path: Path
    record: Mapping[str, Any]
    made: "MadeWith"
    stage: str  # that it ends with
    latents: "Mapping[str, AV[Fingerprint]]"  # after each stage, as far as that is known
    video: Path | None  # the clip as it is played

    @property
    def is_draft(self) -> bool:
        """Whether a second stage was to follow."""
        from ltx2_cli.core.made_with import FIRST

        return self.stage == FIRST

    def request(self, given: Mapping[str, object], settings: list[str]) -> RunSpec:
        """The one that made it, changed by what is `given`; on other devices, for those."""
        from ltx2_cli.core.record import devices
        from ltx2_cli.profile_layers import Layer
        from ltx2_cli.profiles import AUTO, read_spec

        elsewhere = {"sharding": AUTO, "vae_memory": None} if self.made.devices not in (None, devices()) else {}
        config = Layer(f"the record in {self.path}: ", dict(self.record))
        return read_spec({**elsewhere, **given}, config=config, dotlist=settings)


def recorded(path: Path) -> Recorded:
    """What `path` says. Raises `SpecError` where that is nothing, or damaged."""
    from ltx2_cli.core.made_with import FINAL, read_made_with

    found = describe(path)
    if not isinstance(found, Record | Clip):
        raise SpecError(f"{path} is no clip", NAMES)
    if found.record is None:
        raise SpecError(f"{path} does not say what made it: another program wrote or changed it", NAMES)
    made = read_made_with(found.record, str(path))
    stage = (found.stage if isinstance(found, Clip) else None) or (list(made.latents) or [FINAL])[-1]
    if found.kind == "latents":
        return Recorded(path, found.record, made, stage, {**made.latents, stage: _fingerprints(path)}, None)
    video = path.with_suffix(".mp4") if isinstance(found, Record) else path
    return Recorded(path, found.record, made, stage, made.latents, video if video.exists() else None)


def _fingerprints(path: Path) -> "AV[Fingerprint]":
    from ltx2_cli.diffusion.fingerprints import fingerprint
    from ltx2_cli.diffusion.latents import open_latents

    return AV(*map(fingerprint, open_latents(path).read()))


def check_overrides(made: Recorded, asked: Collection[str]) -> None:
    """Raise `SpecError` for what is asked and cannot be changed."""
    for key in SIZE if made.made.source else ():
        if key in asked:
            raise SpecError(
                f"{made.path} went on from latents, and {key} follows from theirs",
                f"leave --{key.replace('_', '-')} out, or make another first stage: ltx2 generate --stop-after stage1",
            )
    if made.is_draft and "output" in asked:
        raise SpecError(f"{made.path} is a draft: its latents are made again, no clip", "--save-latents FILE")


def find_source(made: Recorded, instead: Path | None) -> Begun | None:
    """The latents that it went on from; `instead` says where they are now. Raises `SpecError` where they are gone or
    changed."""
    from ltx2_cli.core.made_with import UPSAMPLED
    from ltx2_cli.diffusion.latents import open_latents
    from ltx2_cli.files import refuse_special
    from ltx2_cli.weights.digests import digest

    then, hint = made.made.source, "--latents FILE says where they are now"
    place = instead.expanduser() if instead else None if then is None else then.file
    if place is None:
        if made.stage == UPSAMPLED:
            raise SpecError(f"{made.path} went on from latents that its record does not name", hint)
        return None
    if not place.exists():
        raise SpecError(f"the latents that {made.path} went on from are gone: there is no {place}", hint)
    refuse_special(place, hint)
    file = open_latents(place)
    if then and then.sha256 not in (now := file.sha256(), digest(place)):  # an older record has the whole file's
        raise SpecError(
            f"{made.path} went on from other latents: {place} is {now[:SHORT]}, they were {then.sha256[:SHORT]}",
            f"--latents FILE names those; `ltx2 upsample {place}` goes on from others",
        )
    return Begun(file, then.fps if then else file.fps or made.record["fps"])


def check_weights(made: Recorded, plan: "Plan", asked: Collection[str], any_weights: bool) -> list[str]:
    """Sentences on files that are not those of the record. Raises `SpecError` with them, unless other files are
    `asked` for, or any will do."""
    from ltx2_cli.core.record import input_files
    from ltx2_cli.weights.digests import HEADER, digests, header_digests

    then, files = made.made.files, input_files(plan)
    whole = any(not was.startswith(HEADER) for was in then.values())
    now, headers = digests(files) if whole else {}, header_digests(files)
    changed = []
    for name, was in then.items():
        found = headers if was.startswith(HEADER) else now
        if was not in found.values():
            changed.append(f"{name} was {shortened(was)}, is {shortened(found.get(name, 'not used'))}")
    if changed and not (any_weights or WEIGHTS & set(asked)):
        raise SpecError(
            f"{made.path} was made of other files: {'; '.join(changed)}",
            "--any-weights goes on with those that are here; --model, --lora and others name others",
        )
    return changed


def circumstances(made: "MadeWith", plan: "Plan") -> Iterator[str]:
    """What else is not as it was."""
    from ltx2_cli.core.record import made_with, versions
    from ltx2_cli.weights.digests import HEADER

    now = made_with(plan, {}, {})
    if unread := [name for name, was in made.files.items() if was.startswith(HEADER)]:
        yield f"of {', '.join(unread)} the header alone was compared: the rest had not been hashed when it was made"
    for package, version in versions().items():
        if (was := made.versions.get(package, version)) != version:
            yield f"{package} was {was}, is {version}"
    if made.devices not in (None, now["devices"]):
        yield f"devices were {made.devices}, are {now['devices']}"
    for stage, mesh in now["meshes"].items():
        if (was := made.meshes.get(stage, mesh)) != mesh:
            yield f"the mesh of {stage} was {was}, is {mesh}"
    if made.at_once != now["at_once"]:
        yield f"it was one of {made.at_once} videos made at once, which may change its last bits"
