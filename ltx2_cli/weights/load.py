"""From files to devices: what is declared is checked against the headers, then placed one tensor at a time."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from ltx2_cli.spec import RunError
from ltx2_cli.weights.checkpoint import Index, TensorFiles
from ltx2_cli.weights.declare import Shape, Weight, declared, map_weights

M = TypeVar("M", bound=nnx.Module)
Placement = Callable[[tuple[str | None, ...]], NamedSharding]
FLOATS = {"F64", "F32", "F16", "BF16"}
SMALL = 2**20  # elements
SPLIT_ABOVE = 2**24  # elements: a replicated weight this large crosses from the host in parts


def mismatches(module: nnx.Module, files: TensorFiles, ours: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Every way in which `files` is not what `module` declares; `ours` tells which of the file's names to judge."""
    wanted = declared(module)
    found = {name: tensor for name, tensor in files.items() if ours(name)}
    return [
        *_some("missing", sorted(wanted.keys() - found.keys())),
        *_some("not known", sorted(found.keys() - wanted.keys())),
        *_some(
            "of another shape",
            [
                f"{name} is {_by(found[name].shape)}, not {_by(shape)}"
                for name, shape in wanted.items()
                if name in found and found[name].shape != shape
            ],
        ),
        *_some(
            "of a type that is not read",
            [f"{name} is {found[name].dtype}" for name in wanted if name in found and found[name].dtype not in FLOATS],
        ),
    ]


def _some(what: str, names: list[str], most: int = 5) -> Iterable[str]:
    if names:
        more = f" and {len(names) - most} more" if len(names) > most else ""
        yield f"{len(names)} {what}: {', '.join(names[:most])}{more}"


def _by(shape: Shape) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def load(module: M, files: TensorFiles, place: Placement) -> M:
    """`module` with its weights on the devices, each cast once to its declared dtype and laid out by `place`.

    The host never holds more than one tensor, or one small weight. Raises `RunError` naming the tensors that are
    not finite.
    """
    finite: dict[str, bool] = {}

    def fill(weight: Weight) -> Weight:
        arrange = _on_host if weight.get_value().size <= SMALL else _on_devices
        array, each = arrange(weight, files, place(weight.axes))
        finite.update(each)
        return weight.with_value(array)

    loaded = map_weights(fill, module)
    if broken := [name for name, good in finite.items() if not good]:
        found = "; ".join(_some("not finite", broken))
        raise RunError(f"the weights in {files.folder} are damaged: {found}", "download the checkpoint again")
    return loaded


def _on_host(weight: Weight, files: TensorFiles, place: NamedSharding) -> tuple[jax.Array, dict[str, bool]]:
    """A small weight, arranged before it travels: to compile a program for its shape would take longer."""
    value = weight.get_value()
    disk = {name: files.read(name, (slice(None),) * len(shape)) for name, shape in weight.tensors()}
    arrays = [array.transpose(weight.order).astype(value.dtype) for array in disk.values()]
    whole = np.stack(arrays) if weight.layers else arrays[0]
    array = jax.make_array_from_callback(value.shape, place, lambda index: whole[index])
    return array, {name: bool(np.isfinite(array).all()) for name, array in zip(disk, arrays, strict=True)}


def _on_devices(weight: Weight, files: TensorFiles, place: NamedSharding) -> tuple[jax.Array, dict[str, bool]]:
    """A large weight, sent as it lies on disk, tensor by tensor, and arranged where it arrives."""
    value = weight.get_value()
    if not weight.layers:
        array, good = _arrange(_read(files, weight, weight.source, place), weight.order, value.dtype, place)
        return array, {weight.source: bool(good)}
    finite = {}
    array = _empty(value.shape, value.dtype, place)
    within = NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))
    for layer, (name, _) in enumerate(weight.tensors()):
        disk = _read(files, weight, name, within)
        array, good = _insert(array, disk, np.int32(layer), weight.order, place)
        finite[name] = bool(good)  # waits: the host lets go of one tensor before it reads the next
        del disk
    return array, finite


def _read(files: TensorFiles, weight: Weight, name: str, sharding: NamedSharding) -> jax.Array:
    """A tensor in the order of the disk, on the devices that will want its parts."""
    shape, order = files[name].shape, weight.order
    spec = (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    on_disk: list[str | None] = [spec[order.index(i)] for i in range(len(shape))]
    if not any(spec) and np.prod(shape) >= SPLIT_ABOVE:
        on_disk = _split(shape, sharding)
    layout = NamedSharding(sharding.mesh, PartitionSpec(*on_disk))

    def part(index: Index | None) -> np.ndarray:
        assert index is not None
        return files.read(name, index)

    return jax.make_array_from_callback(shape, layout, part)


def _split(shape: Shape, sharding: NamedSharding) -> list[str | None]:
    """Over which mesh axis a whole tensor may travel in equal parts, if any."""
    for axis, size in sharding.mesh.shape.items():
        for dimension, length in enumerate(shape):
            if size > 1 and length % size == 0:
                return [axis if i == dimension else None for i in range(len(shape))]
    return [None] * len(shape)


@partial(jax.jit, static_argnames=("order", "dtype", "sharding"))
def _arrange(
    disk: jax.Array, order: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    array = jax.lax.with_sharding_constraint(disk.transpose(order).astype(dtype), sharding)
    return array, jnp.isfinite(array).all()


@partial(jax.jit, static_argnames=("order", "sharding"), donate_argnames="stack")
def _insert(
    stack: jax.Array, disk: jax.Array, layer: jax.Array, order: tuple[int, ...], sharding: NamedSharding
) -> tuple[jax.Array, jax.Array]:
    array = disk.transpose(order).astype(stack.dtype)
    filled = jax.lax.dynamic_update_index_in_dim(stack, array, layer, 0)
    return jax.lax.with_sharding_constraint(filled, sharding), jnp.isfinite(array).all()


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _empty(shape: Shape, dtype: jnp.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)
