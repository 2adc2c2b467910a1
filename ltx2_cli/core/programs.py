"""The compiled programs of a run: each is one function and its arguments, for a run and for compilation ahead of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ltx2_cli.sharding import ShardingPlan

# By platform: XLA for the CPU leaves convolutions to a library, over wide ones for up to twice its own code's time.
CONVOLUTION_OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}


@dataclass(frozen=True)
class Program:
    """One compiled program, described before there is a weight, or a device to run it on.

    The abstract arguments have the shapes, dtypes and shardings of a run's, so that the run compiles nothing more.
    """

    name: str
    network: str | None  # whose weights it takes, the last to be loaded of several; None: no network's
    function: Any  # of `jitted` or `jit_for_convs`
    arguments: Callable[[], tuple[Any, ...]]  # abstract
    stage: int = 0  # the index of the plan's stage to which it belongs

    def __call__(self, *arguments: Any) -> Any:
        """Run it."""
        return self.function(*arguments)

    def lower(self) -> jax.stages.Lowered:
        """The program before XLA compiles it."""
        return self.function.lower(*self.arguments())

    def outputs(self) -> Any:
        """The results, abstract, laid out as the function lays them out."""
        return self.function.eval_shape(*self.arguments())


@cache
def jitted(function: Callable[..., Any], out_shardings: Any, donate: tuple[str, ...] = (), **static: Any) -> Any:
    """`function` with its static arguments, compiled to lay its results out so; once for the same arguments."""
    return jax.jit(partial(function, **static), out_shardings=out_shardings, donate_argnames=donate)


@cache
def jit_for_convs(function: Callable[..., Any], sharding: ShardingPlan, out_shardings: Any, **static: Any) -> Any:
    """As `jitted`, for a function whose work is convolutions on the devices of `sharding`."""
    options = CONVOLUTION_OPTIONS.get(sharding.mesh.devices.flat[0].platform)
    bound = partial(function, sharding=sharding, **static)
    return jax.jit(bound, out_shardings=out_shardings, compiler_options=options)


def as_abstract(arrays: Any, sharding: Sharding) -> Any:
    """Any tree of arrays without their values, laid out as `sharding` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), arrays)
