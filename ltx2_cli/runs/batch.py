"""`ltx2 batch`: the clips of many requests, made by one or several processes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import check_outputs
from ltx2_cli.errors import (
    MAKE_ROOM,
    AbortedRunError,
    InterruptedRunError,
    StorageError,
    UsageError,
)
from ltx2_cli.media.contact_sheet import is_contact_sheet
from ltx2_cli.runs.job_lines import STDIN, Line, read_lines
from ltx2_cli.runs.jobs import DONE, BatchSettings, Jobs
from ltx2_cli.runs.session import Session


def batch(session: Session, settings: BatchSettings, source: str) -> None:
    """Make the clips of the jobs in a file or from stdin."""
    piped = source == STDIN
    reads = [*settings.reads, *([] if piped else [user_path(source)])]
    settings = replace(settings, piped=piped, reads=reads)
    check_image_outputs(session, settings, reads)
    jobs = Jobs(session, settings)
    finish_jobs(jobs, make_jobs(jobs, read_lines(source)))


def check_image_outputs(
    session: Session, settings: BatchSettings, reads: Iterable[Path], sheet: Output | None = None, own: bool = False
) -> None:
    """Raise `UsageError` for a sheet or preview that cannot be written or would overwrite another image. A preview may
    replace any sheet; a sheet one of its `own` command."""
    previews = [Output(settings.preview, "--preview")] if settings.preview else []
    replaced = [file.path for file in previews if is_contact_sheet(file.path)]
    replaced += [sheet.path] if sheet and own else []
    check_outputs([*([sheet] if sheet else []), *previews], reads, session.force, replaced)


def make_jobs(jobs: Jobs, arriving: Iterable[Sequence[Line]]) -> bool:
    """Make the unfinished jobs of the arriving lines. Returns whether there was any."""
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
        if open_jobs:
            from ltx2_cli.runs import open_jobs as planned  # after the start: it imports jax

            open_jobs = [*planned.checked(jobs, open_jobs)] if session.dry_run else open_jobs
        if open_jobs and not jobs.settings.piped:
            session.report.note(f"time: {planned.expected_time_of_jobs(jobs, open_jobs)}")
        if worker and open_jobs:
            try:
                worker.make(open_jobs)
            except (InterruptedRunError, AbortedRunError, StorageError) as error:
                room = f"{MAKE_ROOM}; then " if isinstance(error, StorageError) else ""
                hint = f"{room}the same command goes on; jobs that are done: {jobs.counts[DONE]}"
                raise type(error)(str(error), hint) from error
    if worker:
        worker.end()
    return worker is not None


def finish_jobs(jobs: Jobs, started: bool) -> None:
    """Print the table. Raises `PartlyFailedError` if jobs failed."""
    jobs.end()
    if started:
        jobs.session.finish(())  # the clips were named one by one
