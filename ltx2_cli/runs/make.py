"""Make the clips of a request: check the output files before jax is imported."""

from dataclasses import replace
from pathlib import Path

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import (
    Product,
    check_outputs,
    check_place,
    outputs,
    read_files,
    run_file,
    with_free_names,
)
from ltx2_cli.errors import UsageError
from ltx2_cli.request.spec import NO_CACHE, RunSpec
from ltx2_cli.request.spelling import option_name
from ltx2_cli.request.validation import random_seed
from ltx2_cli.runs.session import Session, synchronized
from ltx2_cli.runs.settings import RunSettings


def make(
    session: Session, spec: RunSpec, settings: RunSettings, product: Product = Product.clips, config: Path | None = None
) -> None:
    """Execute a request that is the same on all hosts, or print a dry run; `config` is the file it was read from.
    Raises `UsageError` if its files cannot be written, `DoesNotFitError` before anything is downloaded."""
    with synchronized(session.hosts) as facts:
        if settings.preview and not spec.running.video:
            hint = f"leave out --preview, or {option_name('streams/audio')}"
            raise UsageError("--preview shows the video, and none is made", hint)
        facts |= {"preview": str(settings.preview)}  # all hosts make it together
    random = spec.seed is None
    if random:  # the first host draws a seed for all
        spec = replace(spec, seed=(int(session.hosts.allgather_text(str(random_seed(spec)))[0]),))
    with synchronized(session.hosts):
        if session.hosts.first:
            spec = with_free_names(spec, product, session.force)
        traces = [Output(settings.profile, "--profile")] if settings.profile else []
        for folder, flag in traces:
            check_place(folder, flag, "FOLDER")
        if spec.compile_cache not in (None, NO_CACHE):
            check_place(user_path(spec.compile_cache), option_name("compile_cache"), "FOLDER")
        clips = [] if settings.warmup else [*outputs(spec, product), run_file(spec)]
        others = {"--perf-dump": settings.perf_dump, "--preview": settings.preview}
        files = [*clips, *(Output(path, flag) for flag, path in others.items() if path)] if session.hosts.first else []
        check_outputs(files, read_files(spec, config), session.force, folders=traces)
        session.reserve(files)
    session.start()
    from ltx2_cli.runs.execute import execute_request

    execute_request(session, spec, settings, product, random, files)
