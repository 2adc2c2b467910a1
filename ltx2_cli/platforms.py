"""Which of jax's platforms are tried, not the TPU where only its compiler is installed; and which devices are found."""

import os
from contextlib import suppress
from glob import glob
from typing import TYPE_CHECKING, Any

from ltx2_cli.spec import SpecError

if TYPE_CHECKING:
    import jax

TPU_DEVICES = ("/dev/accel*", "/dev/vfio/[0-9]*")


def skip_absent_tpu() -> None:
    """Keep jax from starting libtpu on a machine without a TPU, which takes up to half a minute and prints lines.

    GPUs, a platform that JAX_PLATFORMS names, and compiling for a described TPU stay as they are. To be called before
    jax looks for devices; later, nothing is done.
    """
    import jax
    from jax.extend.backend import register_backend_factory

    settings: Any = jax.config  # has no types
    if is_tpu_absent(settings.jax_platforms):
        with suppress(RuntimeError):  # it was started
            register_backend_factory("tpu", lambda: None, priority=0, fail_quietly=True)


def is_tpu_absent(platforms: str | None) -> bool:
    """Whether no platform is asked for, and no device file of a TPU is there. jax itself asks for `tpu,cpu` where it
    finds one on the PCI bus."""
    return not (platforms or "JAX_FORCE_TPU_INIT" in os.environ or any(map(glob, TPU_DEVICES)))


def find_devices() -> "list[jax.Device]":
    """The devices that jax finds. Raises `SpecError` where it finds none of the platforms that JAX_PLATFORMS names."""
    import jax

    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a platform's plugin is not installed
        settings: Any = jax.config
        reason = str(error).partition(" (set JAX_PLATFORMS")[0] or "its plugin is not installed"
        raise SpecError(
            f"jax cannot use JAX_PLATFORMS={settings.jax_platforms}: {reason}",
            "leave JAX_PLATFORMS out to take what is here; pip install 'ltx2[gpu]' or 'ltx2[tpu]' installs others",
        ) from error
