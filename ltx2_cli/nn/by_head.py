"""Attention for one CPU: a head and a block of queries at a time."""

import jax
import jax.numpy as jnp

SCORES = 2**19  # at a time: what a core's own cache holds
LEAST_QUERIES = 128  # at a time, however many the keys: a product of fewer rows wastes the reading of its columns


def attend_by_head(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """softmax(q·kᵀ)·v, all arrays [rows, tokens, heads, head_dim], the queries scaled.

    Scores stay in the cache, and the sum of weights divides at the end.
    """
    rows, tokens, heads, dim = queries.shape
    blocks = -(-tokens // max(LEAST_QUERIES, SCORES // keys.shape[1]))
    padded = jnp.pad(queries, ((0, 0), (0, -tokens % blocks), (0, 0), (0, 0)))
    split = padded.swapaxes(1, 2).reshape(rows * heads, blocks, -1, dim)
    keys, values = (x.swapaxes(1, 2).reshape(rows * heads, -1, dim) for x in (keys, values))

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, keys, values = head

        def one_block(queries: jax.Array) -> jax.Array:
            scores = jnp.matmul(queries, keys.T, preferred_element_type=jnp.float32)
            weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
            gathered = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return (gathered / weights.sum(axis=-1, keepdims=True)).astype(values.dtype)

        return jax.lax.map(one_block, queries)

    done = jax.lax.map(one_head, (split, keys, values))
    return done.reshape(rows, heads, -1, dim)[:, :, :tokens].swapaxes(1, 2)
