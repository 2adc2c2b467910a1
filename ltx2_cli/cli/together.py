"""One command on several hosts: what one of them refuses none does, and the first speaks for all."""

import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ltx2_cli.interrupts import INTERRUPTED, before_forced_end, end_soon
from ltx2_cli.spec import MAKE_ROOM, FitError, NotFiniteError, RunError, RunSpec, SpecError, StoppedError
from ltx2_cli.validation import random_seed

if TYPE_CHECKING:
    from ltx2_cli.hosts import Hosts
    from ltx2_cli.plan import Plan

FAILED, REFUSED, TOO_LARGE, FLAWED = 1, 2, 3, 4
FINISHED = (0, FLAWED)  # all clips are written
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
Facts = dict[str, str]
Refusal = tuple[int, str, str]  # the exit code, the sentence, the hint
ERRORS: dict[int, type[SpecError | FitError | RunError]] = {REFUSED: SpecError, TOO_LARGE: FitError, FAILED: RunError}


def begin(address: str | None, processes: int | None, process: int | None, timeout: int) -> "Hosts":
    """Meet the other hosts, if there are any. Libraries that connect CPUs talk on stdout, which is for results: from
    then on they are heard on stderr."""
    from ltx2_cli.hosts import end_others, end_with_others, join

    hosts = join(address, processes, process, timeout)
    if hosts.count > 1:
        sys.stdout = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        before_forced_end(end_others)
        end_with_others(end_soon)
    return hosts


@contextmanager
def in_step(hosts: "Hosts") -> Iterator[Facts]:
    """The body is done on every host. Where one refuses, or where they find different facts, all of them end with the
    same exit code, and the first says why: it raises that error of `ERRORS`; an `OSError` becomes a `RunError`."""
    facts: Facts = {}
    if hosts.count == 1:
        yield facts
        return
    cause: SpecError | FitError | RunError | OSError | None = None
    try:
        yield facts
    except (SpecError, FitError, RunError, OSError) as found:
        cause = found
    error = of_system(cause) if isinstance(cause, OSError) else cause
    refusal = error and (_exit_code(error), str(error), error.hint)
    end = _end([json.loads(said) for said in hosts.gather(json.dumps((refusal, facts)))])
    if end is None:
        return
    import jax

    jax.distributed.shutdown()  # here all are: nobody waits for another
    if hosts.first:
        raise end from cause
    sys.exit(_exit_code(end))


def _exit_code(error: SpecError | FitError | RunError) -> int:
    return next(code for code, kind in ERRORS.items() if isinstance(error, kind))


def of_system(error: OSError) -> RunError | SpecError:
    """What the system refused, in a sentence."""
    if error.errno == errno.ENAMETOOLONG:
        return SpecError(f"a name of {len(str(error.filename))} characters is too long for a file", "a shorter name")
    if error.errno == errno.ENOENT and error.filename is None:  # of `os.getcwd`
        return SpecError("the current folder is gone", "cd to one that is there")
    place = f": {error.filename}" if error.filename else ""
    return RunError(f"{error.strerror or error}{place}", MAKE_ROOM if error.errno in FULL else "--debug shows where")


def _end(verdicts: list[tuple[Refusal | None, Facts]]) -> SpecError | FitError | RunError | None:
    """Why the hosts cannot go on, if they cannot."""
    for host, (refusal, _) in enumerate(verdicts):
        if refusal:
            code, sentence, hint = refusal
            return ERRORS[code]((f"host {host}: {sentence}" if host else sentence).split("\n"), hint.split("\n"))
    for host, (_, facts) in enumerate(verdicts):
        for what, value in verdicts[0][1].items():
            if facts.get(what) != value:
                return SpecError(
                    f"the hosts differ: {what} is {value} on host 0 and {facts.get(what)} on host {host}",
                    "start the same command on every host, with the same files; --num-processes 1 runs one alone",
                )
    return None


def asked(spec: RunSpec) -> Facts:
    """What must be the same on every host before they draw a seed."""
    values = asdict(spec).items()
    return {key: ", ".join(map(str, value)) if isinstance(value, tuple) else repr(value) for key, value in values}


def held(files: Iterable[Path]) -> Facts:
    """What these files hold, which must be the same on every host."""
    return {f"what {path.name} holds": _digest(path.read_bytes()) for path in files}


def found(plan: "Plan") -> Facts:
    """What must be the same on every host before they load: what computes, the files' headers, the noise."""
    from importlib.metadata import version

    from ltx2_cli.refiner import holding

    headers: dict[str, object] = {
        name: [(tensor, entry.shape, entry.dtype) for tensor, entry in sorted(files.items())]
        for name, files in plan.checkpoint.files.items()
    }
    headers["lora"] = {name: sorted(tensors) for name, tensors in plan.added.items()}
    noise = Path(plan.spec.noise).expanduser().read_bytes() if plan.spec.noise else b""
    return {
        **{f"version of {package}": version(package) for package in ("ltx2", "jax", "jaxlib")},
        **{f"what {name} holds": _digest(repr(header).encode()) for name, header in headers.items()},
        "what noise holds": _digest(noise),
        "how a second stage's LoRA is held": holding(plan.networks).value,
    }


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def with_common_seed(spec: RunSpec, hosts: "Hosts") -> RunSpec:
    """The request with a seed that the first host draws for all, unless it names one."""
    if spec.seed is not None:
        return spec
    return replace(spec, seed=(int(hosts.gather(str(random_seed(spec)))[0]),))


def part(error: Exception) -> bool:
    """After what all hosts end with alike, such as a request that was agreed on, numbers that all compute, or a stop
    after the same step, let them leave at once; whether the first says it for this one."""
    if not (isinstance(error, SpecError | NotFiniteError | StoppedError) and _are_others()):
        return False
    jax = sys.modules["jax"]
    silent = bool(jax.process_index())
    jax.distributed.shutdown()  # who left earlier would be a failure to the others
    return silent


def leave(code: int) -> NoReturn:
    """End the process at once: Python would take seconds to clear its memory, would wait for a program that is being
    compiled, and after Ctrl-C for ever for a thread of a pool that was being started.

    Where other hosts are finished too, all leave together; after a failure they wait for this one in vain.
    """
    others = _are_others()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before the program began
        stream.flush()
    if others and code in FINISHED:
        sys.exit(code)
    if others and code == INTERRUPTED:
        from ltx2_cli.hosts import end_others

        end_others()
    os._exit(code)


def _are_others() -> bool:
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()
