"""Weights that are needed next, read from disk into the system's cache of files while the devices are busy."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial

from ltx2_cli.weights.tensors import Tensor

ONE_REQUEST = 2**17  # bytes: of a larger request Linux reads a part, as large as the disk likes


def cache_requests(tensors: Iterable[Tensor], most: float) -> Iterator[Callable[[], None]]:
    """Calls that ask the system to read tensors into its cache, in this order and at most so many bytes. None where it
    cannot be asked, as on macOS."""
    if not hasattr(os, "posix_fadvise"):
        return
    for tensor in tensors:
        most -= tensor.stored_bytes
        if most < 0:
            return
        yield partial(_request, tensor)


def _request(tensor: Tensor) -> None:
    with suppress(OSError), tensor.file.open("rb") as file:  # who reads the file next reports that
        end = tensor.begin + tensor.stored_bytes
        for begin in range(tensor.begin, end, ONE_REQUEST):
            os.posix_fadvise(file.fileno(), begin, min(ONE_REQUEST, end - begin), os.POSIX_FADV_WILLNEED)
