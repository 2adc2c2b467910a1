"""Cache of values read from files, within a number of bytes: a request is planned several times."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

from ltx2_cli.artifacts.files import file_state, refuse_special
from ltx2_cli.errors import UsageError


class Sized(Protocol):
    """A value with a size in memory."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


@dataclass
class FileCache(Generic[T]):
    """Cache of the latest values read from files, within a number of bytes. Values of a changed file are read again."""

    most: int
    readable: str  # which files are read
    kept: dict[Hashable, T] = field(default_factory=dict)  # the oldest first
    lock: Lock = field(default_factory=Lock)  # a gallery reads many clips at once

    def get(self, path: Path, asked: Hashable, read: Callable[[], T]) -> T:
        """The value `asked` of a file, from the cache or read. Raises `UsageError` if there is no file."""
        key = path, asked, _version(path, self.readable)
        with self.lock:
            kept = self.kept.pop(key, None)
        value = read() if kept is None else kept
        with self.lock:
            self.kept[key] = value
            while sum(other.nbytes for other in self.kept.values()) > self.most:
                del self.kept[next(iter(self.kept))]
        return value


def _version(path: Path, readable: str) -> tuple[int, ...]:
    """A value that changes with the content of a file."""
    refuse_special(path, readable)
    try:
        size, state = path.stat().st_size, file_state(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "check its path") from None
    if not size:
        raise UsageError(f"{path} is empty", readable)
    return state
