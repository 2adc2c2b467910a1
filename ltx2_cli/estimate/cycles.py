"""Cycles of a compiled program on a TPU, by two clocks of its compiler. The schedule: for each kernel the longest of
its issued bundles, its matmuls, and its copies from and to HBM at the chip's rates. XLA: the estimates in its text,
which guide its choices, and 60 % of the chip's rate for Pallas attention kernels, which it does not estimate; other
Pallas kernels count as in the schedule. Collectives and parallel copies are in neither."""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ltx2_cli.chips import Chip
from ltx2_cli.estimate.bundles import Issued, issued
from ltx2_cli.estimate.hlo import Loops, callees, computations, lines, sources

KERNEL_RATE = 0.6  # of the chip's rate: attention kernels by XLA's clock
SCOPES = {
    "self_attention": "self-attention",
    "text_attention": "text",
    "exchange": "exchange",
    "feed_forward": "feed-forward",
}
LAYERS, OUTSIDE = "else in the layers", "outside the layers"
SCHEDULE, XLA = "the compiler's schedule", "XLA's estimates, for want of a schedule"
REMARKS = {  # omissions of the figures, with the millions of cycles of Pallas kernels
    SCHEDULE: "collectives, parallel copies and stalls; {:.3g} M are Pallas kernels, their scalar arguments ones",
    XLA: "collectives and stalls; {:.3g} M are Pallas kernels, at 60 % of the chip's rate",
}
VARIABLE = "LIBTPU_INIT_ARGS"
FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
    " --xla_jf_dump_llo_pass_label_regex=^(final_bundles|deduplication-map)$"
)
NO_ESTIMATE = 2**62  # larger estimates are none

