"""Collectives of compiled programs, from XLA's text. That numbers devices by their place in the mesh's array, row by
row."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from ltx2_cli.estimate.hlo import Loops, callees, computations, lines
from ltx2_cli.parallel.links import seconds_per_byte

ReplicaGroups = list[tuple[int, ...]]
# Bytes that a device sends for each byte of its result, in a group of n: the minimum, which a ring algorithm reaches.
SENT: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "collective-permute": lambda n: 1,
}

_COLLECTIVE = re.compile(rf" = (?P<results>.*?) (?P<kind>{'|'.join(SENT)})(?P<start>-start)?\((?P<operands>[^)]*)")
_STARTS = re.compile(r".*-start\(.*").findall
_ENDS = re.compile(r"-(?:done|update)\(")
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHAIN = re.compile(r'channel_id=(\d+),.*\bchain_id="(\d+)"')
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]+\},?)+)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_MESH_AXIS = re.compile(r"'?([\w.]+)'?=(\d+)")
_MESH_PART = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")


@dataclass(frozen=True)
class Collective:
    """One collective of a program, on one device. A loop whose number of iterations is an argument of the program
    counts as one iteration in `times` and `sent_bytes`."""

    kind: str  # a key of SENT
    axes: tuple[str, ...]  # of the mesh: the devices lie along them
    devices: int  # in a group
    results: tuple[str, ...]  # `bf16[1024,512]`; several where XLA combined several collectives
    bytes: int  # sent by a device in one run of it
    times: int  # number of runs
    sent_bytes: int  # sent by a device in all runs
    seconds: float | None  # of all runs at the published rates of links; None: unknown rates
    asynchronous: bool  # started before its result is needed; otherwise arithmetic waits
    in_traced_loop: bool  # it runs more often than `times`
    loops: Loops  # iterations of each loop around it, outermost first; None: an argument of the program
    op_name: str  # path of its operation in the traced function


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """All collectives in `compiled.as_text()` of a program for the devices of `mesh`, in order, including all branches
    of a conditional. Raises `ValueError` for any other text."""
    return [collective for _, _, collective in instructions(text, mesh) if collective]


def instructions(text: str, mesh: Mesh) -> Iterator[tuple[str, Loops, Collective | None]]:
    """The lines of a program in order, as of `collectives`: the loops around each, and its collective. A TPU may spread
    one over several lines; it is of the first."""
    texts, entry = computations(text)
    chains = set[object]()
    started = "".join(
        texts.get(callee, "") for text in texts.values() for start in _STARTS(text) for callee in callees(start)
    )
    for line, loops in lines(texts, entry, lambda line: not _COLLECTIVE.search(line) and not _ENDS.search(line)):
        collective = None
        if match := _COLLECTIVE.search(line):
            chain = _CHAIN.search(line)
            key = (*chain.groups(), loops) if chain else match
            if key not in chains:
                asynchronous = bool(chain or match["start"] or line in started)
                collective = _collective(line, match, loops, asynchronous, mesh)
            chains.add(key)
        yield line, loops, collective


def sent_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes that a device sends in one run of the program; a loop of unknown length counts as one iteration."""
    return sum(collective.sent_bytes for collective in collectives)


def _collective(line: str, match: re.Match[str], loops: Loops, asynchronous: bool, mesh: Mesh) -> Collective:
    kind, members, op_name = match["kind"], groups(line, mesh.size), _OP_NAME.search(line)
    results, operands = list(_SHAPE.finditer(match["results"])), match["operands"].count("%")
    if match["start"] and len(results) >= 2 * operands:  # the operands, the results, handles
        results = results[operands : 2 * operands]
    size = 0  # without the padding of tiles
    for dtype, dims in (result.groups() for result in results):
        bits = re.search(r"\d+", dtype.replace("pred", "u8"))
        size += math.ceil(math.prod(_numbers(dims)) * int(bits[0]) / 8) if bits else 0
    sent = round(size * SENT[kind](len(members[0])))
    times = math.prod(count for count in loops if count is not None)
    taking_part = [[mesh.devices.flat[number] for number in group] for group in members]
    per_byte = seconds_per_byte(kind, taking_part)
    return Collective(
        kind=kind,
        axes=axes_of(members, mesh),
        devices=len(members[0]),
        results=tuple(result[0] for result in results),
        bytes=sent,
        times=times,
        sent_bytes=sent * times,
        seconds=None if per_byte is None else sent * times * per_byte,
        asynchronous=asynchronous,
        in_traced_loop=None in loops,
        loops=loops,
        op_name=op_name[1] if op_name else "",
    )


def groups(attributes: str, devices: int) -> ReplicaGroups:
    """The devices of each group of a collective, or the two of each pair of a permutation. `{{0,1},{2,3}}` lists them;
    `[2,2]<=[4]` and `[2,2]<=[2,2]T(1,0)` count, transpose, and cut into rows; `mesh['a'=2,'b'=2],
    device_ids=([2,2]T(1,0)) {'a'}` names axes of another mesh. Without any, all devices are one group."""
    if listed := _LISTED.search(attributes):
        return [tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
    if counted := _COUNTED.search(attributes):
        return [tuple(map(int, row)) for row in _order(counted[2]).reshape(_numbers(counted[1]))]
    if mesh := _MESH.search(attributes):
        return _groups_along(mesh[1], mesh[2] or "", mesh[3], devices)
    return [tuple(range(devices))]


def _groups_along(axes: str, order: str, along: str, devices: int) -> ReplicaGroups:
    """The groups of devices that differ along these axes alone. `'a':(2)4` is a part of an axis: 4 long, inside an
    outer part 2 long."""
    sizes = {name: int(size) for name, size in _MESH_AXIS.findall(axes)}
    numbers = _order(order) if order else np.arange(devices)
    places = dict(zip(sizes, np.unravel_index(np.arange(devices), tuple(sizes.values())), strict=True))
    for name, before, length in _MESH_PART.findall(along):
        stride = sizes[name] // (int(before) * int(length)) if before else 1
        places[name] = places[name] - places[name] // stride % int(length or sizes[name]) * stride
    _, group = np.unique(np.stack(list(places.values())), axis=1, return_inverse=True)
    return [tuple(map(int, numbers[group == number])) for number in range(group.max() + 1)]


def _order(text: str) -> np.ndarray:
    """Devices in the order of `0,2,1,3`, of `[4]`, or of `[2,2]T(1,0)`: counted row by row, then transposed."""
    if not text.startswith("["):
        return np.asarray(_numbers(text))
    dims, _, order = text.strip("[)").partition("]")
    shape = _numbers(dims)
    return np.arange(math.prod(shape)).reshape(shape).transpose(_numbers(order.removeprefix("T(")) or None).reshape(-1)


def axes_of(groups: ReplicaGroups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` along which devices of one group differ."""
    places = [np.unravel_index(np.asarray(group), mesh.devices.shape) for group in groups]
    spans = [[np.ptp(along) > 0 for along in place] for place in places]
    return tuple(axis for axis, crossed in zip(mesh.axis_names, np.any(spans, axis=0), strict=True) if crossed)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]
