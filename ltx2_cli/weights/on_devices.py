"""Tensors sent to the devices as they lie on disk, and arranged there; one at a time leaves the host."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.weights.checkpoint import Index, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight

Placement = Callable[[Weight], NamedSharding | Format]
SPLIT_ABOVE = 2**24  # elements: a replicated array this large crosses from the host in parts


class LowRank(Protocol):
    """A matrix to be added to one tensor."""

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Its factors, float32 a [rank, in] and b [out, rank]; the matrix is b·a."""


def sharding_of(place: NamedSharding | Format) -> NamedSharding:
    """Where a weight lies, whatever its tiles."""
    sharding = place.sharding if isinstance(place, Format) else place
    assert isinstance(sharding, NamedSharding)
    return sharding


def on_devices(weight: Weight, files: TensorFiles, place: NamedSharding, added: Mapping[str, LowRank]) -> jax.Array:
    """A large weight, sent as it lies on disk, tensor by tensor, and arranged where it arrives."""
    value = weight.get_value()
    if not weight.layers:
        sent = _send(weight, files, weight.source, place, added)
        return arrange(*sent, weight.order, value.dtype, place)
    array = _empty(value.shape, value.dtype, place)
    within = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
    for layer, (name, _) in enumerate(weight.tensors()):
        sent = _send(weight, files, name, within, added)
        array = insert(array, *sent, np.int32(layer), weight.order, place)
        jax.block_until_ready(array)  # the host lets go of one tensor before it reads the next
        del sent
    return array


Sent = tuple[jax.Array, np.float32, tuple[np.ndarray, np.ndarray] | None]


def _send(weight: Weight, files: TensorFiles, name: str, sharding: NamedSharding, added: Mapping[str, LowRank]) -> Sent:
    """A tensor in the order of the disk, on the devices that will want its parts; its scale; what is added to it."""
    shape, order = files[name].shape, weight.order
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    on_disk = NamedSharding(sharding.mesh, PartitionSpec(*(spec[order.index(i)] for i in range(len(shape)))))
    disk = send(shape, on_disk, partial(files.read, name))
    return disk, files.scale(name), added[name].read() if name in added else None


def send(shape: Shape, sharding: NamedSharding, read: Callable[[Index], np.ndarray]) -> jax.Array:
    """An array laid out so, but in parts where it is large and whole on every device: less crosses from the host."""

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        return read(index)

    parts = not any(sharding.spec) and np.prod(shape) >= SPLIT_ABOVE
    spec = _split(shape, sharding) if parts else sharding.spec
    return jax.make_array_from_callback(shape, NamedSharding(sharding.mesh, PartitionSpec(*spec)), part)


def _split(shape: Shape, sharding: NamedSharding) -> list[str | None]:
    """Over which mesh axis a whole tensor may travel in equal parts, if any."""
    for axis, size in sharding.mesh.shape.items():
        for dimension, length in enumerate(shape):
            if size > 1 and length % size == 0:
                return [axis if i == dimension else None for i in range(len(shape))]
    return [None] * len(shape)


@partial(jax.jit, static_argnames=("order", "dtype", "sharding"))
def arrange(
    disk: jax.Array,
    scale: np.float32,
    factors: tuple[jax.Array, jax.Array] | None,
    order: tuple[int, ...],
    dtype: jnp.dtype,
    sharding: NamedSharding,
) -> jax.Array:
    """A tensor on disk as ours: scaled, added to, transposed, cast."""
    wide = disk.astype(jnp.float32) * scale
    if factors is not None:
        a, b = factors
        wide = wide + jnp.matmul(b, a, precision="highest")
    return jax.lax.with_sharding_constraint(wide.astype(dtype).transpose(order), sharding)


@partial(jax.jit, static_argnames=("order", "sharding"), donate_argnames="stack")
def insert(
    stack: jax.Array,
    disk: jax.Array,
    scale: np.float32,
    factors: tuple[jax.Array, jax.Array] | None,
    layer: jax.Array,
    order: tuple[int, ...],
    sharding: NamedSharding,
) -> jax.Array:
    """`stack` with a tensor on disk, arranged, in the place of one layer's."""
    within = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    array = arrange(disk, scale, factors, order, stack.dtype, within)
    filled = jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)
    return jax.lax.with_sharding_constraint(filled, sharding)


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _empty(shape: Shape, dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)
