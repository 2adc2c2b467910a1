"""From files to devices: declared weights are checked against the headers, read ahead by threads in the parts that the
devices get, and placed piece by piece."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from math import prod
from os import cpu_count
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.background import in_background
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.weights.checkpoint import DTYPES, EIGHT_BITS, FLOATS, Index, TensorFiles, count_and_list, shape_text
from ltx2_cli.weights.declare import Shape, declared, map_weights, weights
from ltx2_cli.weights.transfer import (
    Additions,
    Piece,
    Place,
    Placement,
    addition,
    compile_transfer,
    pieces,
    send,
    send_factors,
    sharding_of,
)

M = TypeVar("M", bound=nnx.Module)
Parts = dict[str, np.ndarray]  # of an array in the host's memory, by the text of their index
CHUNK = 2**27  # bytes that travel together
ON_THE_WAY = 2  # pieces on the devices that are not in their places: one arrives while the next is sent
READ_AHEAD = 2**29  # bytes that are read before they are sent
PORTION = 2**24  # bytes that one thread reads at a time
CACHED = 2**19  # bytes that stay in a core's cache while they are cast or transposed
ALIGNMENT = 64  # bytes; the CPU backend takes over memory that has it
THREADS = ThreadPoolExecutor(max(8, cpu_count() or 1))  # more than cores: a disk or a network is waited for


def mismatches(module: nnx.Module, files: TensorFiles) -> list[str]:
    """Every difference between what `module` declares and the tensors in `files`."""
    wanted = declared(module)
    common = {name: files[name] for name in wanted if name in files}
    scales = {name: tensor.scale for name, tensor in files.items() if tensor.scale}
    unscaled = [name for name, tensor in files.items() if tensor.dtype in EIGHT_BITS and not tensor.scale]
    problems = {
        "missing": sorted(wanted.keys() - files.keys()),
        "not known": sorted(files.keys() - wanted.keys()),
        "of another shape": [
            f"{name} is {shape_text(tensor.shape)}, not {shape_text(wanted[name])}"
            for name, tensor in common.items()
            if tensor.shape != wanted[name]
        ],
        "scaled by what is not one number": [
            name for name, scale in scales.items() if prod(scale.shape) != 1 or scale.dtype not in FLOATS
        ],
        "without the scale that others have": unscaled if scales else [],
        "of a type that is not read": [
            f"{name} is {tensor.dtype}" for name, tensor in common.items() if tensor.dtype not in DTYPES
        ],
    }
    return count_and_list(problems)


def load(
    module: M, files: TensorFiles, place: Placement, added: Additions | None = None, chunk: int | None = None
) -> M:
    """`module` with its weights on the devices, each cast once to its declared dtype and laid out by `place`.

    A tensor is multiplied by its scale, and the matrix that `added` has for it is added, in float32 before the cast.
    Threads read the next tensors while one is sent. Of several hosts each reads the parts of its own devices.
    `chunk` bytes travel together, by default `CHUNK`; a CPU by default computes with the memory that was read into.
    Beside the devices' memory a host holds no more than `READ_AHEAD` bytes and four chunks, or tensors if larger.
    """
    added, parameters = added or {}, weights(module)
    platforms = {sharding_of(place(weight)).mesh.devices.flat[0].platform for weight in parameters}
    if chunk is None and platforms - {"cpu"}:  # its devices read what the host wrote, without a copy
        chunk = CHUNK
    all_pieces = [piece for weight in parameters for piece in pieces(weight, files, place, added, chunk)]
    arrays: dict[str, jax.Array] = {}
    arriving = None
    # The programs that finish pieces, in the order of their use.
    transfers = dict.fromkeys(piece.transfer for piece in all_pieces if not piece.transfer.final)
    compiled = in_background("compile", (partial(compile_transfer, transfer) for transfer in transfers))
    programs = dict(zip(transfers, compiled, strict=True))
    try:
        for piece, parts, (scale, factors) in _read_ahead(all_pieces, files, added):
            transfer, source = piece.transfer, piece.weight.source
            array = send(transfer, parts)
            sent = array, scale, factors and send_factors(factors, transfer.place)
            # So one program gathers at a time: those of CPUs may wait for each other's threads.
            jax.block_until_ready(arriving)
            arriving = array
            if not transfer.final:
                empty, finish = programs[transfer].result()
                stack = arrays.pop(source, None) if piece.first else empty and empty()
                arriving = finish(stack, *sent, np.int32(piece.first))
            arrays[source] = arriving
    finally:
        for program in compiled:
            program.cancel()
    return map_weights(lambda weight: weight.with_value(arrays[weight.source]), module)


def _read_ahead(
    all_pieces: Iterable[Piece], files: TensorFiles, added: Additions
) -> Iterator[tuple[Piece, Parts, tuple[Any, Any]]]:
    """Yield each piece once it is read: its parts, and the scale that the devices multiply by and the factors that they
    add, or None. Threads read up to `READ_AHEAD` bytes of the next ones meanwhile. Raises `RunError`."""
    ahead: deque[tuple[Piece, Parts, list[Future[Any]]]] = deque()
    try:
        for piece in (*all_pieces, None):
            held = sum(earlier.host_bytes for earlier, _, _ in ahead)
            while ahead and (piece is None or piece.host_bytes + held > READ_AHEAD):
                earlier, parts, reads = ahead[0]  # until it is read it counts as read ahead
                changes, *_ = [read.result() for read in reads]
                ahead.popleft()
                held -= earlier.host_bytes
                yield earlier, parts, changes
            if piece:
                ahead.append((piece, *_begin(piece, files, added)))
    finally:
        for _, _, reads in ahead:
            for read in reads:
                read.cancel()


def _begin(piece: Piece, files: TensorFiles, added: Additions) -> tuple[Parts, list[Future[Any]]]:
    """Start threads that read a piece: its parts, which are complete when all reads are done, and the reads."""
    (name, _), *_ = piece.tensors
    transfer, parts = piece.transfer, {}

    def changes() -> tuple[np.float32 | None, tuple[np.ndarray, np.ndarray] | None]:
        return files.scale(name) if transfer.scaled else None, added[name].read() if transfer.rank else None

    reads: list[Future[Any]] = [THREADS.submit(changes)]
    for text, index in transfer.parts().items():
        parts[text] = _aligned(transfer.sharding.shard_shape(transfer.shape), transfer.stored)
        reads += [THREADS.submit(work) for work in _work(piece, index, parts[text], files)]
    return parts, reads


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An empty array that the CPU backend can use without a copy."""
    size = prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


