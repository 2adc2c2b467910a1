"""A mesh of devices and the rules that lay arrays out on it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MappingProxyType

import jax
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ltx2_cli.chips import chip
from ltx2_cli.errors import UsageError
from ltx2_cli.parallel.devices import chip_place, skip_absent_tpu, slice_index
from ltx2_cli.parallel.rules import rule_mistakes
from ltx2_cli.request.spec import AttentionBackend, Offload, ShardingSpec
from ltx2_cli.request.spelling import typed
from ltx2_cli.weights.declare import Axes, Shape, Weight
from ltx2_cli.weights.host import HOST

skip_absent_tpu()  # all that uses devices imports this module

Rules = tuple[tuple[str, str], ...]  # logical axis, mesh axis
LANES = 128  # columns of a TPU's tile
SUBLANES = 8  # its rows, unless a profile says otherwise


@dataclass(frozen=True)
class ShardingPlan:
    """A mesh of devices and the rules from logical to mesh axes. Hashable: a static argument of compiled functions."""

    mesh: Mesh
    weights: Rules
    activations: Rules
    attention: AttentionBackend = AttentionBackend.xla
    bf16_tile_sublanes: int | None = None
    input_major: bool = False
    offload: Offload = Offload.none

    def weight(self, axes: tuple[str | None, ...]) -> NamedSharding:
        """The sharding of a weight of these logical axes."""
        return NamedSharding(self.mesh, PartitionSpec(*_lookup(self.weights, axes)))

    def place(self, weight: Weight) -> NamedSharding | Format:
        """The sharding of a weight, with its order and tiles in memory unless the device chooses them."""
        sharding, layout = self.weight(weight.axes), self._layout(weight)
        if self._on_host(weight):
            sharding = sharding.with_memory_kind(HOST)
        return Format(layout, sharding) if layout else sharding

    def layer_order(self, weight: Weight) -> Layout | None:
        """The order in memory of one layer of a stacked weight; None if the device chooses it."""
        layout = self._layout(weight) if weight.dtype.itemsize == 2 else None
        return layout and Layout(tuple(axis - 1 for axis in layout.major_to_minor[1:]))

    def _layout(self, weight: Weight) -> Layout | None:
        rows = self.bf16_tile_sublanes or SUBLANES
        if not _is_stacked_matrix(weight):
            return None
        _, outputs, inputs = weight.shape
        if weight.dtype.itemsize == 1 and self._on_tpus and self._on_host(weight):
            # libtpu 0.0.42 slices a stack on the host in these tiles alone; in others, it copies the whole stack.
            return Layout((0, 1, 2), ((SUBLANES, LANES), (4, 1)))
        if weight.dtype.itemsize != 2:
            return None
        # libtpu 0.0.42 aborts where a tile is not filled
        if self.input_major and outputs % LANES == inputs % rows == 0:
            return Layout((0, 2, 1), ((rows, LANES), (2, 1)))
        if self.bf16_tile_sublanes and outputs % rows == 0:
            return Layout((0, 1, 2), ((rows, LANES), (2, 1)))
        return None

    def mesh_axis(self, axis: str | None) -> str | None:
        """The mesh axis of a logical axis of activations; None: it is not split, as on a mesh axis of one device."""
        mesh_axis = dict(self.activations).get(axis or "")
        return mesh_axis if mesh_axis and self.mesh.shape[mesh_axis] > 1 else None

    def activation(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of an activation. A dimension that its mesh axis does not divide stays whole."""
        mesh_axes = zip(map(self.mesh_axis, axes), shape, strict=True)
        return PartitionSpec(
            *(axis if axis and length % self.mesh.shape[axis] == 0 else None for axis, length in mesh_axes)
        )

    def parts(self, axis: str | None) -> int:
        """The number of parts of a logical axis of activations."""
        mesh_axis = self.mesh_axis(axis)
        return self.mesh.shape[mesh_axis] if mesh_axis else 1

    def pair(self, axis: str | None) -> str | None:
        """The mesh axis of a logical axis of weights, if it has two devices that compute while they send."""
        (mesh_axis,) = _lookup(self.weights, (axis,))
        return mesh_axis if mesh_axis and self.is_pair(mesh_axis) else None

    def is_pair(self, mesh_axis: str) -> bool:
        """Whether an axis of the mesh has two devices that compute while they send."""
        return self.mesh.shape[mesh_axis] == 2 and self.overlaps(mesh_axis)

    def overlaps(self, mesh_axis: str) -> bool:
        """Whether devices along an axis of the mesh compute while they send. Those of one chip send about as fast as
        they copy; with GPUs it was not tried."""
        between_chips = any(len(set(map(chip_place, group))) > 1 for group in self.groups(mesh_axis))
        return between_chips and self.mesh.devices.flat[0].platform != "gpu"

    def groups(self, mesh_axis: str) -> list[list[jax.Device]]:
        """The devices along an axis of the mesh, for each place on the others."""
        along = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index(mesh_axis), -1)
        return along.reshape(-1, self.mesh.shape[mesh_axis]).tolist()

    def keeps_together(self, groups: int) -> bool:
        """Whether each device along the axis of rows holds whole groups of rows, of `groups` in all."""
        return groups % self.parts("rows") == 0

    def _on_host(self, weight: Weight) -> bool:
        """Whether a weight lies in the host's memory: a stack of matrices, or of those of feed-forwards alone; on TPUs
        of those that fill tiles."""
        if self.offload is Offload.none or not _is_stacked_matrix(weight):
            return False
        if self.offload is Offload.feed_forward and "mlp" not in weight.axes:
            return False
        _, outputs, inputs = weight.shape
        return not self._on_tpus or outputs % SUBLANES == inputs % LANES == 0

    @property
    def _on_tpus(self) -> bool:
        return self.mesh.devices.flat[0].platform == "tpu"

    @property
    def text(self) -> str:
        """The mesh in words, without axes of one device."""
        return " x ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items() if size > 1) or "one device"

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())


