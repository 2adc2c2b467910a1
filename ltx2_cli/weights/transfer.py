"""How weights travel: in pieces that leave the host once and that the devices gather where they are replicated, and the
programs that finish them on the devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.parallel.jit import jitted_once
from ltx2_cli.weights.checkpoint import DTYPES, Index, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight
from ltx2_cli.weights.lora import LoraDelta

SMALL = 2**22  # bytes: a smaller array crosses once for each device, which takes less time than a program to gather it
TRANSFERS = 512  # programs that stay loaded, more than all networks have kinds of weights
Place = NamedSharding | Format
Placement = Callable[[Weight], Place]
Factors = tuple[jax.Array, jax.Array]  # float32 a [rank, in] and b [out, rank]; b·a is added to a matrix as on disk
Additions = Mapping[str, LoraDelta]  # by tensor


def sharding_of(place: Place) -> NamedSharding:
    """The sharding of a weight, whatever its memory layout."""
    sharding = place.sharding if isinstance(place, Format) else place
    assert isinstance(sharding, NamedSharding)
    return sharding


def spread(shape: Shape, sharding: NamedSharding, order: Sequence[int] | None = None) -> NamedSharding:
    """`sharding` with each unused mesh axis put on the first dimension that it divides, so that every device gets a
    part of its own from the host. Dimensions are tried in `order`; one that no size divides stays whole."""
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in spec]
    used = {axis for entry in axes for axis in entry}
    for axis in [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]:
        for dimension in range(len(shape)) if order is None else order:
            if shape[dimension] % prod(mesh.shape[name] for name in (axis, *axes[dimension])) == 0:
                axes[dimension].append(axis)
                break
    if sum(map(len, axes)) == len(used):
        return sharding
    return NamedSharding(mesh, PartitionSpec(*(tuple(entry) or None for entry in axes)))


@dataclass(frozen=True)
class Transfer:
    """How an array travels: a whole weight, or some layers of a stack. Hashable: programs are compiled for it."""

    shape: Shape
    stored: np.dtype  # of the numbers that travel
    dtype: np.dtype  # of the weight
    sharding: NamedSharding  # on the way
    place: Place  # of the weight
    order: tuple[int, ...]  # the permutation from a tensor on disk to one of the weight
    scaled: bool  # whether a scale travels with it
    rank: int  # of the factors that travel with it, 0 for none
    stack: Shape | None  # of the weight, where the array is some of its layers

    @property
    def final(self) -> bool:
        """Whether the array that is sent is the weight, so that no program finishes it."""
        same = self.stored == self.dtype and self.sharding == self.place
        return same and not self.scaled and not self.rank and self.stack is None

    def parts(self) -> dict[str, Index]:
        """Each part of the array that a device of this host gets, by the text of its index."""
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {str(index): index for index in indices if index is not None}


@dataclass(frozen=True, eq=False)
class Piece:
    """What travels as one array: a weight, or consecutive layers of a stack."""

    weight: Weight
    transfer: Transfer
    first: int  # its first layer
    tensors: tuple[tuple[str, Shape], ...]  # names and shapes on disk, layer by layer

    @cached_property
    def host_bytes(self) -> int:
        """The memory that it takes on this host."""
        transfer = self.transfer
        part = prod(transfer.sharding.shard_shape(transfer.shape)) * transfer.stored.itemsize
        factors = transfer.rank * sum(self.tensors[0][1][:2]) * np.dtype(np.float32).itemsize
        return len(transfer.parts()) * part + factors


def pieces(
    weight: Weight, files: TensorFiles, place: Placement, added: Additions, chunk: int | None
) -> Iterator[Piece]:
    """A weight in pieces: the most layers that fit into `chunk` bytes and divide all layers evenly. None is for devices
    that compute in the host's memory: all layers in one piece, cast by the host, without a copy. The host casts small
    weights for all devices. A layer with a scale or an addition is a piece of its own."""
    value, tensors, stacked = weight.get_value(), tuple(weight.tensors()), bool(weight.layers)
    computed = any(files[name].scale or name in added for name, _ in tensors)
    count = 1 if computed else len(tensors) if chunk is None else _layers_together(tensors, files, chunk)
    # The dimensions in the order on disk, so that parts are contiguous there; that of layers last.
    disk_first = [stacked + weight.order.index(i) for i in range(len(weight.order))] + [0] * stacked
    for first in range(0, len(tensors), count):
        (name, _), *_ = part = tensors[first : first + count]
        shape = (len(part), *value.shape[1:]) if stacked else value.shape
        small, sharding = prod(shape) * value.dtype.itemsize < SMALL, sharding_of(place(weight))
        cast_here = not computed and (small or chunk is None)
        transfer = Transfer(
            shape=shape,
            stored=value.dtype if cast_here else np.dtype(DTYPES[files[name].dtype]),
            dtype=value.dtype,
            sharding=sharding if small else spread(shape, sharding, disk_first),
            place=place(weight),
            order=weight.order,
            scaled=files[name].scale is not None,
            rank=added[name].rank if name in added else 0,
            stack=value.shape if stacked and (computed or len(part) < weight.layers) else None,
        )
        yield Piece(weight, transfer, first, part)


def _layers_together(tensors: Sequence[tuple[str, Shape]], files: TensorFiles, chunk: int) -> int:
    """The number of layers that travel as one array: of one dtype, within `chunk` bytes, a divisor of all."""
    dtype, *others = {files[name].dtype for name, _ in tensors}
    size, total = prod(tensors[0][1]) * np.dtype(DTYPES[dtype]).itemsize, 1 if others else len(tensors)
    return max((count for count in range(1, total + 1) if not total % count and count * size <= chunk), default=1)


def send(transfer: Transfer, parts: Mapping[str, np.ndarray]) -> jax.Array:
    """An array on the devices from its parts in the host's memory, which must not change afterwards."""
    shape, sharding = transfer.shape, transfer.sharding
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[str(index)], dtype=transfer.stored)


