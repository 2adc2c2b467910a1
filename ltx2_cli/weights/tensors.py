"""Tensors by the headers of files: where their numbers are, and how they are stored."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ltx2_cli.errors import RunError

LOST = "was removed or changed while it was read"
FP8_DTYPES: dict[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    **FP8_DTYPES,
}  # the types whose numbers are read as they are
FLOATS = DTYPES.keys() - FP8_DTYPES.keys()
NUMPY_DTYPES: dict[str, Any] = DTYPES | {"I8": np.int8}  # others are bytes


class MatrixType(NamedTuple):
    """A type of matrices in eight or four bits."""

    dtype: np.dtype  # int8, float8_e4m3fn or int4
    group_size: int = 0  # input channels that ConvRot rotates together, a power of 4; 0: none
    rounds_input: bool = False  # whether products round the input to eight bits, with a scale for each token

    @property
    def name(self) -> str:
        """`int8`, `fp8` or `int4`."""
        return "fp8" if self.dtype == ml_dtypes.float8_e4m3fn else self.dtype.name

    @property
    def of_inputs(self) -> "MatrixType":
        """The type of rounded inputs, and of products: int8 for int4."""
        return self._replace(dtype=np.dtype(np.int8)) if self.dtype == ml_dtypes.int4 else self

    def __str__(self) -> str:
        rotated = f" with ConvRot in groups of {self.group_size}" if self.group_size else ""
        return f"{self.name}{rotated}, multiplied in eight bits," if self.rounds_input else self.name + rotated


@dataclass(frozen=True)
class Encoding:
    """The format of a quantised matrix [out, in]: codes, in each row block after block, and scales beside them. Its
    numbers are computed while it is read."""

    format: str  # by its marker, or by the type of a GGUF tensor
    block: int  # numbers of a row that are decoded together
    block_bytes: int  # their codes
    # by which decoded numbers are multiplied: one for the matrix or for each row, or swizzled ones
    # for each block; None: they are among the codes
    scale: "Tensor | None" = None
    scale_2: "Tensor | None" = None  # by which the scales of nvfp4 are multiplied
    group_size: int = 0  # numbers of a row that ConvRot rotated together; 0: not rotated


@dataclass(frozen=True)
class Tensor:
    """A tensor by a file's header."""

    shape: tuple[int, ...]
    dtype: str  # of what is stored: that of a safetensors file, or the type in a GGUF file
    file: Path
    begin: int  # its first byte there
    scale: "Tensor | None" = None  # of eight-bit numbers: the one number by which all are to be multiplied
    encoding: Encoding | None = None  # None: the numbers are stored one by one

    @property
    def stored_dtype(self) -> np.dtype:
        """The type of the stored items: numbers, int8 codes, or bytes."""
        return np.dtype(NUMPY_DTYPES.get(self.dtype, np.uint8))

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The stored shape: the tensor's, or of packed codes [out, bytes of a row]."""
        if self.encoding is None:
            return self.shape
        *rows, columns = self.shape
        return *rows, columns // self.encoding.block * self.encoding.block_bytes

    @property
    def stored_bytes(self) -> int:
        """The bytes of the stored items."""
        return prod(self.stored_shape) * self.stored_dtype.itemsize

    @property
    def read_dtype(self) -> np.dtype:
        """The type of its numbers as they are read."""
        return np.dtype(np.float32) if self.encoding else self.stored_dtype

    @property
    def matrix_type(self) -> MatrixType | None:
        """The type in which a matrix can be kept on the devices as it is stored; None: there is none."""
        if self.dtype == "F8_E4M3" and self.scale:
            return MatrixType(np.dtype(FP8_DTYPES[self.dtype]))
        if self.dtype == "I8" and self.encoding:
            packed = self.encoding.block_bytes < self.encoding.block
            return MatrixType(np.dtype(ml_dtypes.int4 if packed else np.int8), self.encoding.group_size)
        return None

    @property
    def codes(self) -> Encoding | None:
        """The encoding of the stored integers themselves; None: each has bytes of its own."""
        if self.encoding is None or self.encoding.block_bytes == self.encoding.block:
            return None
        return replace(self.encoding, scale=None, scale_2=None, group_size=0)

    @property
    def format(self) -> str:
        """The format of its numbers in words that publishers use."""
        if self.encoding is None:
            return np.dtype(DTYPES[self.dtype]).name if self.dtype in DTYPES else self.dtype
        named = "convrot" in self.encoding.format or not self.encoding.group_size
        return self.encoding.format if named else f"{self.encoding.format} with ConvRot"

    def stored(self, first: int = 0, count: int = -1) -> np.ndarray:
        """The stored items, flat: `count` of them from `first` on, or all. Raises `RunError` if the file is gone."""
        dtype, size = self.stored_dtype, prod(self.stored_shape) if count < 0 else count
        try:
            items = np.fromfile(self.file, dtype, size, offset=self.begin + first * dtype.itemsize)
        except OSError:
            items = np.empty(0, dtype)
        if len(items) < size:
            raise RunError(f"{self.file} {LOST}", "run again when it is whole")
        return items


def shape_text(shape: Sequence[int]) -> str:
    """`3x4` of (3, 4)."""
    return "x".join(map(str, shape)) or "a scalar"
