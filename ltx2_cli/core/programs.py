"""The compiled programs of a run, each described before there is a weight, or a device to run it on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from ltx2_cli.sharding import ShardingPlan

# By platform: XLA for the CPU leaves convolutions to a library, over wide ones for up to twice its own code's time.
CONVOLUTION_OPTIONS = {"cpu": {"xla_cpu_experimental_ynn_fusion_type": ""}}


@dataclass(frozen=True)
class Program:
    """One compiled program: what it is called, and how it is lowered from abstract arguments.

    They have the shapes, dtypes and shardings that the run's have, so that the run compiles nothing more.
    """

    name: str
    network: str | None  # whose weights it takes, the last to be loaded of several; None: no network's
    lower: Callable[[], jax.stages.Lowered]
    stage: int = 0  # the plan's, whose loop it belongs to


@cache
def convolving(function: Callable[..., Any], sharding: ShardingPlan, *static: str) -> Any:
    """`function`, whose work is convolutions, compiled for the devices of `sharding`; which arguments are static."""
    platform = sharding.mesh.devices.flat[0].platform
    return jax.jit(function, static_argnames=static, compiler_options=CONVOLUTION_OPTIONS.get(platform))


def abstract(arrays: Any, sharding: Sharding) -> Any:
    """Any tree of arrays without their values, laid out as `sharding` says."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding), arrays)


def results(traced: jax.stages.Traced) -> Any:
    """What a traced program returns, abstract: each array lies as the constraint says that the program ends it with.

    One that is left to the compiler has no sharding here.
    """
    equations = (each for each in traced.jaxpr.eqns if each.primitive.name == "sharding_constraint")
    shardings = {each.outvars[0]: each.params["sharding"] for each in equations}
    ends = [
        jax.ShapeDtypeStruct(each.aval.shape, each.aval.dtype, sharding=shardings.get(each))
        for each in traced.jaxpr.jaxpr.outvars
    ]
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), ends)
