"""Cycles of one kernel from its final schedule, a text that libtpu dumps: bundles of instructions, one for each cycle.
The scalar instructions that branches and copies depend on are executed, so that each bundle counts as often as it is
issued. Stalls, mostly for copies, do not count."""

import operator
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

GRANULE = 32  # bytes; the unit of a copy's size
MATMUL = {"f32": 2}  # cycles of all matrix units together for one matmul instruction, of 8 rows of this type
USUAL_MATMUL = 4  # of 16 rows of bfloat16
MOST_BUNDLES = 10_000_000  # executed for one kernel
UNKNOWN = 1  # assumed value of results that are not scalar
ARGUMENT = 0x01010101  # assumed word of a kernel's arguments: four flags, all set (rows and blocks attend)

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) [^{\n]*\{", re.MULTILINE)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_COMMENT = re.compile(r"/\*.*?\*/|\}.*", re.DOTALL)
_BRANCH = re.compile(r"%\w+ = sbr\.rel .*target = \$region(\d+)")
# `dma.general` has a comment if the copy stays on the core, also between cores of other devices; without it, it copies
# a window of an array in HBM.
_COPY = re.compile(
    r"%\w+ = dma\.(?:hbm_to_vmem|vmem_to_hbm|general(?!.*vmem-to-vmem)) .*?/\*size_in_granules=\*/([^,]+),", re.DOTALL
)
_MATMUL = re.compile(r"= vmatmul\.(?:mubr\.)?(\w+)")
_SCALAR = re.compile(r"%\w+?_([sp]\d+) = ([\w.]+) (.*)", re.DOTALL)
_STORE = re.compile(r"%\w+ = (sst) \[smem:(\[#\w+\])\] (.*)", re.DOTALL)
_CONDITION = re.compile(r"\((!?)%\w+?_(p\d+)\),?")
_SELECT = re.compile(r"\((!?)%\w+?_(p\d+), ([^)]*)\), (.*)")  # where the predicate does not hold, the old value stays
_WITHOUT_EFFECT = {"sphi", "int_to_ptr"}  # their result lies in its register already
_DIVISION = re.compile(r"%(\d+) = sdivrem\.u32 (.*) /\* k(Div|Rem) \*/", re.DOTALL)
_OPERAND = re.compile(r"%\w+?_([sp]\d+)|\[smem:(\[#.*\])\]|(\d+)$|%(\d+)$")

Operand = str | int  # a register or place in scalar memory; a number
Condition = tuple[str, bool]  # a predicate register, and its value that enables an instruction


class Instruction(NamedTuple):
    """A scalar instruction."""

    result: str
    function: str
    operands: tuple[Operand, ...]
    condition: Condition | None


class Bundle(NamedTuple):
    """The parts of a bundle that count: scalar instructions, copies from and to HBM, branches."""

    address: int
    instructions: list[Instruction]
    copies: list[tuple[Operand, Condition | None]]  # granules
    branches: list[tuple[str, Condition | None]]  # target region


class Issued(NamedTuple):
    """Totals of one run of a kernel."""

    cycles: int  # issued bundles
    matrix_cycles: int  # of its matmul instructions, with all matrix units always busy
    copied_bytes: int  # from and to HBM


def _signed(compare: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    return lambda x, y: compare(x ^ 1 << 31, y ^ 1 << 31)


_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_FUNCTIONS: Mapping[str, Callable[..., int]] = {
    **{f"scmp.{name}.u32.totalorder": compare for name, compare in _COMPARISONS.items()},
    **{f"scmp.{name}.s32.totalorder": _signed(compare) for name, compare in _COMPARISONS.items()},
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "sshll.u32": lambda x, bits: x << bits if bits < 32 else 0,
    "sshrl.u32": operator.rshift,
    "sshra.s32": lambda x, bits: (x ^ 1 << 31) - (1 << 31) >> bits,
    "sdivrem.Div": lambda x, y: x // y if y else 0,
    "sdivrem.Rem": lambda x, y: x % y if y else 0,
    **dict.fromkeys(("smov", "pmov", "sld", "sst", "spop.drf"), lambda x: x),
    "pneg": operator.not_,
    "por": operator.or_,
    "pnand": lambda x, y: not (x and y),
    "scalar_select": lambda condition, x, y: x if condition else y,
}


def issued(text: str, branch_delay: int = 4, bounds_hold: bool = True) -> Issued:
    """Totals of a kernel from the text of its file `...-final_bundles.txt`. `bounds_hold`: all of its comparisons of
    floating-point numbers are true, else all false. `branch_delay` is that of the `Chip`. Raises `ValueError` for
    another text, and for a kernel that does not end."""
    if not (places := [*_BUNDLE.finditer(text)]):
        raise ValueError("this is not the text of a schedule: it has no bundles")
    ends = [place.start() for place in places[1:]] + [len(text)]
    bundles, regions = [], dict[str, int]()
    products = list[int]()  # the address of each matmul instruction, once for each of its cycles
    for place, end in zip(places, ends, strict=True):
        body, address = text[place.end() : end], int(place[1], 16)
        for region in _REGION.findall(body):
            regions.setdefault(region, address)
        products += [address] * sum(MATMUL.get(kind, USUAL_MATMUL) for kind in _MATMUL.findall(body))
        bundles.append(_bundle(address, body))
    registers = _Registers(bounds_hold)
    spans, granules = _run(_deciding(bundles), registers, regions, bundles[-1].address + 1, branch_delay)
    cycles = sum(times * (leave - start) for (start, leave), times in spans.items())
    matrix_cycles = sum(
        times * (bisect_left(products, leave) - bisect_left(products, start)) for (start, leave), times in spans.items()
    )
    return Issued(cycles, matrix_cycles, GRANULE * granules)


def _bundle(address: int, body: str) -> Bundle:
    bundle = Bundle(address, [], [], [])
    for part in map(str.strip, body.split(";;")):
        if copy := _COPY.match(part):
            bundle.copies.append((_operands(copy[1])[0], _condition(part)))
        elif branch := _BRANCH.match(part):
            bundle.branches.append((branch[1], _condition(part)))
        elif division := _DIVISION.match(part):  # a later bundle reads its result by this number
            bundle.instructions.append(_instruction(division[1], f"sdivrem.{division[3]}", division[2]))
        elif store := _STORE.match(_COMMENT.sub("", part)):
            bundle.instructions.append(_instruction(store[2], store[1], store[3]))
        elif (scalar := _SCALAR.match(_COMMENT.sub("", part))) and scalar[2].split(".")[0] not in _WITHOUT_EFFECT:
            bundle.instructions.append(_instruction(*scalar.groups()))
    return bundle


def _instruction(result: str, function: str, text: str) -> Instruction:
    if select := _SELECT.match(text):
        negated, predicate, old, new = select.groups()
        choice = (old, new) if negated else (new, old)
        return Instruction(result, "scalar_select", (predicate, *_operands(", ".join(choice))), None)
    return Instruction(result, function, _operands(_CONDITION.sub("", text)), _condition(text))


def _condition(text: str) -> Condition | None:
    found = _CONDITION.search(text)
    return (found[2], not found[1]) if found else None


def _operands(text: str) -> tuple[Operand, ...]:
    found = [_OPERAND.match(part.strip()) for part in text.split(", ")]
    return tuple(part[1] or part[2] or part[4] or int(part[3]) if part else UNKNOWN for part in found)


def _deciding(bundles: Iterable[Bundle]) -> list[Bundle]:
    """The bundles with a branch, a copy, or an instruction that one of these depends on."""
    kept = [bundle for bundle in bundles if any(bundle[1:])]
    instructions = [instruction for bundle in kept for instruction in bundle.instructions]
    needed, size = set[Operand](), -1
    for bundle in kept:
        for operand, condition in (*bundle.copies, *bundle.branches):
            needed |= {operand, *(condition or ())}
    while size != len(needed):
        size = len(needed)
        for result, _, operands, condition in instructions:
            needed |= {*operands, *(condition or ())} if result in needed else set()
    kept = [bundle._replace(instructions=[x for x in bundle.instructions if x.result in needed]) for bundle in kept]
    return [bundle for bundle in kept if any(bundle[1:])]


class _Registers(dict[Operand, int]):
    """Values of registers, and of places in scalar memory, whose names begin with a bracket."""

    def __init__(self, bounds_hold: bool) -> None:
        super().__init__()
        self.bounds_hold = bounds_hold

    def __missing__(self, operand: Operand) -> int:
        return ARGUMENT if str(operand).startswith("[") else UNKNOWN

    def value(self, operand: Operand) -> int:
        return operand if isinstance(operand, int) else self[operand]

    def holds(self, condition: Condition | None) -> bool:
        return condition is None or bool(self[condition[0]]) == condition[1]

    def results(self, bundle: Bundle) -> Iterator[tuple[str, int]]:
        """The registers that a bundle changes, with new values computed from the values before it."""
        for result, function, operands, condition in bundle.instructions:
            if not self.holds(condition):
                continue
            if known := _FUNCTIONS.get(function):
                yield result, known(*map(self.value, operands)) & 0xFFFFFFFF
            else:
                yield result, int(self.bounds_hold) if function.endswith(".partialorder") else UNKNOWN


def _run(
    bundles: Sequence[Bundle], registers: _Registers, regions: Mapping[str, int], end: int, delay: int
) -> tuple[Mapping[tuple[int, int], int], int]:
    """Execute a kernel up to the address `end`, behind its last bundle. Returns the number of runs of each span of
    addresses without a jump, and the copied granules. A branch has no effect in the delay of a taken one, which ends
    where another region starts."""
    addresses = [bundle.address for bundle in bundles]
    starts = [*sorted(regions.values()), end]
    spans, granules, place, start = Counter[tuple[int, int]](), 0, 0, 0
    leave = follow = end  # the address behind a taken branch, and its target
    for _ in range(MOST_BUNDLES):
        if place == len(bundles) or addresses[place] >= leave:
            spans[start, leave] += 1
            if leave == end:
                return spans, granules
            start, leave, place = follow, end, bisect_left(addresses, follow)
            continue
        bundle = bundles[place]
        granules += sum(registers.value(size) for size, condition in bundle.copies if registers.holds(condition))
        for region, condition in bundle.branches:
            if leave == end and region in regions and registers.holds(condition):
                another = starts[bisect_right(starts, bundle.address)]
                leave, follow = min(bundle.address + delay + 1, another), regions[region]
        registers.update([*registers.results(bundle)])
        place += 1
    raise ValueError(f"the schedule goes on after {MOST_BUNDLES} bundles with branches")
