"""Cycles of a compiled program on a TPU, by two clocks of its compiler. The schedule's: of each kernel the bundles that
it issues, or what its products or its copies from and to HBM take at the chip's rate, the longest. XLA's: the estimates
in its text, by which it chooses, and 60 % of the chip's rate for Pallas' attention, of which it knows nothing; other
Pallas kernels count as by the schedule. Collectives and copies beside the kernels are in neither."""

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

KERNEL_RATE = 0.6  # of the chip's, of attention kernels by XLA's clock
SCOPES = {
    "self_attention": "self-attention",
    "text_attention": "text",
    "exchange": "exchange",
    "feed_forward": "feed-forward",
}
LAYERS, OUTSIDE = "else in the layers", "outside the layers"
SCHEDULE, XLA = "the compiler's schedule", "XLA's estimates, for want of a schedule"
REMARKS = {  # what the figures leave out, with the millions of cycles of Pallas kernels
    SCHEDULE: "collectives, parallel copies and stalls; {:.3g} M are Pallas kernels, their scalar arguments ones",
    XLA: "collectives and stalls; {:.3g} M are Pallas kernels, at 60 % of the chip's rate",
}
VARIABLE = "LIBTPU_INIT_ARGS"
FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text=true --xla_jf_dump_hlo_text=false"
    " --xla_jf_dump_llo_pass_label_regex=^(final_bundles|deduplication-map)$"
)
NEVER = 2**62  # an estimate above it is none

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
    """What one run of a program takes on a device, by its compiler. A loop of unknown length counts as one turn."""

    clock: str  # SCHEDULE, or XLA where there is no schedule
    by_scope: dict[str, float]
    kernels: float  # of all that, in Pallas kernels, whose scalar arguments count as ones
    searching: float  # more, where no bound of a kernel's scores holds and it looks for each query's largest
    products: float  # that all products would take alone, as they are laid out; 0 by XLA's clock
    dearest: str  # instruction that is no product, and the line of its source
    dearest_cycles: float
    by_xla: float  # in all, by the other clock
    hertz: float  # of the cores, at which they reach the published rate

    @property
    def total(self) -> float:
        """Cycles in all."""
        return sum(self.by_scope.values())

    @property
    def seconds(self) -> float:
        """The time of all cycles."""
        return self.total / self.hertz


class _Item(NamedTuple):
    """One instruction of a program, as often as it runs."""

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
    """If libtpu starts in the body, it writes the schedules of what it compiles into a folder that is removed at the
    end. It reads its flags once in a process."""
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
    """Remove the schedules of what was compiled until now."""
    for file in _files():
        file.unlink()


def _files() -> list[Path]:
    folder = _FOLDER.get()
    return [*folder.iterdir()] if folder else []


def program_cycles(text: str, chip: Chip | None) -> Cycles | None:
    """The cycles of the program that was compiled last, by its optimised HLO; None for what is no TPU known here."""
    if chip is None or not chip.flops_per_cycle:
        return None
    schedules = _schedules()
    try:
        items = [*_items(text, schedules, chip)]
    except ValueError:  # written by another libtpu, in another way
        schedules = {}
        items = [*_items(text, schedules, chip)]
    clock = attrgetter("scheduled" if schedules else "estimated")
    by_scope: dict[str, float] = {}
    for item in items:
        by_scope[item.scope] = by_scope.get(item.scope, 0) + clock(item)
    dearest = max((item for item in items if not item.is_product), key=clock, default=None)
    return Cycles(
        clock=SCHEDULE if schedules else XLA,
        by_scope=by_scope,
        kernels=sum(clock(item) for item in items if item.is_kernel),
        searching=sum(item.searching for item in items),
        products=sum(item.products for item in items),
        dearest=f"{dearest.name}, {dearest.source}" if dearest else "",
        dearest_cycles=clock(dearest) if dearest else 0,
        by_xla=sum(item.estimated for item in items),
        hertz=chip.flops / chip.flops_per_cycle,
    )


def _schedules() -> dict[str, Path]:
    """The file of each kernel of what was compiled last, by the names of the instructions that it is for."""
    files = {match[1]: file for file in _files() if (match := _KERNEL_FILE.fullmatch(file.name))}
    for table in (file for file in _files() if file.name.endswith("-deduplication-map.txt")):
        for name, alike in _ALIKE.findall(table.read_text()):
            files |= dict.fromkeys(alike.split(), files[name]) if name in files else {}
    return files


def _items(text: str, schedules: Mapping[str, Path], chip: Chip) -> Iterator[_Item]:
    """What the core runs, one after the other."""
    texts, entry = computations(text)
    places, rate = sources(text), chip.flops_per_cycle
    bytes_per_cycle = rate * chip.hbm_bandwidth / chip.flops
    for line, loops in lines(texts, entry, _CALL.search):
        instruction, estimate = _INSTRUCTION.match(line), _ESTIMATE.search(line)
        if instruction is None or _BESIDE.match(instruction[2]):
            continue
        name, is_kernel = instruction[1], _PALLAS in line
        estimated = attention_flops(line) / rate / KERNEL_RATE if is_kernel else float(estimate[1]) if estimate else 0
        scheduled = estimated = estimated if estimated < NEVER else 0
        products = searching = 0.0
        if name in schedules:
            kernel = _issued(schedules[name], chip.branch_delay)
            products = kernel.matrix_cycles
            scheduled = _longest(kernel, bytes_per_cycle)
            estimated = estimated or scheduled  # nothing else is known of a Pallas kernel without attention
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
    """Cycles of a kernel's bundles, its products, or its copies, which take as long as the longest of these."""
    return max(kernel.cycles, kernel.matrix_cycles, kernel.copied_bytes / bytes_per_cycle)


def _scope(texts: Sequence[str], loops: Loops) -> str:
    """By the name of the operation that an instruction was made for, else by those inside it."""
    for path in (path for text in texts for path in _OP_NAME.findall(text)):
        for scope, name in SCOPES.items():
            if scope in path:
                return name
    return LAYERS if loops else OUTSIDE


def _source(texts: Sequence[str], places: Mapping[int, str]) -> str:
    frames = (int(frame) for text in texts for frame in _FRAME.findall(text))
    return next((places[frame] for frame in frames if frame in places), "without a source")


def attention_flops(line: str) -> int:
    """Operations of a Pallas kernel that has queries, keys and values among its operands, those on padding as well; 0
    of another."""
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
