"""A network that is another and what LoRAs add to it, held ready beside that one: no weight is read again."""

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.layout import Format
from jax.sharding import NamedSharding

from ltx2_cli.weights.declare import A, B, Weight, map_weights, weights
from ltx2_cli.weights.load import THREADS
from ltx2_cli.weights.on_devices import LowRank, Placement, arrange, insert, send, sharding_of

M = TypeVar("M", bound=nnx.Module)
ONE = np.float32(1)


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


def _moved(array: jax.Array, place: NamedSharding | Format) -> jax.Array:
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
    return [(each, _placed(array, place(each))) for each, array in zip(pair, (a, b), strict=True)]


def _placed(array: np.ndarray, place: NamedSharding | Format) -> jax.Array:
    return jax.device_put(send(array.shape, sharding_of(place), array.__getitem__), place, donate=True)


def _with(array: jax.Array, weight: Weight, place: NamedSharding | Format, added: Mapping[str, LowRank]) -> jax.Array:
    """A copy of a weight with what is added to its tensors."""
    sharding = sharding_of(place)
    if not weight.layers:
        made = arrange(array, ONE, added[weight.source].read(), weight.order, array.dtype, sharding)
        return jax.device_put(made, place, donate=True)
    made = jnp.copy(array)
    for layer, (name, _) in enumerate(weight.tensors()):
        if name in added:
            made = _add(made, added[name].read(), np.int32(layer), weight.order, sharding)
            jax.block_until_ready(made)  # the host lets go of one pair before it reads the next
    return jax.device_put(made, place, donate=True)


@partial(jax.jit, static_argnames=("order", "sharding"), donate_argnames="stack")
def _add(
    stack: jax.Array,
    factors: tuple[jax.Array, jax.Array],
    layer: jax.Array,
    order: tuple[int, ...],
    sharding: NamedSharding,
) -> jax.Array:
    """`stack` with b·a added to one layer's weight."""
    weight = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    return insert(stack, weight, ONE, factors, layer, order, sharding)
