"""The cache of text contexts, beside the compiled programs: a clip of a prompt that was encoded before loads no text
encoder, whatever its seed, size or steps are."""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from ltx2_cli.artifacts.files import file_state, folder_state
from ltx2_cli.artifacts.tensor_file import misfits, read_tensors, write_tensors
from ltx2_cli.core.cache_folder import cached_file, delete_oldest
from ltx2_cli.core.provenance import network_files
from ltx2_cli.core.report import Report
from ltx2_cli.errors import RunError, UsageError
from ltx2_cli.parallel.arrays import to_host
from ltx2_cli.plan.inputs import CONNECTORS
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import Streams

MOST_BYTES = 2**31  # of the folder: about forty pairs of prompts of LTX-2.3
XLA_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that may change a program's last bits
TRUNCATED = "truncated"  # metadata key: the prompts that lost their end, as JSON


class EncodedPrompts(NamedTuple):
    """A plan's prompts as the denoiser reads them."""

    contexts: Streams[jax.Array | np.ndarray]  # [prompts, tokens, width] of each stream, in the plan's dtype
    truncated: tuple[str, ...]  # the prompts that lost their end


def missing_in_cache(plan: Plan, names: Iterable[str]) -> list[str]:
    """Those of the connectors `names` whose contexts of the plan's prompts are not in the cache."""
    return [name for name in names if (path := _path(plan, name)) is None or not path.is_file()]


def read_contexts(plan: Plan, name: str, report: Report) -> EncodedPrompts | None:
    """The contexts of the plan's prompts by the connectors `name`; None where the cache has none, or a damaged file or
    one of other shapes, which is deleted."""
    path = _path(plan, name)
    if path is None or not path.is_file():
        return None
    try:
        tensors, facts = read_tensors(path, "text contexts", "delete it")
        widths = plan.arch.connectors.widths._asdict()
        shapes = {stream: (len(plan.prompts), plan.text_tokens, width) for stream, width in widths.items()}
        if problem := next(misfits(tensors, shapes), None):
            raise UsageError(f"{path} holds other contexts: {problem}", "delete it")
        truncated = tuple(map(str, json.loads(facts[TRUNCATED])))
    except (UsageError, OSError, KeyError, TypeError, ValueError):
        with report.activity(f"delete damaged contexts {path}"), suppress(OSError):
            path.unlink()
        return None
    with suppress(OSError):  # the cache of someone else
        os.utime(path)  # the oldest use is deleted first
    return EncodedPrompts(Streams(*(tensors[stream].astype(plan.dtype.value) for stream in widths)), truncated)


def keep_contexts(plan: Plan, name: str, encoded: EncodedPrompts) -> None:
    """Write the contexts of the plan's prompts, and delete the oldest of more than `MOST_BYTES`. Where they cannot be
    written, they are encoded again in the next run."""
    if (path := _path(plan, name)) is None:
        return
    arrays = {stream: to_host(array).astype(np.float32) for stream, array in encoded.contexts._asdict().items()}
    with suppress(RunError, OSError):
        path.parent.mkdir(exist_ok=True)
        write_tensors(path, arrays, {TRUNCATED: json.dumps(encoded.truncated)})
        delete_oldest(path, MOST_BYTES)


def _path(plan: Plan, name: str) -> Path | None:
    """The file of contexts; None where nothing is kept."""
    try:
        return cached_file("contexts", _facts(plan, name), ".safetensors")
    except OSError:  # a file of the checkpoint is gone; the run has it open, or says so
        return None


def _facts(plan: Plan, name: str) -> Iterator[object]:
    """All that the contexts depend on, to their last bit."""
    yield from (plan.prompts, plan.text_tokens, plan.prompts_at_once, plan.compile_text_encoder)
    yield from (plan.dtype, plan.text_encoder_dtype, plan.checkpoint.matrices(plan.spec)[:2])
    yield from (plan.arch.text_encoder, plan.arch.connectors, folder_state(plan.checkpoint.tokenizer))
    for network in ("text_encoder", CONNECTORS, name):
        yield [(str(file), file_state(file)) for file in sorted(network_files(plan, network))]
    deltas = plan.lora_deltas.get(name, {})
    yield {tensor: [(str(lora.path), *others) for lora, *others in delta.parts] for tensor, delta in deltas.items()}
    device = plan.sharding.mesh.devices.flat[0]
    yield from (dict(plan.sharding.mesh.shape), device.device_kind, device.client.platform_version)
    yield [getattr(plan.sharding, field.name) for field in fields(plan.sharding) if field.name != "mesh"]
    yield [os.environ.get(variable) for variable in XLA_VARIABLES]
