"""Neighborhood attention: each token of a video [batch, frames, height, width, heads, dim] attends to a window of
tokens around it. At a border the window is shifted inward and keeps its size."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ltx2_cli.nn.layers import precision

Window = tuple[int, int, int]  # frames, height, width

QUERY_BLOCK = 8  # queries of a block along each axis

TokenGrid = Float[jax.Array, "batch frames height width heads dim"]


def neighborhood_attention(q: TokenGrid, k: TokenGrid, v: TokenGrid, window: Window) -> TokenGrid:
    """softmax(q·kᵀ)·v over each token's window, sums in float32; q is scaled already. A block of 8×8×8 queries reads
    one box of keys, which holds the windows of all of them, and masks the rest. Blocks are computed in turn:
    the scores of one are in memory, for a window of 11×11×11 in float32 12 MB for each head and video. Copies of
    operands and result take more: compiled for one v6e chip, 121×128×192 tokens of 4×64 features in bfloat16 take
    10.2 GiB besides the 5.7 of operands and result."""
    grid = q.shape[1:4]
    if any(length < size for length, size in zip(grid, window, strict=True)):
        raise ValueError(f"a grid of {grid} tokens is smaller than the window of {window}")
    block, box = block_and_box(grid, window)
    counts = tuple(-(-n // b) for n, b in zip(grid, block, strict=True))
    extra = [(0, c * b - n) for n, b, c in zip(grid, block, counts, strict=True)]
    q = jnp.pad(q, [(0, 0), *extra, (0, 0), (0, 0)])

    def attend(index: jax.Array) -> jax.Array:
        first = index * jnp.array(block)
        start = jnp.clip(first - jnp.array(window) // 2, 0, jnp.array(grid) - jnp.array(box))
        seen = _seen(first, start, block, box, grid, window)
        return _attend_box(_cut(q, first, block), _cut(k, start, box), _cut(v, start, box), seen)

    indices = np.stack(np.unravel_index(np.arange(math.prod(counts)), counts), axis=-1)
    y = jax.lax.map(attend, jnp.asarray(indices))
    y = y.reshape(*counts, q.shape[0], *block, *q.shape[4:])
    y = y.transpose(3, 0, 4, 1, 5, 2, 6, 7, 8).reshape(q.shape)
    return y[:, : grid[0], : grid[1], : grid[2]]


def block_and_box(grid: Sequence[int], window: Window) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extents of a block of queries, and of the box of keys that it reads."""
    block = tuple(min(QUERY_BLOCK, length) for length in grid)
    return block, tuple(min(n, b + size - 1) for n, b, size in zip(grid, block, window, strict=True))


def _cut(x: jax.Array, start: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """The box of `sizes` tokens of x that begins at `start`, as [batch, tokens, heads, dim]."""
    zero = jnp.zeros((), start.dtype)
    box = jax.lax.dynamic_slice(x, (zero, *start, zero, zero), (x.shape[0], *sizes, *x.shape[4:]))
    return box.reshape(x.shape[0], math.prod(sizes), *x.shape[4:])


def _seen(
    first: jax.Array,
    start: jax.Array,
    block: tuple[int, ...],
    box: tuple[int, ...],
    grid: tuple[int, ...],
    window: Window,
) -> jax.Array:
    """Whether a query of the block at `first` sees a key of the box at `start`: bool [queries, keys]."""
    seen = jnp.ones((1, 1), bool)
    for axis in range(3):
        begin = first[axis] + jnp.arange(block[axis]) - window[axis] // 2
        begin = jnp.clip(begin, 0, grid[axis] - window[axis])[:, None]
        key = start[axis] + jnp.arange(box[axis])
        along = (key >= begin) & (key < begin + window[axis])
        both = seen[:, None, :, None] & along[None, :, None, :]
        seen = both.reshape(seen.shape[0] * along.shape[0], seen.shape[1] * along.shape[1])
    return seen


def _attend_box(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of [batch, queries, heads, dim] to the keys that they see."""
    exact = precision(q.dtype)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision=exact, preferred_element_type=jnp.float32)
    shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", shares, v, precision=exact)
