"""jax's attention kernel for TPUs, interpreted elsewhere."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from ltx2_cli.nn.kernels.operands import Kernel, PartialAttention, Vector, by_head, pad_tokens
from ltx2_cli.nn.layers import precision
from ltx2_cli.parallel.constrain import device
from ltx2_cli.parallel.mesh import LANES

BLOCKS = (1024, 896, 768, 640, 512)  # lengths of blocks, whose scores stay in a core's VMEM


def _attend(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, key_weights: Vector
) -> PartialAttention:
    """Tokens are zero-padded to whole blocks. Keys that do not count are in another segment than the queries, which
    masks them."""
    assert key_weights is None
    (query_count, key_count), exact = (x.shape[1] for x in (queries, keys)), precision(queries.dtype)
    query_block, key_block = block_length(query_count), block_length(key_count)
    queries = pad_tokens(queries, query_block).swapaxes(1, 2)
    keys, values = (pad_tokens(x, key_block).swapaxes(1, 2) for x in (keys, values))
    _, heads, tokens, _ = queries.shape
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.FullMask((tokens, keys.shape[2]))] * heads),
        block_sizes=splash.BlockSizes(block_q=query_block, block_kv=key_block, block_kv_compute=key_block),
        save_residuals=valid is not None,
        head_shards=1,
        q_seq_shards=1,
        interpret=device().platform != "tpu",
    )
    segments = None
    if valid is not None or key_count < keys.shape[2]:
        counts = jnp.arange(keys.shape[2]) < (key_count if valid is None else valid)
        segments = splash.SegmentIds(jnp.ones(tokens, jnp.int32), counts.astype(jnp.int32))
    with nullcontext() if exact is None else jax.default_matmul_precision(exact.name.lower()):
        attended = jax.vmap(lambda q, k, v: kernel(q, k, v, segment_ids=segments))(queries, keys, values)
    gathered, log_sum = (attended, None) if valid is None else (attended[0], attended[1][0])
    return PartialAttention(*jax.tree.map(lambda x: x.swapaxes(1, 2)[:, :query_count], (gathered, log_sum)))


def block_length(length: int) -> int:
    """The length of the blocks of `length` tokens: one block where that suffices, else the length that pads the fewest
    tokens; of equals the largest."""
    if length <= BLOCKS[0]:
        return -(-length // LANES) * LANES
    return min(BLOCKS, key=lambda block: (-length % block, -block))


KERNEL = Kernel(by_head(_attend), weighs_keys=False, for_tpus=True)
