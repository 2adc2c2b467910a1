"""Warnings of a sharding: what is legal, and makes devices send or store much, or do the same work."""

from collections.abc import Iterator, Mapping, Sequence

from ltx2_cli.estimate.collectives import Collective, sent_bytes
from ltx2_cli.plan.decoding import bytes_on_device
from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.weights.checkpoint import abbreviate
from ltx2_cli.weights.declare import Weight

PROJECTIONS = (".to_q.weight", ".to_k.weight", ".to_v.weight")


def split_inputs(
    weights: Sequence[Weight], plan: ShardingPlan, collectives: Sequence[Collective] | None = None
) -> Iterator[str]:
    """Queries, keys and values whose input channels are split: every layer gathers the weights, or sums their products.
    With the `collectives` of a compiled forward also what that sends."""
    for axis in plan.mesh.axis_names:
        split = [
            weight
            for weight in weights
            if weight.layers and weight.source.endswith(PROJECTIONS) and plan.weight(weight.axes).spec[-1] == axis
        ]
        if split and plan.mesh.shape[axis] > 1:
            sent = [collective for collective in collectives or () if axis in collective.axes]
            amount = f"; a device sends {sent_bytes(sent) / 1e9:.1f} GB along it in a forward" if sent else ""
            yield (
                f"the input channels of {len(split)} projections to queries, keys and values are split along mesh axis"
                f" `{axis}`: every layer gathers these weights or sums their products{amount}"
            )


def undivided(plan: ShardingPlan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Activations that stay whole since their length does not divide; `sizes` by logical axis."""
    for logical, axis in plan.activations:
        parts = plan.mesh.shape[axis]
        if logical in sizes and sizes[logical] % parts:
            yield (
                f"{sizes[logical]} {logical} do not divide by the {parts} of mesh axis `{axis}`: they stay whole, and"
                f" {parts} devices do the same work"
            )


def replicated(weights: Sequence[Weight], plan: ShardingPlan, limit: float) -> Iterator[str]:
    """Weights that each of several devices holds whole, and that fill more than half of the `limit` in bytes."""
    whole = [weight for weight in weights if plan.weight(weight.axes).shard_shape(weight.shape) == weight.shape]
    size = sum(bytes_on_device(weight, plan) for weight in whole)
    if plan.mesh.size > 1 and size > limit / 2:
        largest = sorted(whole, key=lambda weight: -bytes_on_device(weight, plan))
        yield (
            f"{size / 1e9:.1f} GB of weights lie whole on each of {plan.mesh.size} devices, which have"
            f" {limit / 1e9:.1f} GB: {abbreviate([weight.source for weight in largest], 3)}"
        )
