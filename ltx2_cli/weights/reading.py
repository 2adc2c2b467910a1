"""Tensors from files into the host's memory, read ahead by threads, in the parts that the devices get."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from os import cpu_count
from typing import Any, NamedTuple, Protocol

import numpy as np

from ltx2_cli.weights.checkpoint import DTYPES, Index, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight
from ltx2_cli.weights.transfer import Bounds, Place, Placement, Transfer, sharding_of, spread

SMALL = 2**22  # bytes: a smaller array crosses once for each device, which takes less time than a program to gather it
READ_AHEAD = 2**29  # bytes that are read before they are sent
PORTION = 2**24  # bytes that one thread reads at a time
CACHED = 2**19  # bytes that stay in a core's cache while they are cast or transposed
ALIGNMENT = 64  # bytes; the CPU backend takes over memory that has it
THREADS = ThreadPoolExecutor(max(8, cpu_count() or 1))  # more than cores: a disk or a network is waited for


class LowRank(Protocol):
    """A matrix to be added to one tensor."""

    @property
    def rank(self) -> int:
        """The inner dimension of its factors."""

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Its factors, float32 a [rank, in] and b [out, rank]; the matrix is b·a."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What travels as one array: a weight, or consecutive layers of a stack."""

    weight: Weight
    transfer: Transfer
    first: int  # its first layer
    tensors: tuple[tuple[str, Shape], ...]  # names and shapes on disk, layer by layer

    @property
    def host_bytes(self) -> int:
        """The memory that it takes on this host."""
        transfer = self.transfer
        part = prod(transfer.sharding.shard_shape(transfer.shape)) * transfer.stored.itemsize
        factors = transfer.rank * sum(self.tensors[0][1][:2]) * np.dtype(np.float32).itemsize
        return len(transfer.parts()) * part + factors


def pieces(
    weight: Weight, files: TensorFiles, place: Placement, added: Mapping[str, LowRank], chunk: int | None
) -> Iterator[Piece]:
    """A weight in pieces: as many layers together as take no more than `chunk` bytes and divide them evenly.

    None is for devices that compute in the host's memory: all layers together, cast by the host, so that nothing is
    copied. Small weights are cast by the host for all devices. A layer with a scale or an addition is its own piece.
    """
    tensors = tuple(weight.tensors())
    computed = any(files[name].scale or name in added for name, _ in tensors)
    count = 1 if computed else len(tensors) if chunk is None else _layers_together(weight, files, chunk)
    for first in range(0, len(tensors), count):
        part = tensors[first : first + count]
        transfer = _transfer(weight, part, files, place(weight), added.get(part[0][0]), computed, chunk is None)
        yield Piece(weight, transfer, first, part)


def _layers_together(weight: Weight, files: TensorFiles, chunk: int) -> int:
    """The number of layers that travel as one array: of one dtype, within `chunk` bytes, a divisor of all."""
    tensors = list(weight.tensors())
    if len(dtypes := {files[name].dtype for name, _ in tensors}) > 1:
        return 1
    size = prod(tensors[0][1]) * np.dtype(DTYPES[dtypes.pop()]).itemsize
    fitting = (count for count in range(1, len(tensors) + 1) if not len(tensors) % count and count * size <= chunk)
    return max(fitting, default=1)


def _transfer(
    weight: Weight,
    tensors: Sequence[tuple[str, Shape]],
    files: TensorFiles,
    place: Place,
    added: LowRank | None,
    computed: bool,
    in_host_memory: bool,
) -> Transfer:
    """How these layers of a weight travel, or all of it."""
    stored, value = files[tensors[0][0]], weight.get_value()
    shape = (len(tensors), *value.shape[1:]) if weight.layers else value.shape
    small = prod(shape) * value.dtype.itemsize < SMALL
    cast_here = not computed and (small or in_host_memory)
    return Transfer(
        shape=shape,
        stored=value.dtype if cast_here else np.dtype(DTYPES[stored.dtype]),
        dtype=value.dtype,
        sharding=sharding_of(place) if small else spread(shape, sharding_of(place), _disk_first(weight)),
        place=place,
        order=weight.order,
        scaled=stored.scale is not None,
        rank=added.rank if added else 0,
        stack=value.shape if weight.layers and (computed or len(tensors) < weight.layers) else None,
    )


def _disk_first(weight: Weight) -> list[int]:
    """The dimensions of a weight in the order on disk, so that parts are contiguous there; that of layers last."""
    stacked = bool(weight.layers)
    return [stacked + weight.order.index(i) for i in range(len(weight.order))] + [0] * stacked


