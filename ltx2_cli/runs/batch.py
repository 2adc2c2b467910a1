"""`ltx2 batch`: the clips of many requests, by one process or by several that share them."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import Product, check_distinct, check_outputs, outputs, run_file
from ltx2_cli.errors import (
    MAKE_ROOM,
    AbortedRunError,
    CommandError,
    DoesNotFitError,
    InterruptedRunError,
    StorageError,
    UsageError,
)
from ltx2_cli.media.contact_sheet import is_contact_sheet
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs.jobs import DONE, FAILED, OPEN, BatchSettings, Job, Jobs, Result
from ltx2_cli.runs.lines import STDIN, Line, read_lines
from ltx2_cli.runs.session import Session
from ltx2_cli.units import quantity


def batch(session: Session, settings: BatchSettings, source: str) -> None:
    """Make the clips of the jobs in a file, or of those that stdin brings."""
    piped = source == STDIN
    reads = [*settings.reads, *([] if piped else [user_path(source)])]
    settings = replace(settings, piped=piped, reads=reads)
    check_input_videos(session, settings, reads)
    jobs = Jobs(session, settings)
    finish(jobs, make(jobs, read_lines(source)))


def check_input_videos(
    session: Session, settings: BatchSettings, reads: Iterable[Path], sheet: Output | None = None, own: bool = False
) -> None:
    """Raise `UsageError` for a sheet or a preview that cannot be written, or is there and is another picture: a preview
    may replace any sheet, a sheet where it is this command's `own`."""
    previews = [Output(settings.preview, "--preview")] if settings.preview else []
    replaced = [file.path for file in previews if is_contact_sheet(file.path)]
    replaced += [sheet.path] if sheet and own else []
    check_outputs([*([sheet] if sheet else []), *previews], reads, session.force, replaced)


def make(jobs: Jobs, arriving: Iterable[Sequence[Line]]) -> bool:
    """Make what of the arriving lines is not done. Whether there was any."""
    session, worker = jobs.session, None
    if session.hosts.count > 1:
        hint = "--num-processes 1 on each host; --shard I/N, or nothing, shares the jobs between them"
        raise UsageError("several hosts cannot make a batch together", hint)
    for lines in arriving:
        open_jobs = jobs.read(lines)
        if open_jobs and worker is None and not session.dry_run:
            session.start()
            from ltx2_cli.runs.worker import Worker

            worker = Worker(jobs)
        if session.dry_run:
            open_jobs = [*checked(jobs, open_jobs)]
        if open_jobs and not jobs.settings.piped:
            session.report.note(f"time: {expected_time(jobs, open_jobs)}")
        if worker and open_jobs:
            try:
                worker.make(open_jobs)
            except (InterruptedRunError, AbortedRunError, StorageError) as error:
                room = f"{MAKE_ROOM}; then " if isinstance(error, StorageError) else ""
                hint = f"{room}the same command goes on; jobs that are done: {jobs.counts[DONE]}"
                raise type(error)(str(error), hint) from error
    return worker is not None


def checked(jobs: Jobs, open_jobs: Sequence[Job]) -> Iterator[Job]:
    """The jobs that would be made, each of which is said to be; the others fail as they would. Of jobs that are planned
    alike, one is."""
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
    """Why the `.run` file of a job would be refused. Says that the job goes on from it, or why it is begun anew."""
    from ltx2_cli.estimate.fit import Request
    from ltx2_cli.parallel.devices import find_devices
    from ltx2_cli.runs.done import unfinished_state

    path = run_file(spec).path
    if jobs.session.force or not path.exists():
        return None
    try:
        _, changes = unfinished_state(spec, Request(spec, find_devices()).plan())
    except UsageError as error:
        return error
    becomes = f"is begun anew: {changes}" if changes else f"goes on from {path}"
    jobs.session.report.note(f"{jobs.unit} {job.line} {becomes}")
    return None


def refusals(session: Session) -> Callable[[RunSpec], CommandError | None]:
    """What finds why a request would be refused, and says once what would be downloaded, and each warning."""
    from ltx2_cli.core.provenance import input_files
    from ltx2_cli.estimate.fit import Request
    from ltx2_cli.parallel.devices import find_devices
    from ltx2_cli.runs.preflight import DryRun

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


def expected_time(jobs: Jobs, open_jobs: Sequence[Job]) -> str:
    """How long these jobs take, but for those that will be refused."""
    from ltx2_cli.estimate.fit import Request
    from ltx2_cli.parallel.devices import find_devices
    from ltx2_cli.runs.past_times import expected_times

    numbers, plans = Counter(job.work for job in open_jobs), []
    for job in {job.work: job for job in open_jobs}.values():
        with suppress(UsageError):
            plans.append((Request(jobs.spec(job), find_devices()).plan(), numbers[job.work]))
    return expected_times(plans, Product.clips)


def finish(jobs: Jobs, started: bool) -> None:
    """Print the table. Raises `PartlyFailedError` where jobs failed."""
    jobs.end()
    if started:
        jobs.session.finish(())  # the clips were named one by one
