"""Weights from a file to a device: a checkpoint to load, and the memory that this takes beyond the weights' own.

Loaded in chunks, as to devices with a memory of their own, and as on a CPU, which computes with what was read.
`python -m benchmarks.loading FILE` prints both in bytes, measured in a process that does nothing else.
"""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from ltx2_cli.models.arch import TransformerArch
from ltx2_cli.models.transformer import Transformer
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.declare import Scope, declared
from ltx2_cli.weights.load import CHUNK_BYTES, load_weights

LAYERS = 2  # of 48: 2.4 GB


def denoiser() -> Transformer:
    """LTX-2.3's denoiser at its full width, in bfloat16, with few of its layers."""
    modulated: dict[str, Any] = {
        "gated_attn": True,
        "audio_gated_attn": True,
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
    }
    return Transformer(Scope("bfloat16"), TransformerArch(**modulated, use_prompt_embeddings=False, num_layers=LAYERS))


def write_checkpoint(module: nnx.Module, path: Path) -> None:
    """A bfloat16 file of all that `module` declares: the same random numbers over and over, which nobody looks at."""
    header, end = {}, 0
    for name, shape in declared(module).items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    noise = np.random.default_rng(0).bytes(2**24)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(described)) + described)
        for begin in range(0, end, len(noise)):
            file.write(noise[: end - begin])


def to_one_device(weight: object) -> jax.sharding.NamedSharding:
    """Every weight whole on the first device."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("device",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def most_resident() -> int:
    """Bytes of this process that were in memory together at most, since it began or `clear_refs` was written to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM:")))


def memory(path: Path, chunk: int | None) -> tuple[int, int]:
    """The bytes of the weights in `path`, and of the memory beyond theirs that loading them took at most."""
    module, files = denoiser(), TensorFiles(path)
    jax.block_until_ready(jax.device_put(np.zeros(1), to_one_device(None)))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = most_resident()
    loaded = jax.block_until_ready(jax.tree.leaves(load_weights(module, files, to_one_device, chunk_bytes=chunk)))
    size = sum(array.nbytes for array in loaded)
    return size, most_resident() - before - size


def main(path: Path) -> None:
    """Load the denoiser in `path` both ways and print what that took. Linux alone counts it."""
    size, on_a_cpu = memory(path, None)
    _, as_elsewhere = memory(path, CHUNK_BYTES)
    print(json.dumps({"weights": size, "beyond": {"cpu": on_a_cpu, "chunks": as_elsewhere}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
