"""Safetensors files of latents and of unfinished runs: written atomically, checked when they are read."""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ltx2_cli.artifacts.files import refuse_special, replacing
from ltx2_cli.errors import UsageError

CHECKSUM = "crc32"  # metadata key: of all other content, to find bits that a disk or a network changed
FLOAT_DTYPES = ("F16", "F32", "F64")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with a checksum, under a temporary name until it is complete. Equal tensors and
    metadata make equal bytes. Raises `RunError` where it cannot be written."""
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    with replacing(path) as temporary:
        # safetensors' own writer leaves a temporary file of another name where the process is killed
        content = memoryview(save(arrays, {**metadata, CHECKSUM: checksum(arrays, metadata)}))
        end = 8 + int.from_bytes(content[:8], "little")
        # safetensors writes the header's keys in random order
        ordered = json.dumps(
            json.loads(bytes(content[8:end])), sort_keys=True, separators=(",", ":"), ensure_ascii=False
        )
        header = ordered.encode()
        header += b" " * (-len(header) % 8)  # tensors begin at multiples of eight
        with temporary.open("wb") as file:
            file.writelines((len(header).to_bytes(8, "little"), header, content[end:]))


@contextmanager
def open_tensors(path: Path, content: str, hint: str) -> Iterator[Any]:
    """An open safetensors file. Raises `UsageError` where it is another kind of file, or cannot be read in the body."""
    refuse_special(path, hint)
    try:
        with safe_open(path, "np") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} cannot be read as {content}: {error}", hint) from error


def read_tensors(path: Path, content: str, hint: str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors and the metadata of a safetensors file. Raises `UsageError` for another kind of file or a damaged
    one; files of other programs have no checksum."""
    with open_tensors(path, content, hint) as file:
        names, metadata = file.keys(), file.metadata() or {}
        for name in names:
            if (dtype := file.get_slice(name).get_dtype()) not in FLOAT_DTYPES:
                raise UsageError(f"`{name}` in {path} is {dtype}, which {content} never is", "save it as F32")
        tensors = {name: file.get_tensor(name) for name in names}
    if metadata.get(CHECKSUM) not in (None, checksum(tensors, metadata)):
        raise UsageError(
            f"{path} is damaged: it is not what was written",
            f"copy or make it again; a change on purpose leaves out `{CHECKSUM}`",
        )
    return tensors, metadata


def misfits(tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Names of tensors that are missing, or not finite float32 of their shape."""
    for name, shape in shapes.items():
        if (array := tensors.get(name)) is None:
            yield f"there is no `{name}`"
        elif array.shape != shape or array.dtype != np.float32:
            yield f"`{name}` is {array.dtype} {array.shape}, not float32 {shape}"
        elif not np.isfinite(array).all():
            yield f"`{name}` is not finite"


def checksum(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> str:
    """The CRC-32 of contiguous tensors and of all metadata but the checksum, in any order."""
    total = 0
    for name, text in sorted(metadata.items()):
        total = zlib.crc32(f"{name}={text}\0".encode() if name != CHECKSUM else b"", total)
    for name, array in sorted(tensors.items()):
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view(np.uint8).data, total)
    return f"{total:08x}"
