"""`ltx2 batch`: the clips of many requests, by one process or by several that share them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from ltx2_cli.batch.jobs import STDIN, Line, read_lines
from ltx2_cli.cli.commands import Batch
from ltx2_cli.cli.jobs import DONE, OPEN, Jobs, Result
from ltx2_cli.cli.session import Session
from ltx2_cli.errors import AbortedRunError, InterruptedRunError, UsageError
from ltx2_cli.files import Output


def batch(options: Batch, session: Session) -> None:
    """Make the clips of the jobs in a file, or of those that stdin brings."""
    jobs = Jobs(options, session)
    finish(jobs, make(jobs, read_lines(options.jobs), options.jobs == STDIN))


def make(jobs: Jobs, arriving: Iterable[Sequence[Line]], piped: bool = False) -> bool:
    """Make what of the arriving lines is not done. Whether there was any."""
    options, session, worker = jobs.options, jobs.session, None
    if session.hosts.count > 1:
        hint = "--num-processes 1 on each host; --shard I/N, or nothing, shares the jobs between them"
        raise UsageError("several hosts cannot make a batch together", hint)
    for lines in arriving:
        open_jobs = jobs.read(lines, named=not piped)
        if options.dry_run:
            for job in open_jobs:
                jobs.add(Result(job.line, OPEN, job.clips, job.seed))
        elif open_jobs:
            if worker is None:
                session.start()
                from ltx2_cli.cli.worker import Worker

                worker = Worker(jobs, piped)
            try:
                worker.make(open_jobs)
            except (InterruptedRunError, AbortedRunError) as error:
                done = sum(result.status == DONE for result in jobs.results)
                hint = f"the same command goes on; jobs that are done: {done}"
                raise type(error)(str(error), hint) from error
    return worker is not None


def finish(jobs: Jobs, started: bool) -> None:
    """Print the table. Raises `PartlyFailedError` where jobs failed."""
    jobs.end()
    if started:
        jobs.session.finish(Output(Path(clip), "-o") for clip in jobs.made)
