"""Reading with limits; writing whole files, each by one process at a time.

A process that writes a file holds the system's lock on `.partial-<hash of its name>` beside it, which network file
systems pass on to other hosts, and which ends with its process, however that ends. Content that is not whole yet is
called `.partial-<hash>-…`. Where nobody holds the lock, the next process that writes into the folder deletes it.
"""

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

from ltx2_cli.errors import UsageError, write_error

if TYPE_CHECKING:  # imported where it is needed: `--help` answers at once
    from filelock import FileLock

LOCK_NAME = re.compile(r"\.partial-[0-9a-f]{12}(?=-|$)")
CLEANING = 0.1  # seconds for which at most a process holds the lock of a dead one, or one that it takes for dead
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks
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


def file_state(path: Path) -> tuple[int, ...]:
    """A value that changes with the content of a file. Raises `OSError` for a file that is absent."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def folder_state(path: Path) -> tuple[object, ...]:
    """A value that changes with the content of a file, or of the files in a folder and in its folders."""
    files = [path, *sorted(path.glob("*")), *sorted(path.glob("*/*"))] if path.is_dir() else [path]
    states: dict[Path, tuple[int, ...]] = {}
    for file in files:
        with suppress(OSError):  # a link to nothing
            states[file] = file_state(file)
    return tuple(states.items())


class ReservedError(UsageError):
    """A file that another process is writing."""


class Output(NamedTuple):
    """A file or folder that a command writes, and the option that names it."""

    path: Path
    option: str


def named_by(option: str, name: str) -> str:
    """The text to type for another file: the option, or `--set KEY=`, and a name."""
    return f"{option}{'' if option.endswith('=') else ' '}{name}"


@dataclass
class _Lock:
    """The lock of a name, as long as this process holds it."""

    path: Path
    lock: "FileLock | None"  # None: this file system has no locks
    new_folders: list[Path]  # made for it, the innermost first
    holders: int = 0

    def release(self) -> None:
        """Delete the lock file, and new folders that are still empty."""
        if self.lock:
            _delete(self.path)
            self.lock.release()
        with suppress(OSError):
            for folder in self.new_folders:
                folder.rmdir()  # refused for one that holds anything


_mutex = RLock()
_locks: dict[Path, _Lock] = {}  # by the path of the lock file
_folders_without_locks: set[Path] = set()  # that were noted


@contextmanager
def reserve(outputs: Iterable[Output], note: Callable[[str], None] | None = None) -> Iterator[None]:
    """Keep other processes from writing these files during the body. Raises `ReservedError` where one does so already,
    `UsageError` where this user may not lock one. Calls `note` once for each folder whose file system has no locks."""
    with ExitStack() as held:
        for path, option in outputs:
            try:
                lock = held.enter_context(_locked(path))
            except BlockingIOError as error:
                hint = f"wait for it, or name another: {named_by(option, 'FILE')}"
                raise ReservedError(f"another process is writing {path}", hint) from error
            except PermissionError as error:
                lock_path = _lock_path(path)
                why = f"another user locked it by {lock_path}" if lock_path.exists() else "permission denied"
                raise UsageError(f"cannot write {path}: {why}", f"name another: {named_by(option, 'FILE')}") from error
            folder = lock.path.parent
            if note and lock.lock is None and folder not in _folders_without_locks:
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
    """Rename the complete file or folder. An existing folder is deleted last."""
    if temporary.is_file():
        temporary.chmod(0o666 & ~UMASK)  # some libraries write files that only their owner can read
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
        if name and (other := path.with_name(name[0])) not in _locks:
            with suppress(OSError):  # its process lives, or it is another user's
                if lock := _file_lock(other, timeout=0):
                    with lock:
                        for file in {remnant, other}:  # each is deleted once: then another process may create it
                            _delete(file)
    _locks[path] = _Lock(path, _file_lock(path, CLEANING), new_folders)
    return _locks[path]


def _file_lock(path: Path, timeout: float) -> "FileLock | None":
    """The lock, held; None where there are no locks. Raises `BlockingIOError` where another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout, thread_local=False, poll_interval=0.001, fallback_to_soft=False)
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with suppress(FileNotFoundError):  # another process deleted the folder, which was empty
                lock.acquire()
                return lock
        except Timeout:
            raise BlockingIOError(errno.EAGAIN, "another process is writing it") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            _delete(path)
            return None
