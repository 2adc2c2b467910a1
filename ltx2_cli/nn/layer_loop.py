"""Loops over stacked layers. Arrays in the host's memory are copied to the devices a layer ahead: while one layer is
computed, the next one arrives. After the last layer it is copied once more, so that all turns of the loop are alike."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.weights.host import lies_on_host, to_device

X = TypeVar("X")
Y = TypeVar("Y")
Z = TypeVar("Z")
# Layers in a turn of a loop: with one, the next layer would arrive in the memory of the one in work, and XLA starts its
# copy when that is done. A barrier keeps the layers apart: compiled together they would be rounded differently.
BUFFERS = 2
LayerIndex = jax.Array | np.ndarray | int
Copied = list[jax.Array]  # what a layer has in the host's memory, on the devices


class StackedLayers:
    """Layers as one tree of arrays with a leading axis of layers."""

    def __init__(self, layers: Any):
        leaves, self.tree = jax.tree.flatten(layers)
        self.away = [lies_on_host(leaf) for leaf in leaves]
        self.host = [leaf for leaf, away in zip(leaves, self.away, strict=True) if away]
        self.here = [leaf for leaf, away in zip(leaves, self.away, strict=True) if not away]
        self.count = len(leaves[0])

    def copy(self, index: LayerIndex) -> Copied:
        """Start to copy a layer, the last one if there is none of this index."""
        return [to_device(array) for array in _at(self.host, index)]

    def scan(self, body: Callable[[X, Any], tuple[X, Y]], x: X, unroll: int = 1) -> tuple[X, Y]:
        """`jax.lax.scan` of `body(x, layer)`."""
        if not self.host:
            return jax.lax.scan(body, x, self.joined([], self.here), unroll=unroll)

        def turn(state: tuple[X, Copied], scanned: Any) -> tuple[tuple[X, Copied], Y]:
            (x, copied), (index, here) = state, scanned
            following = self.copy(index + 1)
            x, y = body(x, self.joined(copied, here))
            return (jax.lax.optimization_barrier(x), following), y

        indices = jnp.arange(self.count, dtype=jnp.int32)
        (x, _), ys = jax.lax.scan(turn, (x, self.copy(0)), (indices, self.here), unroll=max(unroll, BUFFERS))
        return x, ys

    def loop(
        self, body: Callable[[X, Any], X], x: X, copied: Copied, first: LayerIndex, last: LayerIndex
    ) -> tuple[X, Copied]:
        """`body(x, layer)` for the layers from `first` to before `last`; `copied`: the first of them, and in the result
        the one at `last`."""

        def turn(index: LayerIndex, state: tuple[X, Copied]) -> tuple[X, Copied]:
            x, copied = state
            following = self.copy(index + 1)
            x = body(x, self.joined(copied, _at(self.here, index)))
            return jax.lax.optimization_barrier(x) if self.host else x, following

        def turns(number: jax.Array, state: tuple[X, Copied]) -> tuple[X, Copied]:
            for place in range(BUFFERS):
                state = turn(first + BUFFERS * number + place, state)
            return state

        if not self.host:
            return jax.lax.fori_loop(first, last, turn, (x, copied))
        whole = jnp.subtract(last, first) // BUFFERS
        state = jax.lax.fori_loop(0, whole, turns, (x, copied))
        return jax.lax.fori_loop(first + BUFFERS * whole, last, turn, state)

    def joined(self, host: list[Any], here: list[Any]) -> Any:
        """The tree of a layer's arrays."""
        parts = iter(host), iter(here)
        return jax.tree.unflatten(self.tree, [next(parts[not away]) for away in self.away])


def scan_periods(
    layers: Sequence[Any], body: Callable[[X, int, Any], tuple[X, Y]], x: X, combine: Callable[[list[Y]], Z]
) -> tuple[X, Z]:
    """`jax.lax.scan` over layers of several kinds that repeat, one of each kind in a period: `body(x, place, layer)`,
    with `layers` as a tree of stacked arrays for each place of the period. `combine` makes one result of those of a
    period's layers; the results of all periods are stacked. Barriers keep the layers apart."""
    stacks = [StackedLayers(stack) for stack in layers]

    def lone(x: X, layer: Any) -> tuple[X, Z]:
        x, y = body(x, 0, layer)
        return x, combine([y])

    def turn(state: tuple[X, Copied], scanned: Any) -> tuple[tuple[X, Copied], Z]:
        (x, copied), (index, here), ys = state, scanned, list[Y]()
        for place, stack in enumerate(stacks):
            x, index = jax.lax.optimization_barrier((x, index))  # no layer is copied before it is the next one
            last = place + 1 == len(stacks)
            following = stacks[0].copy(index + 1) if last else stacks[place + 1].copy(index)
            x, y = body(x, place, stack.joined(copied, here[place]))
            copied, ys = following, [*ys, y]
        return (jax.lax.optimization_barrier(x), copied), combine(ys)

    if len(stacks) == 1:
        return stacks[0].scan(lone, x)
    indices = jnp.arange(stacks[0].count, dtype=jnp.int32)
    (x, _), z = jax.lax.scan(turn, (x, stacks[0].copy(0)), (indices, [stack.here for stack in stacks]))
    return x, z


def _at(arrays: list[jax.Array], index: LayerIndex) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(array, index, keepdims=False) for array in arrays]
