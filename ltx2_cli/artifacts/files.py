"""Reading with limits; writing whole files, each by one process at a time.

A process that writes a file holds the system's lock on `.partial-<hash of its name>` beside it, which network file
systems pass on to other hosts, and which ends with its process, however that ends. Content that is not whole yet is
called `.partial-<hash>-…`. Where nobody holds the lock, the next process that writes into the folder deletes it.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import NamedTuple
from uuid import uuid4

from ltx2_cli.errors import UsageError, write_error

LOCK_NAME = re.compile(r"\.partial-[0-9a-f]{12}(?=-|$)")
CLEANING = 0.1  # seconds for which at most a process holds the lock of a dead one, or one that it takes for dead
UMASK = os.umask(0o077)
os.umask(UMASK)


def user_path(path: str | Path) -> Path:
    """A path as it was typed, with the home folder for `~`; that of nobody (`~name`) stays, and is not found."""
    return Path(os.path.expanduser(path))


def refuse_special(path: Path, hint: str) -> None:
    """Raise `UsageError` for a folder, a pipe, a socket or a device, whose reading would block or never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is a {'folder' if path.is_dir() else 'pipe or a device'}, not a file", hint)


def read_limited(path: Path, limit: int, hint: str) -> bytes:
    """The content of a file of at most `limit` bytes. Raises `UsageError` for other files, `OSError` as `open`."""
    refuse_special(path, hint)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{path} has more than {limit:,} bytes", hint)
    return content


class ReservedError(UsageError):
    """A file that another process is writing."""


class Output(NamedTuple):
    """A file or folder that a command writes, and the option that names it."""

    path: Path
    option: str


def named_by(option: str, name: str) -> str:
    """What to type for another file: the option, or `--set KEY=`, and a name."""
    return f"{option}{'' if option.endswith('=') else ' '}{name}"


@dataclass
class _Lock:
    """The lock of a name, as long as this process holds it."""

    path: Path
    file: int | None  # None: this file system has no locks
    new_folders: list[Path]  # made for it, the innermost first
    holders: int = 0

    def release(self) -> None:
        """Delete the lock file, and new folders that are still empty."""
        if self.file is not None:
            _delete(self.path)  # unless it is another user's, as in /tmp
            os.close(self.file)
            self.file = None
        with suppress(OSError):
            for folder in self.new_folders:
                folder.rmdir()  # refused for one that holds anything


_mutex = RLock()
_locks: dict[Path, _Lock] = {}  # by the path of the lock file
_folders_without_locks: set[Path] = set()  # that were noted


@contextmanager
def reserve(outputs: Iterable[Output], note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep other processes from writing these files during the body. Raises `ReservedError` where one does so already.
    Calls `note` once for each folder whose file system has no locks."""
    with ExitStack() as held:
        for path, option in outputs:
            try:
                lock = held.enter_context(_locked(path))
            except BlockingIOError as error:
                hint = f"wait for it, or name another: {named_by(option, 'FILE')}"
                raise ReservedError(f"another process is writing {path}", hint) from error
            folder = lock.path.parent
            if note and lock.file is None and folder not in _folders_without_locks:
                note(f"{folder} has no file locks: another run could write the same files at the same time")
                _folders_without_locks.add(folder)
        yield


def check_unreserved(outputs: Iterable[Output]) -> None:
    """Raise `UsageError` where another process is writing one of these files. Creates no file or folder."""
    with reserve(output for output in outputs if _lock_path(output.path).exists()):
        pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes `path` when the body succeeds and is deleted when it fails, with all
    files that differ from it in the suffix alone. Its permissions follow the umask. Raises `RunError` with `path` where
    the system refuses something in the body, such as space or permission, or where another process is writing it."""
    temporary = path.with_name(f"{_lock_path(path).name}-{uuid4().hex}{path.suffix}")
    try:
        with _locked(path):
            try:
                yield temporary
                _rename(temporary, path)
            finally:
                for remnant in path.parent.glob(f"{temporary.stem}*"):
                    _delete(remnant)
    except OSError as error:
        raise write_error(f"cannot write {path}: {error.strerror or error}", error) from error


def remove_locks() -> None:
    """Release all locks before a forced exit; the first one of a new folder is released last and deletes it."""
    for lock in reversed(list(_locks.values())):
        lock.release()


def _rename(temporary: Path, path: Path) -> None:
    """Rename what is complete. An existing folder is deleted last."""
    if temporary.is_file():
        temporary.chmod(0o666 & ~UMASK)  # some libraries write what nobody else may read
        with temporary.open("rb") as content:
            os.fsync(content.fileno())  # or after a power cut the name may stand before an empty file
    if not path.is_dir():
        os.replace(temporary, path)
        return
    old = path.with_name(f".replaced-{uuid4().hex}")
    os.replace(path, old)
    try:
        os.replace(temporary, path)
    except OSError:
        os.replace(old, path)
        raise
    shutil.rmtree(old)


def _delete(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _lock_path(path: Path) -> Path:
    """The lock file of `path`, one for all spellings of its folder."""
    return Path(os.path.realpath(path.parent), f".partial-{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:12]}")


@contextmanager
def _locked(path: Path) -> Iterator[_Lock]:
    """Hold the lock of `path`, several times if need be. Raises `BlockingIOError` where another process holds it,
    `OSError` for an impossible folder."""
    lock_path = _lock_path(path)
    with _mutex:
        lock = _locks.get(lock_path) or _acquire(lock_path)
        lock.holders += 1
    try:
        yield lock
    finally:
        with _mutex:
            lock.holders -= 1
            if not lock.holders:
                del _locks[lock_path]
                lock.release()


def _acquire(path: Path) -> _Lock:
    """A new lock. Creates its folder, and deletes leftovers of dead processes there."""
    new_folders = [folder for folder in path.parents if not folder.exists()]
    for remnant in path.parent.glob(".partial-*"):
        name = LOCK_NAME.match(remnant.name)
        if name and (lock_path := path.with_name(name[0])) not in _locks:
            with suppress(OSError):  # its process lives, or it is another user's
                lock = _Lock(lock_path, _open_locked(lock_path), [])
                if lock.file is not None:
                    if remnant != lock_path:  # which is deleted once: then another process may create it
                        _delete(remnant)
                    lock.release()
    _locks[path] = _Lock(path, _open_locked(path, time.monotonic() + CLEANING), new_folders)
    return _locks[path]


def _open_locked(path: Path, deadline: float = 0.0) -> int | None:
    """The open lock file; None where there are no locks, or the file is closed to this user. Raises `BlockingIOError`
    where another process holds the lock until the deadline."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        creation = 0 if os.path.lexists(path) else os.O_CREAT | os.O_EXCL  # refused for another user's file in /tmp
        with suppress(FileExistsError, FileNotFoundError), ExitStack() as closing:  # another process made or deleted it
            if (file := _opened(path, creation)) is None:
                return None
            closing.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.001)
                    continue
                raise BlockingIOError(error.errno, "another process is writing it") from error
            except OSError:
                if os.access(path, os.W_OK):  # else it may be locked from where it was written
                    _delete(path)
                return None
            if os.path.samestat(os.fstat(file), path.stat()):  # else its holder deleted it meanwhile: it locks nothing
                closing.pop_all()
                return file


def _opened(path: Path, creation: int) -> int | None:
    """The open file, for reading alone where it is another user's; None where it is closed to this one."""
    for mode in (os.O_RDWR, os.O_RDONLY):  # some network file systems lock only what may be written
        try:
            return os.open(path, mode | os.O_NOFOLLOW | creation, 0o666)
        except PermissionError:
            if creation:
                raise
    return None
