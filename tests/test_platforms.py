"""libtpu without a TPU: it is never started, and nothing is printed; where there may be a TPU, all stays as it is."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest

from ltx2_cli import platforms
from ltx2_cli.platforms import TPU_DEVICES, find_devices, is_tpu_absent
from ltx2_cli.spec import SpecError

COMMAND = """
import os, sys
def end(code, leave=os._exit):
    print("loaded" if "libtpu.so" in open("/proc/self/maps").read() else "not loaded", flush=True)
    leave(code)
os._exit = end
sys.argv = ["ltx2", "generate", "--model", "demo", "--prompt", "a red ball", "--seed", "1", "--dry-run"]
from ltx2_cli.__main__ import main
main()
"""


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.skipif(not is_tpu_absent(None), reason="there is a TPU")
def test_libtpu_is_not_started(tmp_path: Path):
    usual = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND], env=usual, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nnot loaded\n")


def test_a_tpu_is_looked_for_where_one_may_be(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("JAX_FORCE_TPU_INIT", raising=False)
    monkeypatch.setattr(platforms, "TPU_DEVICES", (str(tmp_path / "accel*"),))
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
def test_a_platform_that_is_not_here_is_a_sentence(
    failure: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def devices() -> None:
        raise failure

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(SpecError, match=r"^jax cannot use JAX_PLATFORMS=cpu: ") as caught:
        find_devices()
    assert str(caught.value).endswith(reason)
