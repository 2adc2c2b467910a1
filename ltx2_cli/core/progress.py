"""How far a run is: what it goes on from when it is begun again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import numpy as np

from ltx2_cli.core.record import History
from ltx2_cli.plan import Plan
from ltx2_cli.spec import AV
from ltx2_cli.stages import Stage

Contexts = Mapping[str, AV[jax.Array | np.ndarray]]  # by the name of the connectors that made them


class Phase(NamedTuple):
    """One half of a stage."""

    number: int  # of the stage
    stage: Stage
    denoises: bool  # or upsamples what it begins with


@dataclass(frozen=True)
class Progress:
    """What is done of a run. Latents are tokens float32 [videos, tokens, channels], on the host but for `current`."""

    phase: int = 0  # of `phases`, the first that is not done; behind the last one, the clips are written
    batch: int = 0  # of it, the first that is not done
    step: int = 0  # of that batch
    written: int = 0  # clips, of which each may follow its batch at once
    latents: AV[np.ndarray] | None = None  # after the phase where it is done, else before it, if there was one
    current: AV[jax.Array | np.ndarray] | None = None  # of that batch, after its steps; None: it is not begun
    contexts: Contexts = field(default_factory=dict)  # of the text, as far as it is read
    history: History = ()


Keep = Callable[[Progress], None]


def phases(plan: Plan) -> list[Phase]:
    """What a run goes through, in order, before it decodes."""
    halves = [Phase(number, stage, half) for number, stage in enumerate(plan.stages) for half in (False, True)]
    return [half for half in halves if (len(half.stage.sigmas) > 1 if half.denoises else half.stage.source)]


def clean_videos(plan: Plan, phase: int, batch: int) -> int:
    """How many videos a run has finished denoising that is at this phase and batch."""
    if phase == len(phases(plan)):
        return len(plan.spec.seeds)
    return batch * plan.spec.num_videos if phase == len(phases(plan)) - 1 else 0


def later_steps(plan: Plan, phase: int) -> float:
    """What is denoised after a phase, in steps of that phase: a step works on the tokens of every pass."""

    def work(stage: Stage) -> int:
        return len(stage.passes) * (stage.geometry.video_tokens + stage.geometry.audio_frames)

    later = [stage for _, stage, denoises in phases(plan)[phase + 1 :] if denoises]
    steps = sum((len(stage.sigmas) - 1) * work(stage) for stage in later) * len(plan.batches)
    return steps / work(phases(plan)[phase].stage)


def unread(plan: Plan, start: Progress) -> list[str]:
    """The connectors whose text is still to be read, for what is still to be denoised."""
    names = dict.fromkeys(phase.stage.connectors for phase in phases(plan)[start.phase :] if phase.denoises)
    return [name for name in names if name not in start.contexts]


def forget(progress: Progress) -> None:
    """Keep nothing."""
