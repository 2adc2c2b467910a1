"""Programs compiled for devices that may be absent: memory, cycles, and what is sent."""

import math
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jax.sharding import Mesh

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.chips import chip
from ltx2_cli.core.programs import Program
from ltx2_cli.estimate.collectives import Collective, collectives, sent_bytes
from ltx2_cli.estimate.cycles import Cycles, clear_schedules, instruction_seconds, program_cycles
from ltx2_cli.estimate.waiting import waiting_seconds
from ltx2_cli.weights.host import is_on_host

# How libtpu states the memory of a program that is too large: all of it, or temporaries alone.
_NEEDED = re.compile(r"Used ([\d.]+)([KMGT])\w* of|temporaries \(([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Memory:
    """Bytes on each device while a program runs; the peak includes its results."""

    arguments_bytes: int
    temporaries_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A compiled program on one device."""

    name: str
    network: str | None  # the network whose weights it reads
    stage: int  # index of the plan's stage
    compile_seconds: float
    memory: Memory
    activation_bytes: int  # the peak without the weights that it reads
    collectives: tuple[Collective, ...]
    text: str  # optimised HLO
    cycles: Cycles | None = None  # None unless the device is a known TPU
    waiting_seconds: float | None = None  # that arithmetic waits for what is sent; None: no schedule is known

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends in one run; a loop whose length is an argument counts as one iteration."""
        return sent_bytes(self.collectives)

    @property
    def sent_seconds(self) -> float:
        """Seconds of `sent_bytes`, one collective after the other; 0 if rates are unknown."""
        return sum(collective.seconds or 0 for collective in self.collectives)


@dataclass(frozen=True)
class CompileFailure:
    """A program that the compiler refuses for the devices."""

    name: str
    network: str | None
    stage: int
    reason: str  # a line
    needed_bytes: int | None  # if it is too large, 0: not stated by the compiler; None: another reason


def compile_program(program: Program, mesh: Mesh) -> Compiled | CompileFailure:
    """Compile a program for the devices of `mesh`; the time is the compiler's alone."""
    identity, lowered = (program.name, program.network, program.stage), program.lower()
    clear_schedules()
    start = time.monotonic()
    try:
        with _without_cache():
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        return CompileFailure(*identity, reason, needed_bytes(str(error)) if "RESOURCE_EXHAUSTED" in reason else None)
    seconds, text, analysis = time.monotonic() - start, compiled.as_text() or "", compiled.memory_analysis()
    assert analysis is not None
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    # On the CPU, XLA's peak leaves out temporaries that are never all in use.
    peak = max(analysis.peak_memory_in_bytes - analysis.host_argument_size_in_bytes, arguments + temporaries)
    memory = Memory(arguments, temporaries, peak)
    known = chip(mesh.devices.flat[0].device_kind)
    cycles, by_instruction = program_cycles(text, known), instruction_seconds(text, known)
    waiting = waiting_seconds(text, mesh, by_instruction) if by_instruction else None
    activations = peak - _weight_bytes(compiled)
    return Compiled(*identity, seconds, memory, activations, tuple(collectives(text, mesh)), text, cycles, waiting)


@contextmanager
def _without_cache() -> Iterator[None]:
    """In the body, jax looks into no cache of compiled programs: it makes no key for absent GPUs, and a program that is
    read says nothing of the compiler's time."""
    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    settings.update("jax_enable_compilation_cache", False)
    reset_cache()
    try:
        yield
    finally:
        settings.update("jax_enable_compilation_cache", before)
        reset_cache()


def _weight_bytes(compiled: jax.stages.Compiled) -> int:
    (arguments, _), (shardings, _) = compiled.args_info, compiled.input_shardings
    size = 0
    for argument, placed in zip(arguments, shardings, strict=True):
        if isinstance(argument, nnx.Module):
            leaves = jax.tree.leaves(placed, is_leaf=lambda leaf: leaf is None)  # None: the program does not read it
            for weight, sharding in zip(jax.tree.leaves(argument), leaves, strict=True):
                if sharding and not is_on_host(sharding):
                    size += math.prod(sharding.shard_shape(weight.shape)) * weight.dtype.itemsize
    return size


def needed_bytes(message: str) -> int:
    """The bytes stated in a compiler's refusal, or 0."""
    if (stated := _NEEDED.search(message)) is None:
        return 0
    number, unit = filter(None, stated.groups())
    return round(float(number) * _UNITS[unit])


def write_hlo(programs: Iterable[Compiled], folder: Path) -> None:
    """Write the optimised HLO of each program to a file in `folder`, such as `forward.hlo`."""
    for program in programs:
        with replacing(folder / f"{program.name.replace(' ', '_')}.hlo") as temporary:
            temporary.write_text(program.text)
