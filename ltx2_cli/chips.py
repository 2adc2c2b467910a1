"""What the makers publish of their chips, in chips.csv with the sources. A TPU has the memory that libtpu 0.0.42 gives
a program, by its own message where one needs more."""

import csv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Chip:
    """One device as jax counts them, which on TPU v7x is half a chip."""

    name: str
    kinds: tuple[str, ...]  # beginnings of `jax.Device.device_kind`
    hbm_bytes: float  # that a program may fill
    flops: float  # a second, dense bfloat16
    hbm_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second that a device sends over all its links to its like: half of both directions
    topology: str = ""  # an example of a slice, in libtpu's spelling; none for what is no TPU


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    CHIPS = tuple(
        Chip(name, tuple(kinds.split(";")), float(memory), float(flops), float(bandwidth), float(link), topology)
        for name, kinds, memory, flops, bandwidth, link, topology, _ in list(csv.reader(_table))[1:]
    )


def chip(name: str) -> Chip | None:
    """The chip of a `device_kind`, of a topology such as `v6e:2x4`, or of its name; None for one not known here. The
    first that matches counts: L40S stands before L4."""
    for entry in CHIPS:
        if name == entry.name or name.startswith((*entry.kinds, f"{entry.name}:")):
            return entry
    return None
