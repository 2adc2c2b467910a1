"""Requests against devices: each fits, or is refused with a request that then fits. No device is needed."""

import os
import re
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from compilers import needs_cuda
from devices import GIB, DescribedDevice, cpu, gpu, tpus
from ltx2_cli.errors import DoesNotFitError
from ltx2_cli.estimate.alternatives import PROGRAM_FRACTION as MOST_OF_A_GPU
from ltx2_cli.estimate.alternatives import Alternative, Request, Suggestions, available_memory
from ltx2_cli.estimate.fit import CHANGES, check_fit
from ltx2_cli.media.clip import Media
from ltx2_cli.media.write import write_mp4
from ltx2_cli.request.profiles import read_spec
from ltx2_cli.request.spec import Offload
from ltx2_cli.request.validation import validate
from sounds import tone

DEVICES = {
    "v6e-1": tpus("TPU v6 lite", 1),
    "v6e-8": tpus("TPU v6 lite", 8),
    "v5e-8": tpus("TPU v5 lite", 8),
    "tpu7x-8": tpus("TPU7x", 8, cores=2),
    "v5e-1": tpus("TPU v5 lite", 1),
    "8 GB": gpu(8),
    "24 GB": gpu(24),
    "48 GB": gpu(48),
    "80 GB": gpu(80),
    "cpu": cpu(),
}
REQUESTS: dict[str, dict[str, object]] = {
    "ltx2": {"model": "ltx2"},
    "ltx2.3": {"model": "ltx2.3"},
    "two stages": {"model": "ltx2.3", "recipe": "two_stage", "width": 1536, "height": 1024},
    "demo": {"model": "demo"},
}
FITS, DEMO, MOST = "fits", "demo", "most of the memory"
HEADS, INT8 = "--set sharding.mesh.heads=4", "--set weights=int8"
OFFLOAD = "--set offload=layers"
BOTH = f"{INT8} {OFFLOAD}"
# What each device is told, by request: that it fits; what to ask instead, which is chosen where the sharding is left
# open, and after "or" what is suggested where it is not; or that only the embedded model fits.
EXPECTED = {
    "v6e-1": (INT8, INT8, INT8, FITS),
    "v6e-8": (FITS, FITS, FITS, FITS),
    "v5e-8": (HEADS, HEADS, HEADS, FITS),
    "tpu7x-8": (FITS, FITS, FITS, FITS),
    "v5e-1": (OFFLOAD, OFFLOAD, OFFLOAD, FITS),
    "24 GB": (OFFLOAD, OFFLOAD, OFFLOAD, FITS),
    "8 GB": (BOTH, BOTH, BOTH, FITS),
    "48 GB": (INT8, f"{INT8} or {MOST}", f"{INT8} or {MOST}", FITS),
    "80 GB": (FITS, FITS, FITS, FITS),
    "cpu": (DEMO, DEMO, DEMO, FITS),
}

CLOSE = ("8 GB", "48 GB")  # where XLA's attention, which takes more memory than cuDNN's, has other answers


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """One of 16 GiB, with nothing in the hub's cache."""
    usual = os.sysconf
    memory = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", lambda name: memory[name] if name in memory else usual(name))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)


def ask(devices: tuple[DescribedDevice, ...], **keys: object) -> Request:
    return Request(read_spec(prompt="a fox", **keys), devices)


def refusal(request: Request) -> tuple[DoesNotFitError, Alternative | None]:
    """Why the request does not fit, and what was suggested."""
    suggested: list[Alternative] = []

    def typed(alternative: Alternative) -> str:
        suggested.append(alternative)
        options = " ".join(f"--set {key}={value}" for key, value in alternative.options.items())
        return f"{MOST} {options}" if alternative.most_memory else options

    with pytest.raises(DoesNotFitError) as caught:
        check_fit(request, request.plan(), typed)
    return caught.value, suggested[0] if suggested else None


def fits_now(request: Request, alternative: Alternative) -> bool:
    """Whether the suggested request fits, planned for itself."""
    spec = replace(request.plan().spec, **alternative.values)
    again = replace(request, spec=spec)
    plan = again.plan()
    available = available_memory(plan)
    most = MOST_OF_A_GPU * available.total if alternative.most_memory else available.limit
    return max(memory.peak for memory in again.memory(plan).values()) <= most


