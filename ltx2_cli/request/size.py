"""Convert sizes and lengths such as `16:9`, `720p` and `5s` to legal numbers of pixels and frames."""

import re
from collections.abc import Mapping, Sequence
from math import sqrt

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import ConditionSpec, RunSpec

BY_PROMPT = "auto"  # a duration: that of the shot which the prompt describes
SHORTEST_SECONDS = 1  # of a length by the duration head; the longest is that of all clips
LONGEST_SECONDS = 20  # of the clips that LTX-2 and LTX-2.3 were trained on
NUMBER = r"(\d{1,5}(?:\.\d{1,9})?)"
SIDES = ("width", "height")
SIZE_SHORTHANDS = {
    "aspect": SIDES,
    "resolution": SIDES,
    "duration": ("num_frames",),
}  # keys of each
Lengths = Mapping[str, Sequence[int]]  # the legal numbers of pixels and frames, rising, by key
ASPECT, RESOLUTION, DURATION = (re.compile(text) for text in (f"{NUMBER}:{NUMBER}", r"(\d{1,5})p", f"{NUMBER}s?"))


def size_of(width: int, height: int, aspect: str | None, resolution: str | None, legal: Lengths) -> dict[str, int]:
    """The nearest `legal` width and height in pixels for an aspect and a resolution, the shorter side. Defaults: the
    aspect and the number of pixels of `width` and `height`. Raises `UsageError` for malformed texts, and for a side
    above the largest legal one."""
    ratio = width / height
    if aspect is not None:
        wide, high = map(float, _parsed(ASPECT, aspect, "--aspect", "16:9"))
        if not (wide and high):
            raise UsageError(f"--aspect {aspect} has a side of 0", "for example: --aspect 16:9")
        ratio = wide / high
    longer_by, most = max(ratio, 1 / ratio), min(legal[side][-1] for side in SIDES)
    shorter = sqrt(width * height / longer_by)
    if resolution is not None:
        shorter = float(*_parsed(RESOLUTION, resolution, "--resolution", "720p"))
    if shorter * longer_by > most:
        typed = f"--resolution {resolution}" if resolution is not None else f"--aspect {aspect}"
        sentence = f"{typed} has a side of {shorter * longer_by:.0f} pixels, at most {most} are made"
        raise UsageError(sentence, f"nearest: --resolution {int(most / longer_by)}p")
    exact = {"width": shorter * max(ratio, 1), "height": shorter * max(1 / ratio, 1)}
    return {key: _nearest(legal[key], value) for key, value in exact.items()}


def frames_of(duration: str, fps: float, legal: Lengths) -> int:
    """The `legal` number of frames nearest to `duration` in seconds. Raises `UsageError` for malformed texts, and for
    more than the largest legal number."""
    if duration == BY_PROMPT:
        raise UsageError("--duration auto is an option of `ltx2 generate` alone", "a length: --duration 5s")
    frames, most = seconds_of(duration, "--duration") * fps, legal["num_frames"][-1]
    if frames > most:
        sentence = f"--duration {duration} is {frames:.0f} frames at {fps:g} a second, at most {most} are made"
        raise UsageError(sentence, f"nearest: --duration {int(most / fps)}s")
    return _nearest(legal["num_frames"], frames)


def predicted_frames(seconds: float, fps: float, legal: Lengths) -> int:
    """The largest `legal` number of frames in a predicted length, which is brought into 1 to 20 s first; the smallest
    from 1 s on where there is none."""
    least, most = max(1, round(SHORTEST_SECONDS * fps)), round(LONGEST_SECONDS * fps)
    frames = min(max(round(seconds * fps), least), most)
    long_enough = [number for number in legal["num_frames"] if number >= least] or legal["num_frames"][-1:]
    return max((number for number in long_enough if number <= frames), default=long_enough[0])


def _nearest(legal: Sequence[int], value: float) -> int:
    """The nearest number; of two the smaller."""
    return min(legal, key=lambda number: abs(number - value))


def seconds_of(text: str, option: str) -> float:
    """Parse seconds such as `5s`, `5` or `0.5s`. Raises `UsageError` with the option for malformed texts."""
    return float(*_parsed(DURATION, text, option, "5s"))


def _parsed(pattern: re.Pattern[str], text: str, option: str, example: str) -> tuple[str, ...]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is not like {example}", f"for example: {option} {example}")
    return match.groups()


def most_frames(spec: RunSpec, condition: ConditionSpec) -> int:
    """The default number of frames of a long input video, 8k + 1: half of the clip, or the rest of the clip if less."""
    most = min(max(spec.num_frames // 2, 1), spec.num_frames - max(condition.frame, 0))
    return (most - 1) // 8 * 8 + 1


def longest_clip(fps: float) -> int:
    """The longest clip of the training data at this rate, in frames, 8k + 1; rounded to half a latent."""
    return (int(LONGEST_SECONDS * fps) + 3) // 8 * 8 + 1
