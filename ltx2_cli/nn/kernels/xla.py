"""Attention by plain XLA, on any device."""

import jax
import jax.numpy as jnp

from ltx2_cli.nn.kernels.operands import Kernel, PartialAttention, Vector, by_head, key_bias, pad_tokens
from ltx2_cli.nn.layers import precision

SCORE_BYTES = 2**30  # float32 scores that XLA holds at a time, over all rows and heads: bounds memory, not the result
LEAST_QUERIES = 128  # in a block: a product of fewer rows wastes the reading of its columns


def in_query_blocks(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, key_weights: Vector = None
) -> PartialAttention:
    """A block of the queries of all rows and heads at a time."""
    (rows, tokens, heads, dim), bias = queries.shape, key_bias(keys.shape[1], valid, key_weights)
    affordable = SCORE_BYTES // (4 * rows * heads * keys.shape[1])
    block = min(tokens, max(LEAST_QUERIES, affordable // LEAST_QUERIES * LEAST_QUERIES))
    if tokens == block:
        return softmax_attention(queries, keys, values, bias)
    split = pad_tokens(queries, block).reshape(rows, -1, block, heads, dim).swapaxes(0, 1)
    blocks = jax.lax.map(lambda part: softmax_attention(part, keys, values, bias), split)
    return PartialAttention(*(x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :tokens] for x in blocks))


def softmax_attention(queries: jax.Array, keys: jax.Array, values: jax.Array, bias: Vector) -> PartialAttention:
    """All scores at once."""
    # jax.nn.dot_product_attention is this, but does not compile in float16.
    exact = precision(queries.dtype)
    scores = jnp.einsum("rqhd,rkhd->rhqk", queries, keys, preferred_element_type=jnp.float32, precision=exact)
    if bias is not None:
        scores = scores + bias
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Fused into each other, both products overflow the stack of libtpu 0.0.42's compiler for TPU v7x.
    weights = jax.lax.optimization_barrier(jnp.exp(scores - log_sum).astype(values.dtype))
    return PartialAttention(
        jnp.einsum("rhqk,rkhd->rqhd", weights, values, precision=exact), log_sum[..., 0].swapaxes(1, 2)
    )


KERNEL = Kernel(by_head(in_query_blocks))
