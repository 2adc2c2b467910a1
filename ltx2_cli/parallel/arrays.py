"""Arrays between the memory of hosts and devices, where each host addresses its own devices alone."""

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def to_devices(arrays: Any, sharding: Sharding) -> Any:
    """A tree of arrays placed on the devices, from host memory, equal on all hosts, or from devices. `jax.device_put`
    would compare each array in host memory with those of all other hosts."""

    def place(array: jax.Array | np.ndarray | np.generic) -> jax.Array:
        if isinstance(array, jax.Array):
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, np.asarray(array).__getitem__)

    return jax.tree.map(place, arrays)


def to_host(array: jax.Array) -> np.ndarray:
    """A whole array in this host's memory. All hosts call it together."""
    return np.asarray(_replicated(array))


def to_first_host(array: jax.Array) -> np.ndarray | None:
    """A whole array in the first host's memory; None on the others. All hosts call it together."""
    whole = _replicated(array)
    return np.asarray(whole) if jax.process_index() == 0 else None


def _replicated(array: jax.Array) -> jax.Array:
    """`array`, replicated over its devices unless this host can read it already."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    assert isinstance(array.sharding, NamedSharding)
    return jax.device_put(array, NamedSharding(array.sharding.mesh, PartitionSpec()))
