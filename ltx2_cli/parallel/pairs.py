"""Exchange between the two devices of a mesh axis. They compute until they need what they receive; XLA for TPUs lets
them wait for an all-reduce or all-gather instead."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from ltx2_cli.parallel.mesh import ShardingPlan

SWAP = [(0, 1), (1, 0)]  # from, to


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Exchanged:
    """What both devices of a pair have made, each [2, ...] along their mesh axis: what a device has itself, and what it
    receives."""

    own: jax.Array
    other: jax.Array
    axis: str = field(metadata={"static": True})  # of the mesh


def exchange(make: Callable[..., jax.Array], plan: ShardingPlan, axis: str, specs: Any, *operands: Any) -> Exchanged:
    """The result of `make` on each device of a pair, from its parts of the operands, and that of the other device.
    `specs` name the mesh axis `axis` alone."""

    def swap(*parts: Any) -> tuple[jax.Array, jax.Array]:
        own = make(*parts)[None]
        return own, jax.lax.ppermute(own, axis, SWAP)

    along = jax.shard_map(swap, mesh=plan.mesh, in_specs=specs, out_specs=PartitionSpec(axis), axis_names={axis})
    return Exchanged(*along(*operands), axis)


def combine(
    join: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], plan: ShardingPlan, parts: Exchanged
) -> jax.Array:
    """`join(own, other, first)`, which is the same on both devices of a pair; `first`: whether this is the first."""

    def joined(own: jax.Array, other: jax.Array) -> jax.Array:
        return join(own[0], other[0], jax.lax.axis_index(parts.axis) == 0)

    whole = jax.shard_map(
        joined,
        mesh=plan.mesh,
        in_specs=PartitionSpec(parts.axis),
        out_specs=PartitionSpec(),
        axis_names={parts.axis},
        check_vma=False,
    )
    return whole(parts.own, parts.other)
