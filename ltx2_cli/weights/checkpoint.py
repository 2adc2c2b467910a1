"""A checkpoint on disk: its configs, every tensor as the files' headers describe it, and one at a time read."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ltx2_cli.spec import SpecError
from ltx2_cli.weights.declare import Shape

STEMS = ("diffusion_pytorch_model", "model")
LFS_POINTER = b"version https://git-lfs"
AGAIN = "download the checkpoint again, or name another: --model FOLDER or --model REPO"
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Tensor:
    """One tensor as a file's header describes it."""

    shape: Shape
    dtype: str
    file: Path


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of one network, over all its files. Opening reads headers only.

    Raises `SpecError` where a file is missing, cut short, or not a safetensors file.
    """

    def __init__(self, folder: Path, stems: tuple[str, ...] = STEMS):
        self.folder = folder
        self._handles = {path: _open(path) for path in _files(folder, stems)}
        self._tensors = {
            name: _tensor(handle, name, path)
            for path, handle in self._handles.items()
            for name in handle.keys()  # noqa: SIM118
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def read(self, name: str, index: Index) -> np.ndarray:
        """The part of one tensor that `index` selects, in the file's dtype."""
        return self._handles[self[name].file].get_slice(name)[index]

    def metadata(self) -> dict[str, str]:
        """What the (first) file says of itself beside its tensors."""
        return next(iter(self._handles.values())).metadata() or {}


def _tensor(handle: Any, name: str, path: Path) -> Tensor:
    header = handle.get_slice(name)
    return Tensor(tuple(header.get_shape()), header.get_dtype(), path)


def _open(path: Path) -> Any:
    if not path.exists():
        raise SpecError(f"{path} is missing", "the index beside it names it; download the checkpoint again")
    _begin(path, len(LFS_POINTER))
    try:
        return safe_open(path, "np")
    except SafetensorError as error:
        raise SpecError(f"{path} is damaged or cut short ({error})", "download it again") from error


def _begin(path: Path, size: int = -1) -> bytes:
    """The first bytes of a file that exists, or all; raises `SpecError` where they cannot be read or are a pointer."""
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}", AGAIN) from error
    if content.startswith(LFS_POINTER):
        raise SpecError(f"{path} is a Git LFS pointer, not the file itself", "run `git lfs pull` in that folder")
    return content


def _files(folder: Path, stems: tuple[str, ...]) -> list[Path]:
    for stem in stems:
        index = folder / f"{stem}.safetensors.index.json"
        if index.exists():
            return sorted({folder / name for name in _weight_map(index).values()})
        if (folder / f"{stem}.safetensors").exists():
            return [folder / f"{stem}.safetensors"]
    raise SpecError(f"{folder} holds no weights: no {' or '.join(f'{stem}.safetensors' for stem in stems)}", AGAIN)


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise SpecError(f"{index} is no index: its `weight_map` does not give each tensor the name of a file", AGAIN)
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; raises `SpecError` where it is missing or is none."""
    if not path.exists():
        raise SpecError(f"{path.parent.parent} is no LTX-2 checkpoint: {path} is missing", AGAIN)
    try:
        value = json.loads(_begin(path))
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}", AGAIN) from error
    if not isinstance(value, dict):
        raise SpecError(f"{path} is not a JSON object", AGAIN)
    return value
