"""Which of jax's platforms are tried: not the TPU where only its compiler is installed."""

import os
from contextlib import suppress
from glob import glob
from typing import Any

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
