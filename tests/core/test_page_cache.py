"""What is loaded later is read into the system's cache of files while the devices are busy, and loaded from there."""

import ctypes
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from clips import ALL_ON, Case, Checkpoint, Size, plan_of
from ltx2_cli.core.report import LOAD, Report
from ltx2_cli.core.run import open_components, programs, run
from ltx2_cli.plan.inputs import STAGE2_DENOISER
from ltx2_cli.weights.checkpoint import TensorFiles
from ltx2_cli.weights.page_cache import cache_requests
from ltx2_cli.weights.tensors import Tensor

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such request")
LIBC, PAGE = ctypes.CDLL(None, use_errno=True), os.sysconf("SC_PAGE_SIZE")


def are_in_cache(tensors: Iterable[Tensor]) -> bool:
    """Whether all pages of some tensors are in the system's cache."""
    pages = [(each, slice(each.begin // PAGE, -(-(each.begin + each.stored_bytes) // PAGE))) for each in tensors]
    return all(pages_in_cache(each.file)[those].all() for each, those in pages)


def pages_in_cache(path: Path) -> np.ndarray:
    """Whether each page of a file is in the system's cache."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.nbytes // PAGE), np.uint8)
    size = ctypes.c_size_t(mapped.nbytes)
    assert not LIBC.mincore(ctypes.c_void_p(mapped.ctypes.data), size, ctypes.c_void_p(pages.ctypes.data))
    return (pages & 1).astype(bool)


def evict(path: Path) -> None:
    """Take a file out of the system's cache, which may keep what it has just touched for a moment."""
    deadline = time.monotonic() + 30
    with path.open("rb") as file:
        os.fsync(file.fileno())
        while pages_in_cache(path).any():
            assert time.monotonic() < deadline, f"the file system keeps {path}"
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def not_cached(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that the system's cache has at no moment within half a minute. What it had it may drop again: there
    is no time at which it must have all of them."""
    missing, deadline = [*tensors], time.monotonic() + 30
    while missing and time.monotonic() < deadline:
        missing = [tensor for tensor in missing if not are_in_cache([tensor])]
        time.sleep(0.01)
    return missing


class Watching(Report):
    """Before `at` is loaded, files of later networks leave the cache. What follows its loading waits until their
    tensors have been there again; notes of which networks all have, when these are loaded."""

    def __init__(self, at: str, later: dict[str, list[Tensor]]):
        self.at, self.later = at, later
        self.evicted, self.missing = list[Tensor](), list[Tensor]()
        self.read = dict[str, bool]()

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        network = name.removeprefix(f"{LOAD} ")
        if network == self.at:
            self.evicted = [tensor for tensors in self.later.values() for tensor in tensors]
            for path in {tensor.file for tensor in self.evicted}:
                evict(path)
        elif self.evicted:
            self.missing, self.evicted = not_cached(self.evicted), []
        if network in self.later:
            self.read[network] = not any(tensor in self.missing for tensor in self.later[network])
        yield


def test_decoders_and_loras_are_read_while_the_denoiser_works(
    checkpoint: Checkpoint, second_stage: dict[str, object]
) -> None:
    case = Case(Size(9, 128, 128, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))
    plan = plan_of(checkpoint, case, 3, recipe="two_stage", **second_stage)
    networks = {name.replace("_", " "): [*plan.checkpoint.files[name].values()] for name in ("vae", "audio_vae")}
    (lora,) = {part[0] for delta in plan.lora_deltas[STAGE2_DENOISER].values() for part in delta.parts}
    report = Watching("transformer", {"refiner": [*lora.files.values()], **networks})
    for _ in run(plan, open_components(plan), report):
        pass
    assert report.read == dict.fromkeys(report.later, True)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_network_that_hosts_read_in_parts_is_not_read_whole(
    checkpoint: Checkpoint, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(Size(9, 64, 64, 24.0), 2, ALL_ON.video, ALL_ON.audio, (0,))
    plan = plan_of(checkpoint, case, 3)
    denoiser, decoder = ([*plan.checkpoint.files[name].values()] for name in ("transformer", "vae"))
    for path in {tensor.file for tensor in (*denoiser, *decoder)}:
        evict(path)
    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    components = open_components(plan)
    with components.compiling(programs(plan)), components.use("text_encoder", Report()):
        assert not not_cached(decoder)
        assert hosts > 1 or not not_cached(denoiser)
        assert hosts == 1 or not are_in_cache(denoiser)


def test_no_more_is_read_ahead_than_is_allowed(checkpoint: Checkpoint) -> None:
    (first, second, *_) = tensors = [*TensorFiles(checkpoint.folder / "vae").values()]
    assert len([*cache_requests(tensors, first.stored_bytes + second.stored_bytes)]) == 2
    assert len([*cache_requests(tensors, math.inf)]) == len(tensors)
