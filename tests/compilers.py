"""Marks of tests that compile for TPUs or GPUs that are not here.

`make compilers` installs their compilers, the optional dependencies `tpu-compiler` and `gpu-compiler`, as CI does.
"""

from importlib.util import find_spec

import pytest

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed: make compilers")
needs_cuda = pytest.mark.skipif(
    find_spec("jax_cuda13_plugin") is None, reason="the GPUs' compiler is not installed: make compilers"
)
