"""Everything that is wrong in one message: whatever can be read is, before anything is refused; how it is said."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def some(what: str, names: Sequence[str]) -> Iterator[str]:
    """`3 missing: a, b, c` where there are any."""
    if names:
        yield f"{len(names)} {what}: {shortened(names)}"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def by(shape: Sequence[int]) -> str:
    """`3x4` of (3, 4)."""
    return "x".join(map(str, shape)) or "a scalar"
