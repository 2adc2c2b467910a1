"""Runs that one batch denoises: their states joined, advanced, saved on the way and taken apart again."""

from collections.abc import Sequence

from ltx2_cli.core.components import Components
from ltx2_cli.core.run import advance
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.state import OnProgress, RunState, join_states, split_state
from ltx2_cli.errors import InterruptedRunError
from ltx2_cli.plan.batching import fill, joint_contexts
from ltx2_cli.plan.resolve import Plan


def advance_together(
    joint: Plan,
    members: Sequence[Plan],
    states: Sequence[RunState],
    components: Components,
    phase: int,
    savers: Sequence[RunSaver],
    preview: OnProgress,
) -> list[RunState]:
    """The states of runs that are at the same place, advanced to a phase by their `joint` plan. The saver of each,
    which have one stop request, saves its own part; `preview` sees all. Raises `InterruptedRunError` when all are
    saved."""
    size, contexts = joint.batch_size, [state.contexts for state in states]
    start = join_states(fill(states, size), joint_contexts(members, contexts, size))

    def on_progress(progress: RunState) -> None:
        parts = list(zip(savers, split_state(progress, contexts), strict=True))
        if stopped := [error for part in parts if (error := _interruption(*part))]:
            for part in parts:  # also those that were asked before the stop
                _interruption(*part)
            raise stopped[0]
        preview(progress)

    return split_state(advance(joint, components, start, phase, savers[0].report, on_progress), contexts)


def _interruption(saver: RunSaver, state: RunState) -> InterruptedRunError | None:
    """The interruption that a saver raises, if any."""
    try:
        saver(state)
    except InterruptedRunError as error:
        return error
    return None
