"""A request carried out, from its beginning or by `ltx2 resume` from where it was kept: a plan that all hosts agree on,
what is downloaded for it, the run itself, and what is wrong with its clips."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from os.path import abspath, expanduser, relpath
from pathlib import Path
from time import monotonic

import typer
from huggingface_hub import constants

from ltx2_cli.artifacts.files import Output, user_path
from ltx2_cli.artifacts.outputs import (
    Product,
    check_distinct,
    check_outputs,
    outputs,
    read_files,
    run_file,
)
from ltx2_cli.cli.options import MakingOptions
from ltx2_cli.cli.plan import DryRun, check_published, fitting_plan
from ltx2_cli.cli.session import STARTED, Facts, Session, short_digest, synchronized
from ltx2_cli.core.bench import CLIP, perf_facts
from ltx2_cli.core.checkpoint import RunCheckpointer
from ltx2_cli.core.networks import Components
from ltx2_cli.core.preview import Preview
from ltx2_cli.core.programs import enable_compilation_cache, forbid_compilation
from ltx2_cli.core.provenance import environment_changes, input_files, read_provenance, versions
from ltx2_cli.core.report import Timings
from ltx2_cli.core.run import START, load, programs, traced, warm_up
from ltx2_cli.core.saved_run import RunGoal, SavedRun, open_saved_run
from ltx2_cli.core.state import RunState, no_checkpoint
from ltx2_cli.core.write import write
from ltx2_cli.errors import AbortedRunError, NotFiniteError, RunError, UsageError
from ltx2_cli.estimate.fit import Request
from ltx2_cli.estimate.phases import CONNECT, ENCODE
from ltx2_cli.interrupts import stop_on_signal
from ltx2_cli.parallel.devices import find_devices
from ltx2_cli.plan.open import missing_downloads
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import read_asked
from ltx2_cli.request.spec import NO_CACHE, RunSpec
from ltx2_cli.runs.done import owned_files
from ltx2_cli.runs.past_times import expected_time, remember
from ltx2_cli.runs.trust import check_trust
from ltx2_cli.units import quantity
from ltx2_cli.weights.hub import check_disk_space

# What a command cannot change, by dotted key: what saved latents decide, a clip's record, an unfinished run.
OF_LATENTS = frozenset({"height", "width", "num_frames", "num_videos", "model", "recipe"}).__contains__
OF_RECORD = frozenset({"num_videos", "model"}).__contains__
OF_RUN = "sharding".__ne__


def plan_facts(plan: Plan) -> Facts:
    """Facts of a plan, before weights are loaded: versions, the weight files' headers, the noise."""
    headers: dict[str, object] = {
        name: [(tensor, entry.shape, entry.dtype) for tensor, entry in sorted(files.items())]
        for name, files in plan.checkpoint.files.items()
    }
    headers["lora"] = {name: sorted(tensors) for name, tensors in plan.lora_deltas.items()}
    contents = {name: repr(header).encode() for name, header in headers.items()}
    contents["noise"] = user_path(plan.spec.initial_noise).read_bytes() if plan.spec.initial_noise else b""
    contents["pictures"] = "".join(picture.sha256 for picture in plan.pictures).encode()
    contents["the sound"] = plan.sound.sha256.encode() if plan.sound else b""
    facts = {f"what {name} holds": short_digest(content) for name, content in contents.items()}
    return {**{f"version of {package}": version for package, version in versions().items()}, **facts}


@contextmanager
def agreed_plan(session: Session, request: Request, drawn: bool = False) -> Iterator[Plan]:
    """The plan of a request that fits the devices, and that the body may refuse: the same on every host. A dry run
    prints it afterwards, with the seed as a random one if it was `drawn`; it ends here where networks must be here
    first."""
    with synchronized(session.hosts) as facts:
        if session.options.dry_run:
            preview = DryRun.of(request)
            if preview.plan is not None:
                yield preview.plan
            preview.print(session, drawn)
            if preview.plan is None:
                raise typer.Exit
            return
        enable_compilation_cache(request.spec.compile_cache)
        began = monotonic()
        plan = fitting_plan(request)
        if (size := session.downloads) and (seconds := monotonic() - began):
            session.report.note(f"downloaded {quantity(size)} in {seconds:.0f} s, {quantity(size / seconds)}/s")
            session.fetching += seconds
        session.downloads = 0
        yield plan
        facts |= plan_facts(plan) if session.hosts.count > 1 else {}


