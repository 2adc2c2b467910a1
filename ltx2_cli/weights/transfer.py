"""Chunks of weights that are sent from host to devices, and the programs that finish them there: gather, scale, add
LoRA factors, cast, and write into the stack of layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ltx2_cli.parallel.jit import jitted_once
from ltx2_cli.weights.checkpoint import Index, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight
from ltx2_cli.weights.host import is_on_host, lies_on_host, on_device, to_device
from ltx2_cli.weights.lora import LoraDelta, LoraFactors
from ltx2_cli.weights.quantized_matrix import (
    Matrix,
    Place,
    QuantizedMatrix,
    abstract_matrix,
    as_stored,
    placed,
    places,
    quantize,
)
from ltx2_cli.weights.tensors import MatrixType

SMALL = 2**22  # bytes: a smaller array is sent to each device; a program to gather it would take longer
TRANSFERS = 512  # cached programs: more than the kinds of weights of all networks
Placement = Callable[[Weight], Place]
LoraDeltas = Mapping[str, LoraDelta]  # by tensor


def sharding_of(place: Place) -> NamedSharding:
    """The sharding of a weight, whatever its memory layout."""
    sharding = place.sharding if isinstance(place, Format) else place
    assert isinstance(sharding, NamedSharding)
    return sharding


def scatter_unused_axes(shape: Shape, sharding: NamedSharding, order: Sequence[int] | None = None) -> NamedSharding:
    """`sharding` with each unused mesh axis assigned to the first dimension that it divides, so that no two devices
    receive the same part. Dimensions are tried in `order`; an axis that divides none stays unused."""
    mesh, spec = sharding.mesh, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [[entry] if isinstance(entry, str) else list(entry or ()) for entry in spec]
    used = {axis for entry in axes for axis in entry}
    for axis in [axis for axis, size in mesh.shape.items() if size > 1 and axis not in used]:
        for dimension in range(len(shape)) if order is None else order:
            if shape[dimension] % prod(mesh.shape[name] for name in (axis, *axes[dimension])) == 0:
                axes[dimension].append(axis)
                break
    if sum(map(len, axes)) == len(used):
        return sharding
    return NamedSharding(mesh, PartitionSpec(*(tuple(entry) or None for entry in axes)))


@dataclass(frozen=True)
class Transfer:
    """The transfer of one array: a whole weight, or layers of a stack. Hashable: programs are cached by it."""

    shape: Shape
    stored: np.dtype  # of the array that is sent
    dtype: np.dtype  # of the weight
    sharding: NamedSharding  # of the array that is sent
    place: Place  # of the weight
    order: tuple[int, ...]  # permutation from a tensor on disk to the weight
    scaled: bool  # whether a scale of all its numbers is sent too
    lora: tuple[int, np.dtype] | None  # rank and type of LoRA factors that are sent too
    stack: Shape | None  # shape of the weight if the array is some of its layers

    matrix: MatrixType | None  # of a quantised matrix
    kept: bool  # whether that is what is sent, with a scale for each row

    @property
    def direct(self) -> bool:
        """Whether the array that is sent is the weight itself, so that no program finishes it."""
        same = self.stored == self.dtype and self.sharding == self.place and not self.matrix
        return same and not self.scaled and not self.lora and self.stack is None

    def parts(self) -> dict[str, Index]:
        """Indices of the parts for this host's devices, by their text."""
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        return {str(index): index for index in indices if index is not None}


@dataclass(frozen=True, eq=False)
class Chunk:
    """A weight, or consecutive layers of a stack, sent as one array."""

    weight: Weight
    transfer: Transfer
    first: int  # its first layer
    tensors: tuple[tuple[str, Shape], ...]  # names and shapes on disk, layer by layer

    @cached_property
    def host_bytes(self) -> int:
        """Memory on this host."""
        transfer = self.transfer
        part = prod(transfer.sharding.shard_shape(transfer.shape)) * transfer.stored.itemsize
        return len(transfer.parts()) * part + (factor_bytes(self.tensors[0][1], *transfer.lora) if transfer.lora else 0)


def factor_bytes(shape: Shape, rank: int, dtype: np.dtype) -> int:
    """The bytes of LoRA factors for a matrix (out, in)."""
    return rank * sum(shape) * dtype.itemsize


