"""Layers on parts of the tokens in turn: while a device waits for what another sends of one part, it computes another
part; and on GPUs, the activations of a part take less memory than those of all tokens."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp

from ltx2_cli.chips import chip
from ltx2_cli.nn.attention import TokenAxis
from ltx2_cli.parallel.constrain import active, device
from ltx2_cli.parallel.mesh import LANES
from ltx2_cli.parallel.pairs import Exchanged

# By libtpu's schedule, LTX-2.3 at 768x512 on v6e:2x4, a layer takes 3.67 ms in 6 parts, 3.63 in one, and 3.73 in 8. In
# eight bits it takes 3.02 ms in 4 parts, 2.90 in one, and 3.20 in 6.
TOKEN_PARTS, EIGHT_BIT_PARTS = 6, 4  # at most
UNKNOWN_DEVICE_PARTS = 2
# On a GPU, to save memory. By XLA, the second stage of LTX-2.5 at 1920x1088 in eight bits takes 4.6 GB of an RTX 4090
# beside the weights, 3.2 in 2 parts, 2.8 in 4, 3.1 in 8. On one v6e, LTX-2.3 takes 1.07 times the cycles in 3 parts.
SAVING_PARTS = 4  # at most
SAVING_POSITIONS = 6 * 2**10  # of a part, at least


class LayerStep(NamedTuple):
    """A step of a layer: `finish(state, start(state, inputs), inputs)`. What `start` returns may be on its way between
    devices."""

    start: Callable[[Any, Any], Any]
    finish: Callable[[Any, Any, Any], Any]


class TokenInputs(Protocol):
    """Inputs of a layer for some tokens."""

    @property
    def tokens(self) -> TokenAxis:
        """Their axis."""

    def parts(self, sizes: Sequence[int]) -> Sequence[Self]:
        """The inputs of parts of each device's tokens, of these sizes."""


def part_sizes(rows: int, tokens: int, axis: str | None, eight_bits: bool) -> list[int]:
    """The number of a device's tokens in each part of x [rows, tokens, dim], tokens along a logical axis, for products
    in eight bits or others. Parts are more than one where pairs of devices send each other sums, and where the products
    of a part take longer than reading their weights; and for many tokens on a GPU."""
    plan = active()
    if plan is None:
        return [tokens]
    here, known = tokens // plan.parts(axis), chip(device().device_kind)
    positions = -(-rows // plan.parts("rows")) * here
    if not any(map(plan.pair, ("heads", "mlp"))):
        most = min(SAVING_PARTS, positions // SAVING_POSITIONS) if device().platform == "gpu" else 1
    elif known:
        most = min(EIGHT_BIT_PARTS if eight_bits else TOKEN_PARTS, int(positions * known.hbm_bandwidth / known.flops))
    else:
        most = UNKNOWN_DEVICE_PARTS
    size = -(-here // max(1, most))
    size = -(-size // LANES) * LANES if size > LANES else size
    return [min(size, here - first) for first in range(0, here, size)]


def split_tokens(x: jax.Array, sizes: Sequence[int], dimension: int) -> list[jax.Array]:
    """Parts of x with `sizes` tokens of each device; the tokens lie along a dimension."""
    if len(sizes) == 1:
        return [x]
    before, after = x.shape[:dimension], x.shape[dimension + 1 :]
    by_device = x.reshape(*before, -1, sum(sizes), *after)
    ends = [sum(sizes[:number]) for number in range(1, len(sizes))]
    return [part.reshape(*before, -1, *after) for part in jnp.split(by_device, ends, dimension + 1)]


def join_tokens(parts: Sequence[jax.Array], axis: str | None) -> jax.Array:
    """The array [rows, tokens, dim] of parts that `split_tokens` made."""
    if len(parts) == 1:
        return parts[0]
    plan = active()
    assert plan
    rows, _, dim = parts[0].shape
    by_device = [part.reshape(rows, plan.parts(axis), -1, dim) for part in parts]
    # XLA for TPUs writes updates in place, but a concatenation as the maximum of padded parts.
    whole = jax.lax.empty((rows, plan.parts(axis), sum(part.shape[2] for part in by_device), dim), parts[0].dtype)
    first = 0
    for part in by_device:
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, first, 2)
        first += part.shape[2]
    return whole.reshape(rows, -1, dim)


def run_in_parts(
    steps: Sequence[LayerStep], arrays: Sequence[jax.Array], inputs: TokenInputs, eight_bits: bool
) -> jax.Array:
    """The state after some steps; before them it is one array [rows, tokens, dim], or a tuple of such arrays. Each part
    of the tokens is a step behind the one before it. `eight_bits`: the products of the steps are of these."""
    axis = inputs.tokens.name
    rows, tokens = arrays[0].shape[:2]
    sizes = part_sizes(rows, tokens, axis, eight_bits)
    states = zip(*(split_tokens(x, sizes, 1) for x in arrays), strict=True)
    parts = [
        _Part(state if len(state) > 1 else state[0], own)
        for state, own in zip(states, inputs.parts(sizes), strict=True)
    ]
    last: _Part | None = None
    for turn in range(len(parts) + len(steps)):
        for number, part in reversed(list(enumerate(parts))):
            if 0 <= turn - number <= len(steps):
                if last is not None and last is not part:
                    part.follow(last)
                part.advance(steps, turn - number)
                last = part
    return join_tokens([part.state for part in parts], axis)


class _Part:
    """Some tokens between two steps of a layer."""

    def __init__(self, state: Any, inputs: Any):
        self.state, self.inputs, self.started = state, inputs, None

    def advance(self, steps: Sequence[LayerStep], number: int) -> None:
        """Finish the step before `number`, and start that one."""
        if number > 0:
            self.state, self.started = steps[number - 1].finish(self.state, self.started, self.inputs), None
        if number < len(steps):
            self.started = steps[number].start(self.state, self.inputs)

    def follow(self, last: "_Part") -> None:
        """Compute from here on after what `last` has computed, whether or not that has arrived. Without this, XLA for
        TPUs computes a step of all parts at once, and waits for what they send."""
        computed = last.started.own if isinstance(last.started, Exchanged) else last.started
        own = self.state, self.started
        (self.state, self.started), (last.state, computed) = jax.lax.optimization_barrier((own, (last.state, computed)))
        last.started = replace(last.started, own=computed) if isinstance(last.started, Exchanged) else computed
