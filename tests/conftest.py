"""Every test runs on the CPU, offline, with eight virtual devices and full-precision products."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what is counted is compiled, and nothing is left behind
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs the tests in the background ignores it

jax.config.update("jax_default_matmul_precision", "highest")