def chunks(
    weight: Weight, files: TensorFiles, place: Placement, lora_deltas: LoraDeltas, chunk_bytes: int | None
) -> Iterator[Chunk]:
    """Split a weight into chunks: as many layers as fit into `chunk_bytes` and divide the stack evenly. A layer with a
    scale or a LoRA delta, or quantised, is a chunk of its own. `chunk_bytes` None, for devices that compute in the
    host's memory: one chunk, cast by the host. The host also casts small weights and decoded ones."""
    value, tensors, stacked = weight.get_value(), tuple(weight.tensors()), bool(weight.layers)
    matrix = value.type if isinstance(value, QuantizedMatrix) else None
    computed = matrix or any(files[name].scale or name in lora_deltas for name, _ in tensors)
    count = 1 if computed else len(tensors) if chunk_bytes is None else _layers_together(tensors, files, chunk_bytes)
    # Dimensions in the order on disk, so that parts are contiguous there; layers last.
    disk_first = [stacked + weight.order.index(i) for i in range(len(weight.order))] + [0] * stacked
    for first in range(0, len(tensors), count):
        (name, _), *_ = part = tensors[first : first + count]
        shape = (len(part), *value.shape[1:]) if stacked else value.shape
        small, where = prod(shape) * value.dtype.itemsize < SMALL, sharding_of(place(weight))
        same = matrix is not None and files[name].matrix_type == matrix._replace(rounds_input=False)
        kept = same and name not in lora_deltas
        cast_here = not computed and (small or chunk_bytes is None or files[name].encoding is not None)
        stack = value.shape if stacked and (computed or len(part) < len(weight.layers)) else None
        sharding = where if cast_here and not stack else on_device(where)
        transfer = Transfer(
            shape=shape,
            stored=value.values.dtype if kept else value.dtype if cast_here else files[name].read_dtype,
            dtype=value.dtype,
            sharding=sharding if small or is_on_host(sharding) else scatter_unused_axes(shape, sharding, disk_first),
            place=place(weight),
            order=weight.order,
            scaled=files[name].scale is not None and not kept,
            lora=(lora_deltas[name].rank, lora_deltas[name].dtype) if name in lora_deltas else None,
            stack=stack,
            matrix=matrix,
            kept=kept,
        )
        yield Chunk(weight, transfer, first, part)


def _layers_together(tensors: Sequence[tuple[str, Shape]], files: TensorFiles, chunk_bytes: int) -> int:
    """The number of layers in a chunk: of one dtype, within `chunk_bytes`, a divisor of all layers."""
    dtype, *others = {files[name].read_dtype for name, _ in tensors}
    size, total = prod(tensors[0][1]) * dtype.itemsize, 1 if others else len(tensors)
    return max((count for count in range(1, total + 1) if not total % count and count * size <= chunk_bytes), default=1)


def send(transfer: Transfer, parts: Mapping[str, np.ndarray]) -> jax.Array:
    """Build an array on the devices from its parts on the host, which must not change afterwards."""
    shape, sharding = transfer.shape, transfer.sharding
    return jax.make_array_from_callback(shape, sharding, lambda index: parts[str(index)], dtype=transfer.stored)


def send_factors(factors: LoraFactors, place: Place) -> LoraFactors:
    """Send LoRA factors for a matrix at `place`: split over the devices; the program that adds them gathers them."""

    def sent(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, _factor_sharding(x.shape, place), x.__getitem__)

    return LoraFactors(*map(sent, factors))


def _factor_sharding(shape: Shape, place: Place) -> NamedSharding:
    return scatter_unused_axes(shape, NamedSharding(sharding_of(place).mesh, PartitionSpec()))


def _add(wide: jax.Array, factors: LoraFactors, order: tuple[int, ...], place: Place) -> jax.Array:
    """A float32 tensor plus a low-rank matrix, in full precision; the factors are gathered first. Traced."""
    whole = jax.lax.with_sharding_constraint(factors, NamedSharding(sharding_of(place).mesh, PartitionSpec()))
    a, b = whole.a.astype(jnp.float32), whole.b.astype(jnp.float32) * whole.scales
    return wide + jnp.matmul(b, a, precision="highest").transpose(order)


