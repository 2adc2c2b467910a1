"""Files of strangers are read with limits; files appear whole under their names, and no two processes write the same
file at once.

A process that writes into a folder keeps the file `.partial-lock` there open; the byte at a hash of a name stands for
that name. Locks on bytes are the system's (`fcntl`): network file systems pass them on to other hosts, and they end
with their process, however it ends. A file that is not whole yet is called `.partial-<hash>-…`. Where nobody has that
byte locked, its process is dead, and the next one that writes into the folder deletes the file.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import NamedTuple
from uuid import uuid4

from ltx2_cli.errors import MAKE_ROOM, RunError, UsageError
from ltx2_cli.interrupts import on_forced_exit

LOCK = ".partial-lock"
PRESENCE = 0  # the byte that each process which holds a name has locked too, together with the others
TAKEN = (errno.EACCES, errno.EAGAIN)  # what the system says of a byte that another process has locked
TRIES = 100  # a hundredth of a second apart: another process may be deleting the file of locks
UMASK = os.umask(0o077)
os.umask(UMASK)


def refuse_special(path: Path, hint: str) -> None:
    """Raise `UsageError` for a folder, and for a pipe, a socket or a device: they would be waited for, or never end."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"{path} is a {'folder' if path.is_dir() else 'pipe or a device'}, not a file", hint)


def read_limited(path: Path, limit: int, hint: str) -> bytes:
    """All of a file of at most `limit` bytes. Raises `UsageError` for a larger one or none, `OSError` as `open`."""
    refuse_special(path, hint)
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UsageError(f"{path} has more than {limit:,} bytes", hint)
    return content


class Output(NamedTuple):
    """A file or folder that a command writes, and the option that names it."""

    path: Path
    option: str


@dataclass
class _Folder:
    """The names in a folder that this process holds."""

    path: Path
    made: list[Path]  # of it and the folders above it, the innermost first
    file: int | None  # None: there are no locks on this file system
    holders: Counter[str] = field(default_factory=Counter)
    lack_is_noted: bool = False  # of locks

    def hold(self, name: str) -> None:
        """Raises `BlockingIOError` where another process holds the name."""
        if not (self.holders[name] or self.lock(_byte_of(name))):
            raise BlockingIOError(errno.EBUSY, "another process is writing it")
        self.holders[name] += 1

    def release(self, name: str) -> None:
        self.holders[name] -= 1
        if not self.holders[name]:
            del self.holders[name]
            self.unlock(_byte_of(name))

    def lock(self, byte: int) -> bool:
        return self.file is None or _lock(self.file, fcntl.LOCK_EX, byte)

    def unlock(self, byte: int) -> None:
        if self.file is not None:
            fcntl.lockf(self.file, fcntl.LOCK_UN, 1, byte)

    def clean(self) -> None:
        """Delete what dead processes left."""
        for path in self.path.glob(".partial-*-*") if self.file is not None else ():
            with suppress(OSError, ValueError):  # another user's, or nothing of ours
                byte = int(path.name.split("-")[1], 16)
                if self.lock(byte):
                    _delete(path)
                    self.unlock(byte)

    def close(self) -> None:
        """Delete the file of locks, unless other processes have it open, and the folders that were made in vain."""
        if self.file is not None:
            with suppress(OSError):
                if _lock(self.file, fcntl.LOCK_EX, 0, 0):
                    (self.path / LOCK).unlink()
            os.close(self.file)
            self.file = None
        with suppress(OSError):
            for folder in self.made:
                folder.rmdir()  # refused for one that holds anything


_MUTEX = RLock()
_folders: dict[Path, _Folder] = {}  # closing a file ends all locks that the process has in it: one for each folder


def _ignore(note: str) -> None:
    pass


@contextmanager
def reserve(outputs: Iterable[Output], note: Callable[[str], None] = _ignore) -> Iterator[None]:
    """While the body runs no other process writes these files. Raises `UsageError` where one does so already. Where the
    file system has no locks, `note` is called once for each folder."""
    with ExitStack() as held:
        for path, option in outputs:
            try:
                folder = held.enter_context(_reserved(path))
            except BlockingIOError as error:
                sentence, hint = f"another process is writing {path}", f"wait for it, or name another: {option} FILE"
                raise UsageError(sentence, hint) from error
            if folder.file is None and not folder.lack_is_noted:
                note(f"{folder.path} has no file locks: another run could write the same files at the same time")
                folder.lack_is_noted = True
        yield


