"""Arrays on their way to the devices: each byte leaves the host once; what is whole on several is gathered there."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
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
Bounds = tuple[tuple[int, int], ...]  # an index that can be a key: first and last + 1 along each dimension
Factors = tuple[jax.Array, jax.Array]  # float32 a [rank, in] and b [out, rank]; b·a is added to a matrix as on disk


def sharding_of(place: Place) -> NamedSharding:
    """Where a weight lies, whatever its memory layout."""
    sharding = place.sharding if isinstance(place, Format) else place
    assert isinstance(sharding, NamedSharding)
    return sharding


def spread(shape: Shape, sharding: NamedSharding, order: Sequence[int] | None = None) -> NamedSharding:
    """`sharding` with every mesh axis that it leaves unused put on the first dimension that it divides.

    So a device gets a part of its own from the host. Dimensions are tried in `order`, by default as they are; one that
    no size divides, such as that of a single number, stays whole.
    """
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [list(_names(entry)) for entry in spec]
    used = {axis for entry in axes for axis in entry}
    for axis, size in mesh.shape.items():
        for dimension in range(len(shape)) if order is None else order:
            parts = size * prod(mesh.shape[other] for other in axes[dimension])
            if size > 1 and axis not in used and shape[dimension] % parts == 0:
                axes[dimension].append(axis)
                used.add(axis)
    if used == {axis for entry in spec for axis in _names(entry)}:
        return sharding
    return NamedSharding(mesh, PartitionSpec(*(tuple(entry) or None for entry in axes)))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


@dataclass(frozen=True)
class Transfer:
    """How an array travels: a whole weight, or some layers of a stack. Hashable, since programs are compiled for it."""

    shape: Shape
    stored: np.dtype  # of the numbers that travel
    dtype: np.dtype  # of the weight's
    sharding: NamedSharding  # on the way
    place: Place  # of the weight
    order: tuple[int, ...]  # the permutation from a tensor on disk to one of the weight's
    scaled: bool = False  # whether a scale travels with it
    rank: int = 0  # of the factors that travel with it, 0 for none
    stack: Shape | None = None  # of the weight, where the array is some of its layers

    @property
    def nbytes(self) -> int:
        """The size of the array."""
        return prod(self.shape) * self.stored.itemsize

    @property
    def converted(self) -> bool:
        """Whether the devices compute the weight from what is sent."""
        return self.scaled or self.rank > 0 or self.stored != self.dtype

    @property
    def final(self) -> bool:
        """Whether what is sent is the weight as it is wanted."""
        return self.stack is None and not self.converted and self.sharding == self.place

    def parts(self) -> dict[Bounds, Index]:
        """Each part of the array that a device of this host gets."""
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {_bounds(index, self.shape): index for index in indices if index is not None}


def _bounds(index: Index, shape: Shape) -> Bounds:
    return tuple((part.indices(size)[0], part.indices(size)[1]) for part, size in zip(index, shape, strict=True))


class Sent(NamedTuple):
    """An array on the devices as it left the host, and what it is to be changed by; or both described, abstract."""

    array: Any
    scale: Any = None  # float32, where there is one
    factors: Any = None  # where there are any


def send(transfer: Transfer, parts: Mapping[Bounds, np.ndarray]) -> jax.Array:
    """An array on the devices out of its parts in the host's memory, which must not change afterwards."""

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        return parts[_bounds(index, transfer.shape)]

    return jax.make_array_from_callback(transfer.shape, transfer.sharding, part, dtype=transfer.stored)


def factors_sharding(shape: Shape, place: Place) -> NamedSharding:
    """How one of two factors travels: split, since a program gathers it."""
    return spread(shape, NamedSharding(sharding_of(place).mesh, PartitionSpec()))


def send_factors(a: np.ndarray, b: np.ndarray, place: Place) -> Factors:
    """The factors of what is added to a matrix that lies at `place`."""
    return _send_split(a, factors_sharding(a.shape, place)), _send_split(b, factors_sharding(b.shape, place))


def put(array: np.ndarray, place: Place) -> jax.Array:
    """An array of the host laid out as `place` says."""
    transfer = Transfer(array.shape, array.dtype, array.dtype, spread(array.shape, sharding_of(place)), place, ())
    sent = _send_split(array, transfer.sharding)
    if transfer.final:
        return sent
    placed: tuple[jax.Array] = arrival((transfer,))([Sent(sent)])
    return placed[0]


def _send_split(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)


def plus(wide: jax.Array, factors: Factors, order: tuple[int, ...]) -> jax.Array:
    """A float32 tensor and b·a, which is as on disk, in full precision. Traced."""
    a, b = factors
    return wide + jnp.matmul(b, a, precision="highest").transpose(order)


def _converted(sent: Sent, transfer: Transfer) -> jax.Array:
    """What was sent as the weight's numbers: computed with in float32 and cast once; gathered first. Traced."""
    mesh, rank = sharding_of(transfer.place).mesh, len(transfer.shape)
    array = jax.lax.with_sharding_constraint(sent.array, sharding_of(transfer.place))
    if sent.scale is None and sent.factors is None:
        return array.astype(transfer.dtype)
    wide = array.astype(jnp.float32)
    if sent.scale is not None:
        wide = wide * sent.scale
    if sent.factors is not None:
        whole = jax.lax.with_sharding_constraint(sent.factors, NamedSharding(mesh, PartitionSpec()))
        layer = wide.reshape(wide.shape[rank - len(transfer.order) :])
        wide = plus(layer, whole, transfer.order).reshape(wide.shape)
    return wide.astype(transfer.dtype)


def _abstract(transfer: Transfer) -> Sent:
    array = jax.ShapeDtypeStruct(transfer.shape, transfer.stored, sharding=transfer.sharding)
    scale = jax.ShapeDtypeStruct((), np.float32) if transfer.scaled else None
    if not transfer.rank:
        return Sent(array, scale)
    stacked = len(transfer.shape) - len(transfer.order)
    d_out, d_in = (transfer.shape[stacked:][transfer.order.index(i)] for i in range(2))
    shapes = (transfer.rank, d_in), (d_out, transfer.rank)
    a, b = (
        jax.ShapeDtypeStruct(shape, np.float32, sharding=factors_sharding(shape, transfer.place)) for shape in shapes
    )
    return Sent(array, scale, (a, b))


@cache
def arrival(transfers: tuple[Transfer, ...]) -> jax.stages.Compiled:
    """The program that takes a list of what was sent, and gives the weights, a tuple."""

    def arrange(sent: Sequence[Sent]) -> tuple[jax.Array, ...]:
        return tuple(map(_converted, sent, transfers))

    places = tuple(transfer.place for transfer in transfers)
    return jax.jit(arrange, out_shardings=places).lower([*map(_abstract, transfers)]).compile()


@cache
def insertion(transfer: Transfer) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
    """The program that makes an empty stack, and the one that takes it, some layers as sent and the number of their
    first, and gives the stack, the same memory, with them in it."""
    assert transfer.stack is not None
    shape = transfer.stack

    def empty() -> jax.Array:
        return jnp.zeros(shape, transfer.dtype)

    def insert(stack: jax.Array, sent: Sent, first: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(stack, _converted(sent, transfer), first, 0)

    stack = jax.ShapeDtypeStruct(shape, transfer.dtype, sharding=transfer.place)
    number = jax.ShapeDtypeStruct((), np.int32)
    inserting = jax.jit(insert, donate_argnums=0, out_shardings=transfer.place)
    return (
        jax.jit(empty, out_shardings=transfer.place).lower().compile(),
        inserting.lower(stack, _abstract(transfer), number).compile(),
    )
