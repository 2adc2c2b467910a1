"""Runs from Python, as on the command line: memory is checked before a download, files are locked, each clip has a
record beside it, and an unfinished run can be resumed."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from ltx2_cli.artifacts.outputs import Product
from ltx2_cli.core.report import Report
from ltx2_cli.core.run import SILENT
from ltx2_cli.estimate.fit import in_python
from ltx2_cli.parallel.hosts import ProcessGroup
from ltx2_cli.request.spec import RunSpec
from ltx2_cli.runs import batch, resume
from ltx2_cli.runs.job_lines import Line
from ltx2_cli.runs.jobs import BatchSettings, Jobs, Result
from ltx2_cli.runs.make import make
from ltx2_cli.runs.session import Session, open_session
from ltx2_cli.runs.settings import RunSettings


def run_request(
    spec: RunSpec, settings: RunSettings | None = None, *, force: bool = False, report: Report = SILENT
) -> list[Path]:
    """Make the clips of a request and return their paths. `force` overwrites existing files. Raises `UsageError` for a
    request that cannot be met, `DoesNotFitError` before anything is downloaded or loaded, `RunError` for a failure, and
    after an interruption `AbortedRunError` if its .run file exists, else `KeyboardInterrupt`."""
    with _session(report, force=force) as session:
        make(session, spec, settings or RunSettings(), Product.clips)
        return session.shown


def resume_run(
    path: Path,
    changes: Mapping[str, str] | None = None,
    *,
    allow_changes: bool = False,
    trust: bool = False,
    force: bool = False,
    report: Report = SILENT,
) -> list[Path]:
    """Finish an unfinished run from its .run file, with the bytes of an uninterrupted run, and return the paths of its
    remaining files. `changes` may have `output`, `save_latents`, `sharding` and `compile_cache`. Raises as
    `run_request`, and `UsageError` for other versions or devices without `allow_changes`, and for unknown files that
    the run names without `trust`."""
    with _session(report, force=force, trust=trust) as session:
        resume.resume(session, path, changes or {}, allow_changes, None)
        return session.shown


def run_jobs(
    jobs: Iterable[str | Mapping[str, Any]],
    settings: BatchSettings | None = None,
    *,
    force: bool = False,
    report: Report = SILENT,
) -> Sequence[Result]:
    """Make the clips of many requests with one load of the networks, each a prompt or the values of a request by their
    keys. Returns the result of each: `status` is `done`, `skipped` if the clip already exists, `elsewhere` if another
    process makes it, or `failed` with an `error`. Raises `UsageError` if two jobs name one clip, and the errors that
    end a batch: a full disk, an interruption."""
    values = [{"prompt": job} if isinstance(job, str) else job for job in jobs]
    lines = [Line(number, json.dumps(job, default=str), "job") for number, job in enumerate(values, 1)]
    with _session(report, force=force) as session:
        made = Jobs(session, settings or BatchSettings())
        batch.make_jobs(made, [lines])
        return sorted(made.results, key=lambda result: result.line)


@contextmanager
def _session(report: Report, **settings: bool) -> Iterator[Session]:
    """A session that prints nothing."""
    hosts = ProcessGroup(jax.process_index(), jax.process_count())
    with open_session(hosts, report, in_python, printing=False, **settings) as session:
        yield session
