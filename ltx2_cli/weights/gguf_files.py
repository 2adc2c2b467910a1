"""GGUF files of LTX-2's denoiser: their tensors by the header, and the numbers of their types, by PyPI's `gguf`, which
is imported where such a file is read."""

from pathlib import Path

import numpy as np

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.tensors import Encoding, Tensor

ARCHITECTURE = "ltxv"  # `general.architecture` of files of LTX-Video and LTX-2
MAGIC = b"GGUF"
FLOAT_TYPES = ("F32", "F16", "BF16")
BLOCK_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
MOST_TENSORS = 5  # tensors that a message names


def read_gguf(path: Path) -> dict[str, Tensor]:
    """The tensors of a GGUF file by its header. Raises `UsageError` for a file that is damaged or of another
    architecture, and for types that are not read."""
    from gguf import GGML_QUANT_SIZES, GGUFReader

    try:
        reader = GGUFReader(path)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field else "not stated"
    except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
        raise UsageError(f"{path} is damaged or cut short ({error})", "copy or download it again") from error
    if architecture != ARCHITECTURE:
        sentence = f"{path} is of another architecture: it is {architecture!r}, that of LTX-2 is {ARCHITECTURE!r}"
        raise UsageError(sentence, "name a GGUF file of LTX-2 or LTX-2.3")
    tensors, refused = dict[str, Tensor](), list[str]()
    for tensor in reader.tensors:
        shape, dtype = tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name
        encoding = None
        if dtype in BLOCK_TYPES and len(shape) == 2:
            encoding = Encoding(dtype, *GGML_QUANT_SIZES[tensor.tensor_type])
        elif dtype not in FLOAT_TYPES:
            refused.append(f"{tensor.name} is {dtype}")
        tensors[tensor.name] = Tensor(shape, dtype, path, int(tensor.data_offset), encoding=encoding)
    if refused:
        more = f" and {len(refused) - MOST_TENSORS} more" if len(refused) > MOST_TENSORS else ""
        sentence = (
            f"{path} holds {len(refused)} tensors of a type that is not read: {', '.join(refused[:MOST_TENSORS])}{more}"
        )
        raise UsageError(sentence, f"types that are read: {', '.join((*FLOAT_TYPES, *BLOCK_TYPES))}")
    return tensors


def decode_gguf(form: str, codes: np.ndarray) -> np.ndarray:
    """Numbers [rows, columns] in float32 of codes [rows, bytes] of a GGUF type."""
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(codes, GGMLQuantizationType[form])
