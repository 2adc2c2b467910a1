"""A running command, on one or several hosts: a refusal on one host stops all, the first host writes files and
messages, and all end together."""

import errno
import hashlib
import json
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NoReturn

from ltx2_cli.artifacts.files import Output, reserve
from ltx2_cli.console import print_made
from ltx2_cli.core.report import Report, Timings
from ltx2_cli.errors import (
    DISK_FULL,
    MAKE_ROOM,
    STORAGE,
    CommandError,
    DoesNotFitError,
    InterruptedRunError,
    MediaCheckError,
    NotFiniteError,
    RunError,
    UsageError,
    write_error,
)
from ltx2_cli.interrupts import INTERRUPTED
from ltx2_cli.parallel.devices import find_devices, peak_memory
from ltx2_cli.request.spec import RunSpec

if TYPE_CHECKING:
    from ltx2_cli.core.programs import CompileStats
    from ltx2_cli.estimate.fit import Typed
    from ltx2_cli.parallel.hosts import ProcessGroup

STARTED = monotonic()  # when the program was started
MOST_FLAWS = 1000  # remembered
MOST_FILES = 4  # files named in the message; of more, their number
FINISHED = (0, MediaCheckError.exit_code)  # all clips are written
REFUSALS: dict[int, type[CommandError]] = {error.exit_code: error for error in (UsageError, DoesNotFitError, RunError)}
Facts = dict[str, str]


class DryRunEndError(Exception):
    """The end of a dry run without a plan, because networks must be downloaded first. It is no failure."""


@dataclass
class Session:
    """One command on this host, or one call from Python, until its end."""

    hosts: "ProcessGroup"
    report: Report
    typed: "Typed"  # spelling of an alternative that fits
    resources: ExitStack  # released at the end
    force: bool = False  # existing files are overwritten
    trust: bool = False  # files named by a record are used
    dry_run: bool = False
    strict: bool = False  # flaws are an error
    as_json: bool = False  # one result instead of paths
    printing: bool = True
    began: float = field(default_factory=monotonic)
    compiled: "CompileStats | None" = None
    flaws: list[str] = field(default_factory=list)  # of the finished clips
    files: list[Output] = field(default_factory=list)  # output files
    timings: list[Timings] = field(default_factory=list)  # of its runs
    shown: list[Path] = field(default_factory=list)  # the finished files
    download_bytes: int = 0  # of reported downloads
    extra_seconds: float = 0.0  # of downloads, and of prompts that were written: other runs do without

    def reserve(self, files: Iterable[Output]) -> None:
        """Keep other processes from writing these files until the end. The first host writes; a dry run does not."""
        self.files += (files := list(files))
        if self.hosts.first and not self.dry_run:
            self.resources.enter_context(reserve(files, self.report.note))

    def start(self) -> None:
        """Import jax and find the devices; count the programs that are compiled from here on."""
        with synchronized(self.hosts), self.report.activity("start"):
            from ltx2_cli.core.programs import count_compilations

            find_devices()
        self.compiled = self.resources.enter_context(count_compilations())

    def measuring(self) -> Timings:
        """The report, with the times of one run, for the result."""
        self.timings.append(timings := Timings(self.report))
        return timings

    def show(self, path: Path, findings: Sequence[str] = ()) -> None:
        """Print the path of a finished file; report the flaws of its clip."""
        self.shown.append(path)
        if not self.as_json:
            self.print(str(path))
        self.note_flaws(path, findings)

    def note_flaws(self, path: Path, findings: Sequence[str]) -> None:
        """Report and remember the flaws of a clip."""
        for finding in findings:
            flaw = f"{path}: {finding}"
            self.report.note(flaw)
            if len(self.flaws) < MOST_FLAWS:  # a pipe may never end
                self.flaws.append(flaw)

    def finish(self, written: Iterable[Output], result: Mapping[str, object] | None = None) -> None:
        """Report the written files, time and memory; with --json, print the result. Raises `MediaCheckError` for flaws,
        with --strict."""
        names = [str(file.path) for file in written]
        files = ", ".join(names) if len(names) <= MOST_FILES else f"{len(names)} files"
        host, device = peak_bytes()
        memory = f"{host / 1e9:.1f} GB of memory" + (f", {device / 1e9:.1f} GB of a device" if device else "")
        done = f"{f'wrote {files}' if names else 'done'} in {monotonic() - self.began:.1f} s"
        if result is not None and self.as_json:
            self._print_result(result)
        self.report.note(f"{done}; at most {memory}; {self.compiled}")
        if self.flaws and self.strict:
            raise MediaCheckError(". ".join(self.flaws), "all files are written; without --strict this is no error")

    def _print_result(self, result: Mapping[str, object]) -> None:
        """One line of JSON, on the first host: files, seconds in all and by activity, peaks of memory in bytes, flaws,
        and the command's own `result`."""
        host, device = peak_bytes()
        activities = dict[str, float]()
        for name, seconds in chain.from_iterable(timings.seconds().items() for timings in self.timings):
            activities[name] = activities.get(name, 0.0) + seconds
        facts = {
            "paths": [str(path) for path in self.shown],
            **result,
            "seconds": round(monotonic() - self.began, 3),
            "stages": {name: round(seconds, 3) for name, seconds in activities.items()},
            "peak_memory": {"host": host, "device": device},
            "flaws": self.flaws,
        }
        if self.hosts.first:
            self.print(json.dumps(facts, ensure_ascii=False))

    def print(self, text: str) -> None:
        """Print the paths of finished files."""
        if self.printing:
            print_made(text)