@lru_cache(TRANSFERS)
def compile_transfer(transfer: Transfer) -> tuple[jax.stages.Compiled | None, jax.stages.Compiled]:
    """Two programs for a transfer that is not direct: () -> the empty stack, or None without a stack; and (stack or
    None, array, scale or None, factors or None, first layer) -> the weight, in the stack's memory. A matrix is rounded
    to its type in the parts that are sent, before they are gathered."""
    place, order = transfer.place, transfer.order

    def finish(stack: Any, array: jax.Array, scale: Any, factors: LoraFactors | None, first: jax.Array) -> Any:
        if transfer.matrix is None or transfer.kept:
            array = jax.lax.with_sharding_constraint(array, on_device(sharding_of(place)))  # gathered first
        if transfer.scaled or factors is not None:  # computed in float32, cast once
            array = array.astype(jnp.float32)
        if transfer.scaled:
            array = array * scale
        if factors is not None:
            layer = array.reshape(array.shape[array.ndim - len(order) :])
            array = _add(layer, factors, order, place).reshape(array.shape)
        value = _value(transfer, array, scale)
        if stack is None:
            return value
        return jax.tree.map(partial(_write, layer=first), stack, value)

    empty, stack = None, _abstract_value(transfer, transfer.stack or transfer.shape)
    out = places(stack, place)
    if transfer.stack is None:
        stack = None
    else:
        empty = jitted_once(partial(_zeros, stack), out).lower().compile()
        stack = placed(stack, place)
    first = jax.ShapeDtypeStruct((), np.int32)
    finishing = jitted_once(finish, out, donate=("stack",))
    return empty, finishing.lower(stack, *_abstract(transfer), first).compile()


def _write(stack: jax.Array, value: jax.Array, layer: jax.Array) -> jax.Array:
    """A stack with these layers from `layer` on, in its memory. Traced."""
    if lies_on_host(stack):
        value = jax.device_put(value, jax.memory.Space.Host)
    return jax.lax.dynamic_update_slice_in_dim(stack, value, layer, 0)


def _value(transfer: Transfer, array: jax.Array, scale: Any) -> Matrix:
    """The value of a weight, or of some of its layers, by its numbers; or by what is kept of a file. Traced."""
    if transfer.matrix is None:
        return array.astype(transfer.dtype)
    if transfer.kept:
        scale = jnp.broadcast_to(scale, array.shape[:-1])
        return as_stored(array, scale, transfer.matrix)
    return quantize(array.astype(jnp.float32), transfer.matrix)


def _abstract_value(transfer: Transfer, shape: Shape) -> Any:
    if transfer.matrix is None:
        return jax.ShapeDtypeStruct(shape, transfer.dtype)
    return abstract_matrix(shape, transfer.matrix)


def _zeros(value: Any) -> Any:
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), value)


def _abstract(transfer: Transfer) -> tuple[Any, Any, Any]:
    """Abstract values of the array, its scale or None, and its factors or None."""
    array = jax.ShapeDtypeStruct(transfer.shape, transfer.stored, sharding=transfer.sharding)
    scale = None
    if transfer.scaled or transfer.kept:
        scale = jax.ShapeDtypeStruct(transfer.shape[-2:-1] if transfer.kept else (), np.float32)
    if transfer.lora is None:
        return array, scale, None
    rank, dtype = transfer.lora
    d_out, d_in = (transfer.shape[-2:][transfer.order.index(i)] for i in range(2))

    def factor(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=_factor_sharding(shape, transfer.place))

    return array, scale, LoraFactors(factor(dtype, rank, d_in), factor(dtype, d_out, rank), factor(np.float32, rank))


@lru_cache(TRANSFERS)
def lora_merger(place: Place, order: tuple[int, ...]) -> Callable[[jax.Array, LoraFactors, np.int32 | None], jax.Array]:
    """The program that adds a low-rank matrix to an array at `place`, or to one layer of a stack, in float32 before the
    cast; the result is in the array's memory."""

    def add(array: jax.Array, factors: LoraFactors, layer: jax.Array | None) -> jax.Array:
        tensor = array if layer is None else to_device(jax.lax.dynamic_index_in_dim(array, layer, keepdims=False))
        changed = _add(tensor.astype(jnp.float32), factors, order, place).astype(array.dtype)
        return changed if layer is None else _write(array, changed[None], layer)

    return jitted_once(add, place, donate=("array",))
