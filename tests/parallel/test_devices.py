"""Which devices jax looks for and finds, and how much of a device's memory a program may fill."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

import ltx2_cli.parallel.devices
from devices import GIB, DescribedDevice, cpu, gpu, tpus
from ltx2_cli.errors import UsageError
from ltx2_cli.parallel.devices import (
    PLANNABLE_FRACTION,
    TPU_DEVICES,
    device_memory,
    find_devices,
    is_tpu_absent,
    peak_memory,
)

COMMAND = """
import os, sys
def end(code, leave=os._exit):
    print("loaded" if "libtpu.so" in open("/proc/self/maps").read() else "not loaded", flush=True)
    leave(code)
os._exit = end
sys.argv = ["ltx2", "generate", "--model", "demo", "--prompt", "a red ball", "--seed", "1", "--dry-run"]
from ltx2_cli.parallel.devices import find_devices
find_devices()  # as commands that have imported nothing else
from ltx2_cli.__main__ import main
main()
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(not is_tpu_absent(None), reason="there is a TPU")
def test_libtpu_is_not_started_without_a_tpu(tmp_path: Path):
    usual = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], env=usual, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nnot loaded\n")


def test_device_files_and_variables_decide_whether_a_tpu_is_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    monkeypatch.setattr(ltx2_cli.parallel.devices, "TPU_DEVICES", (str(tmp_path / "accel*"),))
    assert is_tpu_absent(None)
    assert is_tpu_absent("")  # JAX_PLATFORMS= is any
    assert not is_tpu_absent("tpu")
    assert not is_tpu_absent("tpu,cpu")  # as jax says itself where it finds a chip
    assert not is_tpu_absent("cuda,cpu")
    (tmp_path / "accel0").touch()
    assert not is_tpu_absent(None)
    (tmp_path / "accel0").unlink()
    monkeypatch.setenv("JAX_FORCE_TPU_INIT", "1")
    assert not is_tpu_absent(None)
    assert TPU_DEVICES == ("/dev/accel*", "/dev/vfio/[0-9]*")


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (AssertionError(), "its plugin is not installed"),
        (RuntimeError("Unable to initialize backend 'tpu': no TPU (set JAX_PLATFORMS='' to choose)"), "no TPU"),
    ],
)
def test_a_missing_platform_is_an_error_of_one_sentence(
    failure: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices() -> None:
        raise failure

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(UsageError, match=r"^jax cannot use JAX_PLATFORMS=cpu: ") as caught:
        find_devices()
    assert str(caught.value).endswith(reason)


class Report(DescribedDevice):
    """A device whose statistics lack a limit, as of some allocators."""

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": 0}


class Elsewhere(DescribedDevice):
    """A device of another host, or one that is only described to the compiler."""

    def memory_stats(self) -> dict[str, int]:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: MemoryStats is only supported for addressable devices.")


def test_the_reported_limit_is_the_memory() -> None:
    device = DescribedDevice(0, "tpu", "TPU v6 lite", bytes_limit=30 * GIB)
    assert device_memory([device]) == (30 * GIB, 30 * GIB, PLANNABLE_FRACTION * 30 * GIB)


@pytest.mark.parametrize("kind", [DescribedDevice, Report, Elsewhere])
def test_published_memory_is_used_without_a_reported_limit(kind: type[DescribedDevice]) -> None:
    assert device_memory([kind(0, "tpu", "TPU v6 lite")]).limit == 31.25 * GIB
    assert device_memory([kind(0, "gpu", "NVIDIA L4")]).limit == 0.9 * 24e9
    assert device_memory([kind(0, "tpu", "TPU v99")]).limit == float("inf")


class Used(DescribedDevice):
    """A device that says how much was in use at most."""

    def memory_stats(self) -> dict[str, int]:
        return {"peak_bytes_in_use": self.id * GIB}


def test_peak_memory_is_the_maximum_over_devices() -> None:
    devices = [kind(number, "tpu", "TPU") for number, kind in enumerate((Used, Used, Used, Report, Elsewhere))]
    assert peak_memory(devices) == 2 * GIB
    assert peak_memory(devices[3:]) is None


def test_memory_is_the_minimum_over_devices() -> None:
    devices = [DescribedDevice(number, "gpu", "GPU", bytes_limit=number * GIB) for number in (3, 2, 4)]
    assert device_memory(devices).limit == 0.9 * 2 * GIB


def test_a_program_may_fill_nine_tenths_of_what_jax_takes_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert device_memory(gpu(48))[:2] == (0.9 * 36e9, 48e9)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", ".5")
    assert device_memory(gpu(48, fraction=0.5))[:2] == (0.9 * 24e9, 48e9)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.25")
    assert device_memory(gpu(48, fraction=0.25))[:2] == (0.9 * 12e9, 48e9)


def test_cpu_devices_share_the_memory_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", machine.__getitem__)
    monkeypatch.setattr("ltx2_cli.parallel.devices.CGROUPS", Path("/nowhere"))
    assert device_memory(cpu()) == (PLANNABLE_FRACTION * 16 * GIB,) * 3
    assert device_memory(cpu(8)).limit == PLANNABLE_FRACTION * 2 * GIB
    assert device_memory(jax.devices()[:2]).limit == PLANNABLE_FRACTION * 8 * GIB


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": f"{GIB}\n"},  # in a container
        {"job/memory.max": f"{GIB}\n", "job/step/memory.max": "max\n"},  # in a step of a SLURM job
        {"job/memory.max": f"{3 * GIB}\n", "job/step/memory.max": f"{GIB}\n"},
        {"memory/memory.limit_in_bytes": f"{GIB}\n"},  # cgroup v1
    ],
)
def test_control_groups_limit_the_memory(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    own.write_text("1:name=systemd:/old\n0::/job/step\n")
    for name, text in files.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text)
    monkeypatch.setattr("ltx2_cli.parallel.devices.CGROUPS", groups)
    monkeypatch.setattr("ltx2_cli.parallel.devices.OWN_GROUP", own)
    assert device_memory(cpu()).limit == PLANNABLE_FRACTION * GIB


def test_a_tpu_slice_is_laid_out_by_chips() -> None:
    assert [(device.coords, device.core_on_chip) for device in tpus("TPU7x", 4, cores=2)] == [
        ((0, 0, 0), 0),
        ((0, 0, 0), 1),
        ((1, 0, 0), 0),
        ((1, 0, 0), 1),
    ]
