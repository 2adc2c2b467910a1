"""The errors that end a command, each with its exit code."""

import errno
from collections.abc import Sequence

MAKE_ROOM = "free some space, or write to another disk"  # hint for a file that cannot be written
DISK_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # after which no other file can be written there either


class CommandError(Exception):
    """An error that ends a command: sentences, a line each, and a hint that says what to type instead (may be empty).
    Line breaks within a sentence are escaped, so that text from a file adds no lines."""

    exit_code = 1

    def __init__(self, sentences: str | Sequence[str], hint: str | Sequence[str]):
        lines = [[text] if isinstance(text, str) else text for text in (sentences, hint)]
        message, self.hint = ("\n".join(line.replace("\n", "\\n") for line in text) for text in lines)
        super().__init__(message)


class UsageError(CommandError):
    """A request that cannot be met."""

    exit_code = 2


class UnknownNetworkError(UsageError):
    """A network that is not on this machine and has no published description."""


class RunError(CommandError):
    """A failure of a valid request."""


class StorageError(RunError):
    """A disk that is full, a quota that is used up, or a file system that is read-only."""


def write_error(sentence: str, error: OSError, hint: str = MAKE_ROOM) -> RunError:
    """The system refused to write a file."""
    return (StorageError if error.errno in STORAGE else RunError)(sentence, hint)


class DoesNotFitError(CommandError):
    """A plan that needs more memory than the devices have; the hint is a request that fits."""

    exit_code = 3


class MediaCheckError(CommandError):
    """A written clip that failed its checks, with `--strict`."""

    exit_code = 4


class PartlyFailedError(CommandError):
    """Some jobs of a batch failed."""

    exit_code = 5


class InterruptedRunError(CommandError):
    """A run that all hosts stopped after the same step and that can be resumed."""

    exit_code = 130


class AbortedRunError(CommandError):
    """A run that was interrupted at once, with an earlier state kept."""

    exit_code = 130


class NotFiniteError(RunError):
    """A network produced a NaN or an infinity."""