def check_unreserved(outputs: Iterable[Output]) -> None:
    """Raise `UsageError` where another process writes one of these files now. No file or folder is made."""
    with reserve(output for output in outputs if (output.path.parent / LOCK).exists()):
        pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path` that becomes `path` when the body succeeds and vanishes when it does not, with all
    that differs from it in the suffix alone. Who may read the file is as the process's umask says.

    Raises `RunError` with `path` for what the system refuses in the body, be it room or permission, or where another
    process is writing it.
    """
    temporary = path.with_name(f".partial-{_byte_of(path.name):x}-{uuid4().hex}{path.suffix}")
    try:
        with _reserved(path):
            try:
                yield temporary
                _put(temporary, path)
            finally:
                for left in path.parent.glob(f"{temporary.stem}*"):
                    _delete(left)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}", MAKE_ROOM) from error


def _put(temporary: Path, path: Path) -> None:
    """Give what is whole its name."""
    if temporary.is_file():
        temporary.chmod(0o666 & ~UMASK)  # some libraries write what nobody else may read
        with temporary.open("rb") as written:
            os.fsync(written.fileno())  # or after a power cut the name may stand before an empty file
    if path.is_dir():
        _exchange(temporary, path)
    else:
        os.replace(temporary, path)


def _exchange(new: Path, folder: Path) -> None:
    """Put a new folder in the place of one that is there, which is deleted last."""
    old = folder.with_name(f".replaced-{uuid4().hex}")
    os.replace(folder, old)
    try:
        os.replace(new, folder)
    except OSError:
        os.replace(old, folder)
        raise
    shutil.rmtree(old)


def _delete(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@contextmanager
def _reserved(path: Path) -> Iterator[_Folder]:
    """Hold a path in its folder, which this process may do already. Raises `BlockingIOError` where another process
    does, `OSError` where the folder cannot be made or written to."""
    place = Path(os.path.realpath(path.parent))
    with _MUTEX:
        folder = _folders.get(place) or _open_folder(place)
        try:
            folder.hold(path.name)
            _folders[place] = folder
        finally:
            if not folder.holders.total():
                folder.close()
    try:
        yield folder
    finally:
        with _MUTEX:
            folder.release(path.name)
            if not folder.holders:
                del _folders[place]
                folder.close()


def remove_locks() -> None:
    """Of a process that is ended by force: delete the files of locks, and the folders that were made in vain."""
    for folder in list(_folders.values()):
        folder.close()


def _open_folder(place: Path) -> _Folder:
    """A folder, made if it is missing, of which nothing is held yet."""
    made = [folder for folder in (place, *place.parents) if not folder.exists()]
    place.mkdir(parents=True, exist_ok=True)
    for _ in range(TRIES):
        with suppress(FileNotFoundError):  # another process deleted it
            folder = _Folder(place, made, _open_lock_file(place / LOCK))
            if folder.file is None or _is_usable(folder.file, place / LOCK):
                folder.clean()
                on_forced_exit(folder.close)
                return folder
            os.close(folder.file)
        time.sleep(0.01)
    raise OSError(errno.EBUSY, "other processes keep its folder locked")


def _open_lock_file(path: Path) -> int | None:
    """The open file; None where there are no locks, or it is another user's and closed to this one."""
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        os.fchmod(file, 0o666)  # for all who may write into the folder
    except FileExistsError:
        try:
            file = os.open(path, flags)
        except PermissionError:
            return None
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, PRESENCE)
    except OSError as error:
        if error.errno not in TAKEN:
            os.close(file)
            path.unlink(missing_ok=True)
            return None
    return file


def _is_usable(file: int, path: Path) -> bool:
    """Whether this process has locked its presence in the file of that name, which nobody has deleted."""
    return _lock(file, fcntl.LOCK_SH, PRESENCE) and os.path.samestat(os.fstat(file), path.stat())


def _lock(file: int, kind: int, byte: int, length: int = 1) -> bool:
    """Lock so many bytes, 0: all from there on; whether no other process has locked one of them."""
    try:
        fcntl.lockf(file, kind | fcntl.LOCK_NB, length, byte)
    except OSError as error:
        if error.errno in TAKEN:
            return False
        raise
    return True


def _byte_of(name: str) -> int:
    """The one that stands for a name in the file of locks; none is `PRESENCE`."""
    return 1 + int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6])
