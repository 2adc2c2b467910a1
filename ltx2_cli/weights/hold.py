"""A network that is another and what LoRAs add to it, held ready beside that one: no weight is read again."""

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.weights.declare import A, B, Weight, map_weights, weights
from ltx2_cli.weights.on_devices import Factors, Place, Placement, plus, put, send_factors, sharding_of
from ltx2_cli.weights.staging import THREADS, LowRank

M = TypeVar("M", bound=nnx.Module)


def hold(module: M, base: nnx.Module, place: Placement, added: Mapping[str, LowRank]) -> M:
    """`module` with the weights of `base`, laid out by `place`, and with what `added` holds for some of their tensors.

    What lies there already is the same memory in both. Where `module` declares the factors of a weight, they are read,
    their rank filled up with zeros; else what is added is, in float32 before the cast, in a copy. The host holds the
    factors of no more than one weight.
    """
    declared, here = ({each.source: each for each in weights(network)} for network in (module, base))
    factors: dict[str, jax.Array] = {}
    for source in declared:
        if source + A in declared:
            pair = declared[source + A], declared[source + B]
            factors |= {each.source: array for each, array in _factors(here[source], pair, place, added)}

    def held(weight: Weight) -> Weight:
        if weight.source in factors:
            return weight.with_value(factors[weight.source])
        array = _moved(here[weight.source].get_value(), place(weight))
        copied = weight.source + A not in declared and any(name in added for name, _ in weight.tensors())
        return weight.with_value(_with(array, weight, place(weight), added) if copied else array)

    return map_weights(held, module)


def _moved(array: jax.Array, place: Place) -> jax.Array:
    """`array` laid out so: the same memory, if every device has its part of it, be the mesh another."""
    sharding, shape = sharding_of(place), array.shape
    if array.sharding.devices_indices_map(shape) != sharding.devices_indices_map(shape):
        return jax.device_put(array, place)
    return jax.make_array_from_single_device_arrays(shape, sharding, [each.data for each in array.addressable_shards])


def _factors(
    target: Weight, pair: tuple[Weight, Weight], place: Placement, added: Mapping[str, LowRank]
) -> list[tuple[Weight, jax.Array]]:
    """Both factors of what is added to a weight; zeros where nothing is added to a layer, or of a smaller rank."""
    a, b = (np.zeros(each.get_value().shape, each.get_value().dtype) for each in pair)

    def fill(layer: int, name: str) -> None:
        low, high = added[name].read()
        where = (layer,) if target.layers else ()
        a[*where, : len(low)], b[*where, :, : len(low)] = low, high

    layers = [(layer, name) for layer, (name, _) in enumerate(target.tensors()) if name in added]
    for _ in THREADS.map(fill, *zip(*layers, strict=True)):
        pass
    return [(each, put(array, place(each))) for each, array in zip(pair, (a, b), strict=True)]


def _with(array: jax.Array, weight: Weight, place: Place, added: Mapping[str, LowRank]) -> jax.Array:
    """A copy of a weight with what is added to its tensors."""
    changed = jnp.copy(array)
    for layer, (name, _) in enumerate(weight.tensors()):
        if name in added:
            number = np.int32(layer) if weight.layers else None
            changed = _add(changed, send_factors(*added[name].read(), place), number, weight.order, sharding_of(place))
            jax.block_until_ready(changed)  # the host lets go of one pair before it reads the next
    return jax.device_put(changed, place, donate=True)


@partial(jax.jit, static_argnames=("order", "sharding"), donate_argnames="array")
def _add(
    array: jax.Array, factors: Factors, layer: jax.Array | None, order: tuple[int, ...], sharding: NamedSharding
) -> jax.Array:
    """`array` with b·a added, in float32, to it or to one layer of the stack that it is."""
    factors = jax.lax.with_sharding_constraint(factors, NamedSharding(sharding.mesh, PartitionSpec()))
    tensor = array if layer is None else jax.lax.dynamic_index_in_dim(array, layer, keepdims=False)
    changed = plus(tensor.astype(jnp.float32), factors, order).astype(array.dtype)
    if layer is not None:
        changed = jax.lax.dynamic_update_index_in_dim(array, changed, layer, 0)
    return jax.lax.with_sharding_constraint(changed, sharding)
