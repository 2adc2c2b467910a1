"""`ltx2 resume`: finish a run from its .run file."""

import os
from collections.abc import Mapping
from contextlib import chdir
from os.path import abspath, expanduser, relpath
from pathlib import Path

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import Product, check_outputs, outputs, read_files, run_file
from ltx2_cli.core.provenance import environment_changes, input_files, read_provenance
from ltx2_cli.core.run import open_components
from ltx2_cli.core.run_saver import RunSaver
from ltx2_cli.core.saved_run import SavedRun, open_saved_run
from ltx2_cli.errors import UsageError
from ltx2_cli.estimate.alternatives import Request
from ltx2_cli.estimate.phases import CONNECT, ENCODE
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.request.profiles import merge_layers
from ltx2_cli.request.spec import NO_CACHE, RunSpec
from ltx2_cli.request.spelling import option_name
from ltx2_cli.runs.execute import execute
from ltx2_cli.runs.finished_clips import owned_files
from ltx2_cli.runs.preflight import FIXED_BY_RUN, agreed_plan
from ltx2_cli.runs.session import Session, synchronized
from ltx2_cli.runs.trust import check_trust


def resume(session: Session, path: Path, given: Mapping[str, str], allow_changes: bool, every: float | None) -> None:
    """Finish the run in a .run file and print the paths of its files. `given` values override those of its request;
    `every`: seconds between saves, None: as before."""
    session.start()
    with synchronized(session.hosts) as facts:
        kept = open_saved_run(user_path(path).absolute())
        facts["how far the run is"] = str(kept.place)
        session.reserve([Output(kept.path, "-o")])
        names = {"sharding", *(["compile_cache"] if given.get("compile_cache") == NO_CACHE else [])}
        given = {key: text if key in names else str(user_path(text).absolute()) for key, text in given.items()}
        elsewhere = os.path.isdir(kept.folder) and not os.path.samefile(kept.folder, ".")
        if elsewhere:
            session.resources.enter_context(chdir(kept.folder))  # relative paths in its request begin there
        check_trust(merge_layers(given, kept.request), kept.request, session)
        spec = kept.spec({**moved_outputs(kept.spec({}), kept, given), **given})
    product, source = kept.goal  # the text was read before it was kept
    skipped = frozenset({ENCODE, CONNECT})
    request = Request(spec, find_devices(), source, product, skipped, fixed=FIXED_BY_RUN)
    with agreed_plan(session, request) as plan:
        recorded = read_provenance(kept.request.values, str(kept.path))
        if (changes := [*environment_changes(recorded, plan)]) and not allow_changes:
            hint = "--allow-changes goes on; the clip may differ in its last bits"
            raise UsageError(f"{kept.path} was kept elsewhere: {'; '.join(changes)}", hint)
        progress, files = kept.progress(plan), outputs(plan.spec, product)
        if session.hosts.first:
            own = owned_files(plan.spec, product, progress.written)
            reads = [*read_files(plan.spec, kept.path), *input_files(plan)]
            check_outputs(files, reads, session.force, own)
            session.reserve(files)
    if session.dry_run:
        return
    if elsewhere:
        session.report.note(f"in {kept.folder}, where it was begun")
    report, every = session.measuring(), kept.every if every is None else every
    saver = RunSaver(kept.path, plan, kept.goal, report, True, every, written=0)
    execute(session, saver, open_components(plan), progress)
    session.finish(files, {"seeds": plan.spec.seeds})


def moved_outputs(spec: RunSpec, kept: SavedRun, given: Mapping[str, str]) -> dict[str, str]:
    """Changed output paths of a saved request: their location relative to the .run file stays as it was at the start.
    `given` keys are left out. Raises `UsageError` for a path outside of the folder of that file."""
    here = kept.path.parent.resolve()
    started = os.path.join(kept.folder, run_file(spec).path.parent)
    flags = {"save_latents": option_name("save_latents")} if spec.save_latents and "save_latents" not in given else {}
    if kept.goal.product is Product.clips and "output" not in given:
        flags["output" if spec.output else "base_output_directory"] = "-o"
    moved = {}
    for key, flag in flags.items():
        before = abspath(os.path.join(kept.folder, expanduser(vars(spec)[key] or "")))
        after = Path(os.path.realpath(here / relpath(before, started)))
        if not after.is_relative_to(here):
            hint = f"`ltx2 resume {kept.path} {flag} FILE` says where to write instead"
            raise UsageError(f"{kept.path} names a place outside of its folder: {before}", hint)
        if str(after) != os.path.realpath(before):
            moved[key] = str(after)
    return moved
