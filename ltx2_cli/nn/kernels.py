"""softmax(q·kᵀ)·v on one device, with float32 scores that are never all in memory: a row of a table for each
`AttentionBackend`.

Every row is held to one definition: the same float64 attention at the same lengths. A row attends to a whole context,
or to the part of it that lies on this device: then the first `valid` keys count, and the logarithm of the sum of their
exponentials tells how much the part weighs. Its arrays are [rows, tokens, heads, head_dim].
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ltx2_cli.errors import UsageError
from ltx2_cli.nn.layers import precision
from ltx2_cli.nn.rope import rotate
from ltx2_cli.parallel.constrain import device
from ltx2_cli.request.spec import AttentionBackend, DType
from ltx2_cli.request.spelling import typed

SCORE_BYTES = 2**30  # float32 scores that XLA holds at a time, over all rows and heads: bounds memory, not the result
CACHED_SCORES = 2**19  # float32 scores that fit the cache of a CPU core
LEAST_QUERIES = 128  # in a block: a product of fewer rows wastes the reading of its columns
LANES = 128  # of a TPU: the length of a block is a multiple of it
BLOCKS = (1024, 896, 768, 640, 512)  # lengths of splash's blocks, whose scores stay in a TPU core's own memory
MASKED = -1e30  # a score that does not count: exp is 0, and no sum of such scores overflows
WEIGHS_NO_KEYS = "cannot attend to references by a strength or a mask"
LEAST_CAPABILITY = 8.0  # compute capability of the oldest GPUs that cuDNN's attention is made for


class Norm(NamedTuple):
    """What brings the rows of a projection to one length."""

    scales: Any  # of the tokens, float32 [rows, tokens, 1]
    weights: Any  # of the channels, float32 [heads * head_dim]


class Operands(NamedTuple):
    """What attention reads on one device: projections [rows, tokens, heads * head_dim] with normalised keys; and how
    queries are normalised and scaled, both rotated, and results gated."""

    queries: Any
    keys: Any
    values: Any
    ropes: Any = None  # a `Rope` of the queries and one of the keys; None: neither is rotated
    gates: Any = None  # factors of the results, [rows, queries, heads]
    mask: Any = None  # bool [rows]; false: each token keeps its own value, of as many values as queries
    norm: Any = None  # a `Norm` of the queries; None: they are normalised
    shares: Any = None  # of each key in the softmax, a factor of its exponential, float32 [keys]; None: 1


class PartialAttention(NamedTuple):
    """Attention over a part of a context, and the weight of that part."""

    gathered: jax.Array  # [rows, queries, heads * head_dim]
    log_sum: Any  # float32 [rows, queries, heads]: log Σ exp(q·k) over the part's keys; of a whole context maybe None


Kernel = Callable[[Operands, int, jax.Array | None], PartialAttention]


def attend_with(kernel: AttentionBackend, operands: Operands, heads: int) -> jax.Array:
    """Attention over a whole context, [rows, queries, heads * head_dim] in the dtype of the values."""
    return KERNELS[kernel](operands, heads, None).gathered


def attend_partly(kernel: AttentionBackend, operands: Operands, heads: int, valid: jax.Array) -> PartialAttention:
    """Attention over the first `valid` keys, which may be none."""
    return KERNELS[kernel](operands, heads, valid)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[rows, tokens, heads * head_dim] to [rows, tokens, heads, head_dim]."""
    return x.reshape(*x.shape[:2], heads, -1)


def normalised(operands: Operands) -> Operands:
    """The same with queries that need no norm."""
    if operands.norm is None:
        return operands
    queries = operands.queries.astype(jnp.float32) * operands.norm.scales * operands.norm.weights
    return operands._replace(queries=queries.astype(operands.queries.dtype), norm=None)


