"""Declarations of weights: name in the checkpoint, shape, logical axes and layout on disk. Loading, sharding and checks
of files follow from them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from ltx2_cli.weights.quantized_matrix import INT4, QuantizedMatrix, abstract_matrix
from ltx2_cli.weights.tensors import MatrixType

M = TypeVar("M", bound=nnx.Module)
Shape = tuple[int, ...]
Axes = tuple[str | None, ...]

PLAIN = "plain"  # as on disk, linear layers (out, in) too
CONV = "conv"  # disk (out, in, *window) -> ours (*window, in, out)
VIDEO_CONV = "video_conv"  # disk (out, in, frames, height, width) -> ours (height, width, frames, in, out)
TRANSPOSED_CONV = "transposed_conv"  # disk (in, out, *window) -> ours (*window, in, out)


class Weight(nnx.Param[Any]):
    """A parameter with its declaration. Its value is a `jax.ShapeDtypeStruct`, and a `jax.Array` once loaded; a
    quantised matrix is a `QuantizedMatrix` of them. Metadata: `source`, the checkpoint's name with `*` for the layer of
    a stack; `axes`, a logical name or None for each dimension; `layout`, one of the layouts above; `layers`, the
    numbers of the layers on the leading stacked axis, none without one."""

    source: str
    axes: Axes
    layout: str
    layers: range

    def get_value(self, **index: Any) -> Any:
        """The value; without an index it is not copied as a tree, as flax would do slowly."""
        return super().get_value(**index) if index else self.get_raw_value()

    @property
    def key(self) -> tuple[str, range]:
        """What no other weight of its network has."""
        return self.source, self.layers

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation from disk to this weight, `disk.transpose(order)`, without layers."""
        rank = len(self.axes) - bool(self.layers)
        window = tuple(range(2, rank))
        orders = {
            PLAIN: tuple(range(rank)),
            CONV: (*window, 1, 0),
            VIDEO_CONV: (*window[1:], *window[:1], 1, 0),
            TRANSPOSED_CONV: (*window, 0, 1),
        }
        return orders[self.layout]

    def tensors(self) -> Iterator[tuple[str, Shape]]:
        """Name and shape of each tensor on disk, layer by layer for a stack."""
        shape = self.get_value().shape
        tensor = shape[1:] if self.layers else shape
        disk = tuple(tensor[self.order.index(i)] for i in range(len(tensor)))
        for layer in self.layers or range(1):
            yield self.source.replace("*", str(layer)) if self.layers else self.source, disk

    def with_value(self, value: jax.Array | jax.ShapeDtypeStruct | QuantizedMatrix) -> "Weight":
        """The same declaration around another value."""
        return Weight(value, **self.get_metadata())


@dataclass(frozen=True)
class Scope:
    """A place in a checkpoint. `scope / "attn1" / "to_q"` names a child; `stacked` names many layers at once."""

    dtype: DTypeLike
    path: str = ""
    layers: range = range(0)
    matrices: MatrixType | None = None  # in which `matrix` declares; None: in `dtype`

    def __truediv__(self, name: str | int) -> "Scope":
        return replace(self, path=f"{self.path}.{name}" if self.path else str(name))

    def stacked(self, name: str, layers: range) -> "Scope":
        """The scope of equal blocks of these numbers: each weight below it gains a leading axis of layers."""
        return replace(self / name / "*", layers=layers)

    def weight(
        self, name: str, shape: Shape, axes: Axes, layout: str = PLAIN, dtype: DTypeLike | None = None
    ) -> Weight:
        """Declare a weight with this `shape` and logical `axes`; `dtype` if it must differ from the run's."""
        if len(shape) != len(axes):
            raise ValueError(f"{self.path}.{name}: {len(shape)} dimensions but {len(axes)} axes")
        if self.layers:
            shape, axes = (len(self.layers), *shape), ("layers", *axes)
        value = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))
        return Weight(value, source=(self / name).path, axes=axes, layout=layout, layers=self.layers)

    def matrix(self, name: str, shape: Shape, axes: Axes) -> Weight:
        """Declare a matrix (out, in), in eight or four bits where the scope says so; one of an odd number of rows is
        not packed in pairs of them, and stays wide."""
        weight = self.weight(name, shape, axes)
        if self.matrices is None or (self.matrices.dtype == INT4 and shape[0] % 2):
            return weight
        return weight.with_value(abstract_matrix(weight.shape, self.matrices))

    @property
    def unquantized(self) -> "Scope":
        """The scope whose matrices are not quantised."""
        return replace(self, matrices=None)


def is_weight(node: object) -> bool:
    """Whether it is a weight's declaration."""
    return type(node) is Weight  # `isinstance` of flax's variables looks for tracers, too


def weights(module: nnx.Module) -> list[Weight]:
    """Every weight that `module` declares, in a fixed order."""
    return jax.tree.leaves(module, is_leaf=is_weight)


@lru_cache(maxsize=64)
def kinds(network: nnx.Module) -> tuple[list[Weight], ...]:
    """Weights of equal axes, shape and type together, of a network without their values. Looked for once: plans of
    many requests share a network that nobody changes."""
    found: dict[tuple[object, ...], list[Weight]] = {}
    for weight in weights(network):
        found.setdefault((weight.axes, weight.shape, weight.dtype), []).append(weight)
    return tuple(found.values())


def map_weights(change: Callable[[Weight], object], module: M) -> M:
    """`module` with each weight replaced by `change(weight)`."""
    return jax.tree.map(change, module, is_leaf=is_weight)


def declared(module: nnx.Module) -> dict[str, Shape]:
    """Name and shape on disk of every tensor `module` expects."""
    return {name: shape for weight in weights(module) for name, shape in weight.tensors()}
