"""What travels between devices: every collective of a compiled program, how many bytes, how often, and along what."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jax.sharding import Mesh

from ltx2_cli.forecast.groups import axes_of, groups
from ltx2_cli.forecast.loops import Frame, Slice, entry, trip_count
from ltx2_cli.forecast.program import Array, Instruction, read_program

# Bytes that a device sends for each byte of its result, in a group of n: the least that any algorithm needs, as a
# ring does it.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "collective-permute": lambda n: 1,
}
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHAIN = re.compile(r'channel_id=(\d+),.*\bchain_id="(\d+)"')


@dataclass(frozen=True)
class Collective:
    """One collective of a program, as one device sees it."""

    kind: str  # a key of SENT
    results: tuple[Array, ...]  # what a device has afterwards; several where XLA made one collective of them
    bytes: int  # that a device sends each time it runs
    group: int  # devices that take part together
    axes: tuple[str, ...]  # of the mesh, along which they lie
    loops: tuple[int | None, ...]  # turns of each loop around it, the outermost first; None where they are traced
    stacks: tuple[Array | None, ...]  # for each operand that is a slice of a larger array, that array on one device
    op_name: str  # the path of the operation that it was made for

    @property
    def times(self) -> int:
        """How often it runs, each loop whose bounds are traced taken as one turn."""
        return math.prod(turns for turns in self.loops if turns is not None)

    @property
    def in_traced_loop(self) -> bool:
        """Whether it runs oftener than `times`, as many times as a number that is given to the program."""
        return None in self.loops

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends for it in all."""
        return self.bytes * self.times


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every collective in `compiled.as_text()` of a program for the devices of `mesh`, in the program's order.

    Of a conditional all branches count. Raises `ValueError` for a text that is not a compiled program's.
    """
    found: dict[object, Collective] = {}
    for key, collective in _walk(entry(read_program(text)), (), mesh):
        found.setdefault(key, collective)
    return list(found.values())


def wire_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes that a device sends in one run of the program, its traced loops taken as one turn each."""
    return sum(each.wire_bytes for each in collectives)


def _walk(frame: Frame, loops: tuple[int | None, ...], mesh: Mesh) -> Iterator[tuple[object, Collective]]:
    """Each collective, with a key that only those have in common which are one."""
    for each in frame.computation.instructions.values():
        if each.opcode.removesuffix("-start") in SENT:
            yield _chain(each, loops) or object(), _collective(frame, each, loops, mesh)
        elif each.opcode == "while":
            yield from _walk(frame.body(each), (*loops, trip_count(frame, each)), mesh)
        elif each.opcode in ("fusion", "call") or each.opcode.endswith("-start"):
            for name in each.called:
                yield from _walk(frame.call(each, name), loops, mesh)
        elif each.opcode == "conditional":
            for name in each.called:
                yield from _walk(Frame(frame.program, name, lambda _, path: None), loops, mesh)


def _chain(each: Instruction, loops: tuple[int | None, ...]) -> object:
    """What the fusions that begin, carry on and end one collective of a TPU beside other work have in common."""
    found = _CHAIN.search(each.attributes)
    return (*found.groups(), loops) if found else None


def _collective(frame: Frame, each: Instruction, loops: tuple[int | None, ...], mesh: Mesh) -> Collective:
    kind, joined = each.opcode.removesuffix("-start"), groups(each.attributes, mesh.size)
    results, size = _results(each), len(joined[0])
    sources = [frame.value(operand) for operand in each.operands]
    op_name = _OP_NAME.search(each.attributes)
    return Collective(
        kind=kind,
        results=results,
        bytes=round(sum(result.bytes for result in results) * SENT[kind](size)),
        group=size,
        axes=axes_of(joined, mesh),
        loops=loops,
        stacks=tuple(source.stack if isinstance(source, Slice) else None for source in sources),
        op_name=op_name[1] if op_name else "",
    )


def _results(each: Instruction) -> tuple[Array, ...]:
    """What it gives; where it only starts, the operands stand before that in its tuple, and handles behind."""
    count = len(each.operands)
    if each.opcode.endswith("-start") and len(each.shapes) >= 2 * count:
        return each.shapes[count : 2 * count]
    return each.shapes
