"""A copy of the text encoder in bfloat16. Those of LTX-2 and LTX-2.3 are published in float32: a run in bfloat16 reads
47 GB and keeps half."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from itertools import chain
from math import prod
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from ltx2_cli.artifacts.files import file_state, replacing
from ltx2_cli.core.cache_folder import delete_oldest
from ltx2_cli.core.provenance import network_files
from ltx2_cli.core.report import Report
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.models.networks import TEXT_ENCODER
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.profiles import user_cache
from ltx2_cli.request.spelling import typed
from ltx2_cli.units import FLOAT32_BYTES, quantity
from ltx2_cli.weights.checkpoint import TensorFiles

LEAST_COPIED_BYTES = 2**30  # of a copy: a smaller encoder is read in a second
MOST_COPIED_BYTES = 2**36  # of all copies: two
BLOCK_BYTES = 2**26  # that are read at a time
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def text_encoder_files(plan: Plan) -> TensorFiles:
    """The tensors of the plan's text encoder: of its copy, or of the checkpoint where there is none."""
    path = _path(plan)
    if path is not None and path.is_file():
        try:
            copied = TensorFiles(path)
        except UsageError:  # cut short
            with suppress(OSError):
                path.unlink()
        else:
            with suppress(OSError):
                os.utime(path)  # the oldest use is deleted first
            return copied
    return plan.checkpoint.files[TEXT_ENCODER]


def copy_text_encoder(plan: Plan, report: Report) -> None:
    """Write the copy, where there is none and the disk has twice the room. What keeps it from being written costs no
    clip."""
    if (path := _path(plan)) is None or path.is_file():
        return
    files = plan.checkpoint.files[TEXT_ENCODER]
    needed = BFLOAT16.itemsize * sum(prod(tensor.shape) for tensor in files.values())
    if needed < LEAST_COPIED_BYTES:
        return
    with suppress(RunError, OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < 2 * needed:
            return
        with report.activity("copy text encoder"):
            _write(files, path, report.moved)
        report.note(
            f"the text encoder is kept in bfloat16, half as much to read: {quantity(needed)} in {path};"
            f" {typed('text_encoder_copy', False)} keeps none"
        )
        delete_oldest(path, MOST_COPIED_BYTES)


def _path(plan: Plan) -> Path | None:
    """The file of the copy. None for an encoder that it would not serve: one that is used in other types than bfloat16,
    or stored in others than float32; and on several hosts, each of which reads its own part."""
    if not plan.spec.text_encoder_copy or jax.process_count() > 1:
        return None
    used = {leaf.dtype for leaf in jax.tree.leaves(plan.network(TEXT_ENCODER))}
    stored = {(tensor.dtype, tensor.encoding) for tensor in plan.checkpoint.files[TEXT_ENCODER].values()}
    if used != {BFLOAT16} or stored != {("F32", None)}:
        return None
    try:
        states = sorted((str(file), file_state(file)) for file in network_files(plan, TEXT_ENCODER))
    except OSError:
        return None
    return user_cache() / "text_encoders" / f"{sha256(repr(states).encode()).hexdigest()}.safetensors"


def _write(files: TensorFiles, path: Path, moved: Callable[[int], None]) -> None:
    """A safetensors file of these tensors in bfloat16, a block of rows after the other, each told to `moved`."""
    header, end = dict[str, object](), 0
    for name, tensor in files.items():
        begin, end = end, end + BFLOAT16.itemsize * prod(tensor.shape)
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at multiples of eight
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.writelines((len(text).to_bytes(8, "little"), text))
        for block in chain.from_iterable(_blocks(files, name) for name in files):
            file.write(block.astype(BFLOAT16).tobytes())
            moved(block.nbytes)


def _blocks(files: TensorFiles, name: str) -> Iterator[np.ndarray]:
    shape = files[name].shape or (1,)
    step = max(1, BLOCK_BYTES // max(1, FLOAT32_BYTES * prod(shape[1:])))
    for first in range(0, shape[0], step):
        yield files.numbers(name, (range(first, min(first + step, shape[0])), *map(range, shape[1:])))
