"""From files to devices: what is declared is checked against the headers, then placed one tensor at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.hosts import fetch
from ltx2_cli.weights.checkpoint import DTYPES, EIGHT_BITS, Tensor, TensorFiles
from ltx2_cli.weights.declare import Weight, declared, map_weights, weights
from ltx2_cli.weights.findings import by, some
from ltx2_cli.weights.on_devices import (
    Place,
    Placement,
    Sent,
    Transfer,
    arrival,
    insertion,
    send,
    send_factors,
    sharding_of,
)
from ltx2_cli.weights.staging import LowRank, Piece, Staged, batches, pieces, stage

M = TypeVar("M", bound=nnx.Module)
IN_HOST_MEMORY = ("cpu",)  # platforms whose devices read what the host wrote, without a copy
CHUNK = 2**27  # bytes that travel together
READ_AHEAD = 2**29  # bytes that are read before they are asked for
ON_THE_WAY = 2  # batches on the devices that are not in their places: one arrives while the next is sent


def mismatches(module: nnx.Module, files: TensorFiles, ours: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Every way in which `files` is not what `module` declares; `ours` tells which of the file's names to judge."""
    wanted = declared(module)
    found = {name: tensor for name, tensor in files.items() if ours(name)}
    return [
        *some("missing", sorted(wanted.keys() - found.keys())),
        *some("not known", sorted(found.keys() - wanted.keys())),
        *some(
            "of another shape",
            [
                f"{name} is {by(found[name].shape)}, not {by(shape)}"
                for name, shape in wanted.items()
                if name in found and found[name].shape != shape
            ],
        ),
        *some("scaled by what is not one number", [name for name, tensor in found.items() if _misscaled(tensor)]),
        *some("without the scale that others have", _unscaled(found)),
        *some(
            "of a type that is not read",
            [f"{name} is {found[name].dtype}" for name in wanted if name in found and found[name].dtype not in DTYPES],
        ),
    ]


def _misscaled(tensor: Tensor) -> bool:
    scale = tensor.scale
    return scale is not None and (prod(scale.shape) != 1 or scale.dtype not in DTYPES.keys() - EIGHT_BITS.keys())


def _unscaled(found: Mapping[str, Tensor]) -> list[str]:
    """Eight-bit tensors that mean nothing without a scale, as those beside them show."""
    names = [name for name, tensor in found.items() if tensor.dtype in EIGHT_BITS and tensor.scale is None]
    return names if any(tensor.scale for tensor in found.values()) else []


def load(
    module: M,
    files: TensorFiles,
    place: Placement,
    added: Mapping[str, LowRank] | None = None,
    chunk: int | None = None,
) -> M:
    """`module` with its weights on the devices, each cast once to its declared dtype and laid out by `place`.

    What is stored is multiplied by its scale, and what `added` holds for a tensor is added, before the cast, both in
    float32. Threads read the next tensors while one is sent. Of several hosts each reads what its own devices get.
    `chunk` bytes travel together, by default `CHUNK`; a CPU by default computes with the memory that was read into.
    Beside the devices' memory a host holds no more than `READ_AHEAD` bytes and four chunks, or tensors if larger.
    """
    added, every = added or {}, weights(module)
    if chunk is None and not all(_in_host_memory(place(weight)) for weight in every):
        chunk = CHUNK
    everything = [piece for weight in every for piece in pieces(weight, files, place, added, chunk)]
    travelling, arrays = list(batches(everything, chunk or CHUNK)), dict[str, jax.Array]()
    arriving: list[jax.Array] = []
    with _compiling(travelling) as programs:
        for batch, staged in zip(travelling, _staged(travelling, files, added), strict=True):
            sent = [_sent(each) for each in staged]
            # So one program gathers at a time: those of CPUs may wait for each other's threads.
            jax.block_until_ready(arriving)
            arriving = _arrive(batch, sent, programs, arrays)
    return map_weights(lambda weight: weight.with_value(arrays[weight.source]), module)


def _in_host_memory(place: Place) -> bool:
    return sharding_of(place).mesh.devices.flat[0].platform in IN_HOST_MEMORY


Batch = tuple[Piece, ...]
Programs = Mapping[tuple[Transfer, ...], "Future[Any]"]


