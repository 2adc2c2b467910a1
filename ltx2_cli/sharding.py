"""Sharding is rules: a mesh, and which mesh axis each logical axis of a weight or an activation lies along."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.spec import ShardingSpec, SpecError

Rules = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ShardingPlan:
    """A mesh of devices and the rules from logical to mesh axes. Hashable: a static argument of compiled functions."""

    mesh: Mesh
    weights: Rules
    activations: Rules

    def weight(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """Where a weight of these logical axes lies."""
        return NamedSharding(self.mesh, PartitionSpec(*_lookup(self.weights, axes)))

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def _lookup(rules: Rules, axes: tuple[str | None, ...]) -> list[str | None]:
    table = dict(rules)
    return [table.get(axis) if axis else None for axis in axes]


class Declared(Protocol):
    """What `lay_out` asks of a weight."""

    @property
    def source(self) -> str:
        """Its name in the checkpoint."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """A logical name or None for each dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""


def lay_out(spec: ShardingSpec, devices: Sequence[jax.Device], weights: Sequence[Declared]) -> ShardingPlan:
    """The plan that a profile means on these devices: one device where its mesh has no axis.

    Raises `SpecError` with everything that does not fit: sizes to the devices, rules to the mesh, weights to both.
    """
    mesh = _mesh(spec, devices)
    rules = {**spec.weights, **spec.activations}
    if strangers := sorted(set(rules.values()) - set(mesh.axis_names)):
        known = ", ".join(f"`{axis}`" for axis in mesh.axis_names)
        raise SpecError(f"sharding profile {spec.profile}: its mesh has no axis `{strangers[0]}`", f"it has {known}")
    plan = ShardingPlan(mesh, tuple(sorted(spec.weights.items())), tuple(sorted(spec.activations.items())))
    if problems := [problem for weight in weights for problem in _misfits(plan, weight)]:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise SpecError(
            f"sharding profile {spec.profile} does not fit the model: {'; '.join(problems[:5])}{more}",
            "another mesh with --set sharding.mesh.AXIS=SIZE, another profile, or --sharding single",
        )
    return plan


def _mesh(spec: ShardingSpec, devices: Sequence[jax.Device]) -> Mesh:
    if not spec.mesh:
        return Mesh(np.asarray(devices[:1]), ("device",))
    known = math.prod(size for size in spec.mesh.values() if size != -1)
    sizes = [len(devices) // known if size == -1 else size for size in spec.mesh.values()]
    if math.prod(sizes) != len(devices):
        shape = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.items())
        raise SpecError(
            f"sharding profile {spec.profile}: a mesh of {shape} does not fit {len(devices)} devices",
            "change it with --set sharding.mesh.AXIS=SIZE, or use --sharding single",
        )
    return Mesh(create_device_mesh(sizes, devices), tuple(spec.mesh))


def _misfits(plan: ShardingPlan, weight: Declared) -> Iterator[str]:
    placed = _lookup(plan.weights, weight.axes)
    axes = [axis for axis in placed if axis is not None]
    if len(axes) != len(set(axes)):
        yield f"{weight.source} would lie twice along mesh axis `{max(axes, key=axes.count)}`"
    for length, axis in zip(weight.shape, placed, strict=True):
        if axis is not None and length % plan.mesh.shape[axis]:
            yield f"{weight.source}: {length} does not divide by the {plan.mesh.shape[axis]} of mesh axis `{axis}`"


_active: ContextVar[ShardingPlan | None] = ContextVar("active sharding plan", default=None)


@contextmanager
def activate(plan: ShardingPlan) -> Iterator[None]:
    """While a function is traced inside, `constrain` follows `plan`."""
    token = _active.set(plan)
    try:
        yield
    finally:
        _active.reset(token)


def on_one_cpu() -> bool:
    """Whether what is traced will run on one CPU: the active plan's, or where none is active, the default device."""
    plan = _active.get()
    if plan is None:
        return jax.default_backend() == "cpu"
    return plan.mesh.size == 1 and plan.mesh.devices.flat[0].platform == "cpu"


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """`x` laid out by its logical axes under the active plan; `x` itself where none is active.

    A dimension that does not divide by its mesh axis, such as the single row of an unguided pass, stays whole.
    """
    plan = _active.get()
    if plan is None:
        return x
    mesh_axes = zip(x.shape, _lookup(plan.activations, axes), strict=True)
    fitting = (axis if axis and not length % plan.mesh.shape[axis] else None for length, axis in mesh_axes)
    return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, PartitionSpec(*fitting)))