def check_choice(request: Request, expected: str) -> Request:
    """Check that what is left open is chosen so that the request fits, and said. Returns the request with the profile
    named and weights as they are, which is refused."""
    plan, profile = check_fit(request, request.plan(), str), request.plan().spec.sharding
    assert max(memory.peak for memory in request.memory(plan).values()) <= available_memory(plan).limit
    *_, warning = plan.warnings
    if expected == HEADS:
        assert plan.spec.sharding.mesh["heads"] == 4
        assert (plan.spec.weights, f"chosen: devices {plan.sharding.text}" in warning) == ("auto", True)
    else:
        assert (plan.spec.weights, plan.sharding.text) == ("int8", "one device")
        assert f"chosen: --weights int8, which {CHANGES['int8']}" in warning
    return replace(request, spec=replace(request.spec, sharding=profile))


@pytest.mark.parametrize(
    ("device", "request_", "expected"),
    [
        pytest.param(device, request_, expected, marks=needs_cuda if device in CLOSE else ())
        for device, row in EXPECTED.items()
        for request_, expected in zip(REQUESTS, row, strict=True)
    ],
)
def test_each_request_fits_or_is_refused_with_an_alternative(device: str, request_: str, expected: str) -> None:
    request = ask(DEVICES[device], **REQUESTS[request_])
    if expected == FITS:
        assert check_fit(request, plan := request.plan(), str) == plan
        return
    chosen, _, otherwise = expected.partition(" or ")
    if chosen in (HEADS, INT8):
        request = check_choice(request, chosen)
    error, suggested = refusal(request)
    assert str(error).startswith("this does not fit: to ")
    assert suggested is not None
    assert fits_now(request, suggested)
    if expected == DEMO:
        assert error.hint.startswith("it takes a device with ")
        assert "H100" in error.hint
        assert suggested.options == {"model": "demo"}
    else:
        assert error.hint.startswith(otherwise or chosen)


@pytest.mark.parametrize(
    ("devices", "nearest"),
    [(gpu(24), "feed_forward"), (DEVICES["v5e-1"], "feed_forward"), (gpu(16), "layers")],
)
def test_as_little_as_has_to_moves_to_the_host(devices: tuple[DescribedDevice, ...], nearest: str) -> None:
    _, suggested = refusal(request := ask(devices, model="ltx2.3", weights="int8", compute="full"))
    assert suggested is not None
    assert suggested.options == {"offload": nearest}
    assert fits_now(request, suggested)


@pytest.mark.parametrize(
    ("devices", "nearest", "resident"),
    [
        (gpu(24), "--set weights=int8 --set offload=feed_forward", "--set weights=int4"),
        (DEVICES["v5e-1"], "--set weights=int8 --set offload=feed_forward", "--set weights=int4"),
        pytest.param(
            *(gpu(16), "--set weights=int8 --set offload=layers", f"{MOST} --set weights=int4"), marks=needs_cuda
        ),
        (gpu(12), "--set weights=int8 --set offload=layers", ""),
    ],
)
def test_narrow_matrices_are_named_beside_layers_on_the_host(
    devices: tuple[DescribedDevice, ...], nearest: str, resident: str
) -> None:
    """Then int4 without layers there, where it fits."""
    error, suggested = refusal(ask(devices, model="ltx2.3"))
    assert suggested is not None
    assert suggested.options == {"offload": "layers"}
    hints = [f"or with fewer bytes to copy: {nearest}, which {CHANGES['int8']}"]
    if resident:
        hints.append(f"or with fewer bytes to copy: {resident}, which {CHANGES['int4']}")
    assert error.hint.splitlines()[1:] == hints


@pytest.mark.parametrize("kind", CHANGES)
def test_what_narrow_matrices_change_was_measured(kind: str) -> None:
    measured = Path("benchmarks/accuracy.md").read_text()
    percent = re.search(r"([0-9.]+) %", CHANGES[kind])[1]
    assert re.search(rf"^\| {kind} \| weights \|.* {float(percent) / 100:.3f}, ", measured, re.MULTILINE)


@pytest.mark.parametrize(
    ("devices", "has", "nearest"),
    [
        (gpu(24), "14.6 GB", {"offload": Offload.feed_forward}),
        (gpu(12), "14.6 GB", {"weights": "int4"}),
        (tpus("TPU v5 lite", 4), "3.7 GB", {"weights": "int4", "offload": Offload.none}),
    ],
)
def test_layers_that_the_host_has_no_memory_for_are_refused(
    devices: tuple[DescribedDevice, ...], has: str, nearest: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """85 % of 16 GiB, which the devices of a host share; not of the host of devices elsewhere. Feed-forwards alone take
    less than half of it, and all layers in four bits about as much."""
    request = ask(devices, model="ltx2.3", offload="layers", weights="int8", sharding={"mesh": {}, "profile": "gpu"})
    check_fit(request, request.plan(), str)
    monkeypatch.setattr(jax, "local_devices", lambda: list(devices))
    error, suggested = refusal(request)
    sentence = rf"--offload layers takes 18\.\d GB of this machine's memory for a device; it has {has} for each"
    assert re.search(sentence, str(error))
    assert suggested.options == nearest
    assert (f"\nint4 {CHANGES['int4']}" in error.hint) == ("weights" in nearest)
    memory = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 8 * memory(name) if name == "SC_PHYS_PAGES" else memory(name))
    check_fit(request, request.plan(), str)


