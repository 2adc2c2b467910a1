"""Weights in the host's memory, from where a program copies what it needs next."""

from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, Sharding

HOST = "pinned_host"  # kind of the memory: devices read it without the processor


def is_on_host(place: Sharding | Format) -> bool:
    """Whether arrays at `place` lie in the host's memory."""
    sharding = place.sharding if isinstance(place, Format) else place
    return isinstance(sharding, NamedSharding) and sharding.memory_kind == HOST


def leaves_room(sharding: NamedSharding) -> bool:
    """Whether arrays of a sharding take no memory of their devices. CPUs compute in the host's."""
    return is_on_host(sharding) and sharding.mesh.devices.flat[0].platform != "cpu"


def on_device(place: NamedSharding) -> NamedSharding:
    """The same parts in the memory of the devices."""
    return NamedSharding(place.mesh, place.spec) if is_on_host(place) else place


def lies_on_host(array: Any) -> bool:
    """Whether an array of a traced function lies in the host's memory."""
    return jax.typeof(array).memory_space == jax.memory.Space.Host


def to_device(array: jax.Array) -> jax.Array:
    """An array of a traced function, copied to the devices; itself if it is there."""
    return jax.device_put(array, jax.memory.Space.Device) if lies_on_host(array) else array
