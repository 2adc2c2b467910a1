"""The one place that calls `jax.jit`, under the sharding plan of a function's layers."""

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import lru_cache, wraps
from typing import Any

import jax
from jax.experimental.layout import Format

from ltx2_cli.chips import chip
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan

CompilerOptions = dict[str, str | bool]
# By platform. XLA for the CPU hands convolutions to a library, which takes up to twice as long for wide ones.
CONVOLUTION_OPTIONS: dict[str, CompilerOptions] = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}
# By platform. XLA for the CPU converts bfloat16 weights to float32: with this pass, of all layers ahead of their loop.
# XLA for GPUs waits for half of the layers that arrive from the host, unless this scheduler puts their copies earlier.
LOOP_OPTIONS: dict[str, CompilerOptions] = {
    "cpu": {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"},
    "gpu": {"xla_gpu_enable_latency_hiding_scheduler": True},
}
PROGRAMS = 64  # compiled functions that stay loaded: about ten sizes


@lru_cache(PROGRAMS)
def jitted(
    function: Callable[..., Any],
    out_shardings: Any,
    sharding: ShardingPlan | None = None,
    donate: tuple[str, ...] = (),
    convolves: bool = False,
    sizes: Hashable = None,
    **static: Any,
) -> Any:
    """`jax.jit` of `function` with its static arguments, traced under a sharding plan; cached by all arguments.
    `convolves`: its work is convolutions, with compiler options of their own. `sizes`, of its arguments, make the cache
    an entry for each: programs of old sizes leave the devices after `PROGRAMS` newer ones."""

    @wraps(function)
    def bound(*arguments: Any) -> Any:
        with activate(sharding) if sharding else nullcontext():
            return function(*arguments, **static)

    options = _compiler_options(sharding.mesh.devices.flat[0], convolves) if sharding else _loop_options(out_shardings)
    return jax.jit(bound, out_shardings=out_shardings, donate_argnames=donate, compiler_options=options)


def jitted_once(function: Callable[..., Any], out_shardings: Any, donate: tuple[str, ...] = ()) -> Any:
    """`jax.jit` of a function that needs no sharding plan, without a cache: its caller keeps the program."""
    options = _loop_options(out_shardings)
    return jax.jit(function, out_shardings=out_shardings, donate_argnames=donate, compiler_options=options)


def _compiler_options(device: jax.Device, convolves: bool) -> CompilerOptions | None:
    if convolves:
        return CONVOLUTION_OPTIONS.get(device.platform)
    known = chip(device.device_kind)
    own = dict(known.compiler_options) if known else {}
    return {**LOOP_OPTIONS.get(device.platform, {}), **own} or None


def _loop_options(out_shardings: Any) -> CompilerOptions | None:
    """The options of a function without a sharding plan, by the devices of its results."""
    for where in jax.tree.leaves(out_shardings):
        sharding: Any = where.sharding if isinstance(where, Format) else where
        return LOOP_OPTIONS.get(next(iter(sharding.device_set)).platform)
    return None
