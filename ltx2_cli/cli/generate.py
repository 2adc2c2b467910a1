"""`ltx2 generate`: from a prompt to a video with sound."""

from pathlib import Path

from ltx2_cli.cli.options import Generate
from ltx2_cli.cli.requests import configured_spec, overrides, prompt_and_seeds
from ltx2_cli.cli.session import Session, request_facts, synchronized, with_common_seed
from ltx2_cli.console import print_out, visible
from ltx2_cli.devices import find_devices
from ltx2_cli.errors import UsageError
from ltx2_cli.files import Output
from ltx2_cli.outputs import (
    Product,
    check_distinct,
    check_outputs,
    check_place,
    outputs,
    read_files,
    run_file,
    with_free_names,
)
from ltx2_cli.request.spec import NO_CACHE, RunSpec

ANYTHING = "a"  # the prompt of a warm-up; every text encoder knows it


def generate(options: Generate, session: Session) -> None:
    """Make the clips and print their paths; or only warm up, or say what would be done."""
    with synchronized(session.hosts) as facts:
        if options.warmup and options.no_compile:
            raise UsageError("--warmup compiles what --no-compile forbids", "leave one of them out")
        if options.stop_after and not options.save_latents:
            raise UsageError("--stop-after writes latents, and no file is named for them", "--save-latents FILE")
        text = prompt_and_seeds(options.prompt, options.seed, options.words or [])
        anything = {"prompt": ANYTHING} if options.warmup else {}
        spec = configured_spec({**anything, **overrides(options, **text)}, options)
        facts |= request_facts(spec)
    random, product = spec.seed is None, Product.drafts if options.stop_after else Product.clips
    spec = with_common_seed(spec, session.hosts)
    with synchronized(session.hosts):
        if session.hosts.first and not options.force:
            spec = with_free_names(spec, product)
        files = _claimed(options, session, spec, product)
    if options.dry_run:
        _dry_run(session, spec, product, random, files)
    else:
        _run(options, session, spec, product, random, files)


def _claimed(options: Generate, session: Session, spec: RunSpec, product: Product) -> list[Output]:
    """All files that this host writes, checked and kept from other processes."""
    traces = [Output(options.profile, "--profile")] if options.profile else []
    for folder, flag in traces:
        check_place(folder, flag, "FOLDER")
    if spec.compile_cache not in (None, NO_CACHE):
        check_place(Path(spec.compile_cache).expanduser(), "--compile-cache", "FOLDER")
    clips = [] if options.warmup else [*outputs(spec, product), run_file(spec)]
    dump = [Output(options.perf_dump, "--perf-dump")] if options.perf_dump else []
    files = [*clips, *dump] if session.hosts.first else []
    reads = [*read_files(spec), *([options.config] if options.config else [])]
    check_outputs(files, reads, options.force, folders=traces)
    if not options.dry_run:
        session.reserve(files)
    return files


def _dry_run(session: Session, spec: RunSpec, product: Product, random: bool, files: list[Output]) -> None:
    """Print what would be done; `random`: another seed will be drawn."""
    from ltx2_cli.cli.plan import dry_run_lines
    from ltx2_cli.estimate.requests import Request

    with synchronized(session.hosts):
        if session.hosts.first:
            lines = dry_run_lines(Request(spec, find_devices(), product=product), random, files)
            print_out("\n".join(map(visible, lines)))


def _run(
    options: Generate, session: Session, spec: RunSpec, product: Product, random: bool, files: list[Output]
) -> None:
    session.start()
    from ltx2_cli.cli.execute import agreed_plan, execute, note_downloads
    from ltx2_cli.core.programs import forbid_compilation
    from ltx2_cli.core.provenance import input_files
    from ltx2_cli.core.report import Timings
    from ltx2_cli.core.run import load, programs, traced, warm_up
    from ltx2_cli.core.run_state import RunCheckpointer, RunGoal
    from ltx2_cli.estimate.requests import Request
    from ltx2_cli.plan.resolve import Plan

    def check(plan: Plan) -> None:
        check_distinct(files, input_files(plan))
        if options.no_compile:
            session.resources.enter_context(forbid_compilation(programs(plan, product)))

    request = Request(spec, find_devices(), product=product)
    note_downloads(session, request)
    plan = agreed_plan(session, request, check)
    components, flaws = load(plan), list[str]()
    if random and not options.warmup:
        session.report.note(f"seed: {plan.spec.seeds[0]}")
    with traced(options.profile):
        timings = Timings(session.report)
        if options.warmup:
            warm_up(plan, components, timings)
        else:
            goal, keep = RunGoal(product, source=None), (options.resumable, options.keep_every)
            flaws = execute(RunCheckpointer(run_file(plan.spec).path, plan, goal, timings, *keep), components)
        if session.hosts.first and options.perf_dump:
            timings.write(options.perf_dump)
    session.finish([] if options.warmup else outputs(plan.spec, product), flaws)
