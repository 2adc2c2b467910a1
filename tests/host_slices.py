"""One of two hosts that load weights split over both."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.parallel.hosts import init_distributed
from ltx2_cli.weights import load as loading
from ltx2_cli.weights import transfer
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, Weight

NAMES = ("rows", "columns", "stack", "replicated")


class Counting(TensorFiles):
    """The bytes that are read of each name."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.bytes_read, self.mapped = dict.fromkeys(NAMES, 0), set[tuple[str, str]]()

    def read(self, name: str, index: object) -> np.ndarray:
        part = super().read(name, index)  # a map: its pages are read once, however many devices want them
        if (name, str(index)) not in self.mapped:
            self.bytes_read[name.split(".")[0]] += part.nbytes
        self.mapped.add((name, str(index)))
        return part

    def read_into(self, name: str, first: int, out: np.ndarray) -> None:
        super().read_into(name, first, out)
        self.bytes_read[name.split(".")[0]] += out.nbytes


class Network(nnx.Module):
    def __init__(self) -> None:
        scope = Scope("float32")
        self.rows = scope.weight("rows", (64, 32), ("across", None))
        self.columns = scope.weight("columns", (64, 32), (None, "across"))
        self.stack = scope.stacked("stack", range(3)).weight("kernel", (16, 32), ("across", "within"))
        self.replicated = scope.weight("replicated", (64, 32), (None, None))


def read(told: Sequence[str]) -> None:
    """Load them from the folder, laid out on the host and then on the devices; each time print whether they are what
    the other files hold, and the bytes that were read."""
    _, address, _, count, _, number = told
    transfer.SMALL = 0  # nothing is sent whole to every device
    init_distributed(address, int(count), int(number))
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("across", "within"))  # hosts, devices of a host

    def place(weight: Weight) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(axis if axis in mesh.shape else None for axis in weight.axes)))

    for chunk in (None, 1):
        files = Counting(Path.cwd())
        loaded = loading.load_weights(Network(), files, place, chunk_bytes=chunk)
        same = [np.array_equal(to_host(vars(loaded)[name][...]), np.load(f"{name}.npy")) for name in NAMES]
        print(json.dumps([all(same), files.bytes_read]))
