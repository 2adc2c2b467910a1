"""The classic faults of a sharding, as sentences: those that a compiled program and its plan show for certain."""

from collections.abc import Iterator, Mapping, Sequence

from ltx2_cli.forecast.hlo import Collective, wire_bytes
from ltx2_cli.forecast.memory import local_shape, weight_bytes
from ltx2_cli.forecast.program import Array
from ltx2_cli.sharding import ShardingPlan
from ltx2_cli.weights.declare import Shape, Weight

PROJECTIONS = (".to_q.weight", ".to_k.weight", ".to_v.weight")


def faults(
    collectives: Sequence[Collective],
    weights: Sequence[Weight],
    plan: ShardingPlan,
    sizes: Mapping[str, int],
    hbm_bytes: float,
) -> list[str]:
    """What is wrong with a program of stacked layers, as it was compiled under `plan`.

    `weights` are those that it reads, `sizes` says how long each logical axis of an activation is (rows, heads,
    tokens), `hbm_bytes` what a device holds.
    """
    return [
        *gathered_weights(collectives, weights, plan),
        *summed_projections(collectives, weights, plan),
        *undivided(plan, sizes),
        *replicated(weights, plan, hbm_bytes),
    ]


def gathered_weights(collectives: Sequence[Collective], weights: Sequence[Weight], plan: ShardingPlan) -> Iterator[str]:
    """Weights that are made whole at every layer: an all-gather of a slice of a stack that is shaped as theirs."""
    stacks = [weight for weight in weights if weight.layers]
    guilty: dict[str, Collective] = {}
    for each in collectives:
        if each.kind == "all-gather":
            for stack, result in zip(each.stacks, each.results, strict=True):
                owners = [weight.source for weight in stacks if _is_of(weight, plan, stack, result, each)]
                guilty |= dict.fromkeys(owners, each)
    if guilty:
        travels = wire_bytes({id(each): each for each in guilty.values()}.values())
        axes = sorted({axis for each in guilty.values() for axis in each.axes})
        yield (
            f"weights are gathered along mesh axis {_names(axes)} in every layer, {travels / 1e9:.1f} GB sent by a"
            f" device in a forward: {_some(sorted(guilty))}"
        )


def summed_projections(
    collectives: Sequence[Collective], weights: Sequence[Weight], plan: ShardingPlan
) -> Iterator[str]:
    """Queries, keys and values whose contracted channels are split: each product is summed over devices."""
    for axis in plan.mesh.axis_names:
        split = [
            weight
            for weight in weights
            if weight.layers and weight.source.endswith(PROJECTIONS) and plan.weight(weight.axes).spec[-1] == axis
        ]
        widths = {local_shape(weight, plan)[-2] for weight in split}
        sums = [
            each
            for each in collectives
            if each.kind == "all-reduce"
            and axis in each.axes
            and any(weight.layers in each.loops for weight in split)
            and all(len(result.dims) > 2 and result.dims[-1] in widths for result in each.results)
        ]
        if sums and plan.mesh.shape[axis] > 1:
            yield (
                f"the input channels of {len(split)} projections to queries, keys and values lie along mesh axis"
                f" `{axis}`, so that their products are summed over it: {wire_bytes(sums) / 1e9:.1f} GB sent by a"
                " device in a forward"
            )


def undivided(plan: ShardingPlan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Activations that stay whole since their length does not divide: every device along that axis does all of it."""
    for logical, axis in plan.activations:
        parts = plan.mesh.shape[axis]
        if logical in sizes and sizes[logical] % parts:
            yield (
                f"{sizes[logical]} {logical} do not divide by the {parts} of mesh axis `{axis}`: they stay whole, and"
                f" {parts} devices do the same work"
            )


def replicated(weights: Sequence[Weight], plan: ShardingPlan, hbm_bytes: float) -> Iterator[str]:
    """Weights that lie whole on each of several devices and fill more than half of one."""
    whole = [weight for weight in weights if local_shape(weight, plan) == tuple(weight.get_value().shape)]
    size = weight_bytes(whole, plan)
    if plan.mesh.size > 1 and size > hbm_bytes / 2:
        largest = sorted(whole, key=lambda weight: -weight_bytes([weight], plan))
        yield (
            f"{size / 1e9:.1f} GB of weights lie whole on each of {plan.mesh.size} devices, which have"
            f" {hbm_bytes / 1e9:.1f} GB: {_some([weight.source for weight in largest])}"
        )


def _is_of(weight: Weight, plan: ShardingPlan, stack: Array | None, result: Array, gathered: Collective) -> bool:
    """Whether a gather brings together slices of this very stack, which lies split along the gather's axes."""
    ours, whole = local_shape(weight, plan), local_shape(weight, plan, gathered.axes)
    return stack is not None and ours == stack.dims and ours != whole and _cut(result.dims) == _cut(whole[1:])


def _cut(dims: Shape) -> list[int]:
    """Lengths without regard to order and to axes of one: XLA adds, drops and turns them at will."""
    return sorted(length for length in dims if length != 1)


def _names(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
