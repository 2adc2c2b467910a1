"""Sharding is rules: a mesh, and which mesh axis each logical axis of a weight or an activation lies along."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ShardingPlan:
    """A mesh of devices and the rules from logical to mesh axes. Hashable: a static argument of compiled functions."""

    mesh: Mesh
    weights: Rules
    activations: Rules

    def weight(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """Where a weight of these logical axes lies."""
        return _place(self.mesh, self.weights, axes)

    def activation(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """Where an activation of these logical axes lies."""
        return _place(self.mesh, self.activations, axes)

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def _place(mesh: Mesh, rules: Rules, axes: tuple[str | None, ...]) -> NamedSharding:
    table = dict(rules)
    return NamedSharding(mesh, PartitionSpec(*(table.get(axis) if axis else None for axis in axes)))


_active: ContextVar[ShardingPlan | None] = ContextVar("active sharding plan", default=None)


@contextmanager
def activate(plan: ShardingPlan) -> Iterator[None]:
    """While a function is traced inside, `constrain` follows `plan`."""
    token = _active.set(plan)
    try:
        yield
    finally:
        _active.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` laid out by its logical axes under the active plan; `x` itself where none is active."""
    plan = _active.get()
    return x if plan is None else jax.lax.with_sharding_constraint(x, plan.activation(axes))
