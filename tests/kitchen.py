"""Weights quantised by comfy-kitchen, as published files have them, and its own dequantisation."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from comfy_kitchen.backends.eager import convrot_w4a4 as w4a4
from comfy_kitchen.backends.eager import quantization as kitchen
from comfy_kitchen.tensor.int8_utils import _build_hadamard, _rotate_weight

Fields = Mapping[str, Any]
Torch = dict[str, torch.Tensor]


class Quantised(NamedTuple):
    """A weight in a file: tensors by what follows the weight's name, and what its marker says; and its numbers."""

    tensors: Torch
    marker: Fields
    numbers: np.ndarray  # float32


def fp8(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().max() / 448
    codes = kitchen.quantize_per_tensor_fp8(weight, scale)
    numbers = kitchen.dequantize_per_tensor_fp8(codes, scale, torch.float32)
    return Quantised({"": codes, "_scale": scale}, {"format": "float8_e4m3fn"}, numbers.numpy())


def int8(weight: torch.Tensor) -> Quantised:
    codes, scale = kitchen.quantize_int8_tensorwise(weight)
    numbers = kitchen.dequantize_int8_simple(codes, scale)
    return Quantised({"": codes, "_scale": scale}, {"format": "int8_tensorwise", "orig_dtype": "x"}, numbers.numpy())


def int8_rows(weight: torch.Tensor) -> Quantised:
    codes, scale = kitchen.quantize_int8_rowwise(weight)
    numbers = kitchen.dequantize_int8_simple(codes, scale)
    return Quantised({"": codes, "_scale": scale[:, 0]}, {"format": "int8_tensorwise"}, numbers.numpy())


def convrot(group: int) -> Callable[[torch.Tensor], Quantised]:
    def quantise(weight: torch.Tensor) -> Quantised:
        codes, scale = kitchen.quantize_int8_convrot_weight(weight, group)
        # its formula in float64: in float32 the last bits are those of the library that multiplies
        numbers = _rotate_weight(codes.double() * scale.double(), _build_hadamard(group).double(), group).float()
        near = kitchen.dequantize_int8_convrot_weight(codes, scale, group)
        torch.testing.assert_close(numbers, near, rtol=0, atol=float(2**-20 * near.abs().max()))
        fields = {"convrot": True} if group == 256 else {"convrot": True, "convrot_groupsize": group}
        return Quantised({"": codes, "_scale": scale}, {"format": "int8_tensorwise", "params": fields}, numbers.numpy())

    return quantise


def mxfp8(weight: torch.Tensor) -> Quantised:
    codes, scale = kitchen.quantize_mxfp8(weight)
    numbers = kitchen.dequantize_mxfp8(codes, scale, torch.float32)
    return Quantised({"": codes, "_scale": scale.view(torch.uint8)}, {"format": "mxfp8"}, numbers.numpy())


def nvfp4(weight: torch.Tensor) -> Quantised:
    scale = weight.abs().max() / (448 * 6)
    codes, blocks = kitchen.quantize_nvfp4(weight, scale)
    numbers = kitchen.dequantize_nvfp4(codes, scale, blocks, torch.float32)
    tensors = {"": codes, "_scale": blocks, "_scale_2": scale}
    return Quantised(tensors, {"format": "nvfp4", "full_precision_matrix_mult": True}, numbers.numpy())


unpacked = w4a4.prepare_int4_weight_for_int8_linear  # two of four bits in a byte, to int8


def convrot_w4a4(group: int) -> Callable[[torch.Tensor], Quantised]:
    def quantise(weight: torch.Tensor) -> Quantised:
        # As `quantize_convrot_w4a4_weight`, which refuses widths that its kernels cannot multiply.
        codes, scale = w4a4.quantize_signed_int4_rowwise(_rotate_weight(weight, _build_hadamard(group), group))
        integers = unpacked(codes)
        numbers = _rotate_weight(integers.double() * scale.double()[:, None], _build_hadamard(group).double(), group)
        near = w4a4.dequantize_convrot_w4a4_weight(codes, scale, group)
        torch.testing.assert_close(numbers.float(), near, rtol=0, atol=float(2**-20 * near.abs().max()))
        fields = {"convrot_groupsize": group, "quant_group_size": 64, "linear_dtype": "int4"}
        return Quantised({"": codes, "_scale": scale}, {"format": "convrot_w4a4", **fields}, numbers.float().numpy())

    return quantise


FORMATS: dict[str, Callable[[torch.Tensor], Quantised]] = {
    "fp8": fp8,
    "int8": int8,
    "int8_rows": int8_rows,
    **{f"convrot_{group}": convrot(group) for group in (16, 64, 256)},
    **{f"convrot_w4a4_{group}": convrot_w4a4(group) for group in (4, 16)},
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
}


def marker_tensor(fields: Fields) -> torch.Tensor:
    return torch.tensor([*json.dumps(fields).encode()], dtype=torch.uint8)


def marker_metadata(layers: Mapping[str, Fields]) -> dict[str, str]:
    return {"_quantization_metadata": json.dumps({"layers": layers})}


def quantised_file(
    tensors: Mapping[str, np.ndarray], formats: Mapping[str, str], in_metadata: bool
) -> tuple[Torch, dict[str, str], dict[str, np.ndarray]]:
    """What a file holds where the weights of `formats` are quantised so, its metadata, and the numbers that it means.
    Each quantised layer has a scale of its input, which is not used."""
    stored = {name: torch.from_numpy(np.asarray(tensor)) for name, tensor in tensors.items()}
    meant, layers = {name: np.asarray(tensor) for name, tensor in tensors.items()}, {}
    for name, form in formats.items():
        quantised, layer = FORMATS[form](stored.pop(name)), name.removesuffix(".weight")
        stored |= {name + suffix: tensor for suffix, tensor in quantised.tensors.items()}
        stored[f"{layer}.input_scale"] = torch.tensor(3.0)
        meant[name], layers[layer] = quantised.numbers, quantised.marker
        if not in_metadata:
            stored[f"{layer}.comfy_quant"] = marker_tensor(quantised.marker)
    return stored, marker_metadata(layers) if in_metadata else {}, meant
