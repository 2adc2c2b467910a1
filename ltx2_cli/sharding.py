"""Sharding is rules: a mesh, and which mesh axis each logical axis of a weight or an activation lies along."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from itertools import combinations
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.platforms import skip_absent_tpu
from ltx2_cli.spec import Kernel, ShardingSpec, SpecError

skip_absent_tpu()  # all that uses devices imports this module

Rules = tuple[tuple[str, str], ...]
WEIGHT_AXES = ("layers", "embed", "heads", "mlp", "vocab", "conv_in", "conv_out")
ACTIVATION_AXES = ("rows", "tokens", "audio_tokens", "heads")
LANES = 128  # columns of a TPU's tile


class Declared(Protocol):
    """What a plan asks of a weight."""

    @property
    def source(self) -> str:
        """Its name in the checkpoint."""

    @property
    def axes(self) -> tuple[str | None, ...]:
        """A logical name or None for each dimension."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size in each dimension."""

    @property
    def dtype(self) -> np.dtype:
        """What its numbers are."""


@dataclass(frozen=True)
class ShardingPlan:
    """A mesh of devices and the rules from logical to mesh axes. Hashable: a static argument of compiled functions."""

    mesh: Mesh
    weights: Rules
    activations: Rules
    attention: Kernel = Kernel.xla
    tile_rows: int | None = None

    def weight(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """Where a weight of these logical axes lies."""
        return NamedSharding(self.mesh, PartitionSpec(*_lookup(self.weights, axes)))

    def place(self, weight: Declared) -> NamedSharding | Format:
        """Where a weight lies, and in which tiles if that is not left to the device."""
        sharding, rows = self.weight(weight.axes), self.tile_rows
        stacked = weight.axes[:1] == ("layers",) and len(weight.axes) == 3 and weight.dtype.itemsize == 2
        if rows is None or not stacked or weight.shape[1] % rows:  # libtpu 0.0.42 aborts where a tile is not filled
            return sharding
        return Format(Layout((0, 1, 2), ((rows, LANES), (2, 1))), sharding)

    def activation(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """How an activation of these logical axes lies. What does not divide by its mesh axis, such as the single row
        of an unguided pass, stays whole."""
        mesh_axes = zip(shape, _lookup(self.activations, axes), strict=True)
        return PartitionSpec(
            *(axis if axis and not length % self.mesh.shape[axis] else None for length, axis in mesh_axes)
        )

    def parts(self, axis: str) -> int:
        """Into how many parts a logical axis of activations is divided."""
        (along,) = _lookup(self.activations, (axis,))
        return self.mesh.shape[along] if along else 1

    @property
    def text(self) -> str:
        """The mesh in words, without axes of one device."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def _lookup(rules: Rules, axes: tuple[str | None, ...]) -> list[str | None]:
    table = dict(rules)
    return [table.get(axis) if axis else None for axis in axes]


def lay_out(
    spec: ShardingSpec,
    devices: Sequence[jax.Device],
    weights: Sequence[Declared],
    rows: int = 1,
    heads: Mapping[str, int] = MappingProxyType({}),
) -> ShardingPlan:
    """The plan that a profile means on these devices for batches of `rows`: one device where its mesh has no axis.

    `heads` counts those of each attention that the rules split; the profile's attention kernel is one of the table, not
    `auto`. Raises `SpecError` with everything that does not fit:
    rules to the mesh, sizes to the devices, weights and heads to both; and with the nearest mesh that does.
    """
    if wrong := list(_wrong_rules(spec)):
        sentences, hints = (dict.fromkeys(each) for each in zip(*wrong, strict=True))
        raise SpecError(f"sharding profile {spec.profile}: {'; '.join(sentences)}", "; ".join(hints))
    lay = partial(_lay_out, devices=devices, weights=weights, rows=rows, heads=heads)
    try:
        return lay(spec)
    except SpecError as error:
        raise SpecError(str(error), _nearest(spec, lay, len(devices)) + error.hint) from None


def _nearest(spec: ShardingSpec, lay: Callable[[ShardingSpec], ShardingPlan], devices: int) -> str:
    """What to type for the mesh that differs along one axis, as little as can be, and fits; empty if none does."""
    sizes = divisors(devices)
    others = sorted((abs(size - asked), axis, size) for axis, asked in spec.mesh.items() for size in sizes)
    for _, axis, size in others:
        with suppress(SpecError):
            lay(replace(spec, mesh={**spec.mesh, axis: size}))
            return f"nearest: --set sharding.mesh.{axis}={size}; or "
    return ""


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _lay_out(
    spec: ShardingSpec, devices: Sequence[jax.Device], weights: Sequence[Declared], rows: int, heads: Mapping[str, int]
) -> ShardingPlan:
    mesh = _mesh(spec, devices, rows)
    tile_rows = spec.tile_rows if devices[0].platform == "tpu" else None
    weight_rules, activation_rules = (tuple(sorted(each.items())) for each in (spec.weights, spec.activations))
    plan = ShardingPlan(mesh, weight_rules, activation_rules, spec.attention, tile_rows)
    if problems := [
        *(problem for weight in weights for problem in _misfits(plan, weight)),
        *_shared_heads(plan, heads),
    ]:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise SpecError(
            f"sharding profile {spec.profile} does not fit the model: {'; '.join(problems[:5])}{more}",
            "another mesh with --set sharding.mesh.AXIS=SIZE, another profile, or --sharding single",
        )
    return plan


def _mesh(spec: ShardingSpec, devices: Sequence[jax.Device], rows: int) -> Mesh:
    if not spec.mesh:
        return Mesh(np.asarray(devices[:1]), ("device",))
    asked = [size for size in spec.mesh.values() if size != -1]
    countable = min(asked, default=1) > 0 and len(spec.mesh) - len(asked) <= 1
    sizes = _sizes(spec, len(devices), rows) if countable else {}
    if not sizes or math.prod(sizes.values()) != len(devices):
        shape = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.items())
        raise SpecError(
            f"sharding profile {spec.profile}: a mesh of {shape} does not fit {len(devices)} devices",
            "another with --set sharding.mesh.AXIS=SIZE, or --sharding single",
        )
    laid = create_device_mesh(list(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(laid, tuple(sizes))


def _sizes(spec: ShardingSpec, devices: int, rows: int) -> dict[str, int]:
    """Devices along each axis. The axis of the rows takes no more than there are rows to lie side by side, where that
    of the tokens has the rest."""
    sizes = dict(spec.mesh)
    rest = [axis for axis, size in sizes.items() if size == -1]
    axis, tokens = spec.activations.get("rows"), spec.activations.get("tokens")
    if axis in sizes and rest == [tokens]:
        others = math.prod(size for name, size in sizes.items() if name not in (axis, tokens))
        sizes[axis] = math.gcd(sizes[axis], rows, devices // others)
    known = math.prod(size for size in sizes.values() if size != -1)
    return {axis: devices // known if size == -1 else size for axis, size in sizes.items()}


def _wrong_rules(spec: ShardingSpec) -> Iterator[tuple[str, str]]:
    """What is wrong with the rules and the mesh's axes by themselves, and what to do about it."""
    for what, rules, known in (
        ("weights", spec.weights, WEIGHT_AXES),
        ("activations", spec.activations, ACTIVATION_AXES),
    ):
        for axis in rules:
            if axis not in known:
                yield f"{what} have no axis `{axis}`{_closest(axis, known)}", f"{what} have {_quoted(known)}"
    named = {*spec.weights.values(), *spec.activations.values()}
    for axis in sorted(named - set(spec.mesh)):
        yield (
            f"its mesh has no axis `{axis}`{_closest(axis, spec.mesh)}",
            f"the mesh has {_quoted(spec.mesh) or 'none'}",
        )
    for axis, size in spec.mesh.items():
        if size != 1 and axis not in named:
            yield (
                f"no rule names mesh axis `{axis}`{_closest(axis, named)}",
                f"leave out {axis}: its devices do the same work",
            )
    for one, other in combinations(sorted(spec.activations), 2):
        if spec.activations[one] == spec.activations[other] and {one, other} != {"tokens", "audio_tokens"}:
            axis = spec.activations[one]
            yield f"{one} and {other} of activations both lie along mesh axis `{axis}`", "give each an axis of its own"


def _closest(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, known, 1)
    return f"; closest: `{found[0]}`" if found else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _shared_heads(plan: ShardingPlan, heads: Mapping[str, int]) -> Iterator[str]:
    parts = plan.parts("heads")
    for name, count in heads.items():
        if count % parts:
            yield f"the {count} heads of {name} do not divide by the {parts} devices that share them"


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


def active() -> ShardingPlan | None:
    """The plan that is followed here."""
    return _active.get()


def platform() -> str:
    """The platform that the traced program is for: that of the active plan's devices, else of the default device."""
    plan = _active.get()
    return jax.default_backend() if plan is None else plan.mesh.devices.flat[0].platform


def constrain(x: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
    """`x` laid out by its logical axes under the active plan; `x` itself where none is active."""
    plan = _active.get()
    if plan is None:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(plan.mesh, plan.activation(axes, x.shape)))


def fill(x: jax.Array, axes: tuple[str | None, ...], dimension: int) -> jax.Array:
    """`x` laid out by its logical axes, with zeros behind one dimension so that the devices share it evenly."""
    plan, axis = _active.get(), axes[dimension]
    if plan is None or axis is None:
        return x
    behind = [(0, 0)] * x.ndim
    behind[dimension] = (0, -x.shape[dimension] % plan.parts(axis))
    return constrain(jnp.pad(x, behind), axes)
