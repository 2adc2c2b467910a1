"""`--duration auto`: the length of a clip by its prompt."""

from dataclasses import replace

from ltx2_cli.core.components import Components
from ltx2_cli.core.run import START, with_contexts
from ltx2_cli.core.state import RunState
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.models.duration_head import DurationHead
from ltx2_cli.plan.open import find_duration_head
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.sizes import legal_lengths
from ltx2_cli.request.size import predicted_frames
from ltx2_cli.request.spec import Streams
from ltx2_cli.request.validation import validate
from ltx2_cli.runs.preflight import agreed_plan
from ltx2_cli.runs.session import Session


def check_duration_head(session: Session, plan: Plan) -> DurationHead | None:
    """The duration head of a plan's checkpoint; None where a dry run would have to download it. Raises `UsageError`
    for a checkpoint without one."""
    head = find_duration_head(plan.spec.checkpoint, plan.arch, offline=session.dry_run)
    if session.dry_run:
        frames = f"{plan.num_frames} frames, {plan.num_frames / plan.spec.fps:.2f} s"
        session.report.note(f"the length is known once the prompt is read; this plan is for {frames}")
    return head


def plan_by_prompt(
    session: Session, request: Request, plan: Plan, components: Components, start: RunState, head: DurationHead
) -> tuple[Plan, RunState]:
    """The plan for the length that the head reads from the prompt, with `components` switched to it; and the state
    `start` with the contexts of the text, but for those of another mesh, which differ in their last bits from a
    replay's."""
    state, spec = with_contexts(plan, components, start, session.report), plan.spec
    contexts = state.contexts[plan.stages[0].connectors]
    seconds = head.seconds(Streams(*(stream[0] for stream in contexts)))  # the prompt is the first
    frames = predicted_frames(seconds, spec.fps, legal_lengths(spec))
    session.report.note(f"length: {frames} frames, {frames / spec.fps:.2f} s, for {seconds:.2f} s by the prompt")
    spec = replace(spec, num_frames=frames, asked=tuple(sorted({*spec.asked, "num_frames"})))
    validate(spec)
    with agreed_plan(session, replace(request, spec=spec)) as final:
        components.adopt(final)
    return final, state if final.sharding == plan.sharding else replace(START, history=start.history)
