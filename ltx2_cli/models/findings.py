"""Everything that is wrong in one message: whatever can be read is, before anything is refused."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ltx2_cli.spec import SpecError

T = TypeVar("T")


def attempt(readings: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], list[SpecError]]:
    """What the readings give, by name, and the `SpecError`s of those that fail."""
    found, problems = {}, []
    for name, reading in readings.items():
        try:
            found[name] = reading()
        except SpecError as error:
            problems.append(error)
    return found, problems


def refuse(problems: Iterable[SpecError]) -> None:
    """Raise one `SpecError` with all sentences and each hint once; nothing where there are no problems."""
    if problems := list(problems):
        hints = dict.fromkeys(problem.hint for problem in problems)
        raise SpecError(". ".join(map(str, problems)), "; ".join(hints))
