"""A checkpoint on disk: its configs, its tensors as the files' headers describe them, and their data on request."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.files import refuse_special

MAX_JSON = 64_000_000  # bytes of a config or an index
STEMS = ("diffusion_pytorch_model", "model")
LFS_POINTER = b"version https://git-lfs"
AGAIN = "download the checkpoint again, or name another: --model FOLDER or --model REPO"
EIGHT_BITS: dict[str, Any] = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    **EIGHT_BITS,
}  # the types that are read
Index = tuple[slice, ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Tensor:
    """One tensor as a file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    begin: int  # its first byte there
    scale: "Tensor | None" = None  # of eight-bit numbers: the one number by which all are to be multiplied


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of one network, over all its files. Opening reads headers only.

    An eight-bit weight has its scale as a part; what a file keeps for arithmetic in eight bits is left out. Raises
    `UsageError` where a file is missing, cut short, or not a safetensors file. No stems: what is described, not here.
    """

    def __init__(self, folder: Path, stems: tuple[str, ...] = STEMS):
        self.folder = folder
        tensors: dict[str, Tensor] = {}
        self._metadata: dict[str, str] = {}
        headers, problems = collect({str(path): partial(read_header, path) for path in _files(folder, stems)})
        raise_all(problems)
        for described, metadata in headers.values():
            tensors |= described
            self._metadata |= metadata
        self._tensors = _with_scales(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def metadata(self) -> dict[str, str]:
        """The metadata of the files."""
        return self._metadata

    def config(self, absent: str) -> dict[str, Any] | None:
        """The config in a single file's metadata, or what `absent` says where there is none; None where that is not a
        JSON object."""
        try:
            config = json.loads(self._metadata.get("config", absent))
        except (ValueError, RecursionError):
            return None
        return config if isinstance(config, dict) else None

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The tensors of `names`, a table from new name to old, under their new names."""
        part = copy(self)
        part._tensors = {new: self[old] for new, old in names.items() if old in self}
        return part

    def read(self, name: str, index: Index) -> np.ndarray:
        """The part of one tensor that `index` selects, as it is stored; the pages are read when they are touched."""
        tensor = self[name]
        dtype = np.dtype(DTYPES[tensor.dtype])
        size = prod(tensor.shape) * dtype.itemsize
        try:
            stored = np.memmap(tensor.file, np.uint8, "r", tensor.begin, (size,)).view(np.ndarray)
        except (OSError, ValueError) as error:
            raise _lost(tensor.file) from error
        return stored.view(dtype).reshape(tensor.shape)[index]

    def read_into(self, name: str, first: int, out: np.ndarray) -> None:
        """Rows of one tensor from `first` on, as they are stored, straight into the contiguous `out`."""
        tensor = self[name]
        try:
            with tensor.file.open("rb", buffering=0) as file:
                file.seek(tensor.begin + first * out.itemsize * prod(tensor.shape[1:]))
                _fill(out.reshape(-1).view(np.uint8).data, file)
        except (OSError, EOFError) as error:
            raise _lost(tensor.file) from error

    def scale(self, name: str) -> np.float32:
        """The factor of a tensor's stored numbers: 1 unless they have eight bits and a scale. Raises
        `RunError` where it is not a positive number."""
        tensor = self[name].scale
        if tensor is None:
            return np.float32(1)
        stored = np.fromfile(tensor.file, DTYPES[tensor.dtype], 1, offset=tensor.begin).astype(np.float32)
        if not (len(stored) and 0 < stored[0] < np.inf):
            raise RunError(f"{tensor.file} is damaged: the scale of {name} is no number above 0", AGAIN)
        return np.float32(stored[0])


@dataclass(frozen=True)
class Renaming:
    """The names of one network's tensors in an original single file: their prefix there, and pairs of fragments, ours
    and theirs.

    A fragment is one or more elements of a path. At each position the longest that matches is replaced.
    """

    prefix: str
    fragments: tuple[tuple[str, str], ...]

    def originals(self, names: Iterable[str]) -> dict[str, str]:
        """The original name of each declared tensor; raises `ValueError` where two would share one."""
        table = {name: self._original(name) for name in names}
        if len(set(table.values())) < len(table):
            raise ValueError(f"two tensors below `{self.prefix}` have the same original name")
        return table

    def _original(self, name: str) -> str:
        table, elements, renamed = dict(self.fragments), name.split("."), []
        while elements:
            size = next((n for n in range(len(elements), 0, -1) if ".".join(elements[:n]) in table), 1)
            fragment = ".".join(elements[:size])
            renamed.append(table.get(fragment, fragment))
            elements = elements[size:]
        return self.prefix + ".".join(renamed)


