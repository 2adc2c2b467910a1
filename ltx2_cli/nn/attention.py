"""Multi-head attention as every LTX-2 transformer uses it (arXiv:2601.03233)."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.nn.basic import Linear, rms_norm
from ltx2_cli.nn.rope import Rope, rotate
from ltx2_cli.sharding import constrain, on_one_cpu
from ltx2_cli.weights.declare import Scope

SCORE_BYTES = 2**30  # float32 scores held at a time, over all rows and heads: bounds memory, not the result
LEAST_QUERIES = 128
NORM_EPS = 1e-6  # of queries and keys, whatever a model's other norms add
BY_HEAD = ("rows", None, "heads", None)


class KeysValues(NamedTuple):
    """Keys (normalised, rotated) and values of one context, each [rows, tokens, heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


def attend(queries: jax.Array, context: KeysValues) -> jax.Array:
    """softmax(q·kᵀ/√d)·v with float32 scores; all arrays [rows, tokens, heads, head_dim]."""
    return _attend_by_head(queries, context) if on_one_cpu() else _attend_all_heads(queries, context)


def _attend_by_head(queries: jax.Array, context: KeysValues) -> jax.Array:
    """One head and a few queries at a time, whose scores stay in the cache; the sum of weights divides at the end."""
    rows, tokens, heads, dim = queries.shape
    block = min(tokens, LEAST_QUERIES)
    blocks = -(-tokens // block)
    padded = jnp.pad(queries, ((0, 0), (0, blocks * block - tokens), (0, 0), (0, 0)))
    split = padded.transpose(0, 2, 1, 3).reshape(rows * heads, blocks, block, dim)
    keys = context.keys.transpose(0, 2, 3, 1).reshape(rows * heads, dim, -1)
    values = context.values.transpose(0, 2, 1, 3).reshape(rows * heads, -1, dim)

    def one_head(head: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        queries, keys, values = head

        def one_block(queries: jax.Array) -> jax.Array:
            scores = jnp.matmul(queries, keys, preferred_element_type=jnp.float32) * dim**-0.5
            weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
            gathered = jnp.matmul(weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
            return (gathered / weights.sum(axis=-1, keepdims=True)).astype(values.dtype)

        return jax.lax.map(one_block, queries)

    done = jax.lax.map(one_head, (split, keys, values))
    return done.reshape(rows, heads, blocks * block, dim)[:, :, :tokens].swapaxes(1, 2)


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


class Attention(nnx.Module):
    """Attention with biases, RMS-normalised queries and keys over all heads jointly, and optional per-head gates."""

    def __init__(self, scope: Scope, dim: int, context_dim: int, heads: int, head_dim: int, gated: bool):
        inner = heads * head_dim
        self.to_q = Linear(scope / "to_q", dim, inner, ("embed", "heads"))
        self.to_k = Linear(scope / "to_k", context_dim, inner, ("embed", "heads"))
        self.to_v = Linear(scope / "to_v", context_dim, inner, ("embed", "heads"))
        self.to_out = Linear(scope / "to_out" / 0, inner, dim, ("heads", "embed"))
        self.norm_q = (scope / "norm_q").weight("weight", (inner,), ("heads",))
        self.norm_k = (scope / "norm_k").weight("weight", (inner,), ("heads",))
        self.gate = Linear(scope / "to_gate_logits", dim, heads, ("embed", None)) if gated else None
        self.heads = heads

    def keys_values(self, context: jax.Array, rope: Rope | None = None) -> KeysValues:
        """Keys and values of `context` [rows, tokens, context_dim]."""
        keys = self._split(rms_norm(self.to_k(context), NORM_EPS, self.norm_k[...]))
        return KeysValues(keys if rope is None else rotate(keys, rope), self._split(self.to_v(context)))

    def __call__(
        self,
        x: jax.Array,
        context: KeysValues,
        rope: Rope | None = None,
        attending: jax.Array | np.ndarray | None = None,
    ) -> jax.Array:
        """Attend from x [rows, tokens, dim] to `context`.

        `attending` (bool [rows]) is for self-attention: where false, a token's own value stands in for what it
        would have gathered — the perturbation of spatio-temporal guidance.
        """
        queries = self._split(rms_norm(self.to_q(x), NORM_EPS, self.norm_q[...]))
        by_head = partial(constrain, axes=BY_HEAD)
        context = KeysValues(*map(by_head, context))
        heads = attend(by_head(queries if rope is None else rotate(queries, rope)), context)
        if attending is not None:
            heads = jnp.where(attending[:, None, None, None], heads, context.values)
        if self.gate is not None:
            heads = heads * (2 * jax.nn.sigmoid(self.gate(x)))[..., None]
        return self.to_out(heads.reshape(*x.shape[:2], -1))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)
