"""What the weights take on each device: known before anything is compiled."""

import math
from collections.abc import Sequence
from typing import Any

import jax

from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.weights.declare import Shape, Weight


def local_shape(weight: Weight, plan: ShardingPlan, whole_along: tuple[str, ...] = ()) -> Shape:
    """What one device holds of `weight`; with those mesh axes that it was gathered along, what it holds then."""
    spec = tuple(plan.weight(weight.axes).spec)
    parts = (1 if axis is None or axis in whole_along else plan.mesh.shape[axis] for axis in spec)
    return tuple(length // part for length, part in zip(_value(weight).shape, parts, strict=True))


def weight_bytes(weights: Sequence[Weight], plan: ShardingPlan) -> int:
    """Bytes of `weights` on each device, without the padding of tiles."""
    return sum(math.prod(local_shape(weight, plan)) * _value(weight).dtype.itemsize for weight in weights)


def placed_bytes(arrays: Any) -> int:
    """Bytes on each device of a tree of abstract arrays, laid out as they say."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(each.sharding.shard_shape(each.shape)) * each.dtype.itemsize for each in leaves)


def _value(weight: Weight) -> jax.Array | jax.ShapeDtypeStruct:
    return weight.get_value()
