"""`ltx2 doctor`: checks of the installation, disks and devices, with a fix for each problem."""

import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from functools import partial
from glob import glob
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import imageio_ffmpeg
from huggingface_hub import constants
from packaging.requirements import Requirement

from ltx2_cli.artifacts.outputs import check_place
from ltx2_cli.console import columns, print_out, reporter
from ltx2_cli.core.report import Report
from ltx2_cli.errors import CommandError, RunError, UsageError
from ltx2_cli.parallel.devices import device_memory, find_devices, install_command, is_tpu_absent, memory_fraction
from ltx2_cli.request.profiles import configs, program_cache
from ltx2_cli.request.spelling import option_name
from ltx2_cli.runs.models import in_cache
from ltx2_cli.units import quantity
from ltx2_cli.weights.published import CATALOG, FOLDER, MODEL_KIND

if TYPE_CHECKING:  # importing jax takes long
    import jax

NVIDIA_DEVICES = "/dev/nvidia[0-9]*"
CODECS = ("libx264", "aac")
UNUSED = "unset JAX_PLATFORMS; a new driver; end the process that holds it"
ANOTHER_DEVICE = "drivers and libraries of the tested versions; if it stays, another device"
ANOTHER_KERNEL = "another kernel: `ltx2 generate --set sharding.attention=xla`"
WHOLE = (MODEL_KIND, FOLDER)  # kind and form of models with all that they need
HALF = 0.5  # of a GPU's memory that jax takes: with less, most clips do not fit


class State(StrEnum):
    """Severity of a finding."""

    ok = "ok"
    note = "note"
    broken = "broken"


class Finding(NamedTuple):
    """The result of one check, and its cure."""

    area: str
    state: State
    text: str
    cure: str = ""


def doctor(as_json: bool) -> None:
    """Print the findings. Raises `RunError` afterwards if something is broken."""
    findings = list(examine(Report() if as_json else reporter()))
    if as_json:
        print_out(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        print_out("\n".join(columns([(finding.state, finding.area, sentence(finding)) for finding in findings])))
    if broken := sum(finding.state is State.broken for finding in findings):
        raise RunError(f"{broken} of {len(findings)} findings are broken", "each line says what helps")


def sentence(finding: Finding) -> str:
    """A finding and its cure."""
    return f"{finding.text}: {finding.cure}" if finding.cure else finding.text


def examine(report: Report) -> Iterator[Finding]:
    """All findings. Devices come last: they take longest."""
    yield from check_versions()
    yield check_ffmpeg()
    yield from check_folders()
    try:
        devices = find_devices()
    except UsageError as error:
        yield Finding("devices", State.broken, str(error), error.hint)
        return
    yield from check_devices(devices)
    yield from check_drivers(devices[0].platform)
    yield from check_computing(devices, report)


def check_versions() -> Iterator[Finding]:
    """Python and each dependency against the bounds of this package."""
    try:
        required = [Requirement(line) for line in metadata.requires("ltx2") or ()]
    except metadata.PackageNotFoundError:
        text = "ltx2 is not installed, so the bounds of its libraries are unknown"
        yield Finding("versions", State.note, text, install_command())
        return
    required = [each for each in required if each.marker is None or each.marker.evaluate({"extra": ""})]
    wrong = [Finding("versions", State.broken, fault, install_command()) for fault in map(_fault, required) if fault]
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("ltx2", "jax", "jaxlib", "flax", "torch"))
        text = f"Python {platform.python_version()}, {shown}; all {len(required)} libraries are within their bounds"
        yield Finding("versions", State.ok, text)


def _fault(required: Requirement) -> str:
    """The problem of the installed version of a library; empty if none."""
    try:
        installed = metadata.version(required.name)
    except metadata.PackageNotFoundError:
        return f"{required} is not installed"
    within = required.specifier.contains(installed, prereleases=True)
    return "" if within else f"{required.name} {installed} is installed, and {required} is needed"


def check_ffmpeg() -> Finding:
    """Whether ffmpeg runs and has the encoders of an mp4."""
    cure = "pip install --force-reinstall imageio-ffmpeg, or IMAGEIO_FFMPEG_EXE=FILE"
    try:
        program = imageio_ffmpeg.get_ffmpeg_exe()
        done = subprocess.run([program, "-hide_banner", "-encoders"], capture_output=True, text=True, check=True)
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return Finding("ffmpeg", State.broken, f"does not run: {error}".replace("\n", " "), cure)
    if missing := [codec for codec in CODECS if f" {codec} " not in done.stdout]:
        return Finding("ffmpeg", State.broken, f"{program} has no encoder {' and '.join(missing)}", cure)
    return Finding("ffmpeg", State.ok, f"{program} has {' and '.join(CODECS)}")


