"""Arrays on their way to the devices: each byte leaves the host once; what is replicated is gathered by the devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.weights.checkpoint import Index
from ltx2_cli.weights.declare import Shape, Weight

Place = NamedSharding | Format
Placement = Callable[[Weight], Place]
Bounds = tuple[tuple[int, int], ...]  # a hashable index: first and last + 1 along each dimension
Factors = tuple[jax.Array, jax.Array]  # float32 a [rank, in] and b [out, rank]; b·a is added to a matrix as on disk


def sharding_of(place: Place) -> NamedSharding:
    """The sharding of a weight, whatever its memory layout."""
    sharding = place.sharding if isinstance(place, Format) else place
    assert isinstance(sharding, NamedSharding)
    return sharding


def spread(shape: Shape, sharding: NamedSharding, order: Sequence[int] | None = None) -> NamedSharding:
    """`sharding` with each unused mesh axis put on the first dimension that it divides, so that every device gets a
    part of its own from the host. Dimensions are tried in `order`; one that no size divides stays whole."""
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [list(_names(entry)) for entry in spec]
    used = {axis for entry in axes for axis in entry}
    for axis in [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]:
        for dimension in range(len(shape)) if order is None else order:
            if shape[dimension] % prod(mesh.shape[name] for name in (axis, *axes[dimension])) == 0:
                axes[dimension].append(axis)
                break
    if sum(map(len, axes)) == len(used):
        return sharding
    return NamedSharding(mesh, PartitionSpec(*(tuple(entry) or None for entry in axes)))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


@dataclass(frozen=True)
class Transfer:
    """How an array travels: a whole weight, or some layers of a stack. Hashable: programs are compiled for it."""

    shape: Shape
    stored: np.dtype  # of the numbers that travel
    dtype: np.dtype  # of the weight
    sharding: NamedSharding  # on the way
    place: Place  # of the weight
    order: tuple[int, ...]  # the permutation from a tensor on disk to one of the weight
    scaled: bool = False  # whether a scale travels with it
    rank: int = 0  # of the factors that travel with it, 0 for none
    stack: Shape | None = None  # of the weight, where the array is some of its layers

    @property
    def nbytes(self) -> int:
        """The size of the array."""
        return prod(self.shape) * self.stored.itemsize

    @property
    def final(self) -> bool:
        """Whether the array that is sent is the weight, so that no program finishes it."""
        same = self.stored == self.dtype and self.sharding == self.place
        return same and not self.scaled and not self.rank and self.stack is None

    def parts(self) -> dict[Bounds, Index]:
        """Each part of the array that a device of this host gets."""
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {_bounds(index, self.shape): index for index in indices if index is not None}


def _bounds(index: Index, shape: Shape) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


class Sent(NamedTuple):
    """An array on the devices as it left the host, and how it changes there; or abstract values of them."""

    array: Any
    scale: Any = None  # float32, where there is one
    factors: Any = None  # where there are any


def send(transfer: Transfer, parts: Mapping[Bounds, np.ndarray]) -> jax.Array:
    """An array on the devices from its parts in the host's memory, which must not change afterwards."""

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        return parts[_bounds(index, transfer.shape)]

    return jax.make_array_from_callback(transfer.shape, transfer.sharding, part, dtype=transfer.stored)


def _factor_sharding(shape: Shape, place: Place) -> NamedSharding:
    return spread(shape, NamedSharding(sharding_of(place).mesh, PartitionSpec()))


def send_factors(factors: tuple[np.ndarray, np.ndarray], place: Place) -> Factors:
    """The factors of what is added to a matrix at `place`; split, since a program gathers them."""
    a, b = (jax.make_array_from_callback(x.shape, _factor_sharding(x.shape, place), x.__getitem__) for x in factors)
    return a, b


def _add(wide: jax.Array, factors: Factors, order: tuple[int, ...], place: Place) -> jax.Array:
    """A float32 tensor plus b·a in full precision; the factors are gathered first. Traced."""
    a, b = jax.lax.with_sharding_constraint(factors, NamedSharding(sharding_of(place).mesh, PartitionSpec()))
    return wide + jnp.matmul(b, a, precision="highest").transpose(order)


def _converted(sent: Sent, transfer: Transfer) -> jax.Array:
    """The weight's numbers: gathered first, computed in float32, cast once. Traced."""
    array = jax.lax.with_sharding_constraint(sent.array, sharding_of(transfer.place))
    if sent.scale is None and sent.factors is None:
        return array.astype(transfer.dtype)
    wide = array.astype(jnp.float32)
    if sent.scale is not None:
        wide = wide * sent.scale
    if sent.factors is not None:
        layer = wide.reshape(wide.shape[wide.ndim - len(transfer.order) :])
        wide = _add(layer, sent.factors, transfer.order, transfer.place).reshape(wide.shape)
    return wide.astype(transfer.dtype)


def _abstract(transfer: Transfer) -> Sent:
    array = jax.ShapeDtypeStruct(transfer.shape, transfer.stored, sharding=transfer.sharding)
    scale = jax.ShapeDtypeStruct((), np.float32) if transfer.scaled else None
    if not transfer.rank:
        return Sent(array, scale)
    d_out, d_in = (transfer.shape[-2:][transfer.order.index(i)] for i in range(2))
    shapes = (transfer.rank, d_in), (d_out, transfer.rank)
    factors = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=_factor_sharding(shape, transfer.place)) for shape in shapes
    )
    return Sent(array, scale, tuple(factors))


class Programs(NamedTuple):
    """Compiled programs for a transfer that is not final."""

    empty: jax.stages.Compiled | None  # () -> the empty stack, where there is one
    finish: jax.stages.Compiled  # (stack or None, sent, its first layer or None) -> the weight, in the stack's memory


@cache
def compile_transfer(transfer: Transfer) -> Programs:
    """The programs that make a weight, or layers of a stack, of what was sent."""
    place, stack = transfer.place, transfer.stack

    def finish(stack: jax.Array | None, sent: Sent, first: jax.Array | None) -> jax.Array:
        array = _converted(sent, transfer)
        return array if stack is None or first is None else jax.lax.dynamic_update_slice_in_dim(stack, array, first, 0)

    finishing = jax.jit(finish, donate_argnums=0, out_shardings=place)
    if stack is None:
        return Programs(None, finishing.lower(None, _abstract(transfer), None).compile())
    whole = jax.ShapeDtypeStruct(stack, transfer.dtype, sharding=place)
    first = jax.ShapeDtypeStruct((), np.int32)
    empty = jax.jit(partial(jnp.zeros, stack, transfer.dtype), out_shardings=place)
    return Programs(empty.lower().compile(), finishing.lower(whole, _abstract(transfer), first).compile())


@cache
def addition(place: Place, order: tuple[int, ...]) -> Callable[[jax.Array, Factors, np.int32 | None], jax.Array]:
    """The function that adds b·a to an array at `place`, or to one layer of the stack that it is, in float32 before the
    cast; the result is the same memory."""

    def add(array: jax.Array, factors: Factors, layer: jax.Array | None) -> jax.Array:
        tensor = array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
        changed = _add(tensor.astype(jnp.float32), factors, order, place).astype(array.dtype)
        return changed if layer is None else jax.lax.dynamic_update_index_in_dim(array, changed, layer, 0)

    return jax.jit(add, donate_argnums=0, out_shardings=place)
