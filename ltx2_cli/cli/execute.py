"""A command at work: its hosts and its report, the plan that the hosts agree on, the run itself, and what is said at
the end."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from ltx2_cli.cli.multihost import Facts, join_hosts, plan_facts, synchronized
from ltx2_cli.cli.options import SessionOptions
from ltx2_cli.cli.preflight import fitting_plan
from ltx2_cli.console import print_out, reporter
from ltx2_cli.core.report import Report, Silent
from ltx2_cli.errors import AbortedRunError, MediaCheckError, NotFiniteError, RunError, UsageError
from ltx2_cli.files import Output, reserve
from ltx2_cli.interrupts import stop_on_signal

if TYPE_CHECKING:
    from ltx2_cli.core.compiling import CompileStats
    from ltx2_cli.core.components import Components
    from ltx2_cli.core.run_state import RunState
    from ltx2_cli.core.saved_run import RunCheckpointer
    from ltx2_cli.distributed import ProcessGroup
    from ltx2_cli.estimate.requests import Request
    from ltx2_cli.plan.resolve import Plan

STARTED = monotonic()  # when the program was started
MOST = 4  # files that are named; of more their number


@dataclass(frozen=True)
class Session:
    """One command on this host, until its end."""

    hosts: "ProcessGroup"
    report: Report
    resources: ExitStack  # released at the end

    def synchronized(self) -> AbstractContextManager[Facts]:
        """As `multihost.synchronized`, with the hosts of this session."""
        return synchronized(self.hosts)

    def reserve(self, files: Iterable[Output]) -> None:
        """Keep other processes from writing these files until the end. The first host writes."""
        if self.hosts.first:
            self.resources.enter_context(reserve(files, self.report.note))

    def start(self) -> "CompileStats":
        """Import jax; count the programs that are compiled from here on."""
        self.report.note("starting …")
        from ltx2_cli.core.compiling import count_compilations

        return self.resources.enter_context(count_compilations())

    def plan(self, request: "Request", check: "Callable[[Plan], None]") -> "Plan":
        """The plan of a request that fits the devices and passes `check`, the same on every host."""
        from ltx2_cli.core.compiling import enable_compilation_cache

        with self.synchronized() as facts:
            enable_compilation_cache(request.spec.compile_cache)
            plan = fitting_plan(request)
            check(plan)
            facts |= plan_facts(plan) if self.hosts.count > 1 else {}
        return plan

    def finish(
        self, written: Iterable[Path], count: "CompileStats", flaws: Sequence[str] = (), strict: bool = False
    ) -> None:
        """Say what was written, how long it took and how much memory. Raises `MediaCheckError` for flaws, if
        `strict`."""
        names = list(map(str, written))
        files = ", ".join(names) if len(names) <= MOST else f"{len(names)} files"
        seconds = monotonic() - STARTED
        self.report.note(f"{f'wrote {files}' if names else 'done'} in {seconds:.1f} s; {_peak_memory()}; {count}")
        if flaws and strict:
            raise MediaCheckError(". ".join(flaws), "all files are written; without --strict this is no error")


@contextmanager
def open_session(options: SessionOptions) -> Iterator[Session]:
    """Meet the other hosts. The first one reports, as --verbose and --quiet say."""
    hosts = join_hosts(
        options.coordinator_address, options.num_processes, options.process_id, options.initialization_timeout
    )
    if options.verbose and options.quiet:
        raise UsageError("--verbose and --quiet contradict each other", "leave one of them out")
    report = reporter(options.verbose) if hosts.first and not options.quiet else Silent()
    with ExitStack() as resources:
        yield Session(hosts, report, resources)


def execute(checkpointer: "RunCheckpointer", components: "Components", start: "RunState | None" = None) -> list[str]:
    """Run the checkpointer's plan, from `start` if given, and print the path of each finished file. Returns the flaws
    of the clips. Raises `InterruptedRunError` or `AbortedRunError` where the run was interrupted and can be resumed."""
    from ltx2_cli.core.run import START, write

    flaws, resume, finished = list[str](), f"`ltx2 resume {checkpointer.path}` goes on", 0
    try:
        with stop_on_signal(checkpointer.stop):
            for path, findings in write(
                checkpointer.plan, components, checkpointer.report, checkpointer.goal.ends, start or START, checkpointer
            ):
                print_out(str(path))
                finished += 1
                flaws += report_flaws(path, findings, checkpointer.report)
    except KeyboardInterrupt:
        if checkpointer.kept:
            raise AbortedRunError("interrupted", resume) from None
        if finished:
            raise AbortedRunError(
                "interrupted", f"{finished} of {len(checkpointer.plan.spec.seeds)} are finished"
            ) from None
        raise
    except NotFiniteError:
        raise  # it would come again
    except RunError as error:
        if checkpointer.kept:
            raise RunError(str(error), f"{error.hint}; then {resume}") from error
        raise
    checkpointer.end()
    return flaws


def report_flaws(path: Path, findings: Sequence[str], report: Report) -> list[str]:
    """Say what is wrong with the clip in `path`; returns these sentences."""
    flaws = [f"{path}: {finding}" for finding in findings]
    for flaw in flaws:
        report.note(flaw)
    return flaws


def _peak_memory() -> str:
    """The most memory that this process took, and of a device where that is known."""
    import resource

    import jax

    from ltx2_cli.devices import peak_memory

    unit = 1 if sys.platform == "darwin" else 1024
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    device = peak_memory(jax.local_devices())
    return f"at most {host / 1e9:.1f} GB of memory" + (f", {device / 1e9:.1f} GB of a device" if device else "")