@needs_cuda
@pytest.mark.parametrize(
    ("gigabytes", "keys"),
    [
        (8, {"model": "ltx2.5"}),
        (8, REQUESTS["two stages"]),
        (6, REQUESTS["ltx2"]),
        (6, REQUESTS["two stages"]),
        (6, {"model": "ltx2.5", "width": 768, "height": 512}),
        (6, {"model": "ltx2.5", "weights": "int4"}),
    ],
    ids=repr,
)
def test_small_gpus_hold_the_clips_that_readme_names(gigabytes: int, keys: dict[str, object]) -> None:
    request = ask(gpu(gigabytes, 0.95), **{"weights": "int8", "compute": "full", "offload": "layers", **keys})
    assert check_fit(request, plan := request.plan(), str) == plan


def test_a_smaller_clip_still_has_all_its_segments() -> None:
    """A shorter one that ends before its last segment would be refused."""
    request = ask(gpu(80), model="ltx2.3", sharding="single", num_frames=5001, segments=["150s: it runs"])
    request = replace(request, fixed=frozenset({"windows"}).__contains__)
    _, suggested = refusal(request)
    assert suggested is not None
    assert fits_now(request, suggested)
    spec = replace(request.plan().spec, **suggested.values)
    validate(spec)
    assert spec.width * spec.height < 768 * 512


def test_a_clip_that_is_too_long_to_be_made_at_once_fits_in_windows() -> None:
    """Of at most 20 s each; a shorter one is made smaller."""
    size = {"model": "ltx2.3", "width": 1536, "height": 1024, "sharding": "trillium"}
    request = ask(tpus("TPU v6 lite", 4), num_frames=2881, **size)
    _, suggested = refusal(request)
    assert suggested is not None
    assert suggested.options == {"windows": "7"}
    assert fits_now(request, suggested)


def test_a_clip_that_is_too_large_for_layers_on_the_host_is_made_smaller() -> None:
    request = ask(gpu(16), model="ltx2.3", num_frames=241, width=1920, height=1088)
    _, suggested = refusal(request)
    assert suggested is not None
    assert suggested.options.keys() >= {"offload", "width"}
    assert fits_now(request, suggested)


def test_an_edit_is_made_smaller_where_its_frames_allow_it(tmp_path: Path) -> None:
    """Around a new part fewer frames are seen, not fewer than it has; kept frames have the size that they have."""
    clip = tmp_path / "clip.mp4"
    write_mp4(Media(np.zeros((49, 128, 128, 3), np.uint8), tone(2, 24000), 24.0, 24000), clip)

    def edit(gigabytes: float, begin: int, end: int) -> Request:
        condition = {"path": str(clip), "kind": "clip", "regenerate": [begin, end]}
        return ask(gpu(gigabytes), model="demo", conditions=[condition])

    for gigabytes, num_frames in ((0.09, "33"), (0.08, "25")):
        _, suggested = refusal(request := edit(gigabytes, 24, 48))
        assert suggested is not None
        assert suggested.options == {"num_frames": num_frames}
        assert fits_now(request, suggested)
    error, suggested = refusal(edit(0.08, 0, 49))
    assert (suggested, "it takes a device with" in error.hint) == (None, True)
    smaller = Alternative({"width": 96, "height": 96})
    for begin, end, resized in ((0, 49, True), (24, 48, False)):
        request = edit(1, begin, end)
        assert Suggestions(request, request.plan()).fits(smaller) == resized


@pytest.mark.parametrize("tiled", [False, True])
def test_frames_of_16_bits_are_counted(tiled: bool) -> None:
    """A byte more for each colour of a pixel, in tiles or not."""
    request = ask(DEVICES["v6e-1"], model="ltx2.3", **({"vae_memory_gb": 0.5} if tiled else {"num_frames": 9}))
    decoding = [replace(request, deep=deep).plan().decoding for deep in (False, True)]
    assert [bool(each.tiles) for each in decoding] == [tiled] * 2
    spec = request.plan().spec
    colours = 3 * spec.num_frames * spec.height * spec.width
    assert decoding[1].video_bytes - decoding[0].video_bytes == colours