class Change(NamedTuple):
    """The factor by which the devices multiply a tensor, and the factors of the matrix that they add to it."""

    scale: np.float32 | None
    factors: tuple[np.ndarray, np.ndarray] | None


class Reading(NamedTuple):
    """A piece that threads read: its parts, complete when the reads are done."""

    piece: Piece
    parts: Mapping[Bounds, np.ndarray]
    change: "Future[Change]"
    reads: "Sequence[Future[Any]]"  # that of the change too


def read_ahead(everything: Iterable[Piece], files: TensorFiles, added: Mapping[str, LowRank]) -> Iterator[Reading]:
    """Each piece once it is read, while threads read as much of those behind it as `READ_AHEAD` allows. Raises
    `RunError` for what cannot be read."""
    ahead: deque[tuple[int, Reading]] = deque()
    try:
        for piece in everything:
            while ahead and piece.host_bytes + sum(size for size, _ in ahead) > READ_AHEAD:
                yield _next(ahead)
            ahead.append((piece.host_bytes, _begin(piece, files, added)))
        while ahead:
            yield _next(ahead)
    finally:
        for read in (read for _, reading in ahead for read in reading.reads):
            read.cancel()


def _next(ahead: deque[tuple[int, Reading]]) -> Reading:
    """The first piece once it is read; until then it counts as read ahead."""
    for read in ahead[0][1].reads:
        read.result()
    return ahead.popleft()[1]


def _begin(piece: Piece, files: TensorFiles, added: Mapping[str, LowRank]) -> Reading:
    """Have threads read a piece."""
    parts: dict[Bounds, np.ndarray] = {}
    change = THREADS.submit(_change, piece, files, added)
    reads: list[Future[Any]] = [change]
    for bounds, index in piece.transfer.parts().items():
        parts[bounds] = _aligned(tuple(end - begin for begin, end in bounds), piece.transfer.stored)
        reads += [THREADS.submit(work) for work in _work(piece, index, parts[bounds], files)]
    return Reading(piece, parts, change, reads)


def _change(piece: Piece, files: TensorFiles, added: Mapping[str, LowRank]) -> Change:
    name, transfer = piece.tensors[0][0], piece.transfer
    return Change(files.scale(name) if transfer.scaled else None, added[name].read() if transfer.rank else None)


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that the CPU backend takes over without a copy."""
    size = prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


Window = tuple[range, ...]  # a part of a tensor on disk: rows, columns, …


def _work(piece: Piece, index: Index, memory: np.ndarray, files: TensorFiles) -> Iterator[Callable[[], None]]:
    """Pieces of work, for several threads, that read a part of a piece into memory."""
    order, stacked = piece.weight.order, bool(piece.weight.layers)
    layers, *within = index if stacked else (slice(None), *index)
    stack = memory if stacked else memory[None]
    for layer, (name, shape) in enumerate(piece.tensors[layers]):
        out = np.atleast_1d(stack[layer, ...].transpose(np.argsort(order)))  # as on disk
        rows, *columns = [range(size)[within[order.index(i)]] for i, size in enumerate(shape)] or [range(1)]
        direct = _are_whole(columns, shape) and DTYPES[files[name].dtype] == out.dtype and out.flags.c_contiguous
        for block in _blocks(out, PORTION):
            if direct:
                yield partial(files.read_into, name, rows[block].start, out[block])
            else:
                yield partial(_convert, files, name, (rows[block], *columns), out[block])


def _are_whole(columns: Sequence[range], shape: Shape) -> bool:
    """Whether a part of a tensor of this shape on disk has whole rows."""
    return all(len(part) == size for part, size in zip(columns, shape[1:], strict=True))


def _blocks(out: np.ndarray, size: int) -> Iterator[slice]:
    """All rows of an array, as many at a time as take no more than `size` bytes, but at least one."""
    step = max(1, size * len(out) // max(out.nbytes, 1))
    yield from (slice(first, first + step) for first in range(0, len(out), step))


def _convert(files: TensorFiles, name: str, window: Window, out: np.ndarray) -> None:
    """A part of one tensor into `out`, which differs in dtype, order or extent. Whole rows are read; of others the
    pages are, when they are touched."""
    tensor, (rows, *columns) = files[name], window
    for block in _blocks(out, CACHED):
        if _are_whole(columns, tensor.shape):
            stored = np.empty((len(rows[block]), *tensor.shape[1:]), DTYPES[tensor.dtype])
            files.read_into(name, rows[block].start, stored)
        else:
            stored = files.read(name, tuple(slice(part.start, part.stop) for part in (rows[block], *columns)))
        np.copyto(out[block], stored, casting="unsafe")
