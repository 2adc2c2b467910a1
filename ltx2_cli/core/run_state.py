"""How far a run is: what it goes on from when it is begun again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np

from ltx2_cli.core.provenance import History
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Denoise, Stage
from ltx2_cli.request.spec import Streams

Contexts = Mapping[str, Streams[jax.Array | np.ndarray]]  # by the name of the connectors that made them


@dataclass(frozen=True)
class RunState:
    """What is done of a run. Latents are tokens float32 [videos, tokens, channels], on the host but for `current`."""

    phase: int = 0  # of the plan's, the first that is not done; behind the last one, the clips are written
    batch: int = 0  # of it, the first that is not done
    step: int = 0  # of that batch
    written: int = 0  # clips, of which each may follow its batch at once
    latents: Streams[np.ndarray] | None = None  # after the phase where it is done, else before it, if there was one
    current: Streams[jax.Array | np.ndarray] | None = None  # of that batch, after its steps; None: not begun
    contexts: Contexts = field(default_factory=dict)  # of the text, as far as it is read
    history: History = ()


OnProgress = Callable[[RunState], None]


def all_latents(progress: RunState) -> Streams[np.ndarray]:
    """Those that are there."""
    assert progress.latents is not None
    return progress.latents


def clean_videos(plan: Plan, phase: int, batch: int) -> int:
    """How many videos a run has finished denoising that is at this phase and batch."""
    if phase == len(plan.phases):
        return len(plan.seeds)
    return batch * plan.batch_size if phase == len(plan.phases) - 1 else 0


def later_steps(plan: Plan, phase: int) -> float:
    """What is denoised after a phase, in steps of that phase: a step works on the tokens of every pass."""

    def work(stage: Stage) -> int:
        return len(stage.passes) * (stage.geometry.video_tokens + stage.geometry.audio_frames)

    later = [phase.stage for phase in plan.phases[phase + 1 :] if isinstance(phase, Denoise)]
    return sum(stage.steps * work(stage) for stage in later) * len(plan.batches) / work(plan.phases[phase].stage)


def missing_contexts(plan: Plan, start: RunState) -> list[str]:
    """The connectors whose text is still to be read, for what is still to be denoised."""
    later = [phase.stage for phase in plan.phases[start.phase :] if isinstance(phase, Denoise)]
    return [name for name in dict.fromkeys(stage.connectors for stage in later) if name not in start.contexts]


def no_checkpoint(progress: RunState) -> None:
    """OnProgress nothing."""
