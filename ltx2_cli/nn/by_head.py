"""Attention for one CPU: a head and a few queries at a time."""

import jax
import jax.numpy as jnp

QUERIES = 128  # at a time


def attend_by_head(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """softmax(q·kᵀ)·v, all arrays [rows, tokens, heads, head_dim], the queries scaled.

    Scores stay in the cache, and the sum of weights divides at the end.
    """
    rows, tokens, heads, dim = queries.shape
    block = min(tokens, QUERIES)
    blocks = -(-tokens // block)
    padded = jnp.pad(queries, ((0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)))
    split = padded.transpose(0, 2, 1, 3).reshape(rows * heads, blocks, block, dim)
    keys = keys.transpose(0, 2, 3, 1).reshape(rows * heads, dim, -1)
    values = values.transpose(0, 2, 1, 3).reshape(rows * heads, -1, dim)

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, keys, values = head

        def one_block(queries: jax.Array) -> jax.Array:
            scores = jnp.matmul(queries, keys, preferred_element_type=jnp.float32)
            weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
            gathered = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return (gathered / weights.sum(axis=-1, keepdims=True)).astype(values.dtype)

        return jax.lax.map(one_block, queries)

    done = jax.lax.map(one_head, (split, keys, values))
    return done.reshape(rows, heads, blocks * block, dim)[:, :, :tokens].swapaxes(1, 2)
