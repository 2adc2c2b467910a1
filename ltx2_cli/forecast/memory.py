"""What the weights take on each device: known before anything is compiled."""

import math
from collections.abc import Sequence

import jax

from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.weights.declare import Shape, Weight
from ltx2_cli.weights.on_devices import Placement


def local_shape(weight: Weight, plan: ShardingPlan, whole_along: tuple[str, ...] = ()) -> Shape:
    """What one device holds of `weight`; with those mesh axes that it was gathered along, what it holds then."""
    spec = tuple(plan.weight(weight.axes).spec)
    parts = (1 if axis is None or axis in whole_along else plan.mesh.shape[axis] for axis in spec)
    return tuple(length // part for length, part in zip(_value(weight).shape, parts, strict=True))


def weight_bytes(weights: Sequence[Weight], plan: ShardingPlan) -> int:
    """Bytes of `weights` on each device, without the padding of tiles."""
    return sum(math.prod(local_shape(weight, plan)) * _value(weight).dtype.itemsize for weight in weights)


def placed_bytes(weights: Sequence[Weight], place: Placement) -> int:
    """Bytes of `weights` on each device where `place` puts them. Most weights have many like them: each kind is placed
    once."""
    kinds: dict[tuple[object, ...], list[Weight]] = {}
    for weight in weights:
        kinds.setdefault((weight.axes, _value(weight).shape, _value(weight).dtype), []).append(weight)
    return sum(len(alike) * _placed_bytes(alike[0], place) for alike in kinds.values())


def _placed_bytes(weight: Weight, place: Placement) -> int:
    shape, dtype = _value(weight).shape, _value(weight).dtype
    sharding = jax.ShapeDtypeStruct(shape, dtype, sharding=place(weight)).sharding
    return math.prod(sharding.shard_shape(shape)) * dtype.itemsize


def _value(weight: Weight) -> jax.Array | jax.ShapeDtypeStruct:
    return weight.get_value()
