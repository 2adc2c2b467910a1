"""The one place that calls `jax.jit`: a function is compiled under the sharding plan that its layers ask for."""

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from functools import lru_cache, wraps
from typing import Any

import jax

from ltx2_cli.chips import chip
from ltx2_cli.parallel.constrain import activate
from ltx2_cli.parallel.mesh import ShardingPlan

# By platform: XLA for the CPU leaves convolutions to a library, over wide ones for up to twice its own code's time.
CONVOLUTION_OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}
PROGRAMS = 64  # that stay loaded; of some ten sizes


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
    """`function` under a sharding plan with its static arguments, compiled to lay its results out so; once for the same
    arguments. `convolves`: its work is convolutions. `sizes` are those of its arguments: what was compiled for others
    leaves the devices once `PROGRAMS` are newer."""

    @wraps(function)
    def bound(*arguments: Any) -> Any:
        with activate(sharding) if sharding else nullcontext():
            return function(*arguments, **static)

    options = _compiler_options(sharding.mesh.devices.flat[0], convolves) if sharding else None
    return jax.jit(bound, out_shardings=out_shardings, donate_argnames=donate, compiler_options=options)


def jitted_once(function: Callable[..., Any], out_shardings: Any, donate: tuple[str, ...] = ()) -> Any:
    """`function`, whose work asks for no plan, compiled; its caller keeps the program."""
    return jax.jit(function, out_shardings=out_shardings, donate_argnames=donate)


def _compiler_options(device: jax.Device, convolves: bool) -> dict[str, str] | None:
    if convolves:
        return CONVOLUTION_OPTIONS.get(device.platform)
    known = chip(device.device_kind)
    return (dict(known.compiler_options) or None) if known else None
