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

Window = tuple[int, int, int]  # frames, height, width

QUERY_BLOCK = 8  # queries of a block along each axis
MATRIX_WIDTH = 256  # channels that a matrix unit of a TPU multiplies at a time

TokenGrid = Float[jax.Array, "batch frames height width channels"]  # channels: those of all heads


def neighborhood_attention(q: TokenGrid, k: TokenGrid, v: TokenGrid, window: Window, head_dim: int) -> TokenGrid:
    """softmax(q·kᵀ)·v over each token's window, sums in float32; q is scaled already. A block of 8×8×8 queries reads
    one box of keys, which holds the windows of all of them, and masks the rest. Blocks are computed in turn: the scores
    of one head are in memory, for a window of 11×11×11 in float32 12 MB."""
    grid, heads = q.shape[1:4], q.shape[-1] // head_dim
    if any(length < size for length, size in zip(grid, window, strict=True)):
        raise ValueError(f"a grid of {grid} tokens is smaller than the window of {window}")
    block, box = block_and_box(grid, window)
    axes = [_blocks(*axis) for axis in zip(grid, block, box, window, strict=True)]
    counts = [len(axis.first) for axis in axes]
    q = jnp.pad(q, [(0, 0), *((0, c * b - n) for n, b, c in zip(grid, block, counts, strict=True)), (0, 0)])
    width = math.gcd(heads, max(MATRIX_WIDTH // head_dim, 1)) * head_dim
    # A frame that no box reads: XLA for TPU v7x lays out a product in another way than boxes need, and without this
    # copies the whole of it for each block: 11.7 G cycles in place of 0.6 G for a tile of 768x512.
    v = jnp.pad(v, [(0, 0), (0, 1), (0, 0), (0, 0), (0, 0)])
    masks = _masks([axis.masks for axis in axes])

    def attend(scanned: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        first, start, mask = scanned
        operands = _cut(q, first, block, width), _cut(k, start, box, width), _cut(v, start, box, width)
        return _attend_box(*operands, masks[mask], head_dim)

    videos, channels = np.arange(len(q)), np.arange(0, q.shape[-1], width)
    firsts, starts = (
        _combined([videos, *(getattr(axis, name) for axis in axes), channels]) for name in ("first", "start")
    )
    _, *kinds, _ = _combined([videos, *(axis.mask for axis in axes), channels]).T
    numbers = np.ravel_multi_index(kinds, [len(axis.masks) for axis in axes])
    y = jax.lax.map(attend, (firsts, starts, numbers)).reshape(len(q), *counts, len(channels), *block, width)
    y = y.transpose(0, 1, 5, 2, 6, 3, 7, 4, 8).reshape(q.shape)
    return y[:, : grid[0], : grid[1], : grid[2]]


def block_and_box(grid: Sequence[int], window: Window) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The extents of a block of queries, and of the box of keys that it reads."""
    block = tuple(min(QUERY_BLOCK, length) for length in grid)
    return block, tuple(min(n, b + size - 1) for n, b, size in zip(grid, block, window, strict=True))


class _Blocks(NamedTuple):
    """The blocks along one axis."""

    first: np.ndarray  # query of each
    start: np.ndarray  # of its box
    mask: np.ndarray  # of each, among
    masks: np.ndarray  # the different ones, bool [masks, keys, queries]: whether a query sees a key


def _blocks(length: int, block: int, box: int, window: int) -> _Blocks:
    first = np.arange(0, length, block, dtype=np.int32)
    start = np.clip(first - window // 2, 0, length - box)
    begin = np.clip(first[:, None] + np.arange(block) - window // 2, 0, length - window)[:, None]
    keys = start[:, None, None] + np.arange(box)[:, None]
    masks, mask = np.unique((begin <= keys) & (keys < begin + window), axis=0, return_inverse=True)
    return _Blocks(first, start, mask.reshape(-1), masks)


def _masks(axes: Sequence[np.ndarray]) -> jax.Array:
    """The masks of all combinations, bool [masks, keys, queries]."""
    masks = jnp.ones((1, 1, 1), bool)
    for axis in axes:
        both = masks[:, None, :, None, :, None] & axis[None, :, None, :, None, :]
        masks = both.reshape([a * b for a, b in zip(masks.shape, axis.shape, strict=True)])
    return masks


def _combined(axes: Sequence[np.ndarray]) -> np.ndarray:
    """All combinations of a value of each axis, int32 [combinations, axes]."""
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes)).astype(np.int32)


def _cut(x: jax.Array, start: jax.Array, sizes: tuple[int, ...], width: int) -> jax.Array:
    """The box of `sizes` tokens and `width` channels of x that begins at `start`, as [tokens, channels]."""
    return jax.lax.dynamic_slice(x, start, (1, *sizes, width)).reshape(-1, width)


def _attend_box(q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array, head_dim: int) -> jax.Array:
    """Attention of queries [tokens, channels] to the keys that they see, a head at a time. The channels of other heads
    are zero in its queries, which leaves its scores, and one in its values, which makes them the sum of its powers:
    matrix units multiply as many channels at a time as several heads have, and copies of a head would take longer."""
    channels, exact = q.shape[-1], precision(q.dtype)
    v = jnp.pad(v, [(0, 0), (0, int(channels == head_dim))])
    y = jnp.zeros(q.shape, jnp.float32)
    for first in range(0, channels, head_dim):
        own = np.arange(v.shape[-1]) // head_dim == first // head_dim
        of_head = jnp.where(own[:channels], q, 0)
        scores = jnp.einsum("kd,qd->kq", k, of_head, precision=exact, preferred_element_type=jnp.float32)
        scores = jnp.where(seen, scores, -jnp.inf)
        powers = jnp.exp(scores - scores.max(axis=0)).astype(v.dtype)
        values = jnp.where(own, v, 1)
        sums = jnp.einsum("kq,kd->qd", powers, values, precision=exact, preferred_element_type=jnp.float32)
        total = sums[:, (first + head_dim) % v.shape[-1], None]
        y = jnp.where(own[:channels], sums[:, :channels] / total, y)
    return y.astype(v.dtype)