def check_folders() -> Iterator[Finding]:
    """Room for downloads, and a place for compiled programs."""
    hub, programs = Path(constants.HF_HUB_CACHE), program_cache()
    free = shutil.disk_usage(next(folder for folder in (hub, *hub.parents) if folder.exists())).free
    text = f"{quantity(free)} free in {hub}"
    missing = {entry.name: entry.size - in_cache(entry)[0] for entry in CATALOG if (entry.kind, entry.form) == WHOLE}
    if large := [f"{name} ({quantity(size)})" for name, size in missing.items() if size > free]:
        cure = "HF_HOME=FOLDER on a larger disk"
        yield Finding("disk", State.note, f"{text}, too little to download {' or '.join(large)}", cure)
    else:
        yield Finding("disk", State.ok, text)
    if constants.HF_HUB_OFFLINE:
        yield Finding("downloads", State.note, "HF_HUB_OFFLINE is set: nothing is downloaded", "unset HF_HUB_OFFLINE")
    try:
        check_place(programs, option_name("compile_cache"), "FOLDER")
    except UsageError as error:
        yield Finding("cache", State.note, f"{error}; every run compiles again", "XDG_CACHE_HOME=FOLDER")
        return
    sizes = [file.stat().st_size for file in programs.glob("*") if file.is_file()]
    yield Finding("cache", State.ok, f"{len(sizes)} files of compiled programs, {quantity(sum(sizes))}, in {programs}")
    yield Finding("settings", State.ok, f"profiles in {configs()}")


def check_devices(devices: "Iterable[jax.Device]") -> Iterator[Finding]:
    """The devices that jax found, by kind, and their memory."""
    for kind, group in groupby(devices, lambda device: device.device_kind):
        alike = list(group)
        memory = device_memory(alike)
        text = f"{len(alike)} {kind} ({alike[0].platform}), {quantity(memory.limit)} for a program on each"
        if alike[0].platform == "gpu" and memory_fraction() < HALF:
            cure = "XLA_PYTHON_CLIENT_MEM_FRACTION=.95"
            yield Finding("devices", State.note, f"{text}: jax takes {memory_fraction():.0%} of it", cure)
        else:
            yield Finding("devices", State.ok, text)


def check_drivers(used: str) -> Iterator[Finding]:
    """TPUs and GPUs of this machine that jax does not use."""
    plugins = any(map(find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin")))
    parts = (
        ("TPU", not is_tpu_absent(None), "tpu", bool(find_spec("libtpu")), "libtpu"),
        ("GPU", bool(glob(NVIDIA_DEVICES)), "gpu", plugins, "jax's CUDA plugin"),
    )
    for name, here, kind, installed, library in parts:
        if here and used != kind:
            reason = f"jax does not use it, though {library} is installed" if installed else f"{library} is missing"
            cure = UNUSED if installed else install_command(f"[{kind}]")
            yield Finding(name, State.broken, f"a {name} is here, and {reason}", cure)
        elif not here and used != kind:
            yield Finding(name, State.ok, f"no {name} in this machine")


def check_computing(devices: "Iterable[jax.Device]", report: Report) -> Iterator[Finding]:
    """The demo's denoiser on each device of this process, and the attention of the first."""
    import jax

    from ltx2_cli.core import self_test

    local = [device for device in devices if device.process_index == jax.process_index()]
    for device in local:
        with report.activity(f"run the demo's denoiser on {device}"):
            error = _attempt(partial(self_test.denoiser_error, device))
        yield _judged("self-test", f"{device}: latents", error, self_test.TOLERANCE, ANOTHER_DEVICE)
    for kernel, dtype in self_test.kernels(local[0]):
        with report.activity(f"check attention by {kernel} in {dtype}"):
            error = _attempt(partial(self_test.kernel_error, kernel, dtype, local[0]))
        most = self_test.ATTENTION_TOLERANCE[dtype]
        yield _judged("attention", f"{kernel} in {dtype}: results", error, most, ANOTHER_KERNEL)


def _attempt(check: Callable[[], float]) -> float | CommandError | RuntimeError:
    """The result or the error of a check, including jax's errors."""
    try:
        return check()
    except (CommandError, RuntimeError) as error:
        return error


def _judged(area: str, what: str, error: float | CommandError | RuntimeError, most: float, cure: str) -> Finding:
    """A relative error compared with the allowed one. A kernel that does not support the device is no fault."""
    if isinstance(error, UsageError):
        return Finding(area, State.ok, f"not used here: {error}")
    if not isinstance(error, float):
        reason, *_ = str(error).split("\n")  # which may be empty
        return Finding(area, State.broken, f"{what} could not be computed: {reason}", cure)
    right = error <= most  # a NaN is not
    text = f"{what} {error:.1e} off what they should be, {most:.0e} is allowed"
    return Finding(area, State.ok, text) if right else Finding(area, State.broken, text, cure)
