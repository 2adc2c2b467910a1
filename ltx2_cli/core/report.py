"""How a run says what it is doing, without knowing who listens."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

PREPARING = ("load", "compile")  # how the names begin of stages that a second run would not need
DECODE, WRITE = "decode", "write"  # the stages that end a clip


class Steps(Protocol):
    """Equal steps of the current stage."""

    def advance(self, steps: int = 1) -> None:
        """Say that `steps` more are done."""


class Report(Protocol):
    """What a run tells: stages, one after the other; steps within a stage; facts worth a line."""

    def stage(self, name: str) -> AbstractContextManager[None]:
        """The work inside is one named stage, such as `encode the prompt`. Stages do not nest."""

    def steps(self, total: int, later: float = 0, clips: int = 0) -> AbstractContextManager[Steps]:
        """The work inside, part of a stage, is `total` equal steps. After them the run does as much as `later` such
        steps, and decodes and writes so many clips."""

    def note(self, text: str) -> None:
        """A fact that the user should see once, such as the seed that was chosen."""


class Silent:
    """A `Report` and its `Steps` for callers that want none."""

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def steps(self, total: int, later: float = 0, clips: int = 0) -> Iterator[Steps]:
        yield self

    def note(self, text: str) -> None:
        pass

    def advance(self, steps: int = 1) -> None:
        pass
