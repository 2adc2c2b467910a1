"""Neighborhood attention: each token of a video attends to a window of tokens around it. At a border the window is
shifted inward and keeps its size."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ltx2_cli.nn.layers import precision

Extent = tuple[int, ...]
Window = tuple[int, int, int]  # frames, height, width

QUERY_BLOCK = 8  # queries of a block along each axis

TokenGrid = Float[jax.Array, "batch frames height width channels"]  # channels: those of all heads


def neighborhood_attention(q: TokenGrid, k: TokenGrid, v: TokenGrid, window: Window, head_dim: int) -> TokenGrid:
    """softmax(q·kᵀ)·v over each token's window, sums in float32; q is scaled already. A block of 8×8×8 queries reads
    one box of keys, which holds the windows of all of them, and masks the rest. Blocks, videos and heads are computed
    in turn: the scores of one are in memory, for a window of 11×11×11 in float32 12 MB."""
    grid = q.shape[1:4]
    if any(length < size for length, size in zip(grid, window, strict=True)):
        raise ValueError(f"a grid of {grid} tokens is smaller than the window of {window}")
    block, box = block_and_box(grid, window)
    axes = [_blocks(*axis) for axis in zip(grid, block, box, window, strict=True)]
    counts = [len(axis.first) for axis in axes]
    q = jnp.pad(q, [(0, 0), *((0, c * b - n) for n, b, c in zip(grid, block, counts, strict=True)), (0, 0)])
    masks = _masks([axis.masks for axis in axes])

    def attend(scanned: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        first, start, mask = scanned
        parts = _cut(q, first, block, head_dim), _cut(k, start, box, head_dim), _cut(v, start, box, head_dim)
        seen = masks[mask]
        y = jax.lax.map(lambda part: _attend_box(part[0], part[1], part[2], seen), parts)
        return y.reshape(q.shape[0], -1, *y.shape[1:]).swapaxes(1, 2).reshape(q.shape[0], *block, -1)

    firsts, starts, kinds = (_combined([getattr(axis, name) for axis in axes]) for name in ("first", "start", "mask"))
    numbers = np.ravel_multi_index(tuple(kinds.T), [len(axis.masks) for axis in axes])
    y = jax.lax.map(attend, (firsts, starts, numbers)).reshape(*counts, q.shape[0], *block, -1)
    y = y.transpose(3, 0, 4, 1, 5, 2, 6, 7).reshape(q.shape)
    return y[:, : grid[0], : grid[1], : grid[2]]


def block_and_box(grid: Sequence[int], window: Window) -> tuple[Extent, Extent]:
    """The extents of a block of queries, and of the box of keys that it reads."""
    block = tuple(min(QUERY_BLOCK, length) for length in grid)
    return block, tuple(min(n, b + size - 1) for n, b, size in zip(grid, block, window, strict=True))


class _Blocks(NamedTuple):
    """The blocks along one axis."""

    first: np.ndarray  # query of each
    start: np.ndarray  # of its box
    mask: np.ndarray  # of each, among
    masks: np.ndarray  # the different ones, bool [masks, queries, keys]: whether a query sees a key


def _blocks(length: int, block: int, box: int, window: int) -> _Blocks:
    first = np.arange(0, length, block, dtype=np.int32)
    start = np.clip(first - window // 2, 0, length - box)
    begin = np.clip(first[:, None] + np.arange(block) - window // 2, 0, length - window)[..., None]
    keys = start[:, None, None] + np.arange(box)
    masks, mask = np.unique((begin <= keys) & (keys < begin + window), axis=0, return_inverse=True)
    return _Blocks(first, start, mask.reshape(-1), masks)


def _masks(axes: Sequence[np.ndarray]) -> jax.Array:
    """The masks of all combinations, bool [masks, queries, keys]."""
    masks = jnp.ones((1, 1, 1), bool)
    for axis in axes:
        both = masks[:, None, :, None, :, None] & axis[None, :, None, :, None, :]
        masks = both.reshape([a * b for a, b in zip(masks.shape, axis.shape, strict=True)])
    return masks


def _combined(axes: Sequence[np.ndarray]) -> np.ndarray:
    """All combinations of a value of each axis, int32 [combinations, axes]."""
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes)).astype(np.int32)


def _cut(x: jax.Array, start: jax.Array, sizes: Extent, head_dim: int) -> jax.Array:
    """The box of `sizes` tokens of x that begins at `start`, as [batch · heads, tokens, head_dim]."""
    zero = jnp.zeros((), start.dtype)
    box = jax.lax.dynamic_slice(x, (zero, *start, zero), (x.shape[0], *sizes, x.shape[-1]))
    return (
        box.reshape(x.shape[0], math.prod(sizes), -1, head_dim).swapaxes(1, 2).reshape(-1, math.prod(sizes), head_dim)
    )


def _attend_box(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attention of queries [tokens, dim] to the keys that they see."""
    exact = precision(q.dtype)
    scores = jnp.einsum("qd,kd->qk", q, k, precision=exact, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, scores, -jnp.inf)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    ones = jnp.ones((len(v), 1), v.dtype)  # their product is the sum of the powers
    y = jnp.einsum(
        "qk,kd->qd",
        powers.astype(v.dtype),
        jnp.concatenate([v, ones], axis=-1),
        precision=exact,
        preferred_element_type=jnp.float32,
    )
    return (y[:, :-1] / y[:, -1:]).astype(v.dtype)
