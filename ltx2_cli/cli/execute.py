"""A request carried out: the plan that all hosts agree on, what is downloaded for it, the run itself, and what is wrong
with its clips."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from ltx2_cli.cli.plan import check_published, fitting_plan
from ltx2_cli.cli.session import Session, plan_facts, synchronized
from ltx2_cli.console import print_out
from ltx2_cli.core.components import Components
from ltx2_cli.core.programs import enable_compilation_cache
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import START, write
from ltx2_cli.core.run_state import RunCheckpointer, RunState
from ltx2_cli.errors import AbortedRunError, NotFiniteError, RunError
from ltx2_cli.estimate.requests import Request
from ltx2_cli.interrupts import stop_on_signal
from ltx2_cli.plan.resolve import Plan, missing_downloads
from ltx2_cli.units import quantity
from ltx2_cli.weights.hub import cache_folder, check_disk_space

# What a command cannot change, by dotted key: what saved latents decide, a clip's record, an unfinished run.
OF_LATENTS = frozenset({"height", "width", "num_frames", "num_videos", "model", "recipe"}).__contains__
OF_RECORD = frozenset({"num_videos", "model"}).__contains__
OF_RUN = "sharding".__ne__


def agreed_plan(session: Session, request: Request, check: Callable[[Plan], None]) -> Plan:
    """The plan of a request that fits the devices and passes `check`, the same on every host."""
    with synchronized(session.hosts) as facts:
        enable_compilation_cache(request.spec.compile_cache)
        plan = fitting_plan(request)
        check(plan)
        facts |= plan_facts(plan) if session.hosts.count > 1 else {}
    return plan


def note_downloads(session: Session, request: Request) -> None:
    """Say what is to be downloaded, a line for each repository. Raises `DoesNotFitError` and `UsageError` where there
    is no room for it."""
    with synchronized(session.hosts):
        check_published(request)
        downloads = missing_downloads(request.spec)
        check_disk_space(downloads)
        for repository, files in groupby(downloads, lambda file: file.repository):
            size = quantity(sum(file.size for file in files))
            session.report.note(f"downloading {size} of {repository} into {cache_folder()}")


def execute(checkpointer: RunCheckpointer, components: Components, start: RunState = START) -> list[str]:
    """Run the checkpointer's plan from `start` and print the path of each finished file. Returns the flaws of the
    clips. Raises `InterruptedRunError` or `AbortedRunError` where the run was interrupted and can be resumed."""
    plan, report, goal = checkpointer.plan, checkpointer.report, checkpointer.goal
    flaws, resume, finished = list[str](), f"`ltx2 resume {checkpointer.path}` goes on", 0
    try:
        with stop_on_signal(checkpointer.stop):
            for path, findings in write(plan, components, report, goal.product, start, checkpointer):
                print_out(str(path))
                finished += 1
                flaws += report_flaws(path, findings, report)
    except KeyboardInterrupt:
        if checkpointer.kept:
            raise AbortedRunError("interrupted", resume) from None
        if finished:
            raise AbortedRunError("interrupted", f"{finished} of {len(plan.spec.seeds)} are finished") from None
        raise
    except NotFiniteError:
        raise  # it would come again
    except RunError as error:
        if checkpointer.kept:
            raise RunError(str(error), f"{error.hint}; then {resume}") from error
        raise
    checkpointer.end()
    return flaws


def report_flaws(path: Path, findings: Sequence[str], report: Report) -> list[str]:
    """Say what is wrong with the clip in `path`; returns these sentences."""
    flaws = [f"{path}: {finding}" for finding in findings]
    for flaw in flaws:
        report.note(flaw)
    return flaws
