"""All facts of each chip, a line of chips.csv: a new chip is a new line. Memory and rates are the makers' figures, with
the sources; a TPU's memory is the limit in libtpu 0.0.42's own message for a program that needs more. Block sizes,
tiles and compiler options are the fastest by libtpu's schedules."""

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class BlockSizes(NamedTuple):
    """Blocks of the fused attention kernel. A loop's turn computes the scores of `queries` with `keys`, `unroll` times:
    exponentials of one block overlap products of the next."""

    queries: int  # at most
    keys: int  # at most
    unroll: int  # at most


@dataclass(frozen=True)
class Chip:
    """One device as jax counts them, which on TPU v7x is half a chip."""

    name: str
    kinds: tuple[str, ...]  # beginnings of `jax.Device.device_kind`
    hbm_bytes: float  # that a program may fill
    flops: float  # a second, dense bfloat16
    hbm_bandwidth: float  # bytes a second
    link_bandwidth: float  # bytes a second over one link, in one direction: half of both
    # Bytes a second from the host; 0: not published. Of GPUs by their generation of PCIe, from memory.
    host_bandwidth: float = 0.0
    torus: tuple[int, ...] = ()  # chips along the axes of the smallest TPU slice whose ends are joined; else a switch
    die_bandwidth: float = 0.0  # bytes a second between the devices of a chip, in one direction
    flops_per_cycle: int = 0  # of a TPU's matrix units
    branch_delay: int = 4  # at most so many bundles behind a branch are issued whether it is taken or not
    topology: str = ""  # an example of a slice, in libtpu's spelling; none for what is no TPU
    profile: str = ""  # the sharding profile of several; none: its platform's
    # Tile height of stacked 16-bit weights as the loop over layers reads them, else every step first makes a copy of
    # all (None: the compiler's choice); and whether they lie (in, out), as products read them: 3 to 4 % of a layer.
    bf16_tile_sublanes: int | None = None
    input_major: bool = False
    vmem_bytes: int = 0  # a TPU core's own memory, as Pallas knows it; 0: the fused attention kernel does not run
    # Of that kernel, the fastest first; the next where they do not fit VMEM. By the compiler's schedule a head of 6,144
    # tokens takes 2.3 times its arithmetic on v6e and 2.5 times on v7x, of 24,576 tokens 2.15 and 2.25 times; 2 is the
    # least, since 128 channels fill half of the matrix units. With 2 blocks of 3,072 keys v7x takes 2.8 times.
    block_sizes: tuple[BlockSizes, ...] = ()
    # For programs of products. With more VMEM for one operation than libtpu's 32 MiB, products read their operands less
    # often, and sum over all inputs at once. XLA's scheduler believes that operations take longer than by libtpu's
    # schedule, and begins to send late: with 0.6 of what it believes, arithmetic of LTX-2.3 at 768x512 on v6e:2x4 waits
    # 29 ms for what is sent in eight bits and 7 ms in bfloat16, with 0.4 it waits 16 and 9.
    compiler_options: tuple[tuple[str, str], ...] = ()
    # The two rates of eight bits are from memory of the same pages, which were not read for them.
    int8_ops: float = 0.0  # a second, dense; 0: slower than bfloat16, or not published
    fp8_flops: float = 0.0  # the same of float8_e4m3fn
    keeps_activations: bool = False  # the compiler keeps all of the audio's activations, and weights laid out again
    # Of a GPU, for XLA's compiler.
    compute_capability: str = ""  # such as 9.0; none for what is no GPU of NVIDIA
    multiprocessors: int = 0
    l2_bytes: int = 0
    clock_ghz: float = 0.0  # the highest

    def rate(self, kind: str) -> float:
        """Operations a second of products with matrices in `int8`, `fp8`, `int4`, multiplied as int8, or another type,
        which is as fast as bfloat16."""
        return {"int8": self.int8_ops, "int4": self.int8_ops, "fp8": self.fp8_flops}.get(kind) or self.flops


def _chip(row: dict[str, str]) -> Chip:
    """The chip of a line of the table. An empty field is 0, false, or the absence of a value."""

    def pairs(field: str, separator: str) -> list[list[str]]:
        return [part.split(separator) for part in row[field].split(";") if part]

    return Chip(
        name=row["name"],
        kinds=tuple(row["kinds"].split(";")),
        hbm_bytes=float(row["hbm_bytes"]),
        flops=float(row["flops"]),
        int8_ops=float(row["int8_ops"] or 0),
        fp8_flops=float(row["fp8_flops"] or 0),
        hbm_bandwidth=float(row["hbm_bandwidth"]),
        link_bandwidth=float(row["link_bandwidth"]),
        host_bandwidth=float(row["host_bandwidth"] or 0),
        torus=tuple(int(size) for size in row["torus"].split("x") if size),
        die_bandwidth=float(row["die_bandwidth"] or 0),
        flops_per_cycle=int(row["flops_per_cycle"] or 0),
        branch_delay=int(row["branch_delay"] or 4),
        topology=row["topology"],
        profile=row["profile"],
        bf16_tile_sublanes=int(row["bf16_tile_sublanes"] or 0) or None,
        input_major=bool(row["input_major"]),
        vmem_bytes=int(row["vmem_bytes"] or 0),
        block_sizes=tuple(BlockSizes(*map(int, sizes)) for sizes in pairs("block_sizes", "x")),
        compiler_options=tuple((key, value) for key, value in pairs("compiler_options", "=")),
        keeps_activations=bool(row["keeps_activations"]),
        compute_capability=row["compute_capability"],
        multiprocessors=int(row["multiprocessors"] or 0),
        l2_bytes=int(row["l2_bytes"] or 0),
        clock_ghz=float(row["clock_ghz"] or 0),
    )


def read_chips(lines: Iterable[str]) -> tuple[Chip, ...]:
    """The chips of a table, whose first line names the fields."""
    return tuple(map(_chip, csv.DictReader(lines)))


TABLE = Path(__file__).with_suffix(".csv")
CHIPS = read_chips(TABLE.read_text(encoding="utf-8").splitlines())


def chip(name: str) -> Chip | None:
    """The chip of a `device_kind`, of a topology such as `v6e:2x4`, or of its name; None for one not known here. The
    first that matches counts: L40S stands before L4. A GeForce with a further word, such as Laptop, is another chip."""
    for entry in CHIPS:
        exact = [entry.name, *(kind for kind in entry.kinds if "GeForce" in kind)]
        starts = [f"{entry.name}:", *(kind for kind in entry.kinds if kind not in exact)]
        if name in exact or name.startswith(tuple(starts)):
            return entry
    return None
