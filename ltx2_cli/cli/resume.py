"""`ltx2 resume`: an unfinished run, from where it was kept to its end."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ltx2_cli.cli import options
from ltx2_cli.cli.carry_out import carry_out
from ltx2_cli.cli.flaws import Strict, refuse_flaws
from ltx2_cli.cli.memory import OF_RUN, fitting_plan
from ltx2_cli.cli.options import FILES, KEEP_EVERY, option
from ltx2_cli.cli.telling import report_for, say_end
from ltx2_cli.cli.together import begin, found, in_step
from ltx2_cli.outputs import check_outputs, outputs
from ltx2_cli.platforms import find_devices
from ltx2_cli.spec import NO_CACHE, SpecError
from ltx2_cli.writing import Output, hold

if TYPE_CHECKING:
    from ltx2_cli.core.report import Report
    from ltx2_cli.core.unfinished import Unfinished
    from ltx2_cli.plan import Plan

RESUME_EXAMPLES = r"""[bold]Examples[/bold]

ltx2 generate --prompt "a fox yawns" -o out/fox.mp4 --resumable    # Ctrl-C, or the machine is taken away
ltx2 resume out/fox.run"""


def resume(
    context: typer.Context,
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The .run file beside the clip it makes.", show_default=False)
    ],
    output: Annotated[
        Path | None, option(FILES, "The mp4, in place of the one that was asked for.", "--output", "-o", metavar="FILE")
    ] = None,
    save_latents: options.SaveLatents = None,
    overwrite: Annotated[bool, option(FILES, "Overwrite what other runs left where it writes.", "--overwrite")] = False,
    force: Annotated[bool, option(FILES, "Also with other versions or devices than before.", "--force")] = False,
    sharding: options.Sharding = None,
    strict: Strict = False,
    keep_every: options.KeepEvery = KEEP_EVERY,
    compile_cache: options.CompileCache = None,
    verbose: options.Verbose = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
    coordinator_address: options.CoordinatorAddress = None,
    num_processes: options.NumProcesses = None,
    process_id: options.ProcessId = None,
    initialization_timeout: options.InitializationTimeout = 300,
) -> None:
    """Go on with an unfinished run; it ends with the bytes of one that was never interrupted."""
    hosts = begin(coordinator_address, num_processes, process_id, initialization_timeout)
    report = report_for(context, hosts.first)
    report.note("starting …")
    from ltx2_cli.cli.resumed_files import own_files
    from ltx2_cli.core.compiling import counted
    from ltx2_cli.core.journal import Journal
    from ltx2_cli.core.run import load
    from ltx2_cli.core.unfinished import open_unfinished

    with counted() as count:
        with in_step(hosts) as facts:
            kept = open_unfinished(run.expanduser().absolute())
            context.with_resource(hold([Output(kept.path, "-o")] if hosts.first else []))
            cache = Path(compile_cache) if compile_cache not in (None, NO_CACHE) else None
            given = {"output": output, "save_latents": save_latents, "compile_cache": cache}
            asked = {key: str(path.expanduser().absolute()) for key, path in given.items() if path}
            others = {"sharding": sharding, "compile_cache": compile_cache}
            _enter(kept.folder, report)
            plan = _plan(kept, {key: value for key, value in others.items() if value} | asked, force)
            progress = kept.progress(plan)
            if hosts.first:
                ends = kept.errand.ends
                own = own_files(plan.spec, ends, progress.written)
                check_outputs(outputs(plan.spec, ends), [kept.path], overwrite, own, "--overwrite")
                context.with_resource(hold(outputs(plan.spec, ends)))
            if hosts.count > 1:
                facts |= {**found(plan), "how far the run is": str(kept.place)}
        journal = Journal(kept.path, plan, kept.errand, report, True, keep_every, written=0)
        flaws = carry_out(journal, load(plan), progress)
    say_end(report, [path for path, _ in outputs(plan.spec, kept.errand.ends)], count)
    refuse_flaws(flaws, strict)


def _enter(folder: str, report: "Report") -> None:
    """Go where the run was begun, if that is here: relative paths in its request begin there."""
    if os.path.isdir(folder) and not os.path.samefile(folder, "."):
        report.note(f"in {folder}, where it was begun")
        os.chdir(folder)


def _plan(kept: "Unfinished", asked: dict[str, str], force: bool) -> "Plan":
    """What the run's request means here, changed by what is `asked` for now. Raises `SpecError` where it is not what it
    was, unless `force`, and where it would write elsewhere than beside its file, unless that place is asked for."""
    from ltx2_cli.cli.resumed_files import places
    from ltx2_cli.core.compiling import keep_programs
    from ltx2_cli.forecast.phases import CONNECT, ENCODE
    from ltx2_cli.forecast.requests import Request

    spec = kept.spec({**places(kept.spec({}), kept, asked), **asked})
    keep_programs(spec.compile_cache)
    ends, source = kept.errand  # the text was read before it was kept
    plan = fitting_plan(Request(spec, find_devices(), source, ends, frozenset({ENCODE, CONNECT}), OF_RUN))
    if (changes := kept.changes(plan)) and not force:
        raise SpecError(
            f"{kept.path} was kept elsewhere: {'; '.join(changes)}",
            "--force goes on; the clip may differ in its last bits",
        )
    return plan
