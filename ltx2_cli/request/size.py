"""Sizes and lengths as people say them, `16:9`, `720p`, `5s`, in the pixels and frames that the models take."""

import re
from collections.abc import Mapping, Sequence
from math import sqrt

from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import ConditionSpec, RunSpec

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
    """The nearest `legal` width and height, pixels, with this aspect and resolution, the shorter side. Without an
    aspect with that of `width` and `height`; without a resolution with as many pixels. Raises `UsageError` for other
    texts, and for a side that is longer than any that is legal."""
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
    """The `legal` number of frames that is nearest to `duration` in seconds. Raises `UsageError` for other texts, and
    for more than any that is legal."""
    frames, most = seconds_of(duration, "--duration") * fps, legal["num_frames"][-1]
    if frames > most:
        sentence = f"--duration {duration} is {frames:.0f} frames at {fps:g} a second, at most {most} are made"
        raise UsageError(sentence, f"nearest: --duration {int(most / fps)}s")
    return _nearest(legal["num_frames"], frames)


def _nearest(legal: Sequence[int], value: float) -> int:
    """Of two the smaller."""
    return min(legal, key=lambda number: abs(number - value))


def seconds_of(text: str, option: str) -> float:
    """The seconds that `5s`, `5` or `0.5s` means. Raises `UsageError` with the option for another text."""
    return float(*_parsed(DURATION, text, option, "5s"))


def _parsed(pattern: re.Pattern[str], text: str, option: str, example: str) -> tuple[str, ...]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{option} {text!r} is not like {example}", f"for example: {option} {example}")
    return match.groups()


def most_frames(spec: RunSpec, condition: ConditionSpec) -> int:
    """How many frames of a long video a clip shows where nobody says it, 8k + 1: half of the clip, or what is left."""
    most = min(max(spec.num_frames // 2, 1), spec.num_frames - max(condition.frame, 0))
    return (most - 1) // 8 * 8 + 1


def longest_clip(fps: float) -> int:
    """The most frames, 8k + 1, that models were trained on at this rate; half a latent more is rounding."""
    return (int(LONGEST_SECONDS * fps) + 3) // 8 * 8 + 1
