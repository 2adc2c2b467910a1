"""Matrices in eight bits, with a scale for each output channel: rounding, widening, products."""

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

# the largest value of each type; rows are scaled to it
LARGEST = {np.dtype(jnp.int8): 127.0, np.dtype(jnp.float8_e4m3fn): 448.0}
Place = NamedSharding | Format  # a sharding, with a layout in memory where the device does not choose it


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix (out, in), or a stack of them, as `values * scale[..., None]`."""

    values: Any  # int8 or float8_e4m3fn [..., out, in]
    scale: Any  # float32 [..., out]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix or stack."""
        return self.values.shape

    @property
    def dtype(self) -> np.dtype:
        """The data type of the values."""
        return self.values.dtype


Matrix = jax.Array | QuantizedMatrix


def widen(matrix: Matrix, dtype: DTypeLike) -> jax.Array:
    """The matrix in `dtype`; a scale is multiplied in float32."""
    if isinstance(matrix, QuantizedMatrix):
        return (matrix.values.astype(jnp.float32) * matrix.scale[..., None]).astype(dtype)
    return matrix.astype(dtype)


def quantize(matrix: jax.Array, dtype: DTypeLike) -> QuantizedMatrix:
    """`matrix` [..., out, in] rounded to the nearest values of `dtype`, int8 or float8_e4m3fn; the largest of each row
    is `LARGEST`."""
    largest, wide = LARGEST[np.dtype(dtype)], matrix.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / largest
    scaled = jnp.clip(wide / jnp.where(scale == 0, 1, scale)[..., None], -largest, largest)
    rounded = jnp.round(scaled) if jnp.issubdtype(dtype, jnp.integer) else scaled
    return QuantizedMatrix(rounded.astype(dtype), scale)


def cast(array: jax.Array, dtype: DTypeLike) -> Matrix:
    """`array` in `dtype`; a matrix or a stack of them, rounded, where that has eight bits."""
    return quantize(array, dtype) if np.dtype(dtype) in LARGEST else array.astype(dtype)


def abstract_matrix(shape: tuple[int, ...], dtype: DTypeLike) -> QuantizedMatrix:
    """A matrix of this shape without values."""
    return QuantizedMatrix(jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32))


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
    """Bytes of a weight's value at `place` on each device."""
    arrays = jax.tree.leaves(placed(value, place))
    return sum(prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)
