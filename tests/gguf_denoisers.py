"""GGUF files, made by PyPI's `gguf` alone."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, dequantize, quantize

K_QUANTS = ("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")  # which the package reads and does not make
HALVES = {"Q6_K": (208,), "Q5_K": (0, 2), "Q4_K": (0, 2), "Q3_K": (108,), "Q2_K": (80, 82)}  # bytes of their scales


def codes(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of a type: the numbers, or of a K-quant random ones with small scales."""
    type_ = GGMLQuantizationType[kind]
    if kind not in K_QUANTS:
        return quantize(numbers, type_)
    block, size = GGML_QUANT_SIZES[type_]
    random = np.random.default_rng(numbers.size)
    blocks = random.integers(0, 256, (numbers.size // block, size), np.uint8)
    for place in HALVES[kind]:
        blocks[:, place : place + 2] = random.uniform(1e-5, 1e-4, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)


def write_gguf(
    path: Path, tensors: Mapping[str, np.ndarray], kinds: Mapping[str, str], architecture: str = "ltxv"
) -> dict[str, np.ndarray]:
    """A GGUF file of tensors, in float32 where `kinds` names no other type; the numbers that it holds."""
    writer, meant = GGUFWriter(path, architecture), {}
    for name, numbers in tensors.items():
        stored = codes(numbers, kind := kinds.get(name, "F32"))
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[kind])
        meant[name] = dequantize(stored, GGMLQuantizationType[kind]).reshape(numbers.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant
