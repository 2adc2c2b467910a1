"""Rotary position embedding in its split form (arXiv:2104.09864)."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rope(NamedTuple):
    """Cos and sin of positions, each float32 [positions, heads, head_dim / 2]."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


# The ropes of the axes of each grid of tokens; grids follow each other. Each lane of a head belongs to one axis and is
# zero in the ropes of the others, so that a token's rope is the sum of its positions' ropes.
RopeGrids = Sequence[Sequence[Rope]]


def axis_ropes(
    fractions: Sequence[np.ndarray], width: int, heads: int, theta: float, still: Sequence[int] = ()
) -> tuple[Rope, ...]:
    """The ropes of a grid's axes; `fractions` are each axis's positions over the largest, float32 [positions].
    Frequencies are a log grid from π/2 to theta·π/2, made in float64; angles are float32, as in the training of the
    weights. In width/2 lanes the axes run fastest; the lanes left over are identity, in front. `still` counts the
    positions of further axes that do not rotate."""
    axes, lanes = len(fractions), width // 2
    count = lanes // axes
    grid = (theta ** np.linspace(0.0, 1.0, count, dtype=np.float64) * (np.pi / 2)).astype(np.float32)
    shapes = [(len(positions), lanes) for positions in fractions] + [(positions, lanes) for positions in still]
    ropes = [Rope(np.zeros(shape, np.float32), np.zeros(shape, np.float32)) for shape in shapes]
    ropes[0].cos[:, : lanes - count * axes] = 1
    for axis, positions in enumerate(fractions):
        angles = ((positions.astype(np.float32) * 2 - 1)[:, None] * grid).astype(np.float64)
        own = slice(lanes - count * axes + axis, None, axes)
        ropes[axis].cos[:, own], ropes[axis].sin[:, own] = np.cos(angles), np.sin(angles)
    return tuple(Rope(*(table.reshape(len(table), heads, lanes // heads) for table in rope)) for rope in ropes)


def over_tokens(grids: Sequence[Sequence[Any]]) -> Any:
    """The rope of all tokens from the ropes of the axes, packed or not. Traced: the host never makes it."""
    by_grid = [reduce(partial(jax.tree.map, _over_cells), axes) for axes in grids]
    return jax.tree.map(lambda *tables: jnp.concatenate(tables), *by_grid)


def _over_cells(outer: jax.Array, inner: jax.Array) -> jax.Array:
    """The sums of all pairs of rows, the inner rows fastest."""
    return (outer[:, None] + inner).reshape(-1, *inner.shape[1:])


def pack_rope(rope: Rope) -> jax.Array:
    """Each head's cosines, then its sines, float32 [tokens, heads * head_dim]."""
    return jnp.concatenate(rope, axis=-1).reshape(rope.cos.shape[0], -1)


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the halves of each head of x [batch, tokens, heads, head_dim] by its token's angles."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
