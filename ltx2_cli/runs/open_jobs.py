"""Open jobs of a batch: checks of each before a run, and the expected time of all."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from ltx2_cli.artifacts.outputs import Product, check_distinct, outputs, run_file
from ltx2_cli.core.provenance import input_files
from ltx2_cli.errors import CommandError, DoesNotFitError, UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.batching import member_plan
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.batch_size import in_batch, kept_batch_size
from ltx2_cli.runs.finished_clips import unfinished_state
from ltx2_cli.runs.jobs import FAILED, OPEN, Job, Jobs, Result
from ltx2_cli.runs.past_times import expected_times
from ltx2_cli.runs.preflight import DryRun
from ltx2_cli.runs.session import Session
from ltx2_cli.units import quantity


def checked(jobs: Jobs, open_jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs that would be made, each reported; the others fail as in a run. Jobs that are planned alike are planned
    once."""
    found = dict[int, CommandError | None]()
    check = refusals(jobs.session)
    for job in open_jobs:
        spec = jobs.spec(job)
        if job.inputs not in found:
            found[job.inputs] = check(spec)
        if error := found[job.inputs] or unfinished_refusal(jobs, job, spec):
            jobs.fail(Result(job.line, FAILED, job.clips, job.seed), error)
        else:
            jobs.add(Result(job.line, OPEN, job.clips, job.seed))
            yield job


def unfinished_refusal(jobs: Jobs, job: Job, spec: RunSpec) -> UsageError | None:
    """The refusal of a job's `.run` file, if any. Reports that the job continues from it, or why it restarts."""
    path = run_file(spec).path
    if jobs.session.force or not path.exists():
        return None
    request, size = Request(spec, find_devices()), kept_batch_size(spec)
    try:
        plan = request.plan()
        plan = member_plan(in_batch(request, size).plan(), plan) if size > 1 else plan
        _, changes = unfinished_state(spec, plan)
    except UsageError as error:
        return error
    becomes = f"is started over: {changes}" if changes else f"goes on from {path}"
    jobs.session.report.note(f"{jobs.unit} {job.line} {becomes}")
    return None


def refusals(session: Session) -> Callable[[RunSpec], CommandError | None]:
    """A function from a request to its refusal, if any. It reports each download and warning once."""
    told = set[str]()

    def refusal(spec: RunSpec) -> CommandError | None:
        try:
            found = DryRun.of(Request(spec, find_devices()), session.typed)
            if found.plan:
                check_distinct(outputs(spec), input_files(found.plan))
        except (UsageError, DoesNotFitError) as error:
            return error
        notes = [f"to download: {quantity(size)} of {name}" for name, size in found.parts.items()]
        for note in [*notes, *(found.plan.warnings if found.plan else ())]:
            if note not in told:
                session.report.note(note)
            told.add(note)
        return None

    return refusal


def expected_time_of_jobs(jobs: Jobs, open_jobs: Sequence[Job]) -> str:
    """The expected time of these jobs, without refused ones."""
    numbers, plans = Counter(job.work for job in open_jobs), []
    for job in {job.work: job for job in open_jobs}.values():
        with suppress(UsageError):
            plans.append((Request(jobs.spec(job), find_devices()).plan(), numbers[job.work]))
    return expected_times(plans, Product.clips)
