"""Claims: several workers on one folder, each clip made by one of them.

A worker that begins a clip creates the file `CLIP.claim`, which says who it is, renews the time of that file while it
works, and deletes it at the end. A claim is void where its process is known to be dead, or, on another host, where it
was not renewed for a minute. Times are those of the file system: clocks of hosts need not agree.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import TypeGuard
from uuid import uuid4

from ltx2_cli.artifacts.files import ReservedError, read_limited
from ltx2_cli.errors import UsageError, write_error

SUFFIX = ".claim"
VERSION = 1
RENEWED = 10.0  # seconds between two renewals of a claim
VOID = 60.0  # seconds without a renewal after which a claim of another host is void
SETTLED = 0.2  # seconds after which of two processes that replace a claim at once, both see whose it is
MAX_SIZE = 10_000  # bytes
HINT = "one worker makes a clip: end those of another version first, then delete the file"


class ClaimedError(ReservedError):
    """A clip that another worker is making, as far as is known: on another host it may have died a moment ago."""


@dataclass(frozen=True)
class Owner:
    """Who holds a claim."""

    host: str
    namespace: str  # in which process numbers mean the same: boot and container; empty where that is unknown
    process: int
    started: str  # when the process was, so that another one of its number is told from it
    id: str = field(default_factory=lambda: uuid4().hex)
    version: int = VERSION


def this_process() -> Owner:
    """The owner of the claims that this process makes."""
    return Owner(socket.gethostname(), _namespace(), os.getpid(), _started(os.getpid()))


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """The body alone makes the clip of this claim. Raises `ReservedError` where another worker does so, `ClaimedError`
    where that is not certain, and `UsageError` for a claim of another version."""
    owner, over = this_process(), Event()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _take(path, owner)
    except OSError as error:
        raise write_error(f"cannot write {path}: {error.strerror}", error) from error
    thread = Thread(target=_renew, args=(path, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with suppress(OSError):
            if _read(path) == owner:
                path.unlink()


def _take(path: Path, owner: Owner) -> None:
    text = json.dumps(asdict(owner))
    while not _create(path, text):
        try:
            other, age = _read(path), _age(path)
        except FileNotFoundError:  # its owner is done
            continue
        if _is_here(other):
            if _started(other.process) == other.started:
                raise ReservedError(f"process {other.process} is making {path.stem}", "")
        elif age < VOID:
            raise ClaimedError(f"{f'a worker on {other.host}' if other else 'a worker'} is making {path.stem}", "")
        new = path.with_name(f".{owner.id}{SUFFIX}")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
        time.sleep(SETTLED)
        if _read(path) != owner:
            raise ClaimedError(f"another worker is making {path.stem}", "")
        return


def _create(path: Path, text: str) -> bool:
    """Whether there was no such file. On a full disk none is left."""
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink()
                raise
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> Owner | None:
    """None for a claim that is not whole, as it is for a moment when it is created. Raises `UsageError` for one of
    another version, and `FileNotFoundError`."""
    try:
        values = json.loads(read_limited(path, MAX_SIZE, HINT))
        version = values["version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if version != VERSION:
        raise UsageError(f"{path} is a claim of version {version!r}, this ltx2 reads version {VERSION}", HINT)
    try:
        owner = Owner(**values)
    except TypeError:
        return None
    return owner if isinstance(owner.process, int) else None


def _is_here(owner: Owner | None) -> TypeGuard[Owner]:
    """Whether the owner's process number is one of those that are known here."""
    here = socket.gethostname(), _namespace()
    return owner is not None and bool(owner.namespace) and (owner.host, owner.namespace) == here


def _age(path: Path) -> float:
    """Seconds since the file was written or renewed, by the clock of its file system."""
    with tempfile.TemporaryFile(dir=path.parent) as now:
        return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime


def _renew(path: Path, over: Event) -> None:
    while not over.wait(RENEWED):
        with suppress(OSError):  # the folder may come back
            os.utime(path)


def _namespace() -> str:
    """The boot and the container of this process, by Linux; empty elsewhere."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(process: int) -> str:
    """When a process of this host was started, in ticks since its boot; empty if it is not there, or dead."""
    try:
        state, *numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else numbers[18]
