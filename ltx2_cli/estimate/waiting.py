"""Time that arithmetic waits for what devices send, from the order in which a program's instructions run."""

import math
import re
from collections.abc import Mapping

from jax.sharding import Mesh

from ltx2_cli.estimate.collectives import instructions

_STARTED = re.compile(r"-start\(")
_AWAITED = re.compile(r"-done\(.*?%([\w.\-]+)\)")
_NAMED = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = ")


class _Links:
    """What is on its way: by the instruction that sends it, the seconds that it would still take alone. All share the
    links evenly, also where they cross different ones."""

    def __init__(self) -> None:
        self.left: dict[str, float] = {}

    def compute(self, seconds: float) -> None:
        """Let time pass."""
        while self.left and seconds > 0:
            step = min(seconds, min(self.left.values()) * len(self.left))
            share = step / len(self.left)
            self.left = {name: left - share for name, left in self.left.items() if left > share * (1 + 1e-9)}
            seconds -= step

    def receive(self, name: str) -> float:
        """Wait until something has arrived: the seconds."""
        waited = 0.0
        while name in self.left:
            step = min(self.left.values()) * len(self.left)
            self.compute(step)
            waited += step
        return waited


def waiting_seconds(text: str, mesh: Mesh, seconds_of: Mapping[str, float]) -> float:
    """Seconds that a device waits in one run of a compiled program, from its text. `seconds_of`: the time of all runs
    of each instruction, by name. A loop of unknown length counts as one iteration."""
    total, around, links, started = 0.0, None, _Links(), ""
    for line, loops, collective in instructions(text, mesh):
        if loops != around:
            links, around = _Links(), loops
        times = math.prod(count for count in loops if count is not None)
        name = named[1] if (named := _NAMED.match(line)) else ""
        started = name if _STARTED.search(line) else started
        if collective:
            sender = started if collective.asynchronous else name
            links.left[sender] = (collective.seconds or 0) / times
            total += 0 if collective.asynchronous else times * links.receive(sender)
        elif awaited := _AWAITED.search(line):
            total += times * links.receive(awaited[1])
        else:
            links.compute(seconds_of.get(name, 0.0) / times)
    return total
