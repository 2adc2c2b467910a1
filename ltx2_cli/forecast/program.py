"""The text of a compiled program (`compiled.as_text()`, XLA's HLO) as computations of instructions."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

NAME = re.compile(r"%([\w.\-]+)")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_BEGINS = re.compile(r"\s+(?:ROOT )?%[\w.\-]+ = ")
_NO_DATA = {"token": 0, "opaque": 0, "pred": 8}


@dataclass(frozen=True)
class Array:
    """What an array is, on one device."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size without the padding of tiles."""
        bits = _NO_DATA.get(self.dtype)
        if bits is None:
            digits = re.search(r"\d+", self.dtype)
            assert digits is not None, self.dtype
            bits = int(digits[0])
        return math.ceil(math.prod(self.dims) * bits / 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line: `%name = shapes opcode(operands), attributes`."""

    name: str
    opcode: str
    shapes: tuple[Array, ...]  # of a tuple, its leaves
    argument: str  # what stands between the parentheses
    attributes: str

    @property
    def operands(self) -> list[str]:
        """The names of the instructions that it reads."""
        return NAME.findall(self.argument)

    @property
    def called(self) -> list[str]:
        """The computations that it runs or reduces with; not the condition and the body of a `while`."""
        branches = (NAME.findall(names) for names in _BRANCHES.findall(self.attributes))
        return [*_CALLED.findall(self.attributes), *(name for names in branches for name in names)]

    def named(self, attribute: str) -> str:
        """The computation that an attribute of a `while` names."""
        found = re.search(rf"\b{attribute}=%([\w.\-]+)", self.attributes)
        assert found is not None, f"{self.name} has no {attribute}"
        return found[1]


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in their order; the result is that of `root`."""

    instructions: Mapping[str, Instruction]
    root: str


@dataclass(frozen=True)
class Program:
    """Computations by name; the program is that of `entry`."""

    computations: Mapping[str, Computation]
    entry: str


def read_program(text: str) -> Program:
    """The program that `text` spells out. Raises `ValueError` where it has no entry computation."""
    computations: dict[str, Computation] = {}
    lines: list[str] = []
    entry, name = "", ""
    for line in text.splitlines():
        if line.endswith("{") and line.startswith(("%", "ENTRY ")):
            name, lines = NAME.findall(line)[0], []
            entry = name if line.startswith("ENTRY ") else entry
        elif re.match(r"}(?!})", line) and name:
            computations[name], name = _computation(lines), ""
        elif name and _BEGINS.match(line):
            lines.append(line)
        elif lines:  # the attributes of a Pallas kernel hold line breaks
            lines[-1] += line
    if not entry:
        raise ValueError("this is not the text of a compiled program: it has no ENTRY computation")
    return Program(computations, entry)


def _computation(lines: list[str]) -> Computation:
    instructions = [_instruction(line) for line in lines]
    roots = [line for line in lines if line.lstrip().startswith("ROOT ")]
    return Computation({each.name: each for each in instructions}, NAME.findall(roots[0])[0])


def _instruction(line: str) -> Instruction:
    left, _, right = line.partition(" = ")
    end = _closing(right, 0) if right.startswith("(") else right.index(" ")
    opening = right.index("(", end)
    closing = _closing(right, opening)
    return Instruction(
        name=NAME.findall(left)[0],
        opcode=right[end:opening].strip(),
        shapes=_shapes(right[:end]),
        argument=right[opening + 1 : closing - 1],
        attributes=right[closing:],
    )


def _shapes(text: str) -> tuple[Array, ...]:
    found = _SHAPE.findall(text)
    return tuple(Array(dtype, tuple(int(each) for each in dims.split(",") if each)) for dtype, dims in found)


def _closing(text: str, opening: int) -> int:
    """The place behind the parenthesis that closes the one at `opening`."""
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place + 1
    raise ValueError(f"a parenthesis is never closed: {text[:80]}")
