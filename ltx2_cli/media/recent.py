"""What was read last of files, kept within a number of bytes: a request is planned several times."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """What takes memory."""

    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Sized)


@dataclass
class Recent(Generic[T]):
    """The values that were asked for last, at most so many bytes of all."""

    most: int
    kept: dict[Hashable, T] = field(default_factory=dict)  # the oldest first

    def get(self, key: Hashable, read: Callable[[], T]) -> T:
        """The value of a key, read where it is not kept."""
        value = self.kept.pop(key) if key in self.kept else read()
        self.kept[key] = value
        while sum(other.nbytes for other in self.kept.values()) > self.most:
            del self.kept[next(iter(self.kept))]
        return value