def _work(piece: Piece, index: Index, memory: np.ndarray, files: TensorFiles) -> Iterator[Callable[[], None]]:
    """The tasks for threads that read a part of a piece into memory."""
    order, stacked = piece.weight.order, bool(piece.weight.layers)
    layers, *within = index if stacked else (slice(None), *index)
    stack = memory if stacked else memory[None]
    for layer, (name, shape) in enumerate(piece.tensors[layers]):
        out = np.atleast_1d(stack[layer, ...].transpose(np.argsort(order)))  # as on disk
        rows, *columns = [range(size)[within[order.index(i)]] for i, size in enumerate(shape)] or [range(1)]
        for block in _blocks(out, PORTION):
            yield partial(_read, files, name, (rows[block], *columns), out[block])


def _blocks(out: np.ndarray, size: int) -> Iterator[slice]:
    """All rows of an array in blocks of at most `size` bytes, but at least one row."""
    step = max(1, size * len(out) // max(out.nbytes, 1))
    yield from (slice(first, first + step) for first in range(0, len(out), step))


def _read(files: TensorFiles, name: str, window: tuple[range, ...], out: np.ndarray) -> None:
    """Read a part of a tensor on disk, its rows, columns, …, into `out`, cast to its dtype. Whole rows are read at
    once, directly if they need no change; otherwise pages are read as they are accessed."""
    tensor, (rows, *columns) = files[name], window
    whole = all(len(part) == size for part, size in zip(columns, tensor.shape[1:], strict=True))
    if whole and DTYPES[tensor.dtype] == out.dtype and out.flags.c_contiguous:
        files.read_into(name, rows.start, out)
        return
    for block in _blocks(out, CACHED):
        if whole:
            stored = np.empty((len(rows[block]), *tensor.shape[1:]), DTYPES[tensor.dtype])
            files.read_into(name, rows[block].start, stored)
        else:
            stored = files.read(name, tuple(slice(part.start, part.stop) for part in (rows[block], *columns)))
        np.copyto(out[block], stored, casting="unsafe")


def merge_lora(module: nnx.Module, place: Placement, added: Additions) -> None:
    """Lay the weights of `module` out by `place` and add `added` to their tensors, in float32 before the cast. It is
    done in place, a weight at a time: a device holds a weight twice only if it moves, and the host the factors of one
    tensor."""
    for weight in weights(module):
        weight.set_value(_moved(weight.get_value(), place(weight)))
        add = addition(place(weight), weight.order)
        for layer, (name, _) in enumerate(weight.tensors()):
            if name in added:
                number = np.int32(layer) if weight.layers else None
                weight.set_value(add(weight.get_value(), send_factors(added[name].read(), place(weight)), number))
                jax.block_until_ready(weight.get_value())  # the host lets go of one pair before it reads the next


def _moved(array: jax.Array, place: Place) -> jax.Array:
    """`array` laid out by `place`, in the same memory where each device has its part already."""
    sharding, shape = sharding_of(place), array.shape
    if array.sharding.devices_indices_map(shape) != sharding.devices_indices_map(shape):
        return jax.device_put(array, place)
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard.data for shard in array.addressable_shards])


def not_finite(module: nnx.Module) -> list[str]:
    """Every tensor of a loaded `module` that holds a NaN or an infinity, by its name on disk."""
    names = []
    for weight in weights(module):
        finite = to_host(jitted(_finite, None, by_layer=bool(weight.layers))(weight.get_value())).reshape(-1)
        names += [name for (name, _), good in zip(weight.tensors(), finite, strict=True) if not good]
    return names


def _finite(array: jax.Array, by_layer: bool) -> jax.Array:
    return jnp.isfinite(array).all(axis=range(1, array.ndim) if by_layer else None)
