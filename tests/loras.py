"""LoRA files for tests: whole ones, and ones of real size that are a header before a hole."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from ltx2_cli.models.original.names import RENAMINGS
from ltx2_cli.weights.declare import Shape
from parity import published

BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8}


def write_header(
    path: Path,
    shapes: Mapping[str, Shape],
    metadata: Mapping[str, str] | None = None,
    dtype: str = "BF16",
    others: Mapping[str, str] | None = None,
) -> Path:
    """A safetensors file with these tensors whose data is a hole in the file: no disk is taken, and zeros are read.

    Those that `others` names have another dtype."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, shape in shapes.items():
        kind = (others or {}).get(name, dtype)
        begin, end = end, end + BYTES[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return path


def write(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None) -> Path:
    """A safetensors file with these tensors."""
    save_file(dict(tensors), path, metadata=dict(metadata) if metadata else None)
    return path


def factors(target: str, d_out: int, d_in: int, rank: int, seed: int, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Random A and B of one target, under the names of published files."""
    draw = np.random.default_rng(seed).standard_normal
    a, b = draw((rank, d_in)), draw((d_out, rank))
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return {f"{target}.lora_A.weight": a.astype(kind), f"{target}.lora_B.weight": b.astype(kind)}


def linears(table: str) -> dict[str, tuple[int, int]]:
    """Shapes (out, in) of a published network's linear layers, by the name without `.weight`."""
    shapes = published(table).items()
    return {
        name.removesuffix(".weight"): shape for name, shape in shapes if name.endswith(".weight") and len(shape) == 2
    }


def original(network: str, names: Iterable[str]) -> dict[str, str]:
    """The names of layers in the published single files."""
    named = RENAMINGS[network].originals([f"{name}.weight" for name in names])
    return {ours.removesuffix(".weight"): theirs.removesuffix(".weight") for ours, theirs in named.items()}


def keys(shapes: Mapping[str, tuple[int, int]], rank: int) -> dict[str, Shape]:
    """A and B of each target, of `rank` or the largest that it can have."""
    pairs: dict[str, Shape] = {}
    for name, (d_out, d_in) in shapes.items():
        least = min(rank, d_in, d_out)
        pairs |= {f"{name}.lora_A.weight": (least, d_in), f"{name}.lora_B.weight": (d_out, least)}
    return pairs


def distilled(model: str, prefix: str = "diffusion_model.") -> dict[str, Shape]:
    """The keys of the published LoRA that distils a model: every linear layer of its denoiser, rank 384 at most."""
    shapes = linears(f"{model}/transformer.tsv")
    names = original("transformer", shapes)
    return keys({names[name].replace("model.diffusion_model.", prefix): shape for name, shape in shapes.items()}, 384)
