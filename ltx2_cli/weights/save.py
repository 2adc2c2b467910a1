"""From devices to a file: a network's weights under the names and in the order they have in a checkpoint."""

from pathlib import Path

import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file

from ltx2_cli.spec import MAKE_ROOM, RunError
from ltx2_cli.weights.declare import weights
from ltx2_cli.writing import replacing


def save(module: nnx.Module, path: Path) -> None:
    """Write every weight of `module` to a safetensors file, under a temporary name until it is whole.

    Raises `RunError` with `path` where there is no room for it.
    """
    tensors = {}
    for weight in weights(module):
        array, inverse = np.asarray(weight.get_value()), np.argsort(weight.order)
        for layer, (name, _) in enumerate(weight.tensors()):
            ours = array[layer] if weight.layers else array
            tensors[name] = np.ascontiguousarray(ours.transpose(inverse))
    with replacing(path) as temporary:
        try:
            save_file(tensors, temporary)
        except SafetensorError as error:
            raise RunError(f"cannot write {path}: {error}", MAKE_ROOM) from error
