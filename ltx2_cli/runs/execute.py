"""Execute a request: run the plan, report flaws of its clips, and resume after an interruption."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import monotonic

from ltx2_cli.artifacts.files import Output
from ltx2_cli.artifacts.outputs import Product, check_distinct, outputs, run_file
from ltx2_cli.core.bench import WARM_RUN, perf_facts
from ltx2_cli.core.components import Components
from ltx2_cli.core.encoder_copy import copy_text_encoder
from ltx2_cli.core.preview import Preview
from ltx2_cli.core.programs import forbid_compilation
from ltx2_cli.core.provenance import input_files, source_history
from ltx2_cli.core.report import Timings
from ltx2_cli.core.run import START, open_components, programs, state_from_latents, traced, warm_up
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.saved_run import RunGoal
from ltx2_cli.core.state import RunState, ignore_progress
from ltx2_cli.core.write import write
from ltx2_cli.diffusion.latents import LatentsFile
from ltx2_cli.errors import AbortedRunError, NotFiniteError, RunError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.interrupts import stop_on_signal
from ltx2_cli.models.networks import TEXT_ENCODER
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.plan.stages import InitialLatents
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.auto_duration import check_duration_head, plan_by_prompt
from ltx2_cli.runs.enhance import check_enhancement, plan_with_prompt
from ltx2_cli.runs.latents import check_source
from ltx2_cli.runs.past_times import expected_time, remember
from ltx2_cli.runs.preflight import FIXED_BY_LATENTS, agreed_plan, check_downloads
from ltx2_cli.runs.session import Session
from ltx2_cli.runs.settings import RunSettings


def execute_request(
    session: Session, spec: RunSpec, settings: RunSettings, product: Product, drawn: bool, files: list[Output]
) -> None:
    """Make clips, or only warm up, after reporting the downloads, and the seed if it was `drawn`."""
    request = Request(spec, find_devices(), product=product)
    if not session.dry_run:
        check_downloads(session, request, settings.auto_duration, bool(settings.enhancement))
    with agreed_plan(session, request, drawn) as plan:
        check_distinct(files, input_files(plan))
        head = check_duration_head(session, plan) if settings.auto_duration else None
        chat = check_enhancement(session, plan) if settings.enhancement else None
    if session.dry_run:
        return
    components, start = open_components(plan), START
    with forbid_compilation([]) if settings.no_compile else nullcontext():
        if chat and settings.enhancement:
            request, plan, start = plan_with_prompt(session, request, plan, components, chat, settings.enhancement)
        if head:
            plan, start = plan_by_prompt(session, request, plan, components, start, head)
    if settings.no_compile:
        session.resources.enter_context(forbid_compilation(programs(plan, product)))
    if drawn and not settings.warmup:
        session.report.note(f"seed: {plan.spec.seeds[0]}")
    if not settings.warmup:
        session.report.note(f"time: {expected_time(plan, product)}")
    with traced(settings.profile):
        timings = session.measuring()
        if settings.warmup:
            warm_up(plan, components, timings)
        else:
            goal, keep = RunGoal(product, source=None), (settings.save_run, settings.save_run_every)
            preview = Preview(settings.preview, plan, session.report) if settings.preview else ignore_progress
            path = run_file(plan.spec).path
            execute(session, RunSaver(path, plan, goal, timings, *keep, preview=preview), components, start)
            remember_run(session, plan, product, timings)
        if session.hosts.first and settings.perf_dump:
            timings.write(settings.perf_dump, perf_facts(plan, WARM_RUN))
    seeds = () if settings.warmup else plan.spec.seeds
    session.finish([] if settings.warmup else outputs(plan.spec, product), {"seeds": seeds})
    if TEXT_ENCODER in components.loaded:
        copy_text_encoder(plan, session.report)


def remember_run(session: Session, plan: Plan, product: Product, timings: Timings) -> None:
    """Remember the time of the only run of a process."""
    if session.hosts.first:
        seconds, compiled = monotonic() - session.began - session.extra_seconds, session.compiled
        remember(plan, product, timings, seconds, compiled is None or compiled.compiled_fresh > 0)


def execute(session: Session, saver: RunSaver, components: Components, start: RunState = START) -> None:
    """Run the saver's plan from `start` and show each finished file. Raises `InterruptedRunError` or
    `AbortedRunError` if the run was interrupted and can be resumed."""
    finished = list[Path]()
    with resumable(saver, finished):
        for path, findings in run_plan(saver, components, start):
            session.show(path, findings)
            finished.append(path)


def run_plan(saver: RunSaver, components: Components, start: RunState) -> Iterator[tuple[Path, list[str]]]:
    """Run the saver's plan from `start`: each finished file, and the flaws of its clip."""
    yield from write(saver.plan, components, saver.report, saver.goal.product, start, saver)
    saver.end()


@contextmanager
def resumable(saver: RunSaver, finished: Sequence[Path] = ()) -> Iterator[None]:
    """In the body, signals stop the saver's run after its step, and errors have the command that resumes it.
    Raises `InterruptedRunError` or `AbortedRunError` if it was interrupted and saved, or has `finished` clips."""
    resume = f"`ltx2 resume {saver.path}` goes on"
    try:
        with stop_on_signal(saver.stop):
            yield
    except KeyboardInterrupt:
        if not (saver.kept or finished):
            raise
        hint = resume if saver.kept else f"{len(finished)} of {len(saver.plan.seeds)} are finished"
        raise AbortedRunError("interrupted", hint) from None
    except RunError as error:
        if isinstance(error, NotFiniteError) or not saver.kept:  # the former would come again
            raise
        raise type(error)(str(error).split("\n"), f"{error.hint}; then {resume}") from error


def go_on(
    session: Session, files: Sequence[LatentsFile], spec: RunSpec, product: Product, settings: RunSettings
) -> None:
    """Continue from saved latents, one clip for each file, and show each finished file."""
    source = InitialLatents(files[0].shapes, spec.fps, files[0].keyframes)
    with agreed_plan(session, Request(spec, find_devices(), source, product, fixed=FIXED_BY_LATENTS)) as plan:
        check_distinct(outputs(spec, product), input_files(plan))
        for file in files:
            check_source(file, plan, spec.fps)
    if session.dry_run:
        return
    goal = RunGoal(product, source)
    session.report.note(f"time: {expected_time(plan, product)}")
    timings, first = session.measuring(), not session.shown
    saver = RunSaver(run_file(plan.spec).path, plan, goal, timings, settings.save_run, settings.save_run_every)
    history = tuple(source_history(file, spec.fps) for file in files)
    keyframes = [file.read_keyframes() for file in files if plan.stages[0].source_keyframes]
    start = state_from_latents([file.read() for file in files], history, keyframes)
    execute(session, saver, open_components(plan), start)
    if first:  # the others find jax imported
        remember_run(session, plan, product, timings)
