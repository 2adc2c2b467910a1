"""The layout of activations in traced functions, by the sharding plan that is active."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.weights.declare import Weight

_active: ContextVar[ShardingPlan | None] = ContextVar("active sharding plan", default=None)


@contextmanager
def activate(plan: ShardingPlan) -> Iterator[None]:
    """Functions traced in the body follow `plan`."""
    token = _active.set(plan)
    try:
        yield
    finally:
        _active.reset(token)


def active() -> ShardingPlan | None:
    """The plan of the innermost `activate`."""
    return _active.get()


def device() -> jax.Device:
    """The first of the active plan's devices, else the default one."""
    plan = _active.get()
    return jax.devices()[0] if plan is None else plan.mesh.devices.flat[0]


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """`x` laid out by its logical axes under the active plan; unchanged without a plan."""
    plan = _active.get()
    if plan is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, plan.activation(axes, x.shape)))


def constrain_and_keep_row_major(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """`constrain`, then `keep_row_major` of each device's part. On the whole array it would make every device
    gather."""
    plan = _active.get()
    if plan is None:
        return x
    spec = plan.activation(axes, x.shape)
    return jax.shard_map(keep_row_major, mesh=plan.mesh, in_specs=spec, out_specs=spec)(x)


def keep_row_major(part: jax.Array) -> jax.Array:
    """`part`, inside `jax.shard_map`, with its last axis along the lanes of a TPU's tiles."""
    # XLA may put tokens along the lanes; matmuls that write or read them then take up to 2.5 times as long. By the
    # compiler's schedule a forward of LTX-2 at 1536x1024 takes 901 M cycles with this and 1,125 without on tpu7x:2x2x1,
    # 978 and 1,035 on v6e:2x4.
    if device().platform != "tpu":
        return part
    return with_layout_constraint(part, Layout(tuple(range(part.ndim))))


def as_placed(stacked: Weight, layer: Any) -> Any:
    """A layer of a stacked weight, constrained to the order of the stack in memory. In loops of steps, and in two loops
    over the same layers, libtpu 0.0.42 would choose another order, and copy all weights first. The constraint is on
    each device's part: on the whole array, every device would gather it."""
    plan = _active.get()
    order = plan.layer_order(stacked) if plan else None
    if plan is None or order is None:
        return layer
    part = PartitionSpec(*plan.weight(stacked.axes).spec[1:])
    ordered: Callable[[jax.Array], jax.Array] = jax.shard_map(
        lambda matrix: with_layout_constraint(matrix, order), mesh=plan.mesh, in_specs=part, out_specs=part
    )
    return ordered(layer)


def pad_to_shards(x: jax.Array, axes: tuple[str | None, ...], dimension: int) -> jax.Array:
    """`x` laid out by its logical axes, its `dimension` zero-padded to equal parts on all devices."""
    plan, axis = _active.get(), axes[dimension]
    if plan is None or axis is None:
        return x
    padding = [(0, 0)] * x.ndim
    padding[dimension] = (0, -x.shape[dimension] % plan.parts(axis))
    return constrain(jnp.pad(x, padding), axes)