def check_downloads(session: Session, request: Request) -> None:
    """Say what will be downloaded. Raises `CommandError` where that does not fit the devices or the disk."""
    with synchronized(session.hosts):
        check_published(request)
        downloads = missing_downloads(request.spec)
        check_disk_space(downloads)
        session.downloads = sum(file.size for file in downloads)
        for repository, parts in groupby(downloads, lambda file: file.repository):
            size = quantity(sum(part.size for part in parts))
            session.report.note(f"downloading {size} of {repository} into {constants.HF_HUB_CACHE}")


def run(
    options: MakingOptions, session: Session, spec: RunSpec, product: Product, drawn: bool, files: list[Output]
) -> None:
    """Make clips, or only warm up, after what has to be downloaded was said, and the seed if it was `drawn`."""
    request = Request(spec, find_devices(), product=product)
    if not options.dry_run:
        check_downloads(session, request)
    with agreed_plan(session, request, drawn) as plan:
        check_distinct(files, input_files(plan))
    if options.dry_run:
        return
    if options.no_compile:
        session.resources.enter_context(forbid_compilation(programs(plan, product)))
    components = load(plan)
    if drawn and not options.warmup:
        session.report.note(f"seed: {plan.spec.seeds[0]}")
    if not options.warmup:
        session.report.note(f"time: {expected_time(plan, product)}")
    with traced(options.profile):
        timings = session.measuring()
        if options.warmup:
            warm_up(plan, components, timings)
        else:
            goal, keep = RunGoal(product, source=None), (options.save_run, options.checkpoint_every)
            preview = Preview(options.preview, plan, session.report) if options.preview else no_checkpoint
            path = run_file(plan.spec).path
            execute(session, RunCheckpointer(path, plan, goal, timings, *keep, preview=preview), components)
            remember_run(session, plan, product, timings)
        if session.hosts.first and options.perf_dump:
            timings.write(options.perf_dump, perf_facts(plan, CLIP))
    seeds = () if options.warmup else plan.spec.seeds
    session.finish([] if options.warmup else outputs(plan.spec, product), {"seeds": seeds})


def remember_run(session: Session, plan: Plan, product: Product, timings: Timings) -> None:
    """Keep how long a run took, of a process that made no other."""
    if session.hosts.first:
        seconds, compiled = monotonic() - STARTED - session.fetching, session.compiled
        remember(plan, product, timings, seconds, compiled is None or compiled.anew > 0)


def execute(session: Session, checkpointer: RunCheckpointer, components: Components, start: RunState = START) -> None:
    """Run the checkpointer's plan from `start` and show each finished file. Raises `InterruptedRunError` or
    `AbortedRunError` where the run was interrupted and can be resumed."""
    finished = list[Path]()
    with resumable(checkpointer, finished):
        for path, findings in carried_out(checkpointer, components, start):
            session.show(path, findings)
            finished.append(path)


def carried_out(
    checkpointer: RunCheckpointer, components: Components, start: RunState
) -> Iterator[tuple[Path, list[str]]]:
    """Run the checkpointer's plan from `start`: each finished file, and what is wrong with the clip in it."""
    yield from write(checkpointer.plan, components, checkpointer.report, checkpointer.goal.product, start, checkpointer)
    checkpointer.end()


