"""Prompts that the text encoder writes: `ltx2 enhance`, and `--enhance` before a clip is made."""

from collections.abc import Sequence
from dataclasses import replace

from ltx2_cli.core.components import Components
from ltx2_cli.core.enhance import MOST_TOKENS, EnhancedPrompt, Idea, check_writer, enhance, open_chat
from ltx2_cli.core.provenance import ENHANCED_FROM
from ltx2_cli.core.report import LOAD
from ltx2_cli.core.run import START, open_components, with_contexts
from ltx2_cli.core.state import RunState
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.phases import ENCODE, PHASES
from ltx2_cli.models.tokenizer import Chat
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import ComputeType, RunSpec
from ltx2_cli.request.validation import random_seed, validate
from ltx2_cli.runs.enhance_settings import EnhanceSettings
from ltx2_cli.runs.preflight import agreed_plan, check_downloads
from ltx2_cli.runs.session import Session

WRITER = frozenset({"text_encoder"})  # the network that stays loaded between prompts, and to encode them


def enhance_prompts(session: Session, spec: RunSpec, prompts: Sequence[str], settings: EnhanceSettings) -> None:
    """Print the prompt that the text encoder writes for each idea, a line each. `spec` says which model it is of, and
    the seed."""
    session.start()
    if random := spec.seed is None and settings.temperature > 0:
        spec = replace(spec, seed=(int(session.hosts.allgather_text(str(random_seed(spec)))[0]),))
    no_stage = replace(spec.second_stage, sigmas=(), lora=())
    spec = replace(spec, compute=ComputeType.weights, lora=(), second_stage=no_stage)
    request = Request(spec, find_devices(), skipped=frozenset(PHASES) - {ENCODE}, networks=WRITER)
    if not session.dry_run:
        check_downloads(session, request, enhances=True)
    with agreed_plan(session, request) as plan:
        chat = check_enhancement(session, plan)
    if chat is None:
        return
    seed = plan.spec.seeds[0] if plan.spec.seed else 0
    if random:
        session.report.note(f"seed: {seed}")
    report, components, results = session.measuring(), open_components(plan), []
    with components.keeping(WRITER):
        for prompt in prompts:
            written = enhance(
                plan, chat, Idea(prompt, settings.instructions, settings.temperature, seed), components, report
            )
            _note_cut(session, written)
            results.append({"prompt": prompt, "enhanced": written.text, "tokens": written.tokens})
            if session.hosts.first and not session.as_json:
                session.print(written.text)
    session.finish([], {"prompts": results, "seed": seed})


def check_enhancement(session: Session, plan: Plan) -> Chat | None:
    """The chats of a plan's text encoder; None for a dry run, whose files may not be here. Raises `UsageError` for one
    that writes no prompts."""
    if session.dry_run:
        check_writer(plan)
        session.report.note("the prompt is known once it is written; this plan is for the one that is given")
        return None
    return open_chat(plan)


def plan_with_prompt(
    session: Session, request: Request, plan: Plan, components: Components, chat: Chat, settings: EnhanceSettings
) -> tuple[Request, Plan, RunState]:
    """Request and plan with the prompt that the text encoder writes for the given one, with `components` switched to
    it; and the state with the contexts of its text, whose history says what was given."""
    idea = Idea(plan.spec.prompt, settings.instructions, settings.temperature, plan.spec.seeds[0])
    with components.keeping(WRITER):
        timings = session.measuring()
        written = enhance(plan, chat, idea, components, timings)
        # Any run loads the text encoder.
        session.extra_seconds += sum(seconds for name, seconds in timings.seconds().items() if LOAD not in name)
        session.report.note(f"prompt: {written.text}")
        _note_cut(session, written)
        request = replace(request, spec=replace(request.spec, prompt=written.text))
        validate(request.spec)
        with agreed_plan(session, request) as final:
            components.adopt(final)
        start = replace(START, history=({ENHANCED_FROM: idea.text},) * len(final.seeds))
        return request, final, with_contexts(final, components, start, session.report)


def _note_cut(session: Session, written: EnhancedPrompt) -> None:
    if not written.whole:
        session.report.note(f"the prompt ends after {MOST_TOKENS} tokens, the most that are written")