def finish(operands: Operands, attended: jax.Array) -> jax.Array:
    """`attended` [rows, queries, heads, head_dim] with the own values of perturbed rows, gated, its heads joined."""
    if operands.mask is not None:
        attended = jnp.where(operands.mask[:, None, None, None], attended, operands.values.reshape(attended.shape))
    if operands.gates is not None:
        attended = attended * operands.gates[..., None]
    return attended.reshape(*attended.shape[:2], -1)


def _by_head(attend: Callable[..., PartialAttention]) -> Kernel:
    """A kernel of attention alone: queries, keys and values [rows, tokens, heads, head_dim], normalised and rotated
    before it, and gated after it."""

    def kernel(operands: Operands, heads: int, valid: jax.Array | None) -> PartialAttention:
        queries, keys, values = (split_heads(x, heads) for x in normalised(operands)[:3])
        if operands.ropes:
            queries, keys = map(rotate, (queries, keys), operands.ropes)
        attended, log_sum = attend(queries, keys, values, valid, operands.shares)
        return PartialAttention(finish(operands, attended), log_sum)

    return kernel


def _fused(operands: Operands, heads: int, valid: jax.Array | None) -> PartialAttention:
    """This project's kernel for TPUs, interpreted elsewhere. Zeros fill the lanes that the heads leave."""
    from ltx2_cli.nn.fused_attention import Blocks, fused_attention  # Pallas takes long to import

    width, head_dim = operands.queries.shape[-1], operands.queries.shape[-1] // heads

    def filled(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -width % LANES)])

    queries, keys, values = map(filled, operands[:3])
    query_rope, key_rope = map(filled, operands.ropes) if operands.ropes else (None, None)
    own_values = None if operands.mask is None else values
    scales = weights = None
    if operands.norm is not None:
        scales, weights = operands.norm.scales, filled(operands.norm.weights[None])
        scales = jnp.broadcast_to(scales, (*scales.shape[:2], LANES))
    shares = operands.shares
    if shares is not None:
        shares = jnp.broadcast_to(shares.astype(values.dtype)[:, None], (len(shares), LANES))
    blocks = Blocks(queries, keys, values, own_values, query_rope, key_rope, operands.gates, scales, weights, shares)
    gathered, log_sum = fused_attention(blocks, head_dim, operands.mask, valid, device())
    if log_sum is not None:
        log_sum = log_sum[..., :width:head_dim]
    return PartialAttention(gathered[..., :width], log_sum)


Vector = jax.Array | None


