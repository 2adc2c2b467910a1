"""Images split over devices: what lies beside the part that one of them holds."""

import jax
import jax.numpy as jnp

from ltx2_cli.nn.conv import Padding

IMAGE_AXES = ("height", "width")  # mesh axes that images may be split along, inside `jax.shard_map`


def surround(x: jax.Array, mirrored: bool) -> tuple[jax.Array, Padding]:
    """x [..., height, width, channels] with one place more on each side, as far as these are no zeros around a whole
    image: those are the second result, to be added by a convolution.

    Beside the part of an image stand its neighbours' edges, which other devices send; beside the image itself zeros
    or, `mirrored`, the image again.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    split = [sizes.get(axis, 1) > 1 for axis in IMAGE_AXES]
    added = tuple((0, 0) if each or mirrored else (1, 1) for each in split)
    if mirrored and not all(split):
        here = tuple((0, 0) if each else (1, 1) for each in split)
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 3) + here + ((0, 0),), mode="reflect")
    for axis, each in zip(IMAGE_AXES, split, strict=True):
        if each:
            x = _exchange(x, axis, sizes[axis], mirrored)
    return x, added


def _exchange(x: jax.Array, mesh_axis: str, parts: int, mirrored: bool) -> jax.Array:
    axis = x.ndim - 3 + IMAGE_AXES.index(mesh_axis)

    def place(index: int) -> jax.Array:
        return jax.lax.slice_in_dim(x, index, index + 1, axis=axis)

    last, length = parts - 1, x.shape[axis]
    # who is sent nothing receives zeros
    before = jax.lax.ppermute(place(length - 1), mesh_axis, [(part, part + 1) for part in range(last)])
    behind = jax.lax.ppermute(place(0), mesh_axis, [(part + 1, part) for part in range(last)])
    if mirrored:
        part = jax.lax.axis_index(mesh_axis)
        before = jnp.where(part == 0, place(1), before)
        behind = jnp.where(part == last, place(length - 2), behind)
    return jnp.concatenate([before, x, behind], axis=axis)
