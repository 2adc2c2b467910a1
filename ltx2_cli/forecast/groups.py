"""Which devices a collective joins, in every spelling of XLA, and along which mesh axes they lie.

Devices are numbered by their place in the mesh's array, row by row: so `jax.jit` hands them to XLA.
"""

import re

import numpy as np
from jax.sharding import Mesh

_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\]"
    r"(?:, device_ids=\((?P<order>\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))? \{(?P<along>[^}]*)\}"
)
_AXIS = re.compile(r"'?([\w.]+)'?=(\d+)")
_PART = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?'?")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")

Groups = list[tuple[int, ...]]


def groups(attributes: str, devices: int) -> Groups:
    """The devices of each group of a collective, or the two of each pair of a permutation.

    `{{0,1},{2,3}}` lists them; `[2,2]<=[4]` and `[2,2]<=[2,2]T(1,0)` count, transpose, and cut into rows;
    `mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}` names the axes of a mesh of its own. Without any, all join.
    """
    if pairs := _PAIRS.search(attributes):
        return _listed(pairs[1])
    if iota := _IOTA.search(attributes):
        rows, _, order = iota[1].partition("<=")
        return _rows(_counted(order).reshape(_numbers(rows)))
    if mesh := _MESH.search(attributes):
        return _along(mesh["axes"], mesh["order"], mesh["along"], devices)
    listed = _LISTED.search(attributes)
    return _listed(listed[1]) if listed and listed[1] else [tuple(range(devices))]


def axes_of(groups: Groups, mesh: Mesh) -> tuple[str, ...]:
    """The axes of `mesh` along which devices of one group differ."""
    places = [np.unravel_index(np.asarray(group), mesh.devices.shape) for group in groups]
    spans = [[np.ptp(along) > 0 for along in place] for place in places]
    return tuple(axis for axis, crossed in zip(mesh.axis_names, np.any(spans, axis=0), strict=True) if crossed)


def _listed(text: str) -> Groups:
    return [tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", text)]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _counted(text: str) -> np.ndarray:
    """`[8]` or `[2,4]T(1,0)`: all numbers in order, as an array of that shape, transposed."""
    shape, _, order = text.partition("T")
    dims = _numbers(shape)
    return np.arange(np.prod(dims)).reshape(dims).transpose(_numbers(order) or None)


def _rows(array: np.ndarray) -> Groups:
    return [tuple(map(int, row)) for row in array]


def _along(axes: str, order: str | None, along: str, devices: int) -> Groups:
    """A part of an axis, `'a':(2)4`, is 4 long and has 2 of its kind before it, slower than it."""
    sizes = {name: [int(size)] for name, size in _AXIS.findall(axes)}
    joined = []
    for name, before, size in _PART.findall(along):
        if before:
            sizes[name] = [int(before), int(size), sizes[name][0] // (int(before) * int(size))]
        joined.append((name, bool(before)))
    dims: list[int] = []
    chosen: list[int] = []
    for name, parts in sizes.items():
        chosen += [len(dims) + (1 if partial else 0) for other, partial in joined if other == name]
        dims += parts
    numbers = np.arange(devices) if order is None else _ordered(order)
    array = numbers.reshape(dims)
    array = np.moveaxis(array, chosen, range(-len(chosen), 0))
    return _rows(array.reshape(-1, np.prod([dims[axis] for axis in chosen])))


def _ordered(text: str) -> np.ndarray:
    return _counted(text).reshape(-1) if text.startswith("[") else np.asarray(_numbers(text))
