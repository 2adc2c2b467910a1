"""Tensors from files into the host's memory, by several threads, in the parts that devices are to get."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from os import cpu_count
from typing import NamedTuple, Protocol

import numpy as np

from ltx2_cli.weights.checkpoint import DTYPES, Index, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight
from ltx2_cli.weights.on_devices import Bounds, Place, Placement, Transfer, sharding_of, spread

SMALL = 2**22  # bytes: a smaller array crosses once for each device, which takes less time than a program to gather it
PORTION = 2**24  # bytes that one thread reads at a time
TILE = (128, 16)  # of rows and, in more than a matrix, columns: stays in a core's cache while it is put in order
ALIGNMENT = 64  # bytes, that they ask for
THREADS = ThreadPoolExecutor(max(8, cpu_count() or 1))  # more than cores: a disk or a network is waited for


class LowRank(Protocol):
    """A matrix to be added to one tensor."""

    @property
    def rank(self) -> int:
        """The length that its factors have in common."""

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
    """A weight in pieces: as many of its layers together as take no more than `chunk` bytes, which divide them evenly.

    None is for devices that compute in the host's memory: all layers, cast by the host, so that nothing is copied; as
    small weights are to all devices, for which no program is compiled then. A layer that is scaled or added to is a
    piece of its own.
    """
    tensors = tuple(weight.tensors())
    computed = any(files[name].scale or name in added for name, _ in tensors)
    count = 1 if computed else len(tensors) if chunk is None else _layers_together(weight, files, chunk)
    for first in range(0, len(tensors), count):
        part = tensors[first : first + count]
        yield Piece(weight, _transfer(weight, part, files, place(weight), added, computed, chunk), first, part)


def _layers_together(weight: Weight, files: TensorFiles, chunk: int) -> int:
    """How many layers travel as one array: those of one type that fit, a number that divides all."""
    tensors = list(weight.tensors())
    if len(kinds := {files[name].dtype for name, _ in tensors}) > 1:
        return 1
    size = prod(tensors[0][1]) * np.dtype(DTYPES[kinds.pop()]).itemsize
    fitting = (count for count in range(1, len(tensors) + 1) if not len(tensors) % count and count * size <= chunk)
    return max(fitting, default=1)


def _transfer(
    weight: Weight,
    tensors: Sequence[tuple[str, Shape]],
    files: TensorFiles,
    place: Place,
    added: Mapping[str, LowRank],
    computed: bool,
    chunk: int | None,
) -> Transfer:
    """How these layers of a weight travel, or all of it."""
    (name, _), value = tensors[0], weight.get_value()
    shape = (len(tensors), *value.shape[1:]) if weight.layers else value.shape
    small = prod(shape) * value.dtype.itemsize < SMALL
    cast_here = not computed and (small or chunk is None)
    return Transfer(
        shape=shape,
        stored=value.dtype if cast_here else np.dtype(DTYPES[files[name].dtype]),
        dtype=value.dtype,
        sharding=sharding_of(place) if small else spread(shape, sharding_of(place), _disk_first(weight)),
        place=place,
        order=weight.order,
        scaled=files[name].scale is not None,
        rank=added[name].rank if name in added else 0,
        stack=value.shape if weight.layers and (computed or len(tensors) < weight.layers) else None,
    )


def _disk_first(weight: Weight) -> list[int]:
    """The dimensions of a weight as they lie on disk: parts of the first are read in one piece; that of layers last."""
    stacked = bool(weight.layers)
    return [stacked + weight.order.index(i) for i in range(len(weight.order))] + [0] * stacked


def batches(everything: Iterable[Piece], chunk: int) -> Iterator[tuple[Piece, ...]]:
    """The pieces that travel together: each large one and each part of a stack alone, `chunk` bytes of small ones."""
    small: list[Piece] = []
    for piece in everything:
        if piece.transfer.nbytes >= SMALL or piece.transfer.stack:
            yield (piece,)
            continue
        small.append(piece)
        if sum(each.transfer.nbytes for each in small) >= chunk:
            yield tuple(small)
            small = []
    if small:
        yield tuple(small)


class Change(NamedTuple):
    """By what the devices multiply a tensor, and the factors of what they add to it."""

    scale: np.float32 | None
    factors: tuple[np.ndarray, np.ndarray] | None


@dataclass(frozen=True, eq=False)
class Staged:
    """A piece that is being read."""

    piece: Piece
    parts: Mapping[Bounds, np.ndarray]
    change: Future[Change]
    reads: Sequence[Future[None]]

    def wait(self) -> None:
        """Return when all is read. Raises `RunError` for what cannot be."""
        for future in self.reads:
            future.result()
        self.change.result()

    def cancel(self) -> None:
        """Leave unread what no thread has begun yet."""
        self.change.cancel()
        for future in self.reads:
            future.cancel()


def stage(piece: Piece, files: TensorFiles, added: Mapping[str, LowRank]) -> Staged:
    """Have threads read a piece."""
    parts: dict[Bounds, np.ndarray] = {}
    reads: list[Future[None]] = []
    for bounds, index in piece.transfer.parts().items():
        parts[bounds] = _aligned(tuple(end - begin for begin, end in bounds), piece.transfer.stored)
        reads += [THREADS.submit(portion) for portion in _fill(piece, index, parts[bounds], files)]
    return Staged(piece, parts, THREADS.submit(_change, piece, files, added), reads)


def _change(piece: Piece, files: TensorFiles, added: Mapping[str, LowRank]) -> Change:
    name, transfer = piece.tensors[0][0], piece.transfer
    return Change(files.scale(name) if transfer.scaled else None, added[name].read() if transfer.rank else None)


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that the CPU backend takes over as it is."""
    size = prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


