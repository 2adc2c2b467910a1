"""Checkpoints on disk: configs, tensors by the files' headers, and their data on request."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open

from ltx2_cli.artifacts.files import refuse_special
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.request.profiles import GGUF, SAFETENSORS
from ltx2_cli.weights.gguf_files import MAGIC, read_gguf
from ltx2_cli.weights.quantized_files import KNOWN_FORMATS, decode_quantized, find_quantized, row_scales
from ltx2_cli.weights.tensors import LOST, MatrixType, Tensor

MAX_JSON = 64_000_000  # bytes of a config or an index
STEMS = ("diffusion_pytorch_model", "model")
LFS_POINTER = b"version https://git-lfs"
AGAIN = "download the checkpoint again, or name another FOLDER or REPO as the model"
Index = tuple[slice, ...]
T = TypeVar("T")


class TensorFiles(dict[str, Tensor]):
    """The tensors of a network by name, of all files in a folder or of one file (None: of no file), and the files'
    metadata. Only headers are read, and markers and scales of quantised weights. Scales are part of their weight; other
    tensors for eight-bit arithmetic are left out. Raises `UsageError` for a file that is missing, cut short, or no
    safetensors or GGUF file, and for quantised weights in a format that is not read."""

    def __init__(self, place: Path | None = None, stems: tuple[str, ...] = STEMS):
        super().__init__()
        self.metadata: dict[str, str] = {}
        paths = {str(path): partial(read_header, path) for path in _files(place, stems)}
        headers, problems = collect(paths)
        raise_all(problems)
        for tensors, metadata in headers.values():
            self.update(tensors)
            self.metadata |= metadata
        if wrong := count_and_list(find_quantized(self, self.metadata)):
            sentence = f"{place} holds quantised weights that cannot be read: {'; '.join(wrong)}"
            raise UsageError(sentence, f"formats that are read: {KNOWN_FORMATS}")

    def config(self, absent: str, key: str = "config") -> dict[str, Any] | None:
        """The config in a single file's metadata, by default the JSON `absent`; None if it is no JSON object."""
        try:
            config = json.loads(self.metadata.get(key, absent))
        except (ValueError, RecursionError):
            return None
        return config if isinstance(config, dict) else None

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The tensors of `names`, which maps new names to old ones, under their new names."""
        part = copy(self)
        part.clear()
        part.update({new: self[old] for new, old in names.items() if old in self})
        return part

    def numbers(self, name: str, window: tuple[range, ...]) -> np.ndarray:
        """The part of a tensor in a window (rows, columns, …): as stored, or decoded to float32. Whole rows are read;
        parts of rows come page by page from mapped memory."""
        tensor, (rows, *columns) = self[name], window
        encoding = tensor.encoding
        if encoding:
            blocks = range(columns[0].start // encoding.block, -(-columns[0].stop // encoding.block))
            columns = [range(blocks.start * encoding.block_bytes, blocks.stop * encoding.block_bytes)]
        if all(len(part) == size for part, size in zip(columns, tensor.stored_shape[1:], strict=True)):
            stored = np.empty((len(rows), *tensor.stored_shape[1:]), tensor.stored_dtype)
            self.read_into(name, rows.start, stored)
        else:
            stored = self.read(name, tuple(slice(part.start, part.stop) for part in (rows, *columns)))
        if not encoding:
            return stored
        before = blocks.start * encoding.block
        begin, end = (edge - before for edge in (window[1].start, window[1].stop))
        return decode_quantized(name, tensor, rows, blocks, stored)[:, begin:end]

    def read(self, name: str, index: Index) -> np.ndarray:
        """The stored items of a tensor that `index` selects. Pages are read when they are first accessed."""
        tensor = self[name]
        try:
            stored = np.memmap(tensor.file, tensor.stored_dtype, "r", tensor.begin, tensor.stored_shape)
        except (OSError, ValueError) as error:
            raise RunError(f"{tensor.file} {LOST}", "run again when it is whole") from error
        return stored.view(np.ndarray)[index]

    def read_into(self, name: str, first: int, out: np.ndarray) -> None:
        """Read stored rows of a tensor, from row `first` on, into the contiguous array `out`."""
        tensor = self[name]
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.begin + first * out.itemsize * prod(tensor.stored_shape[1:]))
                if file.readinto(out.reshape(-1).view(np.uint8).data) < out.nbytes:
                    raise EOFError
        except (OSError, EOFError) as error:
            raise RunError(f"{tensor.file} {LOST}", "run again when it is whole") from error

    def scale(self, name: str) -> np.float32:
        """The scale of a tensor, 1 if it has none."""
        scale = self[name].scale
        return np.float32(scale.stored()[0] if scale else 1)

    def row_scales(self, name: str) -> np.ndarray:
        """The scales of the rows of a matrix in eight bits, float32 [rows]."""
        tensor = self[name]
        scale = tensor.encoding.scale if tensor.encoding else tensor.scale
        assert scale is not None
        return row_scales(scale, range(tensor.shape[0]))[:, 0]

    @cached_property
    def codes(self) -> Self:
        """The tensors as they are stored: codes without their scales and rotations, each a number or two."""
        stored = copy(self)
        stored.update({name: replace(tensor, encoding=tensor.codes, scale=None) for name, tensor in self.items()})
        return stored

    @property
    def matrix_type(self) -> MatrixType | None:
        """The type of most matrices in eight bits; None: there are none that can be kept as they are."""
        types = Counter(tensor.matrix_type for tensor in self.values() if tensor.scale or tensor.encoding)
        return types.most_common(1)[0][0] if types else None


@dataclass(frozen=True)
class Renaming:
    """The names of a network's tensors in an original single file: their prefix, and pairs (our fragment, its
    original). A fragment is one or more elements of a path; at each position the longest match is replaced."""

    prefix: str
    fragments: tuple[tuple[str, str], ...]

    def originals(self, names: Iterable[str]) -> dict[str, str]:
        """The original name of each declared tensor. Raises `ValueError` if two have the same."""
        replacements = dict(self.fragments)
        longest_first = "|".join(re.escape(ours) for ours in sorted(replacements, key=len, reverse=True))
        fragment = re.compile(rf"(?<![^.])({longest_first})(?![^.])")
        table = {name: self.prefix + fragment.sub(lambda match: replacements[match[0]], name) for name in names}
        if len(set(table.values())) < len(table):
            raise ValueError(f"two tensors below `{self.prefix}` have the same original name")
        return table


def read_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors or GGUF file and its metadata. Raises `UsageError` for a file that is damaged or
    neither of them."""
    if _begin(path, len(LFS_POINTER)).startswith(MAGIC) or path.suffix == GGUF:
        return read_gguf(path), {}
    try:
        safe_open(path, "np")  # checks that the header is whole and that the file is as long as it says
    except SafetensorError as error:
        raise UsageError(f"{path} is damaged or cut short ({error})", "make, copy or download it again") from error
    with path.open("rb") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(begin - 8))
    metadata = header.pop("__metadata__", {})
    tensors = {
        name: Tensor(tuple(entry["shape"]), entry["dtype"], path, begin + entry["data_offsets"][0])
        for name, entry in header.items()
    }
    return tensors, metadata


