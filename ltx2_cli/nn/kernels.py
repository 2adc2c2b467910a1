"""softmax(q·kᵀ)·v on one device, with float32 scores that are never all in memory: a function for each `Kernel`.

Arrays are [rows, tokens, heads, head_dim], the queries already scaled. Where only part of a context is here, `valid`
of its keys count, and the logarithm of the sum of exponentials, float32 [rows, queries, heads], tells their weight.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from ltx2_cli.spec import Kernel

SCORE_BYTES = 2**30  # float32 scores held at a time by XLA, over all rows and heads: bounds memory, not the result
LEAST_QUERIES = 128
LANES = 128  # of a TPU: what a block's length divides by
LARGEST_BLOCK = 1024  # of queries and of keys, whose scores splash keeps in a TPU core's own memory
LOWEST = -1e30  # a score that does not count


class Part(NamedTuple):
    """What queries gather from a part of their context, and how much that part weighs."""

    gathered: jax.Array
    log_sum: jax.Array


def attend_with(kernel: Kernel, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """What queries gather from the whole of their context."""
    return KERNELS[_fitting(kernel, queries)](queries, keys, values)


def attend_partly(kernel: Kernel, queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array) -> Part:
    """What they gather from the first `valid` keys."""
    return PARTIAL_KERNELS[_fitting(kernel, queries)](queries, keys, values, valid)


def _fitting(kernel: Kernel, queries: jax.Array) -> Kernel:
    """cuDNN's kernel is one for 16 bit."""
    return Kernel.xla if kernel is Kernel.cudnn and queries.dtype == jnp.float32 else kernel


def _xla(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    return _xla_partly(queries, keys, values, keys.shape[1]).gathered


def _xla_partly(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | int) -> Part:
    """A block of queries at a time."""
    rows, tokens, heads, dim = queries.shape
    affordable = SCORE_BYTES // (4 * rows * heads * keys.shape[1])
    block = min(tokens, max(LEAST_QUERIES, affordable // LEAST_QUERIES * LEAST_QUERIES))
    if tokens == block:
        return _xla_block(queries, keys, values, valid)
    split = _padded(queries, block).reshape(rows, -1, block, heads, dim).swapaxes(0, 1)
    done = jax.lax.map(lambda part: _xla_block(part, keys, values, valid), split)
    return Part(*(x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :tokens] for x in done))


def _xla_block(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | int) -> Part:
    # jax.nn.dot_product_attention is this, but does not compile in float16.
    scores = jnp.einsum("rqhd,rkhd->rhqk", queries, keys, preferred_element_type=jnp.float32)
    if isinstance(valid, jax.Array):
        scores = jnp.where(jnp.arange(keys.shape[1]) < valid, scores, LOWEST)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Fused into each other, both products overflow the stack of libtpu 0.0.42's compiler for TPU v7x.
    weights = jax.lax.optimization_barrier(jnp.exp(scores - log_sum).astype(values.dtype))
    return Part(jnp.einsum("rhqk,rkhd->rqhd", weights, values), log_sum[..., 0].swapaxes(1, 2))


def _cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(queries, keys, values, scale=1.0, implementation="cudnn")


def _cudnn_partly(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array) -> Part:
    # A length of 0 is none to cuDNN: one key stands in, and its weight is taken away.
    lengths = jnp.full(len(queries), jnp.maximum(valid, 1), jnp.int32)
    gathered, log_sum = jax.nn.dot_product_attention(
        queries,
        keys,
        values,
        scale=1.0,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
        return_residual=True,
    )
    return Part(gathered, jnp.where(valid > 0, log_sum, LOWEST))


def _splash(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    valid = keys.shape[1] if keys.shape[1] % LANES else None
    gathered = _splash_kernel(queries, keys, values, valid, save_residuals=False)
    return gathered.swapaxes(1, 2)[:, : queries.shape[1]]


def _splash_partly(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array) -> Part:
    gathered, (log_sum,) = _splash_kernel(queries, keys, values, valid, save_residuals=True)
    return Part(*(x.swapaxes(1, 2)[:, : queries.shape[1]] for x in (gathered, log_sum)))


def _splash_kernel(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | int | None, save_residuals: bool
) -> Any:
    """The TPU kernel with blocks that fit the lengths; heads come before tokens in what it gives."""
    ours, theirs = _block(queries.shape[1]), _block(keys.shape[1])
    queries = _padded(queries, ours).swapaxes(1, 2)
    keys, values = (_padded(x, theirs).swapaxes(1, 2) for x in (keys, values))
    _, heads, tokens, _ = queries.shape
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.FullMask((tokens, keys.shape[2]))] * heads),
        block_sizes=splash.BlockSizes(block_q=ours, block_kv=theirs, block_kv_compute=theirs),
        save_residuals=save_residuals,
        head_shards=1,
        q_seq_shards=1,
    )
    segments = None
    if valid is not None:
        counts = jnp.arange(keys.shape[2]) < valid
        segments = splash.SegmentIds(jnp.ones(tokens, jnp.int32), counts.astype(jnp.int32))
    return jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=segments))(queries, keys, values)


def _block(length: int) -> int:
    """The length of equal blocks, as few as can be, that waste the least on filling the last."""
    blocks = -(-length // LARGEST_BLOCK)
    return -(-length // (blocks * LANES)) * LANES


def _padded(x: jax.Array, block: int) -> jax.Array:
    """x [rows, tokens, ...] with zeros behind, so that its tokens divide into blocks."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)])


KERNELS: dict[Kernel, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {
    Kernel.xla: _xla,
    Kernel.cudnn: _cudnn,
    Kernel.splash: _splash,
}
PARTIAL_KERNELS: dict[Kernel, Callable[[jax.Array, jax.Array, jax.Array, jax.Array], Part]] = {
    Kernel.xla: _xla_partly,
    Kernel.cudnn: _cudnn_partly,
    Kernel.splash: _splash_partly,
}