def _fill(piece: Piece, index: Index, memory: np.ndarray, files: TensorFiles) -> Iterator[Callable[[], None]]:
    """Pieces of work, for several threads, that read a part of a piece into memory."""
    order, stacked = piece.weight.order, bool(piece.weight.layers)
    layers, *within = index if stacked else (slice(None), *index)
    stack = memory if stacked else memory[None]
    for layer, (name, shape) in enumerate(piece.tensors[layers]):
        out = np.atleast_1d(stack[layer, ...].transpose(np.argsort(order)))
        window = tuple(range(size)[within[order.index(i)]] for i, size in enumerate(shape)) or (range(1),)
        whole_rows = all(len(part) == size for part, size in zip(window[1:], shape[1:], strict=True))
        as_stored = whole_rows and DTYPES[files[name].dtype] == out.dtype
        for rows in _portions(out):
            if as_stored and out[rows].flags.c_contiguous:
                yield partial(files.read_into, name, window[0][rows].start, out[rows])
            else:
                yield partial(_convert, files, name, (window[0][rows], *window[1:]), out[rows])


def _portions(out: np.ndarray) -> Iterator[slice]:
    """All rows of an array, as many at a time as are no more than a portion."""
    yield from _blocks(len(out), PORTION * len(out) // max(out.nbytes, 1))


def _tiles(out: np.ndarray) -> Iterator[Index]:
    """All of an array, in tiles."""
    columns = [()] if out.ndim < 3 else [(part,) for part in _blocks(out.shape[1], TILE[1])]
    yield from ((rows, *part) for rows in _blocks(len(out), TILE[0]) for part in columns)


def _blocks(length: int, step: int) -> Iterator[slice]:
    """All of a length, `step` at a time, but at least one."""
    yield from (slice(first, first + max(1, step)) for first in range(0, length, max(1, step)))


Window = tuple[range, ...]  # a part of a tensor on disk: which rows, which columns


def _convert(files: TensorFiles, name: str, window: Window, out: np.ndarray) -> None:
    """A part of one tensor into `out`, which differs in type, order or extent."""
    for rows in _portions(out):
        part, stored = out[rows], _stored(files, name, (window[0][rows], *window[1:]))
        for tile in _tiles(part):
            np.copyto(part[tile], stored[tile], casting="unsafe")


def _stored(files: TensorFiles, name: str, window: Window) -> np.ndarray:
    """A part of one tensor as it is stored. Whole rows are read; the pages of others are, where they are touched."""
    tensor, (rows, *columns) = files[name], window
    if any(len(part) < size for part, size in zip(columns, tensor.shape[1:], strict=True)):
        return files.read(name, tuple(slice(part.start, part.stop) for part in window))
    stored = np.empty((len(rows), *tensor.shape[1:]), DTYPES[tensor.dtype])
    files.read_into(name, rows.start, stored)
    return stored
