"""Quantised weights of safetensors files, in ComfyUI's formats: which they are, and their numbers.

A layer `L` is marked by JSON in the bytes of a tensor `L.comfy_quant`, or in `_quantization_metadata` of the file's
metadata. Its scales are beside `L.weight`. Formats and formulas are those of comfy-kitchen's
`backends/eager/quantization.py` (https://github.com/Comfy-Org/comfy-kitchen)."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ltx2_cli.errors import RunError
from ltx2_cli.weights.gguf_files import decode_gguf
from ltx2_cli.weights.tensors import FLOATS, FP8_DTYPES, Encoding, Tensor, shape_text

MARKER, INPUT_SCALE = ".comfy_quant", ".input_scale"  # after a layer's name
SCALE, SCALE_2 = "_scale", "_scale_2"  # after a weight's name
DENOISER_PREFIX = "model.diffusion_model."  # of its tensors in a file with all networks; others may lack it
CODES = {*FP8_DTYPES, "I8", "U8"}  # types of quantised weights
FP8 = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}  # formats that are numbers times one scale: their types
INT8, MXFP8, NVFP4, W4A4 = "int8_tensorwise", "mxfp8", "nvfp4", "convrot_w4a4"
GROUP_SIZE = 256  # of ConvRot where a marker has none
TILE = 128, 4  # rows and columns of swizzled scales that are stored together


class Format(NamedTuple):
    """A format whose numbers are computed while it is read."""

    dtype: str  # of the codes
    block: int  # numbers that are decoded together, and that share a scale if a row has several
    block_bytes: int
    scale_dtypes: Collection[str]


MATRIX_FORMATS = {
    INT8: Format("I8", 1, 1, FLOATS),
    MXFP8: Format("F8_E4M3", 32, 32, ("U8", "F8_E8M0")),
    NVFP4: Format("U8", 16, 8, ("F8_E4M3",)),
    W4A4: Format("I8", 2, 1, FLOATS),
}
BY_ROW = INT8, W4A4  # formats of integers with a scale for each row, which may be rotated
KNOWN_FORMATS = ", ".join((*FP8, *MATRIX_FORMATS))
# Headings of problems
DAMAGED = "with a marker that is no JSON object with a format"
DISAGREEING = "with two markers that disagree"
NO_MARKER = "without a marker of their format"
UNSUPPORTED = "of a format that is not supported"
OTHER_TYPE = "stored in another type than their format has"
NO_SCALE = "missing scales"
OTHER_SCALE = "scales of another shape or type"
WRONG_SCALE = "scales that are not above 0 and finite"
UNEVEN_WIDTH = "of a width that is no multiple of their blocks"


class Marking(NamedTuple):
    """The format of a layer, by its marker."""

    format: str
    group_size: int = 0  # of ConvRot; 0: not rotated

    def __str__(self) -> str:
        return f"{self.format} with ConvRot in groups of {self.group_size}" if self.group_size else self.format


class _RefusedError(Exception):
    """A heading and the list below it."""


def find_quantized(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> dict[str, list[str]]:
    """Find the quantised weights among tensors: each gets its scale or encoding, and other tensors for its arithmetic
    are removed. Works in place. Reads markers and the scales of whole matrices and rows. Returns lists of what is
    wrong, by heading."""
    every, problems = dict(tensors), dict[str, list[str]]()
    markings = _markings(every, metadata, problems)
    packed = {name for name, tensor in every.items() if (tensor.dtype, len(tensor.shape)) == ("U8", 1)}  # whole files
    coded = [name for name, tensor in every.items() if tensor.dtype in CODES and name not in packed]
    weights = [name for name in coded if not name.endswith((MARKER, SCALE, SCALE_2))]
    for name in dict.fromkeys([*weights, *markings]):
        layer = name.removesuffix(".weight")
        try:
            tensors[name] = found = _quantized(name, markings.get(name, ()), every, metadata.get("quant_format"))
        except _RefusedError as refused:
            heading, text = refused.args
            problems.setdefault(heading, []).append(text)
            continue
        if found.scale or found.encoding:
            for companion in (layer + MARKER, layer + INPUT_SCALE, name + SCALE, name + SCALE_2):
                tensors.pop(companion, None)
    plain = [name for name in weights if not (tensors[name].scale or tensors[name].encoding)]
    if len(plain) < len(weights) and not problems:  # a cast without scales is one of the whole file
        problems |= {NO_SCALE: [name + SCALE for name in plain]} if plain else {}
    return problems


def _markings(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], problems: dict[str, list[str]]
) -> dict[str, set[Marking]]:
    """The different markings of each weight, by both kinds of markers. Adds those that cannot be read to `problems`."""
    markings: dict[str, set[Marking]] = {}
    for source, layer, text in _markers(tensors, metadata):
        try:
            fields = json.loads(text) if isinstance(text, str | bytes) else text
            fields = {**fields, **fields.get("params", {})}
            form = fields["format"]
            rotated = fields.get("convrot") or form == W4A4
            if not isinstance(form, str):
                raise TypeError(form)
            group_size = int(fields.get("convrot_groupsize", GROUP_SIZE)) if rotated else 0
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            problems.setdefault(DAMAGED, []).append(source)
            continue
        if rotated and not group_size:
            problems.setdefault(UNSUPPORTED, []).append(f"{source}, {form} with ConvRot in groups of 0")
            continue
        marking = Marking(form, group_size)
        names = (f"{where}.weight" for where in (layer, DENOISER_PREFIX + layer, layer.removeprefix(DENOISER_PREFIX)))
        if name := next((name for name in names if name in tensors), None):
            markings.setdefault(name, set()).add(marking)
    return markings


def _markers(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    """The place of each marker, its layer, and its content: JSON or the values read from it."""
    key = "_quantization_metadata"
    if key in metadata:
        try:
            for layer, fields in json.loads(metadata[key])["layers"].items():
                yield f"{key} of {layer}", layer, fields
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            yield key, key, None
    for name, tensor in tensors.items():
        if name.endswith(MARKER):
            yield name, name.removesuffix(MARKER), tensor.stored().tobytes()


def _quantized(name: str, markings: Collection[Marking], tensors: Mapping[str, Tensor], usual: str | None) -> Tensor:
    """A weight with its scale or encoding. `usual`: the format of layers that have a scale and no marker. Raises
    `_RefusedError`."""
    tensor, scaled = tensors[name], name + SCALE in tensors
    if len(markings) > 1:
        raise _RefusedError(DISAGREEING, f"{name}: {' and '.join(sorted(map(str, markings)))}")
    if not markings and tensor.dtype in FP8_DTYPES and not scaled:
        return tensor
    by_type = {dtype: form for form, dtype in FP8.items()}
    unmarked = usual or by_type.get(tensor.dtype)
    if not markings and (unmarked is None or not scaled):
        raise _RefusedError(NO_MARKER, f"{name} is {tensor.dtype}")
    marking = next(iter(markings)) if markings else Marking(str(unmarked))
    known, rotated = FP8.keys() | MATRIX_FORMATS.keys(), marking.group_size
    if marking.format not in known or (rotated and (marking.format not in BY_ROW or not _is_power_of_4(rotated))):
        raise _RefusedError(UNSUPPORTED, f"{name} is {marking}")
    dtype = FP8[marking.format] if marking.format in FP8 else MATRIX_FORMATS[marking.format].dtype
    if tensor.dtype != dtype or (marking.format in MATRIX_FORMATS and len(tensor.shape) != 2):
        raise _RefusedError(
            OTHER_TYPE, f"{name} is {shape_text(tensor.shape)} in {tensor.dtype}, marked {marking.format}"
        )
    if marking.format in FP8:
        return replace(tensor, scale=_scale(name + SCALE, tensors, FLOATS, _single_shapes()))
    return _encoded(name, marking, tensors)


def _encoded(name: str, marking: Marking, tensors: Mapping[str, Tensor]) -> Tensor:
    """A weight in one of `MATRIX_FORMATS` with its encoding and the shape of its numbers. Raises `_RefusedError`."""
    form, (rows, width) = MATRIX_FORMATS[marking.format], tensors[name].shape
    columns = width // form.block_bytes * form.block
    block = marking.group_size or form.block
    if columns % block or width % form.block_bytes:
        raise _RefusedError(UNEVEN_WIDTH, f"{name} has {width} columns, {marking}")
    if marking.format in BY_ROW:
        shapes = [*_single_shapes(), (rows,), (rows, 1)]
    else:
        shapes = [(_round_up(rows, TILE[0]), _round_up(columns // block, TILE[1]))]
    encoding = Encoding(
        marking.format,
        block,
        block // form.block * form.block_bytes,
        _scale(name + SCALE, tensors, form.scale_dtypes, shapes),
        _scale(name + SCALE_2, tensors, FLOATS, _single_shapes()) if marking.format == NVFP4 else None,
        marking.group_size,
    )
    return replace(tensors[name], shape=(rows, columns), encoding=encoding)


def _scale(
    name: str, tensors: Mapping[str, Tensor], dtypes: Collection[str], shapes: Collection[tuple[int, ...]]
) -> Tensor:
    """The scale of this name; numbers of it are read. Raises `_RefusedError`."""
    scale = tensors.get(name)
    if scale is None:
        raise _RefusedError(NO_SCALE, name)
    if scale.dtype not in dtypes or scale.shape not in shapes:
        wanted = f"{shape_text(list(shapes)[-1])} in {' or '.join(sorted(dtypes))}"
        raise _RefusedError(OTHER_SCALE, f"{name} is {shape_text(scale.shape)} in {scale.dtype}, not {wanted}")
    if scale.dtype in FLOATS:
        values = scale.stored().astype(np.float32)
        if not ((values > 0) & np.isfinite(values)).all():
            raise _RefusedError(WRONG_SCALE, name)
    return scale


def _single_shapes() -> list[tuple[int, ...]]:
    return [(1, 1), (1,), ()]


def _is_power_of_4(number: int) -> bool:
    return number > 1 and number.bit_count() == 1 and number.bit_length() % 2 == 1


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


# Numbers


def decode_quantized(name: str, tensor: Tensor, rows: range, blocks: range, codes: np.ndarray) -> np.ndarray:
    """The numbers of an encoded tensor in float32 [rows, columns], by the codes of these rows and blocks. Raises
    `RunError` for a scale that is not finite."""
    encoding = tensor.encoding
    assert encoding is not None
    if encoding.format == W4A4 and encoding.scale is None:
        return halves(codes)
    if encoding.scale is None:
        return decode_gguf(encoding.format, codes)
    numbers, scales = _numbers(encoding, codes), _scales(encoding, rows, blocks)
    if not np.isfinite(scales).all():
        raise RunError(f"{tensor.file} is damaged: a scale of {name} is not finite", "download it again")
    numbers = numbers.reshape(*scales.shape, -1)
    numbers *= scales[..., None]
    return numbers.reshape(len(rows), -1)


def _numbers(encoding: Encoding, codes: np.ndarray) -> np.ndarray:
    """The numbers that codes stand for, without scales, in float32."""
    if encoding.format == NVFP4:
        return _fp4_pairs()[codes]
    if encoding.format == MXFP8:
        return _fp8_numbers()[codes.view(np.uint8)]
    integers = halves(codes) if encoding.format == W4A4 else codes
    return unrotate(integers, encoding.group_size) if encoding.group_size else integers.astype(np.float32)


def halves(codes: np.ndarray) -> np.ndarray:
    """The two numbers of each byte of convrot_w4a4 in int8 [rows, 2 * bytes], that of the low half first."""
    return np.stack([codes << 4 >> 4, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)


def unrotate(codes: np.ndarray, group_size: int) -> np.ndarray:
    """Undo ConvRot (arXiv 2512.03673) but for the factor 1 / sqrt(group_size): each group of a row times H, the
    Kronecker power of [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]. Sums of int8 codes, which are
    exact in float32. A row of that matrix is the sum of four minus twice one of them, so that H costs additions."""
    values = np.ascontiguousarray(codes.reshape(-1, group_size).T).astype(np.float32)  # groups last: long loops
    groups, step = values.shape[1], 1
    while step < group_size:
        values = values.reshape(-1, 4, step * groups)
        four = [values[:, i] for i in range(4)]
        total, rotated = (four[0] + four[1]) + (four[2] + four[3]), np.empty_like(values)
        for i in range(4):
            np.subtract(total, four[3 - i] + four[3 - i], out=rotated[:, i])
        values, step = rotated, 4 * step
    return np.ascontiguousarray(values.reshape(group_size, groups).T).reshape(codes.shape)


def _scales(encoding: Encoding, rows: range, blocks: range) -> np.ndarray:
    """The scales of rows [rows, 1], or of their blocks [rows, blocks], in float32."""
    scale = encoding.scale
    assert scale is not None
    if encoding.format in BY_ROW:
        return row_scales(scale, rows) / np.float32(np.sqrt(encoding.group_size or 1))
    stored = _block_scales(scale, rows, blocks)
    if encoding.format == MXFP8:  # exponents of 2, those of float32; as in comfy-kitchen, 0 means 0
        return (stored.astype(np.uint32) << 23).view(np.float32)
    assert encoding.scale_2 is not None
    return encoding.scale_2.stored().astype(np.float32) * _fp8_numbers()[stored]


def row_scales(scale: Tensor, rows: range) -> np.ndarray:
    """Scales [rows, 1] of these rows of an int8 matrix in float32; one that all rows share is repeated."""
    if prod(scale.shape) == 1:
        return np.full((len(rows), 1), scale.stored().astype(np.float32))
    return scale.stored(rows.start, len(rows)).astype(np.float32)[:, None]


def _block_scales(scale: Tensor, rows: range, blocks: range) -> np.ndarray:
    """Bytes of swizzled scales [rows, blocks]. A tile of 128 rows and 4 columns is stored as [32, 4, 4]; byte (i, j, k)
    is in row 32 j + i and column k (https://docs.nvidia.com/cuda/cublas, "1D Block Scaling Factors Layout")."""
    (height, width), first = TILE, rows.start // TILE[0]
    size, number = height * scale.shape[1], _round_up(rows.stop, height) // height - first
    tiles = scale.stored(first * size, number * size).view(np.uint8).reshape(number, -1, 32, 4, width)
    lines = tiles.transpose(0, 3, 2, 1, 4).reshape(number * height, -1)
    return lines[rows.start - first * height :][: len(rows), blocks.start : blocks.stop]


@cache
def _fp8_numbers() -> np.ndarray:
    """The number of each byte of float8_e4m3fn."""
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@cache
def _fp4_pairs() -> np.ndarray:
    """The two numbers of each byte of float4_e2m1fn [256, 2], that of the high half first."""
    halves = np.arange(256, dtype=np.uint8)
    numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return numbers[np.stack([halves >> 4, halves & 15], axis=1)]