def _begin(path: Path, size: int) -> bytes:
    """The first bytes of a file. Raises `UsageError` for a file that cannot be read or is a Git LFS pointer."""
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


def _files(place: Path | None, stems: tuple[str, ...]) -> list[Path]:
    """The files of a network: a single file, the shards of a folder's index, or the folder's only file."""
    if place and place.is_file() and place.suffix not in (SAFETENSORS, GGUF):
        raise UsageError(f"{place} is no folder and no .safetensors or .gguf file", AGAIN)
    if place is None or not place.is_dir():
        return [place] if place else []
    try:
        next(place.iterdir(), None)
    except OSError as error:
        raise UsageError(f"{place} cannot be read: {error.strerror}", AGAIN) from error
    for file in [place / f"{stem}.safetensors" for stem in stems]:
        index = file.with_name(f"{file.name}.index.json")
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                described = "its `weight_map` does not give each tensor the name of a file"
                raise UsageError(f"{index} is no index: {described}", AGAIN)
            shards = sorted({place / name for name in names.values()})
            if absent := [str(shard) for shard in shards if not shard.exists()]:
                are = "is" if len(absent) == 1 else "are"
                hint = "the index beside it names it; download the checkpoint again"
                raise UsageError(f"{abbreviate(absent)} {are} missing", hint)
            return shards
        if file.exists():
            return [file]
    raise UsageError(f"{place} holds no weights: no {' or '.join(f'{stem}.safetensors' for stem in stems)}", AGAIN)


def read_json(path: Path, where: Path | None = None) -> dict[str, Any]:
    """The JSON object in a file. Raises `UsageError` if the file is missing or no JSON object; `where` names it there,
    by default its path."""
    text = _begin(path, MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise UsageError(f"{where or path} has more than {MAX_JSON:,} bytes", AGAIN)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where or path} is not JSON: {error}", AGAIN) from error
    if not isinstance(value, dict):
        raise UsageError(f"{where or path} is not a JSON object", AGAIN)
    return value


def collect(readings: Mapping[str, Callable[[], T]]) -> tuple[dict[str, T], list[UsageError]]:
    """Call all `readings`. Returns results by name, and the `UsageError`s of failures."""
    results, problems = {}, []
    for name, reading in readings.items():
        try:
            results[name] = reading()
        except UsageError as error:
            problems.append(error)
    return results, problems


def raise_all(problems: Iterable[UsageError]) -> None:
    """Raise one `UsageError` with all sentences, and each hint once, if there are problems."""
    if len(problems := list(problems)) == 1:
        raise problems[0]
    if problems:
        hints = dict.fromkeys(problem.hint for problem in problems)
        raise UsageError(". ".join(map(str, problems)), "; ".join(hints))


def count_and_list(findings: Mapping[str, Sequence[str]]) -> list[str]:
    """`3 missing: a, b, c` of each finding that has names."""
    return [f"{len(names)} {what}: {abbreviate(names)}" for what, names in findings.items() if names]


def abbreviate(names: Sequence[str], most: int = 5) -> str:
    """The first of `names`, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"