def _fill(memory: memoryview, file: RawIOBase) -> None:
    while memory:
        done = file.readinto(memory)
        if not done:
            raise EOFError
        memory = memory[done:]


def _lost(file: Path) -> RunError:
    """The error for a file that was whole when its header was read."""
    return RunError(f"{file} was removed or changed while it was read", "run again when it is whole")


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of one safetensors file, and its metadata; raises `UsageError` where it is damaged or none."""
    _begin(path, len(LFS_POINTER))
    try:
        safe_open(path, "np")  # checks that the header is whole and that the file is as long as it says
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged or cut short ({error})", "make, copy or download it again") from error
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    metadata = header.pop("__metadata__", {})
    begin = 8 + size
    return {
        name: Tensor(tuple(entry["shape"]), entry["dtype"], path, begin + entry["data_offsets"][0])
        for name, entry in header.items()
    }, metadata


def _with_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with the scales of eight-bit ones folded in: X.weight has X.weight_scale, and X.input_scale."""
    scaled = [name for name, tensor in tensors.items() if tensor.dtype in EIGHT_BITS and f"{name}_scale" in tensors]
    beside = {f"{name}_scale" for name in scaled} | {_input_scale(name) for name in scaled}
    return {
        name: replace(tensor, scale=tensors.get(f"{name}_scale")) if tensor.dtype in EIGHT_BITS else tensor
        for name, tensor in tensors.items()
        if name not in beside
    }


def _input_scale(name: str) -> str:
    return f"{name.removesuffix('.weight')}.input_scale"


def _begin(path: Path, size: int) -> bytes:
    """The first bytes of a file that exists; raises `UsageError` where they cannot be read or are a pointer."""
    refuse_special(path, AGAIN)
    try:
        with path.open("rb") as file:
            content = file.read(size)
    except FileNotFoundError as error:
        raise UsageError(f"{path} is missing", AGAIN) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", AGAIN) from error
    if content.startswith(LFS_POINTER):
        raise UsageError(f"{path} is a Git LFS pointer, not the file itself", "run `git lfs pull` in that folder")
    return content


def _files(folder: Path, stems: tuple[str, ...]) -> list[Path]:
    if not stems:
        return []
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}", AGAIN) from error
    for stem in stems:
        index = folder / f"{stem}.safetensors.index.json"
        if index.exists():
            shards = sorted({folder / name for name in _weight_map(index).values()})
            if absent := [str(shard) for shard in shards if not shard.exists()]:
                are = "is" if len(absent) == 1 else "are"
                hint = "the index beside it names it; download the checkpoint again"
                raise UsageError(f"{abbreviate(absent)} {are} missing", hint)
            return shards
        if (folder / f"{stem}.safetensors").exists():
            return [folder / f"{stem}.safetensors"]
    raise UsageError(f"{folder} holds no weights: no {' or '.join(f'{stem}.safetensors' for stem in stems)}", AGAIN)


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index."""
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise UsageError(f"{index} is no index: its `weight_map` does not give each tensor the name of a file", AGAIN)
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; raises `UsageError` where it is missing or is none."""
    text = _begin(path, MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise UsageError(f"{path} has more than {MAX_JSON:,} bytes", AGAIN)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}", AGAIN) from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object", AGAIN)
    return value


def collect(readings: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], list[UsageError]]:
    """The results of `readings` by name, and the `UsageError`s of those that fail, so that one message tells all."""
    found, problems = {}, []
    for name, reading in readings.items():
        try:
            found[name] = reading()
        except UsageError as error:
            problems.append(error)
    return found, problems


def raise_all(problems: Iterable[UsageError]) -> None:
    """Raise one `UsageError` with all sentences and each hint once; nothing where there are no problems."""
    if problems := list(problems):
        hints = dict.fromkeys(problem.hint for problem in problems)
        raise UsageError(". ".join(map(str, problems)), "; ".join(hints))


def count_and_list(what: str, names: Sequence[str]) -> Iterator[str]:
    """`3 missing: a, b, c` where there are any."""
    if names:
        yield f"{len(names)} {what}: {abbreviate(names)}"


def abbreviate(names: Sequence[str], most: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def shape_text(shape: Sequence[int]) -> str:
    """`3x4` of (3, 4)."""
    return "x".join(map(str, shape)) or "a scalar"
