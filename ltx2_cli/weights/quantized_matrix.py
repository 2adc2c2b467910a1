"""Matrices in eight bits, with a scale for each output channel: rounding, widening, products."""

from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ltx2_cli.weights.host import leaves_room
from ltx2_cli.weights.tensors import MatrixType

# the largest value of each type; rows are scaled to it
LARGEST = {np.dtype(jnp.int8): 127.0, np.dtype(jnp.float8_e4m3fn): 448.0}
LEAST = 1e-30  # of the largest of a row: smaller ones become zeros
BOUND_MARGIN = 1 + 2**-6  # more than a few roundings to bfloat16 add to a bound
Place = NamedSharding | Format  # a sharding, with a layout in memory where the device does not choose it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (out, in), or a stack of them: `values * scale[..., None]`, rotated back in groups of input channels."""

    values: Any  # int8 or float8_e4m3fn [..., out, in]
    scale: Any  # float32 [..., out]
    group_size: int = field(default=0, metadata={"static": True})
    rounds_input: bool = field(default=False, metadata={"static": True})
    result_dtype: np.dtype | None = field(default=None, metadata={"static": True})  # of its products; None: a weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix or stack."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """The data type of the values."""
        return self.values.dtype

    @property
    def type(self) -> MatrixType:
        """Values, rotation and products."""
        return MatrixType(np.dtype(self.dtype), self.group_size, self.rounds_input)


Matrix = jax.Array | QuantizedMatrix


@cache
def hadamard(size: int) -> np.ndarray:
    """ConvRot's rotation of `size` channels, a power of 4: symmetric and orthogonal, float32 (arXiv:2512.03673)."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32) / 2
    return np.ones((1, 1), np.float32) if size == 1 else np.kron(hadamard(size // 4), four)


def rotate_groups(x: jax.Array, group_size: int) -> jax.Array:
    """x with each group of its last axis rotated, in x's dtype; its own inverse. 0: x itself."""
    if not group_size:
        return x
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.matmul(groups, hadamard(group_size).astype(x.dtype), precision=exact).reshape(x.shape)


def widen(matrix: Matrix, dtype: DTypeLike) -> jax.Array:
    """The matrix in `dtype`, computed in float32."""
    if isinstance(matrix, QuantizedMatrix):
        wide = matrix.values.astype(jnp.float32) * matrix.scale[..., None]
        return rotate_groups(wide, matrix.group_size).astype(dtype)
    return matrix.astype(dtype)


def quantize(matrix: jax.Array, kind: MatrixType, bound: jax.Array | None = None) -> QuantizedMatrix:
    """`matrix` [..., out, in] rotated and rounded to the nearest values; the largest of each row is `LARGEST`. With an
    upper `bound` [..., out] of the largest, float32, no pass over the matrix looks for it; the largest value is a
    little below `LARGEST` then. A bound says nothing of rotated rows."""
    largest, rotated = LARGEST[kind.dtype], rotate_groups(matrix, kind.group_size)
    if bound is None or kind.group_size:
        most = jnp.max(jnp.abs(rotated), axis=-1).astype(jnp.float32)
    else:
        most = bound * BOUND_MARGIN
    # A factor for each row: TPUs divide slowly.
    scaled = rotated.astype(jnp.float32) * jnp.where(most < LEAST, 0, largest / most)[..., None]
    rounded = jnp.round(scaled) if jnp.issubdtype(kind.dtype, jnp.integer) else scaled
    return QuantizedMatrix(rounded.astype(kind.dtype), most / largest, kind.group_size, kind.rounds_input)


def abstract_matrix(shape: tuple[int, ...], kind: MatrixType) -> QuantizedMatrix:
    """A matrix of this shape without values."""
    values, scale = jax.ShapeDtypeStruct(shape, kind.dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    return QuantizedMatrix(values, scale, kind.group_size, kind.rounds_input)


def places(value: Any, place: Place) -> Any:
    """The place of each array of a weight's value that lies at `place`: a scale is split as its rows are."""
    if not isinstance(value, QuantizedMatrix):
        return place
    sharding = place.sharding if isinstance(place, Format) else place
    assert isinstance(sharding, NamedSharding)
    spec = (*sharding.spec, *[None] * (len(value.shape) - len(sharding.spec)))
    return replace(value, values=place, scale=NamedSharding(sharding.mesh, PartitionSpec(*spec[:-1])))


def placed(value: Any, place: Place) -> Any:
    """The abstract arrays of a weight's value at `place`."""

    def at(array: Any, where: Place) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

    return jax.tree.map(at, value, places(value, place))


def bytes_on_device(value: Any, place: Place) -> int:
    """Bytes of a weight's value at `place` on each device, without arrays in the host's memory."""
    return _bytes(value, place, on_host=False)


def bytes_on_host(value: Any, place: Place) -> int:
    """Bytes of a weight's value at `place` in the host's memory for each of its devices."""
    return _bytes(value, place, on_host=True)


def _bytes(value: Any, place: Place, on_host: bool) -> int:
    arrays = [array for array in jax.tree.leaves(placed(value, place)) if leaves_room(array.sharding) == on_host]
    return sum(prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)
