"""Read the images, videos, references, masks and audio of a request from their files."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from ltx2_cli.diffusion.geometry import VAECompression
from ltx2_cli.errors import UsageError
from ltx2_cli.media.audio import Audio, read_audio
from ltx2_cli.media.images import is_image, read_image
from ltx2_cli.media.videos import Video, in_whole_latents, read_video
from ltx2_cli.models.lora import reference_scale
from ltx2_cli.plan.edit import num_shown, read_edited
from ltx2_cli.plan.open import Loras
from ltx2_cli.request.size import most_frames
from ltx2_cli.request.spec import ConditionSpec, RunSpec
from ltx2_cli.request.spelling import of_condition, option_name, typed
from ltx2_cli.request.validation import SHOWN
from ltx2_cli.weights.checkpoint import collect, raise_all


def with_reference_scale(spec: RunSpec, loras: Loras) -> RunSpec:
    """The request with the scale of its references, read from the in-context LoRA among `loras`; LoRAs on other
    machines may be absent. Raises `UsageError` for references without such a LoRA, such a LoRA without references, and
    several of different scales."""
    scales = {lora.path.name: scale for lora, _ in loras if (scale := reference_scale(lora))}
    references = [condition for condition in spec.conditions if condition.kind == "reference"]
    if scales and not references:
        sentence = f"{next(iter(scales))} was trained to follow a reference, and none is given"
        raise UsageError(sentence, f"{of_condition('reference', 'FILE')}, or leave out {option_name('lora')}")
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


def read_input_videos(spec: RunSpec) -> tuple[Video, ...]:
    """Read the files of all conditions. Raises `UsageError` for a file that cannot be read, or whose hash is not the
    request's."""
    readings = {str(number): partial(_read, spec, condition) for number, condition in enumerate(spec.conditions)}
    videos, problems = collect(readings)
    raise_all(problems)
    _check_mask(spec, [*videos.values()])
    return tuple(videos.values())


def read_input_audio(spec: RunSpec) -> Audio | None:
    """Read the audio file of a request. Raises `UsageError` as `read_input_videos`."""
    if spec.audio is None:
        return None
    audio = read_audio(Path(spec.audio.path).expanduser(), spec.num_frames / spec.fps)
    if spec.audio.sha256 not in (None, audio.sha256):
        hint = f"bring that back, or take this one: {typed('audio', spec.audio.path)}"
        raise UsageError(f"{spec.audio.path} is other audio than that of the record", hint)
    return audio


def with_what_was_read(
    spec: RunSpec, compression: VAECompression, videos: Sequence[Video], audio: Audio | None
) -> RunSpec:
    """The request with the hashes of its input files, and the number of frames used of each video. Raises `UsageError`
    as `num_shown`."""
    conditions = []
    for condition, video in zip(spec.conditions, videos, strict=True):
        count = None if condition.kind == "image" else len(video.frames)
        if condition.kind == "clip":
            count = num_shown(spec, condition, video, compression)
        conditions.append(replace(condition, sha256=video.sha256, num_frames=count))
    read = replace(spec.audio, sha256=audio.sha256) if spec.audio and audio else None
    return replace(spec, conditions=tuple(conditions), audio=read)


def _read(spec: RunSpec, condition: ConditionSpec) -> Video:
    path, follows = Path(condition.path).expanduser(), condition.kind not in SHOWN
    if condition.kind == "image" or (follows and is_image(path)):
        video = read_image(path)
    elif condition.kind == "clip":
        video = read_edited(spec, condition)
    elif follows:
        rarer, count = condition.temporal_scale or 1, condition.num_frames
        most = spec.num_frames if count is None else (count - 1) * rarer + 1
        video = read_video(path, spec.fps, most, from_end=False)
        frames = video.frames[::rarer]
        video = replace(video, frames=frames[: in_whole_latents(len(frames))])
    else:  # a clip begins with the end of the video
        most = condition.num_frames or most_frames(spec, condition)
        video = read_video(path, spec.fps, most, from_end=condition.frame == 0)
    if condition.sha256 not in (None, video.sha256):
        changed = f"{condition.path} is another {condition.kind} than that of the record"
        this = of_condition(condition.kind, condition.path + ("" if follows else f"@{condition.frame}"))
        raise UsageError(changed, f"bring that back, or take this one: {this}")
    return video


def _check_mask(spec: RunSpec, videos: Sequence[Video]) -> None:
    """Raise `UsageError` for a mask that is shorter than a reference."""
    counts = {"reference": [0], "mask": [1]}
    for condition, video in zip(spec.conditions, videos, strict=True):
        counts.setdefault(condition.kind, []).append(len(video.frames))
    if 1 < (given := max(counts["mask"])) < (needed := max(counts["reference"])):
        sentence = f"the mask of the references has {given} frames, and a reference {needed}"
        raise UsageError(sentence, "an image, or a video of that length, as the mask")
