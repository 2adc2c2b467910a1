"""Multi-head attention as every LTX-2 transformer uses it (arXiv:2601.03233), on one device or over a mesh. Where a
context's tokens are split over devices, self-attention trades tokens for heads before and after (Ulysses,
arXiv:2309.14509); queries that lie whole attend to each part, and the results are merged by their softmax's sums.

Its kernels, a row of a table for each `AttentionBackend`, are softmax(q·kᵀ)·v on one device, with float32 scores that
are never all in memory. Arrays are [rows, tokens, heads, head_dim], the queries already scaled. A row attends to a
whole context, or to the part of it that lies on this device: then the first `valid` keys count, and the logarithm of
the sum of their exponentials tells how much the part weighs. Every kernel is held to one definition: the same float64
attention at the same lengths.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.nn.layers import Linear, precision, rms_norm
from ltx2_cli.request.spec import AttentionBackend, DType
from ltx2_cli.sharding import active, constrain, platform
from ltx2_cli.weights.declare import Scope

SCORE_BYTES = 2**30  # float32 scores that XLA holds at a time, over all rows and heads: bounds memory, not the result
CACHED_SCORES = 2**19  # float32 scores that fit the cache of a CPU core
LEAST_QUERIES = 128  # in a block: a product of fewer rows wastes the reading of its columns
LANES = 128  # of a TPU: the length of a block is a multiple of it
BLOCKS = (1024, 896, 768, 640, 512)  # lengths of splash's blocks, whose scores stay in a TPU core's own memory
MASKED = -1e30  # a score that does not count: exp is 0, and no sum of such scores overflows
LEAST_CAPABILITY = 8.0  # compute capability of the oldest GPUs that cuDNN's attention is made for


class PartialAttention(NamedTuple):
    """Attention over a part of a context, and the weight of that part."""

    gathered: jax.Array  # [rows, queries, heads, head_dim]
    log_sum: Any  # float32 [rows, queries, heads]: log Σ exp(q·k) over the part's keys; of a whole context maybe None


def attend_with(kernel: AttentionBackend, queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attention over a whole context, in the dtype of the values."""
    return attend_partly(kernel, queries, keys, values, None).gathered


def attend_partly(
    kernel: AttentionBackend, queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | None
) -> PartialAttention:
    """Attention over the first `valid` keys, which may be none; None: over all, and the weight is not wanted."""
    return KERNELS[kernel](queries, keys, values, valid)