def send_factors(factors: tuple[np.ndarray, np.ndarray], place: Place) -> Factors:
    """The factors of what is added to a matrix at `place`; split, since a program gathers them."""
    a, b = (jax.make_array_from_callback(x.shape, _factor_sharding(x.shape, place), x.__getitem__) for x in factors)
    return a, b


def _factor_sharding(shape: Shape, place: Place) -> NamedSharding:
    return spread(shape, NamedSharding(sharding_of(place).mesh, PartitionSpec()))


def _add(wide: jax.Array, factors: Factors, order: tuple[int, ...], place: Place) -> jax.Array:
    """A float32 tensor plus b·a in full precision; the factors are gathered first. Traced."""
    a, b = jax.lax.with_sharding_constraint(factors, NamedSharding(sharding_of(place).mesh, PartitionSpec()))
    return wide + jnp.matmul(b, a, precision="highest").transpose(order)


@lru_cache(TRANSFERS)
def compile_transfer(transfer: Transfer) -> tuple[jax.stages.Compiled | None, jax.stages.Compiled]:
    """The programs for a transfer that is not final: () -> the empty stack, where there is one; (stack or None, array,
    scale or None, factors or None, its first layer) -> the weight, in the stack's memory."""
    place, order = transfer.place, transfer.order

    def finish(stack: Any, array: jax.Array, scale: Any, factors: Factors | None, first: jax.Array) -> jax.Array:
        array = jax.lax.with_sharding_constraint(array, sharding_of(place))  # gathered first
        if scale is not None or factors is not None:  # computed in float32, cast once
            array = array.astype(jnp.float32)
        if scale is not None:
            array = array * scale
        if factors is not None:
            layer = array.reshape(array.shape[array.ndim - len(order) :])
            array = _add(layer, factors, order, place).reshape(array.shape)
        array = array.astype(transfer.dtype)
        return array if stack is None else jax.lax.dynamic_update_slice_in_dim(stack, array, first, 0)

    empty = stack = None
    if transfer.stack is not None:
        stack = jax.ShapeDtypeStruct(transfer.stack, transfer.dtype, sharding=place)
        empty = jitted_once(partial(jnp.zeros, transfer.stack, transfer.dtype), place).lower().compile()
    first = jax.ShapeDtypeStruct((), np.int32)
    finishing = jitted_once(finish, place, donate=("stack",))
    return empty, finishing.lower(stack, *_abstract(transfer), first).compile()


def _abstract(transfer: Transfer) -> tuple[Any, Any, Any]:
    """What is sent, without values: the array; the scale and the factors where there are any."""
    array = jax.ShapeDtypeStruct(transfer.shape, transfer.stored, sharding=transfer.sharding)
    scale = jax.ShapeDtypeStruct((), np.float32) if transfer.scaled else None
    if not transfer.rank:
        return array, scale, None
    d_out, d_in = (transfer.shape[-2:][transfer.order.index(i)] for i in range(2))
    factors = []
    for shape in ((transfer.rank, d_in), (d_out, transfer.rank)):
        sharding = _factor_sharding(shape, transfer.place)
        factors.append(jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding))
    return array, scale, tuple(factors)


@lru_cache(TRANSFERS)
def addition(place: Place, order: tuple[int, ...]) -> Callable[[jax.Array, Factors, np.int32 | None], jax.Array]:
    """The function that adds b·a to an array at `place`, or to one layer of the stack that it is, in float32 before the
    cast; the result is the same memory."""

    def add(array: jax.Array, factors: Factors, layer: jax.Array | None) -> jax.Array:
        tensor = array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        changed = _add(tensor.astype(jnp.float32), factors, order, place).astype(array.dtype)
        return changed if layer is None else jax.lax.dynamic_update_index_in_dim(array, changed, layer, 0)

    return jitted_once(add, place, donate=("array",))
