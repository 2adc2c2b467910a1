"""What a clip shows, follows and sounds like: the pictures, videos, references, masks and the sound of a request, read
and laid out for each stage."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ltx2_cli.diffusion.geometry import ReferenceGrid, ReferenceScale, VAECompression
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio, read_audio
from ltx2_cli.media.images import is_image, read_image
from ltx2_cli.media.videos import COMPRESSION, Video, read_video
from ltx2_cli.models.lora import reference_scale
from ltx2_cli.plan.edit import check_pieces, num_shown, read_edited
from ltx2_cli.request.size import most_frames
from ltx2_cli.request.spec import ConditionSpec, RunSpec
from ltx2_cli.request.spelling import of_condition, option, typed
from ltx2_cli.request.validation import SHOWN, WORDS
from ltx2_cli.weights.checkpoint import collect, raise_all
from ltx2_cli.weights.lora import LoraFile

Loras = Sequence[tuple[LoraFile, float]]  # each with its strength


class ShownPicture(NamedTuple):
    """Where a stage shows a picture or a video of the plan, or that it follows one."""

    number: int  # of the picture in the plan
    frame: float  # of the stage's clip, where it begins; 0: in place of its first latents, else behind its grid
    strength: float
    num_frames: int
    reference: ReferenceGrid | None = None  # behind all that is shown

    @property
    def behind(self) -> bool:
        """Whether its tokens lie behind the grid."""
        return bool(self.frame or self.reference)

    def keyframes(self, compression: int) -> list[tuple[float, float]]:
        """The frames of the clip between which each of its latents lies, if these are behind the grid. That of a single
        frame lasts as long."""
        if not self.frame:
            return []
        latents, length = (self.num_frames - 1) // compression + 1, compression if self.num_frames > 1 else 1
        return [(self.frame + compression * i, self.frame + compression * i + length) for i in range(latents)]


def follows_by_shares(spec: RunSpec) -> bool:
    """Whether a clip and its references attend to each other less than to themselves."""
    kinds = {condition.kind for condition in spec.conditions}
    return "reference" in kinds and (spec.reference_strength < 1 or "mask" in kinds)


def with_reference_scale(spec: RunSpec, loras: Loras) -> RunSpec:
    """The request with the scale of its references, as the in-context LoRA among `loras` says, of which those on other
    machines may lack. Raises `UsageError` for references without such a LoRA, one without references, and several that
    disagree."""
    scales = {lora.path.name: scale for lora, _ in loras if (scale := reference_scale(lora))}
    references = [condition for condition in spec.conditions if condition.kind == "reference"]
    if scales and not references:
        sentence = f"{next(iter(scales))} was trained to follow a reference, and none is given"
        raise UsageError(sentence, f"{of_condition('reference', 'FILE')}, or leave out {option('lora')}")
    if references and not scales:
        path, absent = references[0].path, len(loras) < len(spec.lora)
        reason = "the only LoRAs are not on this machine" if absent else "no in-context LoRA is given"
        raise UsageError(
            f"nothing follows the reference {path}: {reason}", f"{typed('lora', ['FILE'])} of one, or no reference"
        )
    if len(set(scales.values())) > 1:
        raise UsageError(f"{' and '.join(scales)} follow references of different sizes", "leave out one of these LoRAs")

    def scaled(condition: ConditionSpec) -> ConditionSpec:
        if condition.kind in SHOWN:
            return condition
        downscale, temporal = next(iter(scales.values()))
        return replace(
            condition,
            downscale=condition.downscale or downscale,
            temporal_scale=condition.temporal_scale or temporal,
        )

    return replace(spec, conditions=tuple(map(scaled, spec.conditions)))


def read_pictures(spec: RunSpec) -> tuple[Video, ...]:
    """The files of all conditions. Raises `UsageError` for one that cannot be read, or that is another than the request
    says."""
    readings = {str(number): partial(_read, spec, condition) for number, condition in enumerate(spec.conditions)}
    pictures, problems = collect(readings)
    raise_all(problems)
    _check_mask(spec, [*pictures.values()])
    return tuple(pictures.values())


def read_given_sound(spec: RunSpec) -> Audio | None:
    """The file of the sound. Raises `UsageError` as `read_pictures`."""
    if spec.audio is None:
        return None
    sound = read_audio(Path(spec.audio.path).expanduser(), spec.num_frames / spec.fps)
    if spec.audio.sha256 not in (None, sound.sha256):
        hint = f"bring that back, or take this one: {typed('audio', spec.audio.path)}"
        raise UsageError(f"{spec.audio.path} is another sound than that of the record", hint)
    return sound


def with_what_was_read(
    spec: RunSpec, compression: VAECompression, pictures: Sequence[Video], sound: Audio | None
) -> RunSpec:
    """The request with the hashes of what its clip is given, and how many frames of videos. Raises `UsageError` as
    `num_shown` and `check_pieces`."""
    conditions = []
    for condition, picture in zip(spec.conditions, pictures, strict=True):
        count = None if condition.kind == "image" else len(picture.frames)
        if condition.kind == "clip":
            count = num_shown(spec, condition, picture, compression)
        conditions.append(replace(condition, sha256=picture.sha256, num_frames=count))
    audio = replace(spec.audio, sha256=sound.sha256) if spec.audio and sound else None
    return check_pieces(replace(spec, conditions=tuple(conditions), audio=audio))


def _read(spec: RunSpec, condition: ConditionSpec) -> Video:
    path, follows = Path(condition.path).expanduser(), condition.kind not in SHOWN
    if condition.kind == "image" or (follows and is_image(path)):
        picture = read_image(path)
    elif condition.kind == "clip":
        picture = read_edited(spec, condition)
    elif follows:
        rarer, count = condition.temporal_scale or 1, condition.num_frames
        most = spec.num_frames if count is None else (count - 1) * rarer + 1
        picture = read_video(path, spec.fps, most, from_end=False)
        frames = picture.frames[::rarer]
        picture = replace(picture, frames=frames[: (len(frames) - 1) // COMPRESSION * COMPRESSION + 1])
    else:  # what begins the clip is the end of the video
        most = condition.num_frames or most_frames(spec, condition)
        picture = read_video(path, spec.fps, most, from_end=condition.frame == 0)
    if condition.sha256 not in (None, picture.sha256):
        changed = f"{condition.path} is another {WORDS[condition.kind]} than that of the record"
        this = of_condition(condition.kind, condition.path + ("" if follows else f"@{condition.frame}"))
        raise UsageError(changed, f"bring that back, or take this one: {this}")
    return picture


def _check_mask(spec: RunSpec, pictures: Sequence[Video]) -> None:
    """Raise `UsageError` for a mask that ends before a reference."""
    counts = {"reference": [0], "mask": [1]}
    for condition, picture in zip(spec.conditions, pictures, strict=True):
        counts.setdefault(condition.kind, []).append(len(picture.frames))
    if 1 < (given := max(counts["mask"])) < (needed := max(counts["reference"])):
        sentence = f"the mask of the references has {given} frames, and a reference {needed}"
        raise UsageError(sentence, "a picture, or a video of that length, as the mask")


def shown_pictures(
    spec: RunSpec, compression: VAECompression, num_frames: int, last: bool = False
) -> tuple[ShownPicture, ...]:
    """Where a stage of so many frames shows the pictures: at the moments of the clip that is asked for. Behind them the
    references, which the `last` of two stages has not."""
    rate, shown = (num_frames - 1) / max(spec.num_frames - 1, 1), list[ShownPicture]()
    references = list[ShownPicture]()
    for number, condition in enumerate(spec.conditions):
        frame, count = condition.frame, condition.num_frames or 1
        if condition.kind == "reference" and not last:
            scale = ReferenceScale(condition.downscale or 1, condition.temporal_scale or 1)
            grid = ReferenceGrid(compression.latents(count), scale)
            references.append(ShownPicture(number, 0, condition.strength, count, grid))
        elif condition.kind in SHOWN:
            start = frame if frame >= 0 else max(spec.num_frames + frame - count + 1, 0)
            shown.append(ShownPicture(number, start * rate, condition.strength, count))
    return (*shown, *references)