def _xla(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | None) -> PartialAttention:
    """Plain XLA, a block of the queries of all rows and heads at a time."""
    rows, tokens, heads, dim = queries.shape
    affordable = SCORE_BYTES // (4 * rows * heads * keys.shape[1])
    block = min(tokens, max(LEAST_QUERIES, affordable // LEAST_QUERIES * LEAST_QUERIES))
    if tokens == block:
        return _softmax(queries, keys, values, valid)
    split = _padded(queries, block).reshape(rows, -1, block, heads, dim).swapaxes(0, 1)
    blocks = jax.lax.map(lambda part: _softmax(part, keys, values, valid), split)
    return PartialAttention(*(x.swapaxes(0, 1).reshape(rows, -1, *x.shape[3:])[:, :tokens] for x in blocks))


def _blockwise(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | None) -> PartialAttention:
    """For CPUs: a head of a row and a block of its queries at a time, so that scores stay in a core's cache."""
    rows, tokens, heads, dim = queries.shape
    if rows * heads * tokens * keys.shape[1] <= CACHED_SCORES:
        return _softmax(queries, keys, values, valid)
    blocks = -(-tokens // max(LEAST_QUERIES, CACHED_SCORES // keys.shape[1]))
    padded = _padded(queries, -(-tokens // blocks), blocks).swapaxes(1, 2).reshape(rows * heads, blocks, 1, -1, 1, dim)
    context = (x.swapaxes(1, 2).reshape(rows * heads, 1, -1, 1, dim) for x in (keys, values))

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> PartialAttention:
        queries, keys, values = head
        return jax.lax.map(lambda block: _softmax(block, keys, values, valid), queries)

    gathered, log_sum = jax.lax.map(one_head, (padded, *context))
    results = ((gathered, (dim,)), (log_sum, ()))
    by_head = (x.reshape(rows, heads, -1, *last)[:, :, :tokens].swapaxes(1, 2) for x, last in results)
    return PartialAttention(*by_head)


def _softmax(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | None) -> PartialAttention:
    """All scores at once."""
    # jax.nn.dot_product_attention is this, but does not compile in float16.
    exact = precision(queries.dtype)
    scores = jnp.einsum("rqhd,rkhd->rhqk", queries, keys, preferred_element_type=jnp.float32, precision=exact)
    if valid is not None:
        scores = jnp.where(jnp.arange(keys.shape[1]) < valid, scores, MASKED)
    log_sum = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # Fused into each other, both products overflow the stack of libtpu 0.0.42's compiler for TPU v7x.
    weights = jax.lax.optimization_barrier(jnp.exp(scores - log_sum).astype(values.dtype))
    return PartialAttention(
        jnp.einsum("rhqk,rkhd->rqhd", weights, values, precision=exact), log_sum[..., 0].swapaxes(1, 2)
    )


def _cudnn(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | None) -> PartialAttention:
    # Of cuDNN's own partial results jax rounds the logarithms to the dtype of the values: in bfloat16 that is a wrong
    # weight. Queries that attend to parts are few, those of the sound.
    if valid is not None:
        return _xla(queries, keys, values, valid)
    attended = jax.nn.dot_product_attention(queries, keys, values, scale=1.0, implementation="cudnn")
    return PartialAttention(attended, None)


def _splash(queries: jax.Array, keys: jax.Array, values: jax.Array, valid: jax.Array | None) -> PartialAttention:
    """jax's attention kernel for TPUs, interpreted elsewhere. Zeros fill tokens up to whole blocks. Filled keys are in
    another segment than the queries, which masks them."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # takes long to import

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
        interpret=platform() != "tpu",
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


KERNELS: dict[AttentionBackend, Callable[[jax.Array, jax.Array, jax.Array, jax.Array | None], PartialAttention]] = {
    AttentionBackend.xla: _xla,
    AttentionBackend.blockwise: _blockwise,
    AttentionBackend.cudnn: _cudnn,
    AttentionBackend.splash: _splash,
}
# by the platform of a device
NATIVE = {"tpu": AttentionBackend.splash, "gpu": AttentionBackend.cudnn, "cpu": AttentionBackend.blockwise}


def choose_backend(
    wanted: AttentionBackend, device: jax.Device, dtype: DType, head_sizes: Iterable[int]
) -> tuple[AttentionBackend, str]:
    """The kernel that attends on `device`, and a sentence to tell the user; empty if there is nothing to tell. `auto`
    is the platform's own kernel, or plain XLA where that cannot run. Raises `UsageError` for a kernel that is asked for
    by name and cannot run."""
    kernel = NATIVE.get(device.platform, AttentionBackend.xla) if wanted is AttentionBackend.auto else wanted
    obstacle = _obstacle(kernel, device, dtype, head_sizes)
    if not obstacle:
        slow = kernel is AttentionBackend.splash and device.platform == "cpu"
        return kernel, "attention by splash is interpreted on a CPU, which is slow" if slow else ""
    if wanted is AttentionBackend.auto:
        return AttentionBackend.xla, f"attention is computed by XLA, which is slower: {obstacle}"
    raise UsageError(f"attention by {kernel} cannot run: {obstacle}", "--set sharding.attention=auto")


def _obstacle(kernel: AttentionBackend, device: jax.Device, dtype: DType, head_sizes: Iterable[int]) -> str:
    """Why a kernel cannot run on a device; empty if it can."""
    if kernel is AttentionBackend.splash and device.platform == "gpu":
        return f"splash is made for TPUs, this is a {device.device_kind}"
    if kernel is not AttentionBackend.cudnn:
        return ""
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
            jax.eval_shape(lambda q, k, v: _cudnn(q, k, v, None), queries, queries, queries)
        except (NotImplementedError, RuntimeError, ValueError) as error:
            return " ".join(str(error).split())
    return ""


TOKENS, HEADS = 1, 2  # the dimensions of every array here
NORM_EPS = 1e-6  # of queries and keys, whatever a model's other norms add


class KeysValues(NamedTuple):
    """Keys (normalised, rotated) and values of one context, each [rows, tokens, heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


class TokenAxis(NamedTuple):
    """The logical axis along which tokens lie, and their number without the zeros that fill the devices' parts."""

    name: str | None = None
    length: int | None = None  # None: all


TokenAxes = tuple[TokenAxis, TokenAxis]  # of queries and of their context
WHOLE = TokenAxis(), TokenAxis()
Mask = jax.Array | np.ndarray | None


class Rope(NamedTuple):
    """Rotary position embedding in its split form (arXiv:2104.09864): cos and sin of one stream's positions, each
    float32 [tokens, heads, head_dim / 2]."""

    cos: jax.Array | np.ndarray
    sin: jax.Array | np.ndarray


def rope_table(fractions: np.ndarray, width: int, heads: int, theta: float) -> Rope:
    """The table for positions given as fractions of the largest position, float32 [tokens, axes]. Frequencies are a log
    grid from π/2 to theta·π/2 made in float64; angles are float32 because that is what the weights were trained with.
    The axes run fastest; what does not fill width/2 is identity, in front."""
    tokens, axes = fractions.shape
    count = width // (2 * axes)
    grid = theta ** np.linspace(0.0, 1.0, count, dtype=np.float64) * (np.pi / 2)
    centred = fractions.astype(np.float32) * 2 - 1
    angles = (centred[:, None, :] * grid.astype(np.float32)[None, :, None]).reshape(tokens, count * axes)
    padded = np.pad(angles, ((0, 0), (width // 2 - count * axes, 0)))
    exact = padded.reshape(tokens, heads, width // heads // 2).astype(np.float64)
    return Rope(np.cos(exact).astype(np.float32), np.sin(exact).astype(np.float32))


def rotate(x: jax.Array, rope: Rope) -> jax.Array:
    """Rotate the halves of each head of x [batch, tokens, heads, head_dim] by its token's angles."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * rope.cos - second * rope.sin, second * rope.cos + first * rope.sin)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Attention with biases, RMS-normalised queries and keys over all heads jointly, and optional per-head gates."""

    def __init__(self, scope: Scope, dim: int, context_dim: int, heads: int, head_dim: int, gated: bool):
        inner = heads * head_dim
        self.to_q = Linear(scope / "to_q", dim, inner, ("embed", "heads"))
        self.to_k = Linear(scope / "to_k", context_dim, inner, ("embed", "heads"))
        self.to_v = Linear(scope / "to_v", context_dim, inner, ("embed", "heads"))
        # To gather a narrow input sends less than to sum a wide result that every device has a part of.
        self.out_axis = "heads" if inner >= dim else None
        self.to_out = Linear(scope / "to_out" / 0, inner, dim, (self.out_axis, "embed"))
        self.norm_q = (scope / "norm_q").weight("weight", (inner,), ("heads",))
        self.norm_k = (scope / "norm_k").weight("weight", (inner,), ("heads",))
        self.gate = Linear(scope / "to_gate_logits", dim, heads, ("embed", None)) if gated else None
        self.heads = heads

    def keys_values(self, context: jax.Array, rope: Rope | None = None) -> KeysValues:
        """Keys and values of `context` [rows, tokens, context_dim]."""
        keys = self._split(rms_norm(self.to_k(context), NORM_EPS, self.norm_k[...]))
        return KeysValues(keys if rope is None else rotate(keys, rope), self._split(self.to_v(context)))

    def __call__(
        self, x: jax.Array, context: KeysValues, axes: TokenAxes = WHOLE, rope: Rope | None = None, mask: Mask = None
    ) -> jax.Array:
        """Attention from x [rows, tokens, dim] to `context`; `axes` are those of their tokens. `mask` (bool [rows]) is
        for self-attention: where false, a token keeps its own value, the perturbation of spatio-temporal guidance."""
        # Scaled by 1/√d before they are rounded to the run's dtype.
        scale = self.norm_q[...].astype(jnp.float32) * (self.norm_q.shape[-1] // self.heads) ** -0.5
        queries = self._split(rms_norm(self.to_q(x), NORM_EPS, scale))
        heads = attend(queries if rope is None else rotate(queries, rope), context, axes)
        if mask is not None:
            heads = jnp.where(mask[:, None, None, None], heads, context.values)
        if self.gate is not None:
            heads = heads * (2 * jax.nn.sigmoid(self.gate(x)))[..., None]
        return self.to_out(constrain(heads.reshape(*x.shape[:2], -1), ("rows", axes[0].name, self.out_axis)))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)


def attend(queries: jax.Array, context: KeysValues, axes: TokenAxes = WHOLE) -> jax.Array:
    """softmax(q·kᵀ)·v with float32 scores; all arrays [rows, tokens, heads, head_dim], the queries already scaled."""
    plan = active()
    if plan is None or plan.mesh.size == 1:
        return attend_with(plan.attention if plan else AttentionBackend.xla, queries, *context)
    kernel, count = plan.attention, axes[1].length or context.keys.shape[TOKENS]
    split, whole = (
        plan.activation(("rows", axis.name, "heads", None), x.shape)
        for axis, x in zip(axes, (queries, context.keys), strict=True)
    )
    along, parts = whole[TOKENS], plan.mesh.shape.get(whole[TOKENS], 1)

    def attend_locally(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        """On one device: its own queries, and the part of the context that it holds, `count` tokens in all."""
        if along is None:
            return attend_with(kernel, queries, keys, values)
        if split[TOKENS] is None:
            # Whole queries over a context in parts: each part's result, weighted by its share of the softmax's sum.
            here = keys.shape[TOKENS]
            valid = jnp.clip(count - here * jax.lax.axis_index(along), 0, here)
            part = attend_partly(kernel, queries, keys, values, valid)
            weight = jnp.exp(part.log_sum - jax.lax.pmax(part.log_sum, along))[..., None]
            total, gathered = jax.lax.psum((weight, weight * part.gathered), along)
            return (gathered / total).astype(values.dtype)
        if queries.shape[HEADS] % parts:
            entire = (jax.lax.all_gather(x, along, axis=TOKENS, tiled=True)[:, :count] for x in (keys, values))
            return attend_with(kernel, queries, *entire)
        traded, *others = (jax.lax.all_to_all(x, along, HEADS, TOKENS, tiled=True) for x in (queries, keys, values))
        attended = attend_with(kernel, traded, *(x[:, :count] for x in others))
        return jax.lax.all_to_all(attended, along, TOKENS, HEADS, tiled=True)

    specs = (split, whole, whole)
    local = jax.shard_map(attend_locally, mesh=plan.mesh, in_specs=specs, out_specs=split, check_vma=False)
    return local(queries, *context)