def _is_stacked_matrix(weight: Weight) -> bool:
    return weight.axes[:1] == ("layers",) and len(weight.axes) == 3


def _lookup(rules: Rules, axes: tuple[str | None, ...]) -> list[str | None]:
    table = dict(rules)
    return [table.get(axis) if axis else None for axis in axes]


def lay_out(
    spec: ShardingSpec,
    devices: Sequence[jax.Device],
    weights: Sequence[Weight],
    rows: int = 1,
    heads: Mapping[str, int] = MappingProxyType({}),
    offload: Offload = Offload.none,
) -> ShardingPlan:
    """The plan of a profile on these devices for batches of `rows`; a mesh without axes is one device. `heads`: the
    number of heads of each attention that the rules split. `offload`: what lies in the host's memory. The attention
    backend is already chosen. Raises `UsageError` with all contradictions of rules, mesh, devices, weights and heads,
    and with the nearest mesh that fits."""
    if mistakes := list(rule_mistakes(spec)):
        sentences, hints = map(dict.fromkeys, zip(*mistakes, strict=True))
        raise UsageError(f"sharding profile {spec.profile}: {'; '.join(sentences)}", "; ".join(hints))
    try:
        plan = _lay_out(spec, devices, weights, rows, heads)
    except UsageError as error:
        hint, sizes = error.hint, [(axis, size) for axis in spec.mesh for size in divisors(len(devices))]
        for axis, size in sorted(sizes, key=lambda change: (abs(change[1] - spec.mesh[change[0]]), change)):
            with suppress(UsageError):
                _lay_out(replace(spec, mesh={**spec.mesh, axis: size}), devices, weights, rows, heads)
                hint = f"nearest: {typed(f'sharding.mesh.{axis}', size)}; or {hint}"
                break
        raise UsageError(str(error), hint) from None
    return replace(plan, offload=offload)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, smallest first."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _lay_out(
    spec: ShardingSpec, devices: Sequence[jax.Device], weights: Sequence[Weight], rows: int, heads: Mapping[str, int]
) -> ShardingPlan:
    mesh = _mesh(spec, devices, rows)
    weight_rules, activation_rules = (tuple(sorted(rules.items())) for rules in (spec.weights, spec.activations))
    plan = ShardingPlan(mesh, weight_rules, activation_rules, spec.attention, *_weight_layout(spec, devices[0]))
    misfits = cache(partial(_misfits, plan))
    problems = [f"{weight.source}{misfit}" for weight in weights for misfit in misfits(weight.axes, weight.shape)]
    parts = plan.parts("heads")
    problems += [
        f"the {count} heads of {name} do not divide by the {parts} devices that share them"
        for name, count in heads.items()
        if count % parts
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UsageError(
            f"sharding profile {spec.profile} does not fit the model: {'; '.join(problems[:5])}{more}",
            f"another mesh: {typed('sharding.mesh.AXIS', 'SIZE')}, or another profile: {typed('sharding', 'single')}",
        )
    return plan


def _weight_layout(spec: ShardingSpec, device: jax.Device) -> tuple[int | None, bool]:
    """Tile height and order of stacked 16-bit weights: the profile's, else the chip's. A device that is no TPU has no
    tiles."""
    if device.platform != "tpu":
        return None, False
    known = chip(device.device_kind)
    sublanes, input_major = (known.bf16_tile_sublanes, known.input_major) if known else (None, False)
    return spec.bf16_tile_sublanes or sublanes, input_major if spec.input_major is None else spec.input_major


def _misfits(plan: ShardingPlan, axes: Axes, shape: Shape) -> list[str]:
    mesh_axes, misfits = _lookup(plan.weights, axes), []
    if repeated := [axis for axis in mesh_axes if axis and mesh_axes.count(axis) > 1]:
        misfits.append(f" would lie twice along mesh axis `{repeated[0]}`")
    for length, axis in zip(shape, mesh_axes, strict=True):
        if axis is not None and length % plan.mesh.shape[axis]:
            misfits.append(f": {length} does not divide by the {plan.mesh.shape[axis]} of mesh axis `{axis}`")
    return misfits


def _mesh(spec: ShardingSpec, devices: Sequence[jax.Device], rows: int) -> Mesh:
    """The mesh of devices. If the token axis takes the remaining devices, the row axis has at most one for each row."""
    if not spec.mesh:
        return Mesh(np.asarray(devices[:1]), ("device",))
    sizes, open_axes = dict(spec.mesh), [axis for axis, size in spec.mesh.items() if size == -1]
    if all(size > 0 for axis, size in sizes.items() if axis not in open_axes) and len(open_axes) <= 1:
        row_axis, token_axis = spec.activations.get("rows"), spec.activations.get("tokens")
        if row_axis in sizes and open_axes == [token_axis]:
            others = math.prod(size for axis, size in sizes.items() if axis not in (row_axis, token_axis))
            sizes[row_axis] = math.gcd(sizes[row_axis], rows, len(devices) // others)
        known = math.prod(size for size in sizes.values() if size != -1)
        sizes |= dict.fromkeys(open_axes, len(devices) // known)
    if min(sizes.values()) < 1 or math.prod(sizes.values()) != len(devices):
        shape = " x ".join(f"{axis} {size}" for axis, size in spec.mesh.items())
        raise UsageError(
            f"sharding profile {spec.profile}: a mesh of {shape} does not fit {len(devices)} devices",
            f"another: {typed('sharding.mesh.AXIS', 'SIZE')}, or {typed('sharding', 'single')}",
        )
    if (slices := num_slices(devices)) == 1:
        return Mesh(create_device_mesh([*sizes.values()], devices, allow_split_physical_axes=True), tuple(sizes))
    rows_along = spec.activations.get("rows", "")
    if sizes.get(rows_along, 1) % slices:  # rows exchange little, and the network between slices is slow
        hint = f"a number of devices along the axis of rows that {slices} divides, or one slice"
        raise UsageError(f"sharding profile {spec.profile}: {slices} TPU slices do not share the rows evenly", hint)
    between = [slices if axis == rows_along else 1 for axis in sizes]
    within = [size // parts for size, parts in zip(sizes.values(), between, strict=True)]
    return Mesh(create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True), tuple(sizes))


def num_slices(devices: Sequence[jax.Device]) -> int:
    """The number of TPU slices that the devices belong to; 1 for other devices."""
    return len({*map(slice_index, devices)})
