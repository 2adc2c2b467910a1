"""What the value of an instruction is, as far as the text tells: enough to count the turns of a loop."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ltx2_cli.forecast.program import Array, Computation, Instruction, Program

Path = tuple[int, ...]  # into nested tuples
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SAME = {"copy", "bitcast", "convert", "reshape", "transpose", "copy-start", "copy-done"}
_BEYOND = {"LT": 0, "LE": 1, "GT": 0, "GE": -1, "NE": 0}  # from the bound to the first value that ends the loop
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


@dataclass(frozen=True)
class Carried:
    """What a place of a loop's tuple holds when a turn begins, plus a constant."""

    path: Path
    plus: int = 0


@dataclass(frozen=True)
class Slice:
    """A part of `stack`, cut out at an index that is not known."""

    stack: Array


@dataclass(frozen=True)
class Comparison:
    """Whether `left` stands to `right` as `direction` says."""

    left: "Value"
    right: "Value"
    direction: str


Value = int | Carried | Slice | Comparison | None  # None: not known


@dataclass(frozen=True)
class Frame:
    """A computation as it is called: `argument(number, path)` is the value of a parameter."""

    program: Program
    name: str
    argument: Callable[[int, Path], Value]

    @property
    def computation(self) -> Computation:
        """Its instructions."""
        return self.program.computations[self.name]

    def value(self, name: str, path: Path = ()) -> Value:
        """What the instruction `name` gives, at `path` of its tuple."""
        each = self.computation.instructions[name]
        match each.opcode:
            case "constant":
                return int(each.argument) if re.fullmatch(r"-?\d+", each.argument) else None
            case "parameter":
                return self.argument(int(each.argument), path)
            case "get-tuple-element":
                return self.value(each.operands[0], (_index(each), *path))
            case "tuple" if path:
                return self.value(each.operands[path[0]], path[1:])
            case "all-gather":  # of a slice, along one axis after another
                return self.value(each.operands[path[0] if path else 0])
            case "add" | "subtract" if not each.shapes[0].dims:
                left, right = map(self.value, each.operands)
                return _sum(left, right, -1 if each.opcode == "subtract" else 1)
            case "compare":
                left, right = map(self.value, each.operands)
                return Comparison(left, right, _direction(each))
            case "dynamic-slice":
                return Slice(self.computation.instructions[each.operands[0]].shapes[0])
            case "fusion" | "call":
                inner = self.call(each, each.called[0])
                return inner.value(inner.computation.root, path)
            case "while":
                return self.body(each).argument(0, path)
            case same if same in _SAME:
                return self.value(each.operands[0], path)
        return None

    def call(self, caller: Instruction, name: str) -> "Frame":
        """The computation `name` with the operands of `caller`."""
        return Frame(self.program, name, lambda number, path: self.value(caller.operands[number], path))

    def body(self, loop: Instruction) -> "Frame":
        """One turn of `loop`: what no turn changes has the value that it had before the loop."""
        turn = Frame(self.program, loop.named("body"), lambda _, path: Carried(path))

        def unchanged(_: int, path: Path) -> Value:
            kept = turn.value(turn.computation.root, path) == Carried(path)
            return self.value(loop.operands[0], path) if kept else None

        return Frame(self.program, turn.name, unchanged)


def entry(program: Program) -> Frame:
    """The program as it is started: its arguments are not known."""
    return Frame(program, program.entry, lambda _, path: None)


def trip_count(frame: Frame, loop: Instruction) -> int | None:
    """How many turns the `while` in `frame` takes; None where its bounds come from outside the program.

    XLA says so in the loop's configuration, but not on every platform; else it is the turns of a counter from a
    constant to a constant.
    """
    if known := _KNOWN.search(loop.attributes):
        return int(known[1])
    turn = Frame(frame.program, loop.named("body"), lambda _, path: Carried(path))
    condition = Frame(frame.program, loop.named("condition"), lambda _, path: Carried(path))
    test = condition.value(condition.computation.root)
    if not isinstance(test, Comparison) or test.direction not in _BEYOND:
        return None

    def settled(value: Value) -> Value:
        if isinstance(value, Carried) and turn.value(turn.computation.root, value.path) == value:
            return frame.value(loop.operands[0], value.path)
        return value

    counter, bound, direction = settled(test.left), settled(test.right), test.direction
    if isinstance(counter, int):
        counter, bound, direction = bound, counter, _MIRRORED[direction]
    if not isinstance(counter, Carried) or not isinstance(bound, int):
        return None
    start, step = frame.value(loop.operands[0], counter.path), turn.value(turn.computation.root, counter.path)
    if not isinstance(start, int) or not isinstance(step, Carried) or step.path != counter.path:
        return None
    return len(range(start + counter.plus, bound + _BEYOND[direction], step.plus))


def _sum(left: Value, right: Value, sign: int) -> Value:
    match left, right:
        case int(), int():
            return left + sign * right
        case Carried(path, plus), int():
            return Carried(path, plus + sign * right)
        case int(), Carried(path, plus) if sign > 0:
            return Carried(path, plus + left)
    return None


def _index(each: Instruction) -> int:
    found = re.search(r"\bindex=(\d+)", each.attributes)
    assert found is not None, each.name
    return int(found[1])


def _direction(each: Instruction) -> str:
    found = re.search(r"\bdirection=(\w+)", each.attributes)
    assert found is not None, each.name
    return found[1]
