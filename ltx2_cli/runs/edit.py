"""`ltx2 retake` and `ltx2 extend`: build the request for a clip and its part to regenerate."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

from ltx2_cli.artifacts.files import user_path
from ltx2_cli.errors import UsageError
from ltx2_cli.media.probe import is_video, open_video
from ltx2_cli.media.videos import COMPRESSION, Video, in_whole_latents, read_whole_video
from ltx2_cli.plan.edit import extension
from ltx2_cli.request.environment import read_environment
from ltx2_cli.request.layers import ConfigLayer
from ltx2_cli.request.profiles import AUTO, merge_layers, validated_spec
from ltx2_cli.request.size import longest_clip, seconds_of
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.request.spelling import option_name, typed
from ltx2_cli.request.validation import NOISE_LEVELS, RANGES
from ltx2_cli.runs.build_request import config_page, note_environment
from ltx2_cli.runs.make import make
from ltx2_cli.runs.session import Session, request_facts, synchronized
from ltx2_cli.runs.settings import RunSettings
from ltx2_cli.runs.trust import check_trust

ROUNDING = 1e-3  # of a frame
HEIGHT_WIDTH = ("height", "width")
NOT_KEPT: dict[str, object] = {"audio": None, "streams": "both"}  # of a record


@dataclass(frozen=True)
class EditRequest:
    """Options of an edit: its clip, values of the request by key, and settings (`dotted.key=value`)."""

    clip: Path
    given: Mapping[str, object]
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class EditedClip:
    """The opened clip of an edit."""

    edit: EditRequest
    video: Video
    fps: float
    record: ConfigLayer | None

    @property
    def seconds(self) -> float:
        """The length of its video."""
        return len(self.video.frames) / self.fps

    @property
    def references(self) -> list[object]:
        """The references of its record and their mask, unless other LoRAs are asked for."""
        stated: Any = self.record.values.get("conditions") if self.record else None
        asked = "lora" in self.edit.given or any(text.startswith("lora=") for text in self.edit.settings)
        if asked or not isinstance(stated, list):
            return []
        return [item for item in stated if isinstance(item, dict) and item.get("kind") in ("reference", "mask")]

    def request(
        self, session: Session, num_frames: int | None = None, condition: Mapping[str, object] | None = None
    ) -> RunSpec:
        """The request for this clip, with the condition of its regenerated part."""
        given, path = self.edit.given, user_path(self.edit.clip)
        replaced: dict[str, object] = {"seed": None, "num_videos": 1, "initial_noise": None, "windows": 1, **NOT_KEPT}
        replaced |= {} if self.references else {"reference_strength": 1.0}
        replaced |= {"sharding": AUTO, "vae_memory_gb": None, "keyframe_segments": ()} if self.record else {}
        replaced |= dict(zip(HEIGHT_WIDTH, self.video.frames.shape[1:3], strict=True)) | {"fps": self.fps}
        replaced |= {"num_frames": num_frames} if num_frames else {}
        replaced |= {"output": None, **given}
        clip = [{"kind": "clip", "path": str(path), **condition}] if condition else []
        above = self.record, self.edit.settings, read_environment(os.environ)
        of_record = {} if self.references else {"conditions": ()}
        check_trust(merge_layers({**replaced, **of_record}, *above), self.record, session)
        spec = validated_spec(merge_layers({**replaced, "conditions": [*clip, *self.references]}, *above))
        if spec.fps != self.fps:
            sentence = f"{path} was read at {self.fps:g} frames a second"
            raise UsageError(sentence, f"{typed('fps', spec.fps)} in place of --set")
        return spec


def retake(
    session: Session,
    edit: EditRequest,
    settings: RunSettings,
    part: tuple[str | None, str | None],
    streams: str,
    num_frames: int | None,
    noise_level: float,
) -> None:
    """Regenerate a `part` of a clip, from and to these times or those of the clip, and print the paths, or print a dry
    run."""
    with synchronized(session.hosts) as facts:
        note_environment(session.report, edit.given, edit.settings)
        spec = _retaken(session, _open(edit), part, streams, num_frames, noise_level)
        facts |= request_facts(spec)
    make(session, spec, settings)


def extend(session: Session, edit: EditRequest, settings: RunSettings, seconds: str, num_frames: int | None) -> None:
    """Extend a clip by this time and print the paths of the whole clips, or print a dry run."""
    with synchronized(session.hosts) as facts:
        note_environment(session.report, edit.given, edit.settings)
        spec = _extended(session, _open(edit), seconds, num_frames)
        facts |= request_facts(spec)
    make(session, spec, settings)


def _open(edit: EditRequest) -> EditedClip:
    """Open the clip. Raises `UsageError` for a size that no model makes, and for a clip without a record or prompt."""
    path, asked = user_path(edit.clip), edit.given.get("fps")
    if isinstance(asked, int | float) and (problem := RANGES["fps"].problem(asked, typed("fps"))):
        raise UsageError(f"fps {asked:g} is {problem}", "")
    file = open_video(path)
    record = config_page(path) if is_video(path) and "record" in file.metadata else None
    if record is None and not edit.given.get("prompt"):
        raise UsageError(
            f"{path} does not say what made it, and what it shows",
            f'{typed("prompt")}"..." and {typed("model", "NAME")}',
        )
    stated: Any = record.values.get("fps") if record else None
    exact = isinstance(stated, int | float) and abs(stated - file.fps) < ROUNDING
    fps = asked if isinstance(asked, int | float) else (stated if exact else file.fps)
    video, step = read_whole_video(path, fps), RANGES["height"].step
    size = dict(zip(HEIGHT_WIDTH, video.frames.shape[1:3], strict=True))
    set_to = {*edit.given, *(text.partition("=")[0] for text in edit.settings)}
    if whole := {side: length // step * step for side, length in size.items() if length % step and side not in set_to}:
        sentence = f"{path} is {size['width']}x{size['height']}, and models make sides that are multiples of {step}"
        settings = " ".join(typed(side, length) for side, length in whole.items())
        raise UsageError(sentence, f"{settings} edits its middle" if all(whole.values()) else "name a larger one")
    return EditedClip(edit, video, fps, record)


def _retaken(
    session: Session,
    clip: EditedClip,
    part: tuple[str | None, str | None],
    streams: str,
    num_frames: int | None,
    noise_level: float,
) -> RunSpec:
    count, fps, path = len(clip.video.frames), clip.fps, clip.video.path
    whole = in_whole_latents(count)
    if problem := NOISE_LEVELS.problem(noise_level, "--noise-level "):
        raise UsageError(f"--noise-level {noise_level:g} is {problem}", "")
    if part == (None, None) and noise_level == 1 and streams == "both":
        sentence = f"all of {path} would be made anew, which keeps nothing of it"
        raise UsageError(sentence, "--noise-level 0.9, or a part: --from 0s --to 1s")
    start = 0.0 if part[0] is None else seconds_of(part[0], "--from")
    stop = (count if start else whole) / fps if part[1] is None else seconds_of(part[1], "--to")
    if part[1] is not None and start >= stop:
        later = start if stop < start else start + COMPRESSION / fps
        raise UsageError(f"--from {start:g}s is not before --to {stop:g}s", f"--from {stop:g}s --to {later:g}s")
    begin, end = floor(start * fps + ROUNDING), ceil(stop * fps - ROUNDING)
    if begin >= count or end > count:
        sentence = f"{path} lasts {clip.seconds:.2f} s, and {start:.4g} to {stop:.4g} s are to be regenerated"
        nearest = min(begin, count - 1) / fps
        raise UsageError(sentence, f"nearest: --from {nearest:.2f}s --to {floor(100 * clip.seconds) / 100:.2f}s")
    made = num_frames or min(whole, whole if clip.references else longest_clip(fps))
    alone = "video"
    if streams != alone and open_video(path).sample_rate is None:
        raise UsageError(f"{path} has no audio to retake", f"--{alone}")
    level = {"noise_level": noise_level} if noise_level != 1 else {}
    return clip.request(session, made, {"regenerate": [begin, end], "streams": streams, **level})


def _extended(session: Session, clip: EditedClip, seconds: str, num_frames: int | None) -> RunSpec:
    count, fps = len(clip.video.frames), clip.fps
    added = round(seconds_of(seconds, "--seconds") * fps)
    if not added:
        raise UsageError(f"--seconds {seconds} is less than a frame", f"--seconds {1 / fps:.2f}s")
    if clip.references:
        sentence = f"{clip.video.path} followed references, which end with it, by an in-context LoRA"
        raise UsageError(
            sentence, f"--set lora=[] goes on without, or name the LoRAs to go on with: {option_name('lora')}"
        )
    most = clip.request(session).num_frames
    if clip.record and clip.record.values.get("windows", 1) != 1:  # it is longer than what is made at once
        most = min(most, longest_clip(fps))
    shown, length = extension(count, added, most)
    if most - shown < COMPRESSION:
        raise UsageError(
            f"{typed('num_frames', most)} leaves no room for what follows", typed("num_frames", COMPRESSION + 1)
        )
    room = (num_frames or max(most, longest_clip(fps))) - shown
    if added > room:
        behind = f"behind the {shown / fps:.2f} s that it begins with"
        hint = f"extend twice; at most --seconds {floor(100 * room / fps) / 100:.2f}s at a time"
        raise UsageError(f"one clip has no room for --seconds {seconds} {behind}", hint)
    return clip.request(session, length, {"regenerate": [count, count + added], "num_frames": shown})
