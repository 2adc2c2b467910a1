"""A program compiled for devices that need not be here: its memory, what it sends, and its text."""

import math
import re
import time
from dataclasses import dataclass

import jax
from flax import nnx
from jax.sharding import Mesh

from ltx2_cli.core.programs import Program
from ltx2_cli.forecast.hlo import Collective, collectives, wire_bytes

# What libtpu says a program that is too large would need: of all memory, or of temporaries alone.
_NEEDED = re.compile(r"Used ([\d.]+)([KMGT])\w* of|temporaries \(([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while a program runs; the peak is what it needs at once, with its results."""

    arguments_bytes: int
    temporaries_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Compiled:
    """One program as each device runs it."""

    name: str
    network: str | None  # whose weights it takes
    compile_seconds: float
    memory: Memory
    weight_bytes: int  # of the networks among its arguments, as far as it reads them
    collectives: tuple[Collective, ...]
    text: str  # optimised HLO
    stage: int = 0  # the plan's, whose loop it belongs to

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in one run, loops whose turns are given to the program taken as one turn."""
        return wire_bytes(self.collectives)


@dataclass(frozen=True)
class Refused:
    """One program that the compiler does not make for the devices."""

    name: str
    network: str | None
    reason: str  # a line
    too_large: bool
    needed_bytes: int = 0  # of a device, as far as the compiler says
    stage: int = 0


def compile_program(program: Program, mesh: Mesh) -> Compiled | Refused:
    """Compile for the devices of `mesh`; the time is the compiler's alone."""
    lowered = program.lower()
    began = time.monotonic()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        needed, large = needed_bytes(str(error)), "RESOURCE_EXHAUSTED" in reason
        return Refused(program.name, program.network, reason, large, needed, program.stage)
    seconds, text = time.monotonic() - began, compiled.as_text() or ""
    found = tuple(collectives(text, mesh))
    memory, read = _memory(compiled), _weight_bytes(compiled)
    return Compiled(program.name, program.network, seconds, memory, read, found, text, program.stage)


def needed_bytes(message: str) -> int:
    """The memory that a compiler's refusal speaks of; 0 where it names none."""
    found = _NEEDED.search(message)
    if found is None:
        return 0
    number, unit = (part for part in found.groups() if part)
    return round(float(number) * _UNITS[unit])


def _memory(compiled: jax.stages.Compiled) -> Memory:
    said = compiled.memory_analysis()
    assert said is not None
    arguments, temporaries = said.argument_size_in_bytes, said.temp_size_in_bytes
    # What XLA calls the peak leaves out, on the CPU, temporaries that are never all in use.
    return Memory(arguments, temporaries, max(said.peak_memory_in_bytes, arguments + temporaries))


def _weight_bytes(compiled: jax.stages.Compiled) -> int:
    (arguments, _), (placed, _) = compiled.args_info, compiled.input_shardings
    size = 0
    for argument, where in zip(arguments, placed, strict=True):
        if isinstance(argument, nnx.Module):
            shardings = jax.tree.leaves(where, is_leaf=lambda leaf: leaf is None)  # None: it is not read
            for each, sharding in zip(jax.tree.leaves(argument), shardings, strict=True):
                size += math.prod(sharding.shard_shape(each.shape)) * each.dtype.itemsize if sharding else 0
    return size
