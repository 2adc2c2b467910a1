"""Phases of a run between text encoding and decoding: the upsampling and the denoising of stages, by windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ltx2_cli.diffusion.latents import interpolated
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams


@dataclass(frozen=True)
class Upsample:
    """The phase that upsamples all latents to the initial latents of a stage."""

    number: int  # of the stage
    stage: Stage


@dataclass(frozen=True)
class Denoise:
    """The phase of a stage's denoising steps in one of its windows, batch by batch."""

    number: int  # of the stage
    clip: Stage  # with all windows
    window: int = 0

    @cached_property
    def stage(self) -> Stage:
        """The stage for the window's latents."""
        return self.clip.window(self.window)

    @property
    def is_last(self) -> bool:
        """Whether the stage's latents are complete after it."""
        return self.window + 1 == len(self.clip.windows)

    def new(self, tokens: Streams[Any]) -> Streams[Any]:
        """The part of the window's tokens [videos, tokens, channels] that no other window makes."""
        overlap = self.clip.window_tokens(self.window).overlap
        return Streams(*(stream[:, count:] for stream, count in zip(tokens, overlap, strict=True)))

    def within(self, clip: Streams[Any]) -> Streams[Any]:
        """The window's part of the tokens of the clip [videos, tokens, channels]."""
        parts, segments = self.clip.window_tokens(self.window).latents, self.clip.windows[self.window].segments
        video, audio = (stream[:, part] for stream, part in zip(clip, parts, strict=True))
        return Streams(video, audio if segments is None else interpolated(audio, segments.audio))

    def behind(self, clip: Any) -> Any:
        """The window's part of the tokens behind the clip's grid [videos, tokens, channels]."""
        segments = self.clip.windows[self.window].segments
        return clip if segments is None else clip[:, self._tokens_of(segments.keyframes)]

    @property
    def new_behind(self) -> np.ndarray:
        """The numbers of the tokens behind the clip's grid whose keyframes the window alone generates, ascending."""
        segments, geometry = self.clip.windows[self.window].segments, self.clip.geometry
        if segments is not None:
            return self._tokens_of(segments.keyframes[-segments.kept :])
        count = len(geometry.keyframes)
        return self._tokens_of(range(count - geometry.generated, count))

    def _tokens_of(self, keyframes: Sequence[int]) -> np.ndarray:
        """The numbers behind the grid of the tokens of these keyframes."""
        cells = self.clip.geometry.height * self.clip.geometry.width
        return (np.asarray(keyframes, int)[:, None] * cells + np.arange(cells)).ravel()


Phase = Upsample | Denoise


def phase_name(phase: Phase) -> str:
    """The stage of a phase, and the window of several, in words."""
    return " of ".join([*_window_name(phase), f"stage {phase.number + 1}"])


def name_among(phases: Sequence[Phase], phase: Denoise) -> str:
    """The stage of a phase of several stages, and the window of several, in words; empty for the only phase."""
    return phase_name(phase) if phases[-1].number else " ".join(_window_name(phase))


def _window_name(phase: Phase) -> list[str]:
    windows = len(phase.clip.windows) if isinstance(phase, Denoise) else 1
    return [f"window {phase.window + 1} of {windows}"] if isinstance(phase, Denoise) and windows > 1 else []
