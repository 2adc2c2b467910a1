"""A program compiled for devices that need not be here: its memory, its collectives, its text."""

import math
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from ltx2_cli.core.programs import Program
from ltx2_cli.estimate.collectives import Collective, collectives, sent_bytes

# How libtpu states what a program that is too large would need: of all memory, or of temporaries alone.
_NEEDED = re.compile(r"Used ([\d.]+)([KMGT])\w* of|temporaries \(([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while a program runs; the peak is the need at once, with its results."""

    arguments_bytes: int
    temporaries_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Compiled:
    """One program as each device runs it."""

    name: str
    network: str | None  # whose weights it takes
    stage: int  # index of the plan's stage whose loop it belongs to
    compile_seconds: float
    memory: Memory
    activation_bytes: int  # beside the weights of networks among its arguments, as far as it reads them
    collectives: tuple[Collective, ...]
    text: str  # optimised HLO

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends in one run; a loop whose length is an argument counts as one iteration."""
        return sent_bytes(self.collectives)

    def record(self) -> dict[str, Any]:
        """The figures as JSON has them."""
        figures = asdict(self)
        return {**{key: figures[key] for key in figures if key not in ("name", "text")}, "sent_bytes": self.sent_bytes}


@dataclass(frozen=True)
class CompileFailure:
    """One program that the compiler refuses for the devices."""

    name: str
    network: str | None
    stage: int
    reason: str  # a line
    needed_bytes: int | None  # of a device where it is too large, 0 if the compiler does not say; None: another reason


def compile_program(program: Program, mesh: Mesh) -> Compiled | CompileFailure:
    """Compile for the devices of `mesh`; the time is the compiler's alone."""
    which, lowered = (program.name, program.network, program.stage), program.lower()
    start = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        return CompileFailure(*which, reason, needed_bytes(str(error)) if "RESOURCE_EXHAUSTED" in reason else None)
    seconds, text, memory = time.monotonic() - start, compiled.as_text() or "", _memory(compiled)
    activations = memory.peak_bytes - _weight_bytes(compiled)
    return Compiled(*which, seconds, memory, activations, tuple(collectives(text, mesh)), text)


def write_hlo(programs: Iterable[Compiled], folder: Path) -> None:
    """The optimised HLO of each program in a file of its own in `folder`, `forward.hlo` for one."""
    for program in programs:
        path = folder / f"{program.name.replace(' ', '_')}.hlo"
        unfinished = path.with_name(f".{path.name}.part")
        unfinished.write_text(program.text)
        unfinished.replace(path)


def needed_bytes(message: str) -> int:
    """The memory that a compiler's refusal states; 0 where it states none."""
    if (found := _NEEDED.search(message)) is None:
        return 0
    number, unit = filter(None, found.groups())
    return round(float(number) * _UNITS[unit])


def _memory(compiled: jax.stages.Compiled) -> Memory:
    analysis = compiled.memory_analysis()
    assert analysis is not None
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    # On the CPU, XLA's peak leaves out temporaries that are never all in use.
    return Memory(arguments, temporaries, max(analysis.peak_memory_in_bytes, arguments + temporaries))


def _weight_bytes(compiled: jax.stages.Compiled) -> int:
    (arguments, _), (shardings, _) = compiled.args_info, compiled.input_shardings
    size = 0
    for argument, placed in zip(arguments, shardings, strict=True):
        if isinstance(argument, nnx.Module):
            leaves = jax.tree.leaves(placed, is_leaf=lambda leaf: leaf is None)  # None: the program does not read it
            for weight, sharding in zip(jax.tree.leaves(argument), leaves, strict=True):
                size += math.prod(sharding.shard_shape(weight.shape)) * weight.dtype.itemsize if sharding else 0
    return size