def _xla(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, shares: Vector = None
) -> PartialAttention:
    """Plain XLA, a block of the queries of all rows and heads at a time."""
    (rows, tokens, heads, dim), bias = queries.shape, _bias(keys.shape[1], valid, shares)
    affordable = SCORE_BYTES // (4 * rows * heads * keys.shape[1])
    block = min(tokens, max(LEAST_QUERIES, affordable // LEAST_QUERIES * LEAST_QUERIES))
    if tokens == block:
        return _softmax(queries, keys, values, bias)
    split = _padded(queries, block).reshape(rows, -1, block, heads, dim).swapaxes(0, 1)
    blocks = jax.lax.map(lambda part: _softmax(part, keys, values, bias), split)
    return PartialAttention(*(x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :tokens] for x in blocks))


def _blockwise(
    queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, shares: Vector
) -> PartialAttention:
    """For CPUs: a head of a row and a block of its queries at a time, so that scores stay in a core's cache."""
    (rows, tokens, heads, dim), bias = queries.shape, _bias(keys.shape[1], valid, shares)
    if rows * heads * tokens * keys.shape[1] <= CACHED_SCORES:
        return _softmax(queries, keys, values, bias)
    blocks = -(-tokens // max(LEAST_QUERIES, CACHED_SCORES // keys.shape[1]))
    padded = _padded(queries, -(-tokens // blocks), blocks).swapaxes(1, 2).reshape(rows * heads, blocks, 1, -1, 1, dim)
    context = (x.swapaxes(1, 2).reshape(rows * heads, 1, -1, 1, dim) for x in (keys, values))

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> PartialAttention:
        queries, keys, values = head
        return jax.lax.map(lambda block: _softmax(block, keys, values, bias), queries)

    gathered, log_sum = jax.lax.map(one_head, (padded, *context))
    results = ((gathered, (dim,)), (log_sum, ()))
    by_head = (x.reshape(rows, heads, -1, *last)[:, :, :tokens].swapaxes(1, 2) for x, last in results)
    return PartialAttention(*by_head)


def _bias(keys: int, valid: Vector, shares: Vector) -> Vector:
    """What is added to the scores of each key, float32 [keys]; None: nothing."""
    bias = None if shares is None else jnp.maximum(jnp.log(shares), MASKED)
    if valid is None:
        return bias
    return jnp.where(jnp.arange(keys) < valid, 0 if bias is None else bias, MASKED)


def _softmax(queries: jax.Array, keys: jax.Array, values: jax.Array, bias: Vector) -> PartialAttention:
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


def _cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, shares: Vector) -> PartialAttention:
    assert shares is None, WEIGHS_NO_KEYS
    # Of cuDNN's own partial results jax rounds the logarithms to the dtype of the values: in bfloat16 that is a wrong
    # weight. Queries that attend to parts are few, those of the sound.
    if valid is not None:
        return _xla(queries, keys, values, valid)
    attended = jax.nn.dot_product_attention(queries, keys, values, scale=1.0, implementation="cudnn")
    return PartialAttention(attended, None)


def _splash(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: Vector, shares: Vector) -> PartialAttention:
    """jax's attention kernel for TPUs, interpreted elsewhere. Zeros fill tokens up to whole blocks. Filled keys are in
    another segment than the queries, which masks them."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # takes long to import

    assert shares is None, WEIGHS_NO_KEYS
    (query_count, key_count), exact = (x.shape[1] for x in (queries, keys)), precision(queries.dtype)
    query_block, key_block = splash_block(query_count), splash_block(key_count)
    queries = _padded(queries, query_block).swapaxes(1, 2)
    keys, values = (_padded(x, key_block).swapaxes(1, 2) for x in (keys, values))
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


def splash_block(length: int) -> int:
    """The length of splash's blocks for so many tokens: one block where it suffices, else that which fills up the
    fewest tokens (none where it divides the length); of equals the largest."""
    if length <= BLOCKS[0]:
        return -(-length // LANES) * LANES
    return min(BLOCKS, key=lambda block: (-length % block, -block))


def _padded(x: jax.Array, block: int, blocks: int | None = None) -> jax.Array:
    """x [rows, tokens, ...] with zeros behind, so that its tokens are whole blocks."""
    missing = -x.shape[1] % block if blocks is None else block * blocks - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)])


KERNELS: dict[AttentionBackend, Kernel] = {
    AttentionBackend.xla: _by_head(_xla),
    AttentionBackend.blockwise: _by_head(_blockwise),
    AttentionBackend.cudnn: _by_head(_cudnn),
    AttentionBackend.splash: _by_head(_splash),
    AttentionBackend.fused: _fused,
}
# by the platform of a device, the fastest first
NATIVE = {
    "tpu": (AttentionBackend.fused, AttentionBackend.splash, AttentionBackend.xla),
    "gpu": (AttentionBackend.cudnn, AttentionBackend.xla),
    "cpu": (AttentionBackend.blockwise,),
}
MADE_FOR_TPUS = (AttentionBackend.splash, AttentionBackend.fused)


def choose_backend(
    asked: AttentionBackend,
    device: jax.Device,
    dtype: DType,
    head_sizes: Iterable[int],
    tokens: int,
    shares: bool = False,
) -> tuple[AttentionBackend, str]:
    """The kernel that attends on `device` to contexts of at most so many tokens, where keys may have `shares`; and a
    sentence to tell the user, empty if there is nothing to tell. `auto` is the platform's own kernel, or the next that
    can run. Raises `UsageError` for a kernel that is asked for by name and cannot run."""
    native = NATIVE.get(device.platform, (AttentionBackend.xla,))
    kernel, *others = native if asked is AttentionBackend.auto else (asked,)
    obstacle = _obstacle(kernel, device, dtype, head_sizes, tokens, shares)
    if not obstacle:
        slow = kernel in MADE_FOR_TPUS and device.platform == "cpu"
        return kernel, f"attention by {kernel} is interpreted on a CPU, which is slow" if slow else ""
    for other in others:
        if not _obstacle(other, device, dtype, head_sizes, tokens, shares):
            name = "XLA" if other is AttentionBackend.xla else other
            return other, f"attention is computed by {name}, which is slower: {obstacle}"
    raise UsageError(f"attention by {kernel} cannot run: {obstacle}", typed("sharding.attention", "auto"))


def _obstacle(
    kernel: AttentionBackend, device: jax.Device, dtype: DType, head_sizes: Iterable[int], tokens: int, shares: bool
) -> str:
    """Why a kernel cannot run on a device; empty if it can."""
    if kernel in MADE_FOR_TPUS and device.platform == "gpu":
        return f"{kernel} is made for TPUs, this is a {device.device_kind}"
    if shares and kernel in (AttentionBackend.splash, AttentionBackend.cudnn):
        return f"{kernel} {WEIGHS_NO_KEYS}"
    if kernel is AttentionBackend.fused:
        return _obstacle_of_fused(device, dtype, head_sizes, tokens, shares)
    return _obstacle_of_cudnn(device, dtype, head_sizes) if kernel is AttentionBackend.cudnn else ""


def _obstacle_of_fused(device: jax.Device, dtype: DType, head_sizes: Iterable[int], tokens: int, shares: bool) -> str:
    from ltx2_cli.nn import fused_attention as fused  # Pallas takes long to import

    if dtype is DType.float16:
        return "the fused kernel computes in bfloat16 and float32, not in float16"
    for head_size in sorted(set(head_sizes)):
        if head_size % 2 or LANES % head_size:
            return f"the fused kernel needs heads that divide {LANES} channels, these have {head_size}"
    itemsize, memory = jnp.dtype(dtype.value).itemsize, fused.core_memory(device)
    if not memory:
        return f"the fused kernel does not know how much memory a core of {device.device_kind} has"
    if not fused.fitting_cut(device, tokens, itemsize, shares):
        needed = fused.memory_bytes(fused.SMALL_CUT, tokens, itemsize, shares=shares)
        where = f"a core of {device.device_kind} has {memory / 2**20:.0f}"
        return f"the fused kernel needs {needed / 2**20:.0f} MiB for a head of {tokens} tokens, {where}"
    return ""


def _obstacle_of_cudnn(device: jax.Device, dtype: DType, head_sizes: Iterable[int]) -> str:
    if device.platform != "gpu" or device.compute_capability.startswith("gfx"):  # as AMD's are called
        return f"cuDNN is made for NVIDIA's GPUs, this is a {device.device_kind}"
    if float(device.compute_capability) < LEAST_CAPABILITY:
        capability = f"compute capability {device.compute_capability}"
        return f"cuDNN's attention needs {LEAST_CAPABILITY} or newer, a {device.device_kind} has {capability}"
    if dtype is DType.float32:
        return "cuDNN's attention computes in 16 bits, not in float32"
    for head_size in sorted(set(head_sizes)):  # jax knows the head sizes and whether cuDNN is installed
        queries = jax.ShapeDtypeStruct((1, LANES, 1, head_size), dtype.value)
        try:
            # A new function each time: jax would remember the answer of an earlier call.
            jax.eval_shape(lambda q, k, v: _cudnn(q, k, v, None, None), queries, queries, queries)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            return " ".join(str(error).split())
    return ""
