"""`ltx2 doctor`: each thing that can be broken is found, with what helps."""

import json
import shutil
import sys
from importlib import metadata
from math import nan
from pathlib import Path
from types import SimpleNamespace

import imageio_ffmpeg
import jax
import numpy as np
import pytest
from huggingface_hub import constants

from ltx2_cli.core import self_test
from ltx2_cli.errors import NotFiniteError, UsageError
from ltx2_cli.nn.attention_cases import Case, attended, drawn, error
from ltx2_cli.nn.kernels.operands import Operands
from ltx2_cli.nn.rope import Rope
from ltx2_cli.request.spec import DType
from ltx2_cli.runs import doctor
from ltx2_cli.runs.doctor import Finding, State
from program import run_program


def test_this_machine_computes_what_it_should(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.setattr(doctor, "find_devices", lambda: jax.devices()[:1])  # the others compile the same again
    monkeypatch.setattr(doctor, "glob", lambda pattern: [])
    assert run_program(monkeypatch, "doctor", "--json") == 0
    out, err = capsys.readouterr()
    findings = [Finding(**values) for values in json.loads(out)]
    assert err == ""
    areas = {finding.area for finding in findings}
    machine = {"versions", "ffmpeg", "disk", "cache", "settings", "devices", "TPU", "GPU"}
    assert areas >= {*machine, "self-test", "attention"}
    assert [finding for finding in findings if finding.state == State.broken] == []
    attention = [finding.text.split(":")[0] for finding in findings if finding.area == "attention"]
    assert attention == [f"{kernel} in {dtype}" for kernel in ("blockwise", "xla") for dtype in ("float32", "bfloat16")]

    stored = json.loads(self_test.STORED_RESULTS.read_text())
    other = {name: [2 * value for value in values] for name, values in stored.items()}
    (tmp_path / "other.json").write_text(json.dumps(other))
    monkeypatch.setattr(self_test, "STORED_RESULTS", tmp_path / "other.json")
    assert self_test.denoiser_error(jax.devices()[0]) == pytest.approx(0.5, abs=1e-4)


def test_without_devices_the_cure_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def refuse() -> None:
        raise UsageError("jax cannot use JAX_PLATFORMS=cuda", "leave JAX_PLATFORMS out")

    monkeypatch.setattr(doctor, "find_devices", refuse)
    assert run_program(monkeypatch, "doctor") == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].split() == (
        ["broken", "devices", "jax", "cannot", "use", "JAX_PLATFORMS=cuda:", "leave", "JAX_PLATFORMS", "out"]
    )
    assert err.splitlines()[0] == f"error: 1 of {len(out.splitlines())} findings are broken"


def test_keys_too_many_are_beyond_the_tolerance_of_attention():
    """As a kernel attends to that fills keys up to a block and does not mask them."""
    for dtype, most in self_test.ATTENTION_TOLERANCE.items():
        case = drawn(self_test.QUERIES, self_test.KEYS, self_test.HEADS, self_test.HEAD_SIZE, dtype.value)
        first, keys, values, (rope, other), *others = case.operands
        filled = [np.pad(x.astype(np.float32), ((0, 0), (0, 127), (0, 0))) for x in (keys, values)]
        longer = Rope(*(np.pad(table, ((0, 127), (0, 0), (0, 0))) for table in other))
        wrong = Case(Operands(first, *filled, (rope, longer), *others), case.heads)
        assert error(attended(wrong), attended(case)) > 5 * most


@pytest.mark.parametrize(
    ("result", "state"),
    [
        (1e-6, State.ok),
        (2e-3, State.broken),
        (nan, State.broken),
        (NotFiniteError("the video latents are not finite", ""), State.broken),
        (RuntimeError("INTERNAL: no such kernel\nmore"), State.broken),
        (RuntimeError(""), State.broken),
        (UsageError("attention by cudnn cannot run: float32", ""), State.ok),
    ],
)
def test_what_is_wrong_or_fails_is_broken(result: object, state: State):
    found = doctor._judged("attention", "xla in float32: results", result, 1e-3, "another")
    assert (found.state, found.cure) == (state, "another" if state is State.broken else "")
    assert "\n" not in found.text


def test_an_error_of_jax_is_a_finding():
    def fail() -> float:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")

    assert isinstance(doctor._attempt(fail), jax.errors.JaxRuntimeError)


def test_versions_out_of_bounds_are_found(monkeypatch: pytest.MonkeyPatch):
    assert [finding.state for finding in doctor.check_versions()] == [State.ok]
    monkeypatch.setitem(sys.modules, "transformers", None)  # which may be what is broken
    lines = ["jax>=99", "numpy", "no-such-package>=1", "libtpu>=99; extra == 'tpu'", "rich>=99; python_version > '3'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: lines)
    found = [*doctor.check_versions()]
    assert {finding.state for finding in found} == {State.broken}
    assert len(found) == 3
    for finding, named in zip(found, ("jax>=99", "no-such-package", "rich>=99"), strict=True):
        assert named in finding.text

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "requires", missing)
    assert [finding.state for finding in doctor.check_versions()] == [State.note]


def test_an_ffmpeg_without_an_encoder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert doctor.check_ffmpeg().state is State.ok
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\necho ' A..... aac  AAC'\n")
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: str(program))
    assert "does not run" in doctor.check_ffmpeg().text  # it may not be executed
    program.chmod(0o755)
    found = doctor.check_ffmpeg()
    assert (found.state, found.text) == (State.broken, f"{program} has no encoder libx264")
    assert "IMAGEIO_FFMPEG_EXE" in found.cure


def test_too_little_room_and_no_cache_are_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=95e9))
    disk, offline, cache = doctor.check_folders()
    assert disk.text.startswith(f"95.0 GB free in {tmp_path / 'hub'}, too little to download diffusers/LTX-2.3")
    assert "Lightricks/LTX-2 (" not in disk.text
    assert (offline.area, cache.area) == ("downloads", "cache")
    assert {disk.state, offline.state, cache.state} == {State.note}
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1e12))
    assert next(doctor.check_folders()).state is State.ok


def test_chips_that_jax_does_not_use_are_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "glob", lambda pattern: ["/dev/nvidia0"])
    monkeypatch.setattr(doctor, "is_tpu_absent", lambda platforms: False)
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    tpu, gpu = doctor.check_drivers("cpu")
    assert (tpu.state, tpu.cure) == (State.broken, "in a clone of ltx2: pip install -c constraints.txt '.[tpu]'")
    assert (gpu.state, gpu.cure) == (State.broken, "in a clone of ltx2: pip install -c constraints.txt '.[gpu]'")
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)
    tpu, gpu = doctor.check_drivers("cpu")
    assert "though libtpu is installed" in tpu.text
    assert "unset JAX_PLATFORMS" in gpu.cure
    assert [finding.area for finding in doctor.check_drivers("gpu")] == ["TPU"]


def test_the_stored_latents_are_those_of_the_packaged_demo():
    stored = json.loads(self_test.STORED_RESULTS.read_text())
    assert {name: len(values) for name, values in stored.items()} == {"video": 256, "audio": 288}
    assert all(np.std(values) > 0.1 for values in stored.values())
    assert set(self_test.ATTENTION_TOLERANCE) == {DType.float32, DType.bfloat16}
