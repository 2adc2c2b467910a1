"""Weights from files to devices: check declared weights against the headers, read ahead in threads, and send chunk by
chunk."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial, reduce
from itertools import chain
from math import prod
from operator import attrgetter
from os import cpu_count
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.background import in_background
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.weights.checkpoint import Index, TensorFiles, count_and_list
from ltx2_cli.weights.declare import Shape, declared, map_weights, weights
from ltx2_cli.weights.host import to_device
from ltx2_cli.weights.lora import LoraFactors
from ltx2_cli.weights.quantized_matrix import Place, places
from ltx2_cli.weights.tensors import DTYPES, shape_text
from ltx2_cli.weights.transfer import (
    Chunk,
    LoraDeltas,
    Placement,
    chunks,
    compile_transfer,
    factor_bytes,
    lora_merger,
    send,
    send_factors,
    sharding_of,
)

M = TypeVar("M", bound=nnx.Module)
T = TypeVar("T")
R = TypeVar("R")
Parts = dict[str, np.ndarray]  # parts of an array on the host, by the text of their index
CHUNK_BYTES = 2**27  # of an array that is sent to the devices
ON_THE_WAY = 2  # chunks in flight on the devices: one arrives while the next is sent
READ_AHEAD = 2**29  # bytes that are read before they are sent
PORTION = 2**24  # bytes of one read by a thread
CACHED = 2**19  # bytes cast or transposed at a time: they fit into a core's cache
ALIGNMENT = 64  # bytes; the CPU backend takes over memory that has it
THREADS = ThreadPoolExecutor(max(8, cpu_count() or 1))  # more than cores: threads wait for the disk or the network


def mismatches(module: nnx.Module, files: TensorFiles) -> list[str]:
    """Sentences on the differences between the weights that `module` declares and the tensors in `files`."""
    wanted = declared(module)
    common = {name: files[name] for name in wanted if name in files}
    problems = {
        "missing": sorted(wanted.keys() - files.keys()),
        "not known": sorted(files.keys() - wanted.keys()),
        "of another shape": [
            f"{name} is {shape_text(tensor.shape)}, not {shape_text(wanted[name])}"
            for name, tensor in common.items()
            if tensor.shape != wanted[name]
        ],
        "of a type that is not read": [
            f"{name} is {tensor.dtype}"
            for name, tensor in common.items()
            if tensor.dtype not in DTYPES and tensor.encoding is None
        ],
    }
    return count_and_list(problems)


class SentChunk(NamedTuple):
    """A chunk on the devices, as it was sent."""

    chunk: Chunk
    array: jax.Array
    scale: np.float32 | np.ndarray | None
    factors: LoraFactors | None


class Loading(Generic[M]):
    """The weights of a module on their way to the devices, for `load_weights`. Any thread may send the chunks, at any
    time; the thread that runs all other programs runs those that finish chunks, which may gather."""

    def __init__(
        self,
        module: M,
        files: TensorFiles,
        place: Placement,
        lora_deltas: LoraDeltas | None = None,
        chunk_bytes: int | None = None,
    ):
        self.module, self.files, self.lora_deltas, parameters = module, files, lora_deltas or {}, weights(module)
        platforms = {sharding_of(place(weight)).mesh.devices.flat[0].platform for weight in parameters}
        if chunk_bytes is None and platforms - {"cpu"}:  # a CPU device uses the host's array without a copy
            chunk_bytes = CHUNK_BYTES
        of_weight = (chunks(weight, files, place, self.lora_deltas, chunk_bytes) for weight in parameters)
        self.chunks = [*chain.from_iterable(of_weight)]
        # Programs that finish chunks, in the order of their use.
        transfers = dict.fromkeys(chunk.transfer for chunk in self.chunks if not chunk.transfer.direct)
        compiled = in_background("compile", (partial(compile_transfer, transfer) for transfer in transfers))
        self.programs = dict(zip(transfers, compiled, strict=True))

    def cancel(self) -> None:
        """Compile no more."""
        for program in self.programs.values():
            program.cancel()

    def send(self) -> Iterator[SentChunk]:
        """Send chunk by chunk; threads read the next ones meanwhile. Raises `RunError`."""
        reads = _read_ahead(self.chunks, attrgetter("host_bytes"), partial(_begin, self.files, self.lora_deltas))
        for chunk, parts, ((scale, factors), *_) in reads:
            array = send(chunk.transfer, parts)
            yield SentChunk(chunk, array, scale, factors and send_factors(factors, chunk.transfer.place))

    def send_all(self) -> deque[SentChunk]:
        """Send all chunks. Returns when they are on the devices."""
        arrived = deque[SentChunk]()
        for sent in self.send():
            jax.block_until_ready(sent.array)
            arrived.append(sent)
        return arrived

    def finish(self, chunks_sent: Iterable[SentChunk]) -> M:
        """The module with its weights, from all chunks in their order."""
        arrays: dict[tuple[str, range], Any] = {}
        arriving = None
        try:
            for chunk, *sent in chunks_sent:
                # One program gathers at a time: on CPUs, several may deadlock on each other's threads.
                jax.block_until_ready(arriving)
                (arriving, *_), key = sent, chunk.weight.key
                if not chunk.transfer.direct:
                    empty, finish = self.programs[chunk.transfer].result()
                    stack = arrays.pop(key, None) if chunk.first else empty and empty()
                    arriving = finish(stack, *sent, np.int32(chunk.first))
                arrays[key] = arriving
        finally:
            self.cancel()
        return map_weights(lambda weight: weight.with_value(arrays[weight.key]), self.module)


def load_weights(
    module: M,
    files: TensorFiles,
    place: Placement,
    lora_deltas: LoraDeltas | None = None,
    chunk_bytes: int | None = None,
) -> M:
    """`module` with its weights on the devices, each cast once to its declared dtype and laid out by `place`.

    Scales are multiplied and LoRA deltas added in float32 before the cast. Threads read the next chunks while one is
    sent. Each host reads the parts of its own devices. A chunk has at most `chunk_bytes`, by default `CHUNK_BYTES`, or
    one tensor; on CPUs, by default, the devices compute in the memory that was read into. Host memory in use: at most
    `READ_AHEAD` bytes and four chunks.
    """
    loading = Loading(module, files, place, lora_deltas, chunk_bytes)
    return loading.finish(loading.send())


def _read_ahead(
    items: Iterable[T], host_bytes: Callable[[T], int], begin: Callable[[T], tuple[R, list[Future[Any]]]]
) -> Iterator[tuple[T, R, list[Any]]]:
    """Yield each item when it is read: with what `begin` returned for it, and the results of its reads. Threads read up
    to `READ_AHEAD` bytes of the next items meanwhile. Raises `RunError`."""
    ahead: deque[tuple[T, R, list[Future[Any]]]] = deque()
    try:
        for item in (*items, None):
            held = sum(host_bytes(earlier) for earlier, _, _ in ahead)
            while ahead and (item is None or host_bytes(item) + held > READ_AHEAD):
                earlier, begun, reads = ahead[0]  # counts as read ahead until it is yielded
                results = [read.result() for read in reads]
                ahead.popleft()
                held -= host_bytes(earlier)
                yield earlier, begun, results
            if item is not None:
                ahead.append((item, *begin(item)))
    finally:
        for _, _, reads in ahead:
            for read in reads:
                read.cancel()


def _begin(files: TensorFiles, lora_deltas: LoraDeltas, chunk: Chunk) -> tuple[Parts, list[Future[Any]]]:
    """Start the reads of a chunk. Returns its parts, complete when all reads are done, and the reads; the first one
    reads its scale and its LoRA factors, each None if there is none."""
    (name, _), *_ = chunk.tensors
    transfer, parts = chunk.transfer, {}

    def changes() -> tuple[np.float32 | np.ndarray | None, LoraFactors | None]:
        scale = files.scale(name) if transfer.scaled else files.row_scales(name) if transfer.kept else None
        return scale, lora_deltas[name].read() if transfer.lora else None

    reads: list[Future[Any]] = [THREADS.submit(changes)]
    for text, index in transfer.parts().items():
        parts[text] = _aligned(transfer.sharding.shard_shape(transfer.shape), transfer.stored)
        stored = files.codes if transfer.kept else files
        reads += [THREADS.submit(work) for work in _work(chunk, index, parts[text], stored)]
    return parts, reads


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """An uninitialised array aligned for the CPU backend, which then uses it without a copy."""
    size = prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    begin = -buffer.ctypes.data % ALIGNMENT
    return buffer[begin : begin + size].view(dtype).reshape(shape)


def _work(chunk: Chunk, index: Index, memory: np.ndarray, files: TensorFiles) -> Iterator[Callable[[], None]]:
    """The reads of one part of a chunk into `memory`."""
    order, stacked = chunk.weight.order, bool(chunk.weight.layers)
    layers, *within = index if stacked else (slice(None), *index)
    stack = memory if stacked else memory[None]
    for layer, (name, shape) in enumerate(chunk.tensors[layers]):
        out = np.atleast_1d(stack[layer, ...].transpose(np.argsort(order)))  # as on disk
        rows, *columns = [range(size)[within[order.index(i)]] for i, size in enumerate(shape)] or [range(1)]
        for block in _blocks(out, PORTION):
            yield partial(_read, files, name, (rows[block], *columns), out[block])


def _blocks(out: np.ndarray, size: int) -> Iterator[slice]:
    """Slices of the rows of an array, of at most `size` bytes or one row."""
    step = max(1, size * len(out) // max(out.nbytes, 1))
    yield from (slice(first, first + step) for first in range(0, len(out), step))


def _read(files: TensorFiles, name: str, window: tuple[range, ...], out: np.ndarray) -> None:
    """Read the window (rows, columns, …) of a tensor on disk into `out`, decoded and cast to its dtype. Whole rows are
    read directly if they need neither."""
    tensor, (rows, *columns) = files[name], window
    whole = all(len(part) == size for part, size in zip(columns, tensor.shape[1:], strict=True))
    if whole and tensor.encoding is None and tensor.stored_dtype == out.dtype and out.flags.c_contiguous:
        files.read_into(name, rows.start, out)
        return
    for block in _blocks(out, CACHED):
        np.copyto(out[block], files.numbers(name, (rows[block], *columns)), casting="unsafe")


def merge_lora(module: nnx.Module, place: Placement, lora_deltas: LoraDeltas) -> None:
    """Lay the weights of `module` out by `place` and add LoRA deltas to them, in float32 before the cast. Works in
    place, one weight at a time: a device holds a weight twice only if its layout changes, and the host holds at most
    `READ_AHEAD` bytes of factors, or those of two tensors."""
    parameters = weights(module)
    added = [(shape, lora_deltas[name]) for each in parameters for name, shape in each.tensors() if name in lora_deltas]
    all_factors = _read_ahead(
        added,
        lambda of: factor_bytes(of[0], of[1].rank, of[1].dtype),
        lambda of: (None, [THREADS.submit(of[1].read)]),
    )
    for weight in parameters:
        weight.set_value(jax.tree.map(_moved, weight.get_value(), places(weight.get_value(), place(weight))))
        add = lora_merger(place(weight), weight.order)
        for layer, (name, _) in enumerate(weight.tensors()):
            if name in lora_deltas:
                _, _, (factors,) = next(all_factors)
                factors = send_factors(factors, place(weight))
                jax.block_until_ready(weight.get_value())  # one program at a time gathers, and holds factors
                weight.set_value(add(weight.get_value(), factors, np.int32(layer) if weight.layers else None))
        jax.block_until_ready(weight.get_value())


def _moved(array: jax.Array, place: Place) -> jax.Array:
    """`array` laid out by `place`: the same memory if each device already holds its part."""
    sharding, shape = sharding_of(place), array.shape
    if array.sharding.devices_indices_map(shape) != sharding.devices_indices_map(shape):
        return jax.device_put(array, place)
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard.data for shard in array.addressable_shards])


def not_finite(module: nnx.Module) -> list[str]:
    """Names on disk of the tensors of a loaded `module` that hold a NaN or an infinity."""
    names = []
    for weight in weights(module):
        arrays = jax.tree.leaves(weight.get_value())
        finite = to_host(jitted(_finite, None, by_layer=bool(weight.layers))(arrays)).reshape(-1)
        names += [name for (name, _), good in zip(weight.tensors(), finite, strict=True) if not good]
    return names


def _finite(arrays: list[jax.Array], by_layer: bool) -> jax.Array:
    if by_layer:
        return jax.lax.map(partial(_finite, by_layer=False), arrays)
    return reduce(jnp.logical_and, (jnp.isfinite(to_device(array)).all() for array in arrays))
