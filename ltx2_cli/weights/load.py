"""From files to devices: what is declared is checked against the headers, then placed one tensor at a time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import prod
from operator import call
from os import cpu_count
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from ltx2_cli.hosts import fetch
from ltx2_cli.weights.checkpoint import DTYPES, EIGHT_BITS, Index, Tensor, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight, declared, map_weights, weights
from ltx2_cli.weights.findings import by, some
from ltx2_cli.weights.on_devices import LowRank, Placement, on_devices, sharding_of

M = TypeVar("M", bound=nnx.Module)
SMALL = 2**20  # elements
PORTION = 2**24  # bytes that one thread brings at a time
TILE = (128, 16)  # of rows and, in more than a matrix, columns: stays in a core's cache while it is put in order
IN_HOST_MEMORY = ("cpu",)  # platforms whose devices read what the host wrote, without a copy
ALIGNMENT = 64  # bytes, that they ask for
THREADS = ThreadPoolExecutor(cpu_count())


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


def load(module: M, files: TensorFiles, place: Placement, added: Mapping[str, LowRank] | None = None) -> M:
    """`module` with its weights on the devices, each cast once to its declared dtype and laid out by `place`.

    What is stored is multiplied by its scale, and what `added` holds for a tensor is added, before the cast, both in
    float32. Of several hosts each reads what its own devices hold. Beside the devices' memory a host holds no more than
    one tensor.
    """
    added = added or {}
    lying = {each.source: sharding_of(place(each)) for each in weights(module)}
    hosted = {each.source: each for each in weights(module) if _on_host(each, lying[each.source])}
    memory = {source: _parts(weight.get_value(), lying[source]) for source, weight in hosted.items()}
    parts = ((hosted[source], *part) for source, parts in memory.items() for part in parts)
    for _ in THREADS.map(call, (work for part in parts for work in _fill(*part, files, added))):
        pass

    def placed(weight: Weight) -> Weight:
        where, parts = lying[weight.source], memory.pop(weight.source, None)
        if parts is None:
            return weight.with_value(
                jax.device_put(on_devices(weight, files, where, added), place(weight), donate=True)
            )
        return weight.with_value(jax.make_array_from_callback(weight.get_value().shape, where, partial(_part, parts)))

    return map_weights(placed, module)


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


def _on_host(weight: Weight, place: NamedSharding) -> bool:
    """Whether a weight is put together in the host's memory: a small one, since to compile a program for its shape
    would take longer, and every one where that memory is the devices' own."""
    return weight.get_value().size <= SMALL or place.mesh.devices.flat[0].platform in IN_HOST_MEMORY


Part = tuple[Index, np.ndarray]  # where in a weight, and memory for it


def _parts(value: jax.ShapeDtypeStruct, place: NamedSharding) -> list[Part]:
    """Every part of a weight that a device of this host holds, once."""
    parts: list[Part] = []
    for index in place.addressable_devices_indices_map(value.shape).values():
        assert index is not None
        if all(index != other for other, _ in parts):
            shape = tuple(len(range(length)[each]) for length, each in zip(value.shape, index, strict=True))
            parts.append((index, _aligned(shape, value.dtype)))
    return parts


def _part(parts: Sequence[Part], index: Index | None) -> np.ndarray:
    return next(memory for each, memory in parts if each == index)


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Memory that the CPU backend takes over as it is."""
    size = prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % ALIGNMENT
    return room[begin : begin + size].view(dtype).reshape(shape)


def _fill(
    weight: Weight, index: Index, memory: np.ndarray, files: TensorFiles, added: Mapping[str, LowRank]
) -> Iterator[Callable[[], None]]:
    """Pieces of work, for several threads, that bring a part of a weight to its place in memory."""
    layers, *within = index if weight.layers else (slice(None), *index)
    stack = memory if weight.layers else memory[None]
    for layer, (name, shape) in enumerate(list(weight.tensors())[layers]):
        out = np.atleast_1d(stack[layer, ...].transpose(np.argsort(weight.order)))
        window = tuple(range(length)[within[weight.order.index(i)]] for i, length in enumerate(shape)) or (range(1),)
        if name in added:
            yield partial(_convert, files, name, window, out, added[name])
            continue
        whole_rows = all(len(part) == length for part, length in zip(window[1:], shape[1:], strict=True))
        as_stored = whole_rows and files[name].scale is None and DTYPES[files[name].dtype] == out.dtype
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
    columns = [()] if out.ndim < 3 else [(each,) for each in _blocks(out.shape[1], TILE[1])]
    yield from ((rows, *each) for rows in _blocks(len(out), TILE[0]) for each in columns)


def _blocks(length: int, step: int) -> Iterator[slice]:
    """All of a length, `step` at a time, but at least one."""
    yield from (slice(first, first + max(1, step)) for first in range(0, length, max(1, step)))


Window = tuple[range, ...]  # a part of a tensor on disk: which rows, which columns


def _convert(files: TensorFiles, name: str, window: Window, out: np.ndarray, low_rank: LowRank | None = None) -> None:
    """A part of one tensor into `out`, which differs in type, order or extent, or takes more than what is stored."""
    scale, factors = files.scale(name), None
    if low_rank is not None:
        a, b = low_rank.read()
        factors = a[:, _slice(window[1])], b[_slice(window[0])]
    for rows in _portions(out):
        part, stored = out[rows], _stored(files, name, (window[0][rows], *window[1:]))
        for place in _tiles(part):
            block = stored[place] if scale == 1 else stored[place].astype(np.float32) * scale
            if factors is not None:
                a, b = factors
                block = block.astype(np.float32) + b[rows][place] @ a
            np.copyto(part[place], block, casting="unsafe")


def _stored(files: TensorFiles, name: str, window: Window) -> np.ndarray:
    """A part of one tensor as it is stored. Whole rows are read; the pages of others are, where they are touched."""
    tensor, (rows, *columns) = files[name], window
    if any(len(part) < length for part, length in zip(columns, tensor.shape[1:], strict=True)):
        return files.read(name, tuple(map(_slice, window)))
    stored = np.empty((len(rows), *tensor.shape[1:]), DTYPES[tensor.dtype])
    files.read_into(name, rows.start, stored)
    return stored


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
