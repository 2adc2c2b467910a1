"""softmax(q·kᵀ/√d)·v with float32 scores, in the form that each kind of device runs best."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ltx2_cli.nn.by_head import attend_by_head
from ltx2_cli.sharding import on_one_cpu

SCORE_BYTES = 2**30  # float32 scores held at a time, over all rows and heads: bounds memory, not the result
LEAST_QUERIES = 128


class KeysValues(NamedTuple):
    """Keys (normalised, rotated) and values of one context, each [rows, tokens, heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


def attend(queries: jax.Array, context: KeysValues) -> jax.Array:
    """softmax(q·kᵀ/√d)·v with float32 scores; all arrays [rows, tokens, heads, head_dim]."""
    return attend_by_head(queries, *context) if on_one_cpu() else _attend_all_heads(queries, context)


def _attend_all_heads(queries: jax.Array, context: KeysValues) -> jax.Array:
    rows, tokens, heads, dim = queries.shape
    affordable = SCORE_BYTES // (4 * rows * heads * context.keys.shape[1])
    block = max(LEAST_QUERIES, affordable // LEAST_QUERIES * LEAST_QUERIES)
    if tokens <= block:
        return _attend_block(queries, context)
    blocks = -(-tokens // block)
    padded = jnp.pad(queries, ((0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)))
    split = padded.reshape(rows, blocks, block, heads, dim).swapaxes(0, 1)
    done = jax.lax.map(lambda part: _attend_block(part, context), split)
    return done.swapaxes(0, 1).reshape(rows, blocks * block, heads, dim)[:, :tokens]


def _attend_block(queries: jax.Array, context: KeysValues) -> jax.Array:
    # jax.nn.dot_product_attention is this, but does not compile in float16.
    scores = jnp.einsum("rqhd,rkhd->rhqk", queries, context.keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * queries.shape[-1] ** -0.5, axis=-1).astype(context.values.dtype)
    # Fused into each other, both products overflow the stack of libtpu 0.0.42's compiler for TPU v7x.
    weights = jax.lax.optimization_barrier(weights)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, context.values)
