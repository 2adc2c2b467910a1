"""Weights for tests, benchmarks and the trained demo: random ones, and the file of those of a network."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ltx2_cli.artifacts.files import replacing
from ltx2_cli.errors import MAKE_ROOM, RunError
from ltx2_cli.weights.declare import M, Weight, map_weights, weights


def random_weights(module: M, seed: int, scale: float = 0.05) -> M:
    """`module` with every weight drawn from a normal distribution of standard deviation `scale`, on the host."""
    streams = iter(np.random.default_rng(seed).spawn(len(weights(module))))

    def draw(weight: Weight) -> Weight:
        value = weight.get_value()
        noise = next(streams).standard_normal(value.shape, np.float32)
        return weight.with_value(jnp.asarray(scale * noise, value.dtype))

    return map_weights(draw, module)


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
