"""From files to devices and back: what is declared is checked against the headers, then placed piece by piece."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ltx2_cli.distributed import to_host
from ltx2_cli.errors import MAKE_ROOM, RunError
from ltx2_cli.files import replacing
from ltx2_cli.weights.checkpoint import DTYPES, EIGHT_BITS, Tensor, TensorFiles, count_and_list, shape_text
from ltx2_cli.weights.declare import declared, map_weights, weights
from ltx2_cli.weights.reading import LowRank, Piece, Reading, pieces, read_ahead
from ltx2_cli.weights.transfer import (
    Place,
    Placement,
    Programs,
    Sent,
    Transfer,
    addition,
    compile_transfer,
    send,
    send_factors,
    sharding_of,
)

M = TypeVar("M", bound=nnx.Module)
IN_HOST_MEMORY = ("cpu",)  # platforms whose devices read what the host wrote, without a copy
CHUNK = 2**27  # bytes that travel together
ON_THE_WAY = 2  # pieces on the devices that are not in their places: one arrives while the next is sent


def mismatches(module: nnx.Module, files: TensorFiles, judged: Callable[[str], bool] = lambda name: True) -> list[str]:
    """Every difference between `files` and what `module` declares, of the names in the files that are `judged`."""
    wanted = declared(module)
    found = {name: tensor for name, tensor in files.items() if judged(name)}
    common = [name for name in wanted if name in found]
    problems = {
        "missing": sorted(wanted.keys() - found.keys()),
        "not known": sorted(found.keys() - wanted.keys()),
        "of another shape": [
            f"{name} is {shape_text(found[name].shape)}, not {shape_text(wanted[name])}"
            for name in common
            if found[name].shape != wanted[name]
        ],
        "scaled by what is not one number": [name for name, tensor in found.items() if _is_misscaled(tensor)],
        "without the scale that others have": _unscaled(found),
        "of a type that is not read": [
            f"{name} is {found[name].dtype}" for name in common if found[name].dtype not in DTYPES
        ],
    }
    return [sentence for problem, names in problems.items() for sentence in count_and_list(problem, names)]


def _is_misscaled(tensor: Tensor) -> bool:
    scale = tensor.scale
    return scale is not None and (prod(scale.shape) != 1 or scale.dtype not in DTYPES.keys() - EIGHT_BITS.keys())


def _unscaled(found: Mapping[str, Tensor]) -> list[str]:
    """Eight-bit tensors without a scale, where others have one."""
    names = [name for name, tensor in found.items() if tensor.dtype in EIGHT_BITS and tensor.scale is None]
    return names if any(tensor.scale for tensor in found.values()) else []


def load(
    module: M,
    files: TensorFiles,
    place: Placement,
    added: Mapping[str, LowRank] | None = None,
    chunk: int | None = None,
) -> M:
    """`module` with its weights on the devices, each cast once to its declared dtype and laid out by `place`.

    A tensor is multiplied by its scale, and the matrix that `added` has for it is added, in float32 before the cast.
    Threads read the next tensors while one is sent. Of several hosts each reads the parts of its own devices.
    `chunk` bytes travel together, by default `CHUNK`; a CPU by default computes with the memory that was read into.
    Beside the devices' memory a host holds no more than `READ_AHEAD` bytes and four chunks, or tensors if larger.
    """
    added, every = added or {}, weights(module)
    if chunk is None and not all(_in_host_memory(place(weight)) for weight in every):
        chunk = CHUNK
    everything = [piece for weight in every for piece in pieces(weight, files, place, added, chunk)]
    arrays: dict[str, jax.Array] = {}
    arriving = None
    with _compiling(everything) as programs:
        for reading in read_ahead(everything, files, added):
            piece, sent = reading.piece, _send(reading)
            # So one program gathers at a time: those of CPUs may wait for each other's threads.
            jax.block_until_ready(arriving)
            source, first = piece.weight.source, np.int32(piece.first)
            arriving = sent.array
            if not piece.transfer.final:
                empty, finish = programs[piece.transfer].result()
                stack = arrays.pop(source, None) if piece.first else empty and empty()
                arriving = finish(stack, sent, None if empty is None else first)
            arrays[source] = arriving
    return map_weights(lambda weight: weight.with_value(arrays[weight.source]), module)


def _in_host_memory(place: Place) -> bool:
    return sharding_of(place).mesh.devices.flat[0].platform in IN_HOST_MEMORY


@contextmanager
def _compiling(everything: Iterable[Piece]) -> Iterator[Mapping[Transfer, "Future[Programs]"]]:
    """While the body runs, one thread compiles the programs that finish these pieces, in the order of their use."""
    pool = ThreadPoolExecutor(1, "compile")
    try:
        transfers = dict.fromkeys(piece.transfer for piece in everything if not piece.transfer.final)
        yield {transfer: pool.submit(compile_transfer, transfer) for transfer in transfers}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _send(reading: Reading) -> Sent:
    transfer, (scale, factors) = reading.piece.transfer, reading.change.result()
    return Sent(send(transfer, reading.parts), scale, factors and send_factors(factors, transfer.place))


def merge_lora(module: nnx.Module, place: Placement, added: Mapping[str, LowRank]) -> None:
    """Lay the weights of `module` out by `place` and add to their tensors what `added` holds, in float32 before the
    cast.

    In place, a weight at a time: no device holds two of a weight that it has its part of already, and the host no more
    than the factors of one tensor.
    """
    for weight in weights(module):
        weight.set_value(_moved(weight.get_value(), place(weight)))
        add = addition(place(weight), weight.order)
        for layer, (name, _) in enumerate(weight.tensors()):
            if name in added:
                number = np.int32(layer) if weight.layers else None
                weight.set_value(add(weight.get_value(), send_factors(added[name].read(), place(weight)), number))
                jax.block_until_ready(weight.get_value())  # the host lets go of one pair before it reads the next


def _moved(array: jax.Array, place: Place) -> jax.Array:
    """`array` laid out by `place`; the same memory if each device has its part already, in whichever mesh."""
    sharding, shape = sharding_of(place), array.shape
    if array.sharding.devices_indices_map(shape) != sharding.devices_indices_map(shape):
        return jax.device_put(array, place)
    return jax.make_array_from_single_device_arrays(shape, sharding, [shard.data for shard in array.addressable_shards])


def not_finite(module: nnx.Module) -> list[str]:
    """Every tensor of a loaded `module` that holds a NaN or an infinity, by its name on disk."""
    names = []
    for weight in weights(module):
        finite = to_host(_finite(weight.get_value(), bool(weight.layers))).reshape(-1)
        names += [name for (name, _), good in zip(weight.tensors(), finite, strict=True) if not good]
    return names


@partial(jax.jit, static_argnames="by_layer")
def _finite(array: jax.Array, by_layer: bool) -> jax.Array:
    return jnp.isfinite(array).all(axis=range(1, array.ndim) if by_layer else None)


def save(module: nnx.Module, path: Path) -> None:
    """Write every weight of `module` to a safetensors file as on disk, under a temporary name until it is whole.

    Raises `RunError` where there is no room for it.
    """
    tensors = {}
    for weight in weights(module):
        array, inverse = np.asarray(weight.get_value()), np.argsort(weight.order)
        for layer, (name, _) in enumerate(weight.tensors()):
            tensor = array[layer] if weight.layers else array
            tensors[name] = np.ascontiguousarray(tensor.transpose(inverse))
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:
            raise RunError(f"cannot write {path}: {error}", MAKE_ROOM) from error