def peak_bytes() -> tuple[int, int | None]:
    """Peak memory of this process, and of one of its devices if that reports it."""
    import jax

    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return host, peak_memory(jax.local_devices())


@contextmanager
def open_session(hosts: "ProcessGroup", report: Report, typed: "Typed", **settings: Any) -> Iterator[Session]:
    """A session with these fields."""
    with ExitStack() as resources, suppress(DryRunEndError):
        yield Session(hosts, report, typed, resources, **settings)
        report.flush()


@contextmanager
def synchronized(hosts: "ProcessGroup") -> Iterator[Facts]:
    """Run the body on every host, and continue together. If one host refuses, or the facts of hosts differ, all end
    with the same exit code, and the first host raises the error: a `UsageError`, `DoesNotFitError` or `RunError`; an
    `OSError` becomes one of them."""
    facts, cause = Facts(), None
    if hosts.count == 1:
        yield facts
        return
    try:
        yield facts
    except (UsageError, DoesNotFitError, RunError, OSError) as caught:
        cause = caught
    error = system_error(cause) if isinstance(cause, OSError) else cause
    refusal = error and (error.exit_code, str(error), error.hint)
    failure = _failure([json.loads(answer) for answer in hosts.allgather_text(json.dumps((refusal, facts)))])
    if failure is None:
        return
    import jax

    jax.distributed.shutdown()  # all hosts are here: none waits for another
    if hosts.first:
        raise failure from cause
    sys.exit(failure.exit_code)


def _failure(answers: list[tuple[tuple[int, str, str] | None, Facts]]) -> CommandError | None:
    """The first refusal, or the first difference between facts, of all hosts' answers."""
    for host, (refusal, _) in enumerate(answers):
        if refusal:
            code, sentence, hint = refusal
            return REFUSALS[code]((f"host {host}: {sentence}" if host else sentence).split("\n"), hint.split("\n"))
    hint = "start the same command on every host, with the same files; --num-processes 1 runs one alone"
    for host, (_, facts) in enumerate(answers):
        for name, value in answers[0][1].items():
            if (other := facts.get(name)) != value:
                return UsageError(f"the hosts differ: {name} is {value} on host 0 and {other} on host {host}", hint)
    return None


def system_error(error: OSError) -> RunError | UsageError:
    """An error of the operating system, as a sentence."""
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"a name of {len(str(error.filename))} characters is too long for a file", "a shorter name")
    if error.errno == errno.ENOENT and error.filename is None:  # of `os.getcwd`
        return UsageError("the current folder is gone", "cd to one that is there")
    place = f": {error.filename}" if error.filename else ""
    hint = MAKE_ROOM if error.errno in (*DISK_FULL, *STORAGE) else "--debug shows where"
    return write_error(f"{error.strerror or error}{place}", error, hint)


def request_facts(spec: RunSpec) -> Facts:
    """Facts of a request, before a seed is drawn."""
    facts = asdict(spec).items()
    return {key: ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value) for key, value in facts}


def file_facts(files: Iterable[Path]) -> Facts:
    """Facts of files: a hash of their content."""
    return {f"content of {path.name}": short_digest(path.read_bytes()) for path in files}


def short_digest(content: bytes) -> str:
    """A short hash of a content."""
    return hashlib.sha256(content).hexdigest()[:8]


def leave_quietly(error: Exception) -> bool:
    """Disconnect from the other hosts after an error that all have: of the agreed request, of numbers that all compute,
    or a stop after the same step. Returns whether the first host reports it for this one."""
    if not (isinstance(error, UsageError | NotFiniteError | InterruptedRunError) and _is_distributed()):
        return False
    jax = sys.modules["jax"]
    silent = bool(jax.process_index())
    jax.distributed.shutdown()  # a host that leaves without this is a failure to the others
    return silent


def exit_now(code: int) -> NoReturn:
    """End the process at once. Python would take seconds to free its memory, would wait for a running compilation, and
    after Ctrl-C could wait forever for a thread pool. Hosts that have finished disconnect together; after a failure
    they would wait in vain."""
    distributed = _is_distributed()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before the program began
        stream.flush()
    if distributed and code in FINISHED:
        sys.exit(code)
    if distributed and code == INTERRUPTED:
        from ltx2_cli.parallel.hosts import end_others

        end_others()
    os._exit(code)


def _is_distributed() -> bool:
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()
