"""Attention for CPUs, `blockwise`: a head of a row and a block of its queries at a time, so that scores stay in a
core's cache."""

import jax

from ltx2_cli.nn.kernels.operands import Kernel, PartialAttention, Vector, by_head, key_bias, pad_tokens
from ltx2_cli.nn.kernels.xla import LEAST_QUERIES, softmax_attention

CACHED_SCORES = 2**19  # float32 scores that fit the cache of a CPU core


def _by_head_and_block(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, key_weights: Vector
) -> PartialAttention:
    (rows, tokens, heads, dim), bias = queries.shape, key_bias(keys.shape[1], valid, key_weights)
    if rows * heads * tokens * keys.shape[1] <= CACHED_SCORES:
        return softmax_attention(queries, keys, values, bias)
    blocks = -(-tokens // max(LEAST_QUERIES, CACHED_SCORES // keys.shape[1]))
    split = pad_tokens(queries, -(-tokens // blocks), blocks).swapaxes(1, 2)
    split = split.reshape(rows * heads, blocks, 1, -1, 1, dim)
    context = (x.swapaxes(1, 2).reshape(rows * heads, 1, -1, 1, dim) for x in (keys, values))

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> PartialAttention:
        queries, keys, values = head
        return jax.lax.map(lambda block: softmax_attention(block, keys, values, bias), queries)

    gathered, log_sum = jax.lax.map(one_head, (split, *context))
    results = ((gathered, (dim,)), (log_sum, ()))
    joined = (x.reshape(rows, heads, -1, *last)[:, :, :tokens].swapaxes(1, 2) for x, last in results)
    return PartialAttention(*joined)


KERNEL = Kernel(by_head(_by_head_and_block))
