"""The state of a run between two steps or phases."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import jax
import numpy as np

from ltx2_cli.core.provenance import History
from ltx2_cli.plan.phases import Denoise
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import Stage
from ltx2_cli.request.spec import Streams


@dataclass(frozen=True)
class RunState:
    """The progress of a run. Latents are tokens float32 [videos, tokens, channels], on the host but for `current`."""

    phase: int = 0  # the plan's first unfinished phase; after the last one, clips are written
    batch: int = 0  # the phase's first unfinished batch
    step: int = 0  # finished steps of that batch
    written: int = 0  # finished clips
    latents: Streams[np.ndarray] | None = None  # of finished videos after the phase, of others before it
    current: Streams[jax.Array | np.ndarray] | None = None  # of the batch, after its steps; None: not started
    contexts: Mapping[str, Streams[Any]] = field(default_factory=dict)  # of the text, by the name of their connectors
    history: History = ()
    behind: np.ndarray | None = None  # likewise video behind the grid: of keyframes, or what the stage begins with
    skipped: tuple[int, ...] = ()  # of each video, the forwards of the finished steps that skipped layers; empty: none


OnProgress = Callable[[RunState], None]


def all_latents(progress: RunState) -> Streams[np.ndarray]:
    """The latents of a state that has some."""
    assert progress.latents is not None
    return progress.latents


def join_states(states: Sequence[RunState], contexts: Mapping[str, Streams[Any]]) -> RunState:
    """The state of a batch of runs that are at the same place, each with one video, on the host."""
    first = states[0]
    latents, current = ([getattr(state, name) for state in states] for name in ("latents", "current"))
    return replace(
        first,
        latents=first.latents and Streams(*map(np.concatenate, zip(*latents, strict=True))),
        current=first.current and Streams(*map(np.concatenate, zip(*current, strict=True))),
        contexts=contexts,
        history=tuple(chain.from_iterable(state.history for state in states)),
        behind=None if first.behind is None else np.concatenate([state.behind for state in states]),
        skipped=tuple(chain.from_iterable(state.skipped for state in states)),
    )


def split_state(joint: RunState, contexts: Sequence[Mapping[str, Streams[Any]]]) -> list[RunState]:
    """The states of the first runs of a batch, each with its video and contexts; all on the host."""
    current = joint.current and Streams(*map(np.asarray, joint.current))

    def of_row(streams: Streams[Any] | None, row: slice) -> Streams[Any] | None:
        return streams and Streams(*(stream[row] for stream in streams))

    return [
        replace(
            joint,
            latents=of_row(joint.latents, row),
            current=of_row(current, row),
            contexts=own,
            history=joint.history[row],
            behind=None if joint.behind is None else joint.behind[row],
            skipped=joint.skipped[row],
        )
        for row, own in ((slice(video, video + 1), own) for video, own in enumerate(contexts))
    ]


def latents_of(progress: RunState, rows: range) -> Streams[np.ndarray]:
    """Latents of some of the videos."""
    return Streams(*(stream[rows.start : rows.stop] for stream in all_latents(progress)))


def clean_videos(plan: Plan, phase: int, batch: int) -> int:
    """The number of videos that are denoised before this phase and batch."""
    if phase == len(plan.phases):
        return len(plan.seeds)
    return batch * plan.batch_size if phase == len(plan.phases) - 1 else 0


def later_steps(plan: Plan, phase: int) -> float:
    """The denoising after a phase, in steps of that phase; the work of a forward is tokens times passes."""

    def work(stage: Stage) -> float:
        passes = sum(count * len(passes) for passes, count in stage.pass_counts.items()) / stage.steps
        tokens = stage.tile_geometry.video_tokens + stage.geometry.audio_frames
        return passes * stage.forwards * stage.tile_turns * tokens

    later = [phase.stage for phase in plan.phases[phase + 1 :] if isinstance(phase, Denoise)]
    stage = plan.phases[phase].stage
    return sum(map(work, later)) * len(plan.batches) * stage.steps / work(stage)


def missing_contexts(plan: Plan, start: RunState) -> list[str]:
    """The connectors of the remaining stages whose contexts `start` lacks."""
    later = [phase.stage for phase in plan.phases[start.phase :] if isinstance(phase, Denoise)]
    return [name for name in dict.fromkeys(stage.connectors for stage in later) if name not in start.contexts]


def ignore_progress(progress: RunState) -> None:
    """An `OnProgress` that does nothing."""
