"""`ltx2 resume`: an unfinished run, from where it was kept to its end. It writes beside its own file, and over nothing
but what it made."""

import os
from collections.abc import Mapping
from os.path import abspath, expanduser, relpath
from pathlib import Path
from typing import Any

from ltx2_cli.cli.execute import OF_RUN, agreed_plan, execute
from ltx2_cli.cli.inspect import ClipInfo, RecordInfo, inspect
from ltx2_cli.cli.options import Resume
from ltx2_cli.cli.session import Session, synchronized
from ltx2_cli.core.run import load
from ltx2_cli.core.run_state import RunCheckpointer, SavedRun, open_saved_run
from ltx2_cli.devices import find_devices
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.phases import CONNECT, ENCODE
from ltx2_cli.estimate.requests import Request
from ltx2_cli.files import Output
from ltx2_cli.outputs import (
    Product,
    check_outputs,
    latents_paths,
    output_paths,
    outputs,
    record_path,
    run_file,
    sheet_path,
    single_specs,
)
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.layers import ASKED, read_text
from ltx2_cli.request.profiles import OUTPUT_KEYS, PROVENANCE, to_yaml
from ltx2_cli.request.spec import NO_CACHE, RunSpec

OPTIONS = {  # by the key of a place: the key and the option that name another
    "output": ("output", "-o FILE"),
    "base_output_directory": ("output", "-o FILE"),
    "save_latents": ("save_latents", "--save-latents FILE"),
}
NO_CONTENT = {*OUTPUT_KEYS, "compile_cache", ASKED, PROVENANCE}  # keys of a record that are no part of what a clip is


def resume(options: Resume, session: Session) -> None:
    """Finish the run and print the paths of what it makes."""
    session.start()
    with synchronized(session.hosts):
        kept = open_saved_run(options.run.expanduser().absolute())
        session.reserve([Output(kept.path, "-o")])
        spec = _spec(options, session, kept)
    plan, product = _plan(session, kept, spec, options.force), kept.goal.product
    files = outputs(plan.spec, product)
    with synchronized(session.hosts) as facts:
        progress = kept.progress(plan)
        facts["how far the run is"] = str(kept.place)
        if session.hosts.first:
            own = own_files(plan.spec, product, progress.written)
            check_outputs(files, [kept.path], options.overwrite, own, "--overwrite")
            session.reserve(files)
    checkpointer = RunCheckpointer(kept.path, plan, kept.goal, session.report, True, options.keep_every, written=0)
    session.finish(files, execute(checkpointer, load(plan), progress))


def _spec(options: Resume, session: Session, kept: SavedRun) -> RunSpec:
    """The request of what is left. Enters the folder in which the run was started, if it is here: relative paths in its
    request begin there."""
    cache = None if options.compile_cache in (None, NO_CACHE) else Path(options.compile_cache)
    files = {"output": options.output, "save_latents": options.save_latents, "compile_cache": cache}
    others = {"sharding": options.sharding, "compile_cache": options.compile_cache}
    given = {key: value for key, value in others.items() if value}
    given |= {key: str(path.expanduser().absolute()) for key, path in files.items() if path}
    if os.path.isdir(kept.folder) and not os.path.samefile(kept.folder, "."):
        session.report.note(f"in {kept.folder}, where it was begun")
        os.chdir(kept.folder)
    return kept.spec({**places(kept.spec({}), kept, given), **given})


def _plan(session: Session, kept: SavedRun, spec: RunSpec, force: bool) -> Plan:
    """The plan of what is left. Raises `UsageError` where versions or devices have changed, unless `force`."""

    def check(plan: Plan) -> None:
        if (changes := kept.changes(plan)) and not force:
            raise UsageError(
                f"{kept.path} was kept elsewhere: {'; '.join(changes)}",
                "--force goes on; the clip may differ in its last bits",
            )

    product, source = kept.goal  # the text was read before it was kept
    request = Request(spec, find_devices(), source, product, frozenset({ENCODE, CONNECT}), OF_RUN)
    return agreed_plan(session, request, check)


def places(spec: RunSpec, kept: SavedRun, given: Mapping[str, str]) -> dict[str, str]:
    """The values of a kept request that name where it writes, where they have changed: each place lies to the run's
    file as it did when the run was started. Places that are `given` are left out.

    Raises `UsageError` for a place outside of the folder of that file.
    """
    here = kept.path.parent.resolve()
    started = os.path.join(kept.folder, run_file(spec).path.parent)
    clips = ["output" if spec.output else "base_output_directory"] if kept.goal.product is Product.clips else []
    moved = {}
    for key in [*clips, *(["save_latents"] if spec.save_latents else [])]:
        before = abspath(os.path.join(kept.folder, expanduser(vars(spec)[key] or "")))
        after = Path(os.path.realpath(here / relpath(before, started)))
        if {key, OPTIONS[key][0]} & given.keys():
            continue
        if not after.is_relative_to(here):
            raise UsageError(
                f"{kept.path} names a place outside of its folder: {before}",
                f"`ltx2 resume {kept.path} {OPTIONS[key][1]}` says where to write instead",
            )
        if str(after) != os.path.realpath(before):
            moved[key] = str(after)
    return moved


def own_files(spec: RunSpec, product: Product, done: int) -> set[Path]:
    """The files that the run made itself: its first `done` clips, files whose record is its request, and the contact
    sheet where all latents are its own."""
    singles, latents = single_specs(spec), latents_paths(spec)
    clips = [(video, record_path(video)) for video in output_paths(spec)]
    own = {file for pair in clips[:done] for file in pair}
    for pair, single in zip(clips[done:], singles[done:], strict=True):
        own |= {file for file in pair if _has_record(file, single)}
    own |= {file for file, single in zip(latents, singles, strict=False) if _has_record(file, single)}
    return own | ({sheet_path(spec)} if product is Product.drafts and own.issuperset(latents) else set())


def _has_record(file: Path, spec: RunSpec) -> bool:
    """Whether the record in a file is this request."""
    try:
        info = inspect(file)
    except UsageError:
        return False
    record = info.record if isinstance(info, ClipInfo | RecordInfo) else None
    return record is not None and _content(record) == _content(read_text(to_yaml(spec), str(file)).values)


def _content(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in NO_CONTENT}
