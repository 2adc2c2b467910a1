"""Time of collectives between the devices of one slice or host, from the topology of their links and published rates.

Chips of a TPU slice form a grid with a link between neighbours, and where the slice is large enough, between the ends
of each axis; the devices of one chip share its links, and have one between them. A GPU has one link, which reaches all
others. Links carry bytes in both directions at once. Latency does not count.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, combinations, permutations
from math import prod
from typing import NamedTuple

import jax

from ltx2_cli.chips import Chip, chip
from ltx2_cli.parallel.devices import slice_index

DeviceGroups = Sequence[Sequence[jax.Device]]
Coordinates = tuple[int, ...]  # coordinates of a chip, then the number of the device on it
Message = tuple[Coordinates, Coordinates, float]  # from, to, bytes
Link = tuple[int, int, Coordinates]  # axis, step along it, start
ALL_TO_ALL, PERMUTE = "all-to-all", "collective-permute"


class Grid(NamedTuple):
    """The chips of a slice."""

    sizes: Coordinates  # along each axis, and last the devices of a chip
    chip: Chip

    @property
    def is_torus(self) -> bool:
        """Whether the ends of each axis are joined."""
        return all(size % unit == 0 for size, unit in zip(self.sizes, self.chip.torus, strict=False))

    def seconds(self, messages: Iterable[Message]) -> float:
        """Seconds until the busiest link is done."""
        busy = defaultdict[Link, float](float)
        for source, target, size in messages:
            for link, part in self.route(source, target):
                on_chip = link[0] == len(self.sizes) - 1
                busy[link] += size * part / (self.chip.die_bandwidth if on_chip else self.chip.link_bandwidth)
        return max(busy.values(), default=0.0)

    def route(self, source: Coordinates, target: Coordinates) -> Iterator[tuple[Link, float]]:
        """The links between two devices, axis by axis, the shorter way around, each with the part of a message that it
        carries: half where both ways are equally long."""
        for axis, size in enumerate(self.sizes):
            ahead, on_chip = target[axis] - source[axis], axis == len(self.sizes) - 1
            ways = {ahead}
            if self.is_torus and not on_chip:
                ways = {ahead % size, ahead % size - size} if ahead else {0}
            shortest = min(map(abs, ways))
            ways = {way for way in ways if abs(way) == shortest}
            for way in ways:
                step = 1 if way > 0 else -1
                for place in range(source[axis], source[axis] + way, step):
                    here = (*source[:axis], place % size, *source[axis + 1 :])
                    yield (axis, step, here if on_chip else (*here[:-1], 0)), 1 / len(ways)
            source = (*source[:axis], target[axis], *source[axis + 1 :])


def seconds_per_byte(kind: str, groups: DeviceGroups) -> float | None:
    """The time of a collective in which each device sends a byte, in all groups at once; None without published rates
    of the devices, or of the network between slices if it crosses that."""
    first = groups[0][0]
    if (known := chip(first.device_kind)) is None:
        return None
    if not known.torus:
        return 1 / known.link_bandwidth
    own = {slice_index(first)}  # other slices do the same
    within = [group for group in groups if {*map(slice_index, group)} == own]
    places = tuple(tuple((*device.coords, device.core_on_chip) for device in group) for group in within)
    return _on_grid(kind, places, known) if places else None


@lru_cache(maxsize=256)
def _on_grid(kind: str, groups: tuple[tuple[Coordinates, ...], ...], chip: Chip) -> float:
    lowest, highest = ([bound(along) for along in zip(*chain(*groups), strict=True)] for bound in (min, max))
    grid = Grid(tuple(high - low + 1 for low, high in zip(lowest, highest, strict=True)), chip)
    groups = tuple(tuple(_minus(place, lowest) for place in group) for group in groups)
    if kind == PERMUTE:
        return grid.seconds((source, target, 1) for source, target in groups)
    if kind == ALL_TO_ALL:
        return grid.seconds((*pair, 1 / (len(group) - 1)) for group in groups for pair in permutations(group, 2))
    return _rings(grid, groups)


def _minus(place: Coordinates, lowest: Sequence[int]) -> Coordinates:
    return tuple(x - low for x, low in zip(place, lowest, strict=True))


def _rings(grid: Grid, groups: tuple[tuple[Coordinates, ...], ...]) -> float:
    """The time of rings in both directions, along all axes of a group at once where its devices form a grid."""
    group = groups[0]
    distinct = [len(set(along)) for along in zip(*group, strict=True)]
    if prod(distinct) != len(group):
        return grid.seconds(chain(*map(_ring, groups)))
    rates = {}
    for axis in (axis for axis, number in enumerate(distinct) if number > 1):
        lines = defaultdict[Coordinates, list[Coordinates]](list)
        for number, place in ((number, place) for number, group in enumerate(groups) for place in sorted(group)):
            lines[number, *place[:axis], *place[axis + 1 :]].append(place)
        rates[axis] = distinct[axis], 1 / grid.seconds(chain(*map(_ring, lines.values())))
    # A part of the group that spans some of its axes receives all that lies elsewhere along the other axes.
    slowest = 0.0
    for axes in (axes for length in range(len(rates)) for axes in combinations(rates, length)):
        part = prod(rates[axis][0] for axis in axes)
        into = part * sum(rate for axis, (_, rate) in rates.items() if axis not in axes)
        slowest = max(slowest, (1 - part / len(group)) / into)
    return slowest * len(group) / (len(group) - 1)


def _ring(line: Sequence[Coordinates]) -> Iterator[Message]:
    for here, following in zip(line, (*line[1:], line[0]), strict=True):
        yield from ((here, following, 0.5), (following, here, 0.5))
