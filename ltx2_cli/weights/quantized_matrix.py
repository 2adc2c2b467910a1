"""Matrices in eight or four bits, with a scale for each output channel: rounding and widening."""

from dataclasses import dataclass, field, replace
from functools import cache
from math import gcd, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ltx2_cli.weights.host import leaves_room
from ltx2_cli.weights.tensors import MatrixType

INT4 = np.dtype(jnp.int4)
# the largest value of each type; rows are scaled to it
LARGEST = {np.dtype(jnp.int8): 127.0, np.dtype(jnp.float8_e4m3fn): 448.0, INT4: 7.0}
# times the root mean square of a row in int4: larger numbers are cut off, which of normally distributed numbers leaves
# the least error, 0.11 of their norm; scaled to the largest of 4,096 it would be 0.16
CUT_AT = 2.5
LEAST = 1e-30  # of the largest of a row: smaller ones become zeros
BOUND_MARGIN = 1 + 2**-6  # more than a few roundings to bfloat16 add to a bound
Place = NamedSharding | Format  # a sharding, with a layout in memory where the device does not choose it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (out, in), or a stack: `numbers * scale[..., None]`, with groups of input channels rotated back."""

    values: Any  # int8 or float8_e4m3fn [..., out, in]; or int8 [..., out / 2, in] with two of int4 in a byte
    scale: Any  # float32 [..., out]
    group_size: int = field(default=0, metadata={"static": True})
    rounds_input: bool = field(default=False, metadata={"static": True})
    packed_rows: int = field(default=0, metadata={"static": True})  # see `pack`; 0: a byte holds one number
    result_dtype: np.dtype | None = field(default=None, metadata={"static": True})  # of its products; None: a weight

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix or stack."""
        if not self.packed_rows:
            return self.values.shape
        *layers, half, columns = self.values.shape
        return *layers, 2 * half, columns

    @property
    def dtype(self) -> np.dtype:
        """The data type of the numbers."""
        return INT4 if self.packed_rows else self.values.dtype

    @property
    def numbers(self) -> jax.Array:
        """The numbers [..., out, in], of int4 in int8."""
        return unpack(self.values, self.packed_rows) if self.packed_rows else self.values

    @property
    def type(self) -> MatrixType:
        """Values, rotation and products."""
        return MatrixType(np.dtype(self.dtype), self.group_size, self.rounds_input)


Matrix = jax.Array | QuantizedMatrix


def packed_rows(rows: int) -> int:
    """The size of the blocks that `pack` pairs: the largest, up to the lanes of a TPU, of which each of eight devices
    holds whole pairs; 1 where none is."""
    return max((count for count in (128, 64, 32, 16, 8, 4, 2) if rows % (16 * count) == 0), default=1)


def pack(numbers: jax.Array, rows: int) -> jax.Array:
    """Numbers of four bits [..., out, in], in int8, two in a byte [..., out / 2, in]: of each pair of blocks of `rows`,
    the first has the lower half. No number changes its column, and none of a device's part leaves it."""
    *layers, out, columns = numbers.shape
    low, high = jnp.moveaxis(numbers.reshape(*layers, out // (2 * rows), 2, rows, columns), -3, 0)
    return (high << 4 | low & 15).reshape(*layers, out // 2, columns)


def unpack(values: jax.Array, rows: int) -> jax.Array:
    """The numbers that `pack` has packed, in int8."""
    *layers, half, columns = values.shape
    blocks = values.reshape(*layers, half // rows, 1, rows, columns)
    return (blocks << np.array([4, 0], np.int8).reshape(2, 1, 1) >> 4).reshape(*layers, 2 * half, columns)


@cache
def hadamard(size: int) -> np.ndarray:
    """ConvRot's rotation of `size` channels, a power of 4: symmetric and orthogonal, float32 (arXiv:2512.03673)."""
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32) / 2
    return np.ones((1, 1), np.float32) if size == 1 else np.kron(hadamard(size // 4), four)


def rotate_groups(x: jax.Array, group_size: int, total: DTypeLike | None = None) -> jax.Array:
    """x with each group of its last axis rotated, in `total` or x's dtype; its own inverse. Below 4: x itself."""
    if group_size < 4:
        return x
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    rotation = hadamard(group_size).astype(x.dtype)
    return jnp.matmul(groups, rotation, precision=exact, preferred_element_type=total).reshape(x.shape)


def widen(matrix: Matrix, dtype: DTypeLike) -> jax.Array:
    """The matrix in `dtype`, computed in float32."""
    if isinstance(matrix, QuantizedMatrix):
        numbers = matrix.numbers.astype(jnp.bfloat16)  # which has all of them, and those of the rotation
        wide = rotate_groups(numbers, matrix.group_size, jnp.float32).astype(jnp.float32)
        return (wide * matrix.scale[..., None]).astype(dtype)
    return matrix.astype(dtype)


def quantize(matrix: jax.Array, kind: MatrixType, bound: jax.Array | None = None) -> QuantizedMatrix:
    """`matrix` [..., out, in] rotated and rounded to the nearest values; the largest of each row is `LARGEST`, and of
    int4 also those above `CUT_AT`. With an upper `bound` [..., out] of the largest, float32, no pass over the matrix
    looks for it; the largest value is a little below `LARGEST` then."""
    largest, rotated = LARGEST[kind.dtype], rotate_groups(matrix, kind.group_size)
    most = jnp.max(jnp.abs(rotated), axis=-1).astype(jnp.float32) if bound is None else bound * BOUND_MARGIN
    if kind.dtype == INT4:
        most = jnp.minimum(most, CUT_AT * jnp.sqrt(jnp.mean(jnp.square(rotated.astype(jnp.float32)), axis=-1)))
    # A factor for each row: TPUs divide slowly.
    scaled = rotated.astype(jnp.float32) * jnp.where(most < LEAST, 0, largest / most)[..., None]
    rounded = jnp.round(scaled) if jnp.issubdtype(kind.dtype, jnp.integer) else scaled
    if kind.dtype == INT4:
        rounded = jnp.clip(rounded, -largest, largest).astype(jnp.int8)
    return as_stored(rounded, most / largest, kind)


def as_stored(numbers: jax.Array, scale: jax.Array, kind: MatrixType) -> QuantizedMatrix:
    """The matrix of a type by its numbers [..., out, in] and scales [..., out]; those of int4 are packed."""
    if kind.dtype != INT4:
        return QuantizedMatrix(numbers.astype(kind.dtype), scale, kind.group_size, kind.rounds_input)
    rows = packed_rows(numbers.shape[-2])
    return QuantizedMatrix(pack(numbers, rows), scale, kind.group_size, kind.rounds_input, rows)


def abstract_matrix(shape: tuple[int, ...], kind: MatrixType) -> QuantizedMatrix:
    """A matrix of this shape without values. Groups that rotate together are of the most channels, up to those of its
    type, that divide the input's."""
    kind = kind._replace(group_size=kind.group_size and gcd(kind.group_size, _power_of_four(shape[-1])))
    *layers, out, columns = shape
    rows, scale = 0, jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    values = jax.ShapeDtypeStruct(shape, kind.dtype)
    if kind.dtype == INT4:
        rows, values = packed_rows(out), jax.ShapeDtypeStruct((*layers, out // 2, columns), jnp.int8)
    return QuantizedMatrix(values, scale, kind.group_size, kind.rounds_input, rows)


def _power_of_four(number: int) -> int:
    """The largest power of 4 that divides a number."""
    return 1 if number % 4 else 4 * _power_of_four(number // 4)


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