_FOLDER: ContextVar[Path | None] = ContextVar("_FOLDER", default=None)
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%([\w.\-]+) = .*? ([a-z][a-z0-9\-]*)\(")
_BESIDE = re.compile(r"all-|reduce-scatter|collective-|.*-(?:start|done|update)$")  # collectives, parallel copies
_CALL = re.compile(r" (?:call|conditional)\(")
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_PRODUCT = re.compile(r" (?:convolution|dot)\(")
_PALLAS = 'custom_call_target="tpu_custom_call"'
_OPERANDS = re.compile(r"operand_layout_constraints=\{((?:[^{}]|\{[^}]*\})*)\}")
_ARRAY = re.compile(r"\b(?:bf16|f\d\w*)\[([\d,]+)\]")
_KERNEL_FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
_ALIKE = re.compile(r"^key:(\S+)\nordinal:\d+\nequivalent_hlos\[.*\]:\n((?:  .*\n)*)", re.MULTILINE)


@dataclass(frozen=True)
class Cycles:
    """Cycles of one run of a program on a device, by its compiler. A loop of unknown length counts as one iteration."""

    clock: str  # SCHEDULE, or XLA where there is no schedule
    by_scope: dict[str, float]
    kernels: float  # the part in Pallas kernels, with ones for their scalar arguments
    searching: float  # additional, if no bound of the attention scores holds and kernels search each query's maximum
    products: float  # of matrix products alone, in their layouts; 0 by XLA's clock
    dearest: str  # the costliest instruction except matrix products, and the line of its source
    dearest_cycles: float
    by_xla: float  # total by the other clock
    hertz: float  # clock rate of the cores, from the published rate of operations

    @property
    def total(self) -> float:
        """All cycles."""
        return sum(self.by_scope.values())

    @property
    def seconds(self) -> float:
        """The time of all cycles."""
        return self.total / self.hertz


class _Item(NamedTuple):
    """Cycles of all runs of one instruction of a program."""

    name: str
    scope: str
    source: str
    is_kernel: bool
    is_product: bool
    scheduled: float
    estimated: float
    products: float
    searching: float


@contextmanager
def dumped_schedules() -> Iterator[None]:
    """If libtpu starts in the body, it writes the schedules of all programs that it compiles into a folder that is
    removed at the end. It reads its flags once in a process."""
    before = os.environ.get(VARIABLE)
    with TemporaryDirectory(prefix="ltx2-schedules-") as folder:
        os.environ[VARIABLE] = " ".join(filter(None, (before, FLAGS.format(folder))))
        token = _FOLDER.set(Path(folder))
        try:
            yield
        finally:
            _FOLDER.reset(token)
            os.environ.pop(VARIABLE)
            os.environ.update({VARIABLE: before} if before is not None else {})


def clear_schedules() -> None:
    """Remove all schedules."""
    for file in _files():
        file.unlink()


def _files() -> list[Path]:
    folder = _FOLDER.get()
    return [*folder.iterdir()] if folder else []


def program_cycles(text: str, chip: Chip | None) -> Cycles | None:
    """The cycles of the program that was compiled last, from its optimised HLO; None unless a known TPU."""
    if chip is None or not chip.flops_per_cycle:
        return None
    items, name = _clocked(text, chip)
    clock = attrgetter("scheduled" if name == SCHEDULE else "estimated")
    by_scope: dict[str, float] = {}
    for item in items:
        by_scope[item.scope] = by_scope.get(item.scope, 0) + clock(item)
    dearest = max((item for item in items if not item.is_product), key=clock, default=None)
    return Cycles(
        clock=name,
        by_scope=by_scope,
        kernels=sum(clock(item) for item in items if item.is_kernel),
        searching=sum(item.searching for item in items),
        products=sum(item.products for item in items),
        dearest=f"{dearest.name}, {dearest.source}" if dearest else "",
        dearest_cycles=clock(dearest) if dearest else 0,
        by_xla=sum(item.estimated for item in items),
        hertz=chip.flops / chip.flops_per_cycle,
    )


def instruction_seconds(text: str, chip: Chip | None) -> dict[str, float]:
    """The seconds of all runs of each instruction of the program that was compiled last, by its name; empty where
    libtpu made no schedule."""
    if chip is None or not chip.flops_per_cycle:
        return {}
    items, clock = _clocked(text, chip)
    hertz = chip.flops / chip.flops_per_cycle
    return {item.name: item.scheduled / hertz for item in items} if clock == SCHEDULE else {}


def _clocked(text: str, chip: Chip) -> tuple[list[_Item], str]:
    """The instructions that the core runs, and the clock that they have: XLA's where there is no schedule."""
    schedules = _schedules()
    try:
        return [*_items(text, schedules, chip)], SCHEDULE if schedules else XLA
    except ValueError:  # the format of another libtpu
        return [*_items(text, {}, chip)], XLA


def _schedules() -> dict[str, Path]:
    """The schedule files of the program that was compiled last, by the names of their instructions."""
    files = {match[1]: file for file in _files() if (match := _KERNEL_FILE.fullmatch(file.name))}
    for table in (file for file in _files() if file.name.endswith("-deduplication-map.txt")):
        for name, alike in _ALIKE.findall(table.read_text()):
            files |= dict.fromkeys(alike.split(), files[name]) if name in files else {}
    return files


def _items(text: str, schedules: Mapping[str, Path], chip: Chip) -> Iterator[_Item]:
    """The instructions that the core runs, in order."""
    texts, entry = computations(text)
    places, rate = sources(text), chip.flops_per_cycle
    bytes_per_cycle = rate * chip.hbm_bandwidth / chip.flops
    for line, loops in lines(texts, entry, _CALL.search):
        instruction, estimate = _INSTRUCTION.match(line), _ESTIMATE.search(line)
        if instruction is None or _BESIDE.match(instruction[2]):
            continue
        name, is_kernel = instruction[1], _PALLAS in line
        estimated = attention_flops(line) / rate / KERNEL_RATE if is_kernel else float(estimate[1]) if estimate else 0
        scheduled = estimated = estimated if estimated < NO_ESTIMATE else 0
        products = searching = 0.0
        if name in schedules:
            kernel = _issued(schedules[name], chip.branch_delay)
            products = kernel.matrix_cycles
            scheduled = _longest(kernel, bytes_per_cycle)
            estimated = estimated or scheduled  # XLA has no estimate of a Pallas kernel without attention
            if is_kernel:
                searching = _longest(_issued(schedules[name], chip.branch_delay, False), bytes_per_cycle) - scheduled
        if scheduled or estimated:
            own = [line, *(texts[callee] for callee in callees(line))]
            times = math.prod(number for number in loops if number)
            is_product = is_kernel or any(map(_PRODUCT.search, own))
            scope, source = _scope(own, loops), _source(own, places)
            cycles = (times * number for number in (scheduled, estimated, products, searching))
            yield _Item(name, scope, source, is_kernel, is_product, *cycles)


@cache
def _issued(file: Path, branch_delay: int, bounds_hold: bool = True) -> Issued:
    return issued(file.read_text(), branch_delay, bounds_hold)


def _longest(kernel: Issued, bytes_per_cycle: float) -> float:
    """The longest of a kernel's cycles: of its bundles, its matmuls and its copies."""
    return max(kernel.cycles, kernel.matrix_cycles, kernel.copied_bytes / bytes_per_cycle)


def _scope(texts: Sequence[str], loops: Loops) -> str:
    """The scope of an instruction, from the name of its operation, else from those inside it."""
    for path in (path for text in texts for path in _OP_NAME.findall(text)):
        for scope, name in SCOPES.items():
            if scope in path:
                return name
    return LAYERS if loops else OUTSIDE


def _source(texts: Sequence[str], places: Mapping[int, str]) -> str:
    frames = (int(frame) for text in texts for frame in _FRAME.findall(text))
    return next((places[frame] for frame in frames if frame in places), "without a source")


def attention_flops(line: str) -> int:
    """Operations of a Pallas kernel with queries, keys and values among its operands, including padding; 0 for
    another."""
    operands = _OPERANDS.search(line)
    arrays = [[int(n) for n in dims.split(",")] for dims in _ARRAY.findall(operands[1])] if operands else []
    for query, key, value in zip(arrays, arrays[1:], arrays[2:], strict=False):
        if (
            len(query) == len(key) == len(value) > 2
            and key == value
            and query[:: len(query) - 1] == key[:: len(key) - 1]
        ):
            return 4 * math.prod(query) * key[-2]
    return 0