def _unfinished(batch: Batch) -> tuple[Transfer, ...]:
    """Those of a batch that a program has to finish on the devices."""
    return tuple(piece.transfer for piece in batch if not piece.transfer.final)


@contextmanager
def _compiling(travelling: Iterable[Batch]) -> Iterator[Programs]:
    """While the body runs, one thread compiles the programs that finish these batches, in the order of their use."""
    pool, programs = ThreadPoolExecutor(1, "compile"), dict[tuple[Transfer, ...], "Future[Any]"]()
    try:
        for transfers in filter(None, map(_unfinished, travelling)):
            if transfers not in programs:
                compiled = partial(insertion, *transfers) if transfers[0].stack else partial(arrival, transfers)
                programs[transfers] = pool.submit(compiled)
        yield programs
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _staged(travelling: Iterable[Batch], files: TensorFiles, added: Mapping[str, LowRank]) -> Iterator[list[Staged]]:
    """Each batch when it is read, while threads read as much of those behind it as `READ_AHEAD` allows."""
    ahead: deque[tuple[int, list[Staged]]] = deque()
    try:
        for batch in travelling:
            size = sum(piece.host_bytes for piece in batch)
            while ahead and size + sum(held for held, _ in ahead) > READ_AHEAD:
                yield _read(ahead)
            ahead.append((size, [stage(piece, files, added) for piece in batch]))
        while ahead:
            yield _read(ahead)
    finally:
        for piece in (piece for _, staged in ahead for piece in staged):
            piece.cancel()


def _read(ahead: deque[tuple[int, list[Staged]]]) -> list[Staged]:
    """The first batch when it is read; till then it counts as one that is."""
    for piece in ahead[0][1]:
        piece.wait()
    return ahead.popleft()[1]


def _sent(staged: Staged) -> Sent:
    transfer, (scale, factors) = staged.piece.transfer, staged.change.result()
    return Sent(send(transfer, staged.parts), scale, factors and send_factors(*factors, transfer.place))


def _arrive(batch: Batch, sent: Sequence[Sent], programs: Programs, arrays: dict[str, jax.Array]) -> list[jax.Array]:
    """Put what was sent into `arrays`, by the weight's name: as it is, finished by a program, or into its stack.

    Returns the arrays that were put there.
    """
    arrays |= {piece.weight.source: each.array for piece, each in zip(batch, sent, strict=True) if piece.transfer.final}
    unfinished = _unfinished(batch)
    if unfinished and unfinished[0].stack:
        empty, insert = programs[unfinished].result()
        source = batch[0].weight.source
        arrays[source] = insert(arrays.pop(source) if source in arrays else empty(), sent[0], np.int32(batch[0].first))
    elif unfinished:
        waiting = [(piece, each) for piece, each in zip(batch, sent, strict=True) if not piece.transfer.final]
        finished = programs[unfinished].result()([each for _, each in waiting])
        arrays |= {piece.weight.source: array for (piece, _), array in zip(waiting, finished, strict=True)}
    return [arrays[piece.weight.source] for piece in batch]


def not_finite(module: nnx.Module) -> list[str]:
    """Every tensor of a loaded `module` that holds a NaN or an infinity, by its name on disk."""
    found = []
    for weight in weights(module):
        array = weight.get_value()
        here = array.is_fully_addressable and next(iter(array.devices())).platform in IN_HOST_MEMORY
        finite = _finite_here(weight) if here else fetch(_finite(array, bool(weight.layers))).reshape(-1)
        found += [name for (name, _), good in zip(weight.tensors(), finite, strict=True) if not good]
    return found


def _finite_here(weight: Weight) -> np.ndarray:
    """For each layer, or the one tensor; of what lies in this host's memory, for which no program is compiled."""
    finite = np.ones(weight.layers or 1, bool)
    for shard in weight.get_value().addressable_shards:
        if not shard.replica_id:
            part = np.asarray(shard.data)
            layers, stack = (shard.index[0], part) if weight.layers else (slice(None), part[None])
            finite[layers] &= [np.isfinite(layer).all() for layer in stack]
    return finite


@partial(jax.jit, static_argnames="by_layer")
def _finite(array: jax.Array, by_layer: bool) -> jax.Array:
    return jnp.isfinite(array).all(axis=range(1, array.ndim) if by_layer else None)
