"""What the makers publish of their chips, in chips.csv with the sources; how weights lie in their memory. A TPU has the
memory that libtpu 0.0.42 gives a program, by its own message where one needs more."""

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
    link_bandwidth: float  # bytes a second over one link, in one direction: half of both
    torus: tuple[int, ...] = ()  # chips along the axes of the smallest TPU slice whose ends are joined; else a switch
    die_bandwidth: float = 0.0  # bytes a second between the devices of a chip, in one direction
    topology: str = ""  # an example of a slice, in libtpu's spelling; none for what is no TPU
    profile: str = ""  # the sharding profile of several; none: its platform's
    # Tile height of stacked 16-bit weights as the loop over layers reads them, else every step first makes a copy of
    # all (None: the compiler's choice); and whether they lie (in, out), as products read them: 3 to 4 % of a layer.
    bf16_tile_sublanes: int | None = None
    input_major: bool = False


with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as _table:
    CHIPS = tuple(
        Chip(
            row["name"],
            tuple(row["kinds"].split(";")),
            float(row["hbm_bytes"]),
            float(row["flops"]),
            float(row["hbm_bandwidth"]),
            float(row["link_bandwidth"]),
            tuple(int(size) for size in row["torus"].split("x") if size),
            float(row["die_bandwidth"] or 0),
            row["topology"],
            row["profile"],
            int(row["bf16_tile_sublanes"] or 0) or None,
            bool(row["input_major"]),
        )
        for row in csv.DictReader(_table)
    )


def chip(name: str) -> Chip | None:
    """The chip of a `device_kind`, of a topology such as `v6e:2x4`, or of its name; None for one not known here. The
    first that matches counts: L40S stands before L4."""
    for entry in CHIPS:
        if name == entry.name or name.startswith((*entry.kinds, f"{entry.name}:")):
            return entry
    return None
