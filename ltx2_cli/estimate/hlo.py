"""A parser of optimised HLO, the text of a compiled program: its computations, loops, and source lines."""

import re
from collections.abc import Callable, Iterator, Mapping

Loops = tuple[int | None, ...]  # iterations of each, outermost first; None: an argument of the program

_COMPUTATION = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\{$", re.MULTILINE)
_WHILE = re.compile(r" while\(.*condition=%(?P<condition>[\w.\-]+), body=%(?P<body>[\w.\-]+)")
_CALLS = re.compile(
    r"\b(?:calls|to_apply|true_computation|false_computation|branch_computations)=(%[\w.\-]+|\{[^}]*\})"
)
_NAME = re.compile(r"%([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r" = s\d+\[\]\S* constant\((\d+)\)")
_ROW = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_NUMBER = re.compile(r"=(\d+)")
PACKAGE = "/ltx2_cli/"


def computations(text: str) -> tuple[Mapping[str, str], str]:
    """The computations of `compiled.as_text()` by name, and the name of the one that runs first. Raises `ValueError`
    for a text that is not a compiled program's."""
    parts = _COMPUTATION.split(text)[1:]
    entries = [name for entry, name in zip(parts[::3], parts[1::3], strict=True) if entry]
    if not entries:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    return dict(zip(parts[1::3], parts[2::3], strict=True)), entries[0]


def lines(
    texts: Mapping[str, str], name: str, enters: Callable[[str], object], loops: Loops = ()
) -> Iterator[tuple[str, Loops]]:
    """The lines of a computation and of its loops' bodies, each with the loops around it; and behind a line that
    `enters` what it calls, the lines of that."""
    for line in texts[name].splitlines():
        if loop := _WHILE.search(line):
            around = (*loops, _iterations(texts, line, loop["condition"]))
            yield from lines(texts, loop["body"], enters, around)
        else:
            yield line, loops
            for callee in callees(line) if enters(line) else ():
                yield from lines(texts, callee, enters, loops)


def callees(text: str) -> list[str]:
    """Computations that an instruction, or any instruction of a computation, calls."""
    return _NAME.findall(" ".join(_CALLS.findall(text)))


def _iterations(texts: Mapping[str, str], line: str, condition: str) -> int | None:
    """Iterations of a `while`, or None: jax counts from 0 by 1 up to the condition's only constant."""
    if known := _TRIP_COUNT.search(line):
        return int(known[1])
    names = (condition, *callees(texts[condition]))
    bounds = [bound for name in names for bound in _CONSTANT.findall(texts[name])]
    return int(bounds[0]) if len(bounds) == 1 else None


def sources(text: str) -> Mapping[int, str]:
    """Source line of each stack frame, by its number: `nn/layers.py:51` for the innermost of this package, else the
    innermost with its whole path."""
    files, places, frames = (_table(text, name) for name in ("FileNames", "FileLocations", "StackFrames"))
    found: dict[int, str] = {}
    for number, frame in frames.items():
        place, parent = map(int, _NUMBER.findall(frame))
        file, _, line = map(int, _NUMBER.findall(places[place])[:3])
        path = files[file].strip('"')
        outer = found.get(parent - 1, "")  # a parent is written one higher; an outer frame stands before
        own = path.partition(PACKAGE)[2]
        found[number] = f"{own or path}:{line}" if own or outer.startswith("/") or not outer else outer
    return found


def _table(text: str, name: str) -> Mapping[int, str]:
    begin = text.find(f"\n{name}\n")
    rows = text[begin : text.find("\n\n", begin + 1)] if begin >= 0 else ""
    return {int(number): row for number, row in _ROW.findall(rows)}