@contextmanager
def resumable(checkpointer: RunCheckpointer, finished: Sequence[Path] = ()) -> Iterator[None]:
    """In the body, signals stop the checkpointer's run after its step, and errors say how it can be resumed. Raises
    `InterruptedRunError` or `AbortedRunError` where it was interrupted and is kept, or has `finished` clips."""
    resume = f"`ltx2 resume {checkpointer.path}` goes on"
    try:
        with stop_on_signal(checkpointer.stop):
            yield
    except KeyboardInterrupt:
        if not (checkpointer.kept or finished):
            raise
        hint = resume if checkpointer.kept else f"{len(finished)} of {len(checkpointer.plan.seeds)} are finished"
        raise AbortedRunError("interrupted", hint) from None
    except RunError as error:
        if isinstance(error, NotFiniteError) or not checkpointer.kept:  # the former would come again
            raise
        raise type(error)(str(error).split("\n"), f"{error.hint}; then {resume}") from error


def resume(session: Session, path: Path, given: Mapping[str, str], allow_changes: bool, every: float | None) -> None:
    """Finish the run that is kept in a file and print the paths of what it makes. `given` values of its request take
    the place of those that are kept; it is saved `every` so many seconds, None: as before."""
    session.start()
    with synchronized(session.hosts) as facts:
        kept = open_saved_run(user_path(path).absolute())
        facts["how far the run is"] = str(kept.place)
        session.reserve([Output(kept.path, "-o")])
        names = {"sharding", *(["compile_cache"] if given.get("compile_cache") == NO_CACHE else [])}
        given = {key: text if key in names else str(user_path(text).absolute()) for key, text in given.items()}
        elsewhere = os.path.isdir(kept.folder) and not os.path.samefile(kept.folder, ".")
        if elsewhere:
            os.chdir(kept.folder)  # relative paths in its request begin there
        check_trust(read_asked(given, kept.request), kept.request, session.options)
        spec = kept.spec({**places(kept.spec({}), kept, given), **given})
    product, source = kept.goal  # the text was read before it was kept
    request = Request(spec, find_devices(), source, product, frozenset({ENCODE, CONNECT}), OF_RUN)
    with agreed_plan(session, request) as plan:
        recorded = read_provenance(kept.request.values, str(kept.path))
        if (changes := [*environment_changes(recorded, plan)]) and not allow_changes:
            hint = "--allow-changes goes on; the clip may differ in its last bits"
            raise UsageError(f"{kept.path} was kept elsewhere: {'; '.join(changes)}", hint)
        progress, files = kept.progress(plan), outputs(plan.spec, product)
        if session.hosts.first:
            own = owned_files(plan.spec, product, progress.written)
            reads = [*read_files(plan.spec, kept.path), *input_files(plan)]
            check_outputs(files, reads, session.options.force, own)
            session.reserve(files)
    if session.options.dry_run:
        return
    if elsewhere:
        session.report.note(f"in {kept.folder}, where it was begun")
    report, every = session.measuring(), kept.every if every is None else every
    checkpointer = RunCheckpointer(kept.path, plan, kept.goal, report, True, every, written=0)
    execute(session, checkpointer, load(plan), progress)
    session.finish(files, {"seeds": plan.spec.seeds})


def places(spec: RunSpec, kept: SavedRun, given: Mapping[str, str]) -> dict[str, str]:
    """The values of a kept request that name where it writes, where they have changed: each place lies to the run's
    file as it did when the run was started. Those that are `given` are left out. Raises `UsageError` for a place
    outside of the folder of that file."""
    here = kept.path.parent.resolve()
    started = os.path.join(kept.folder, run_file(spec).path.parent)
    options = {"save_latents": "--save-latents"} if spec.save_latents and "save_latents" not in given else {}
    if kept.goal.product is Product.clips and "output" not in given:
        options["output" if spec.output else "base_output_directory"] = "-o"
    moved = {}
    for key, option in options.items():
        before = abspath(os.path.join(kept.folder, expanduser(vars(spec)[key] or "")))
        after = Path(os.path.realpath(here / relpath(before, started)))
        if not after.is_relative_to(here):
            hint = f"`ltx2 resume {kept.path} {option} FILE` says where to write instead"
            raise UsageError(f"{kept.path} names a place outside of its folder: {before}", hint)
        if str(after) != os.path.realpath(before):
            moved[key] = str(after)
    return moved
