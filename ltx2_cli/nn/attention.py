"""Multi-head attention as every LTX-2 transformer uses it (arXiv:2601.03233)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.nn.basic import Linear, rms_norm
from ltx2_cli.nn.rope import Rope, rotate
from ltx2_cli.weights.declare import Scope

QUERY_BLOCK = 1024  # queries scored at a time: bounds the memory of the scores without touching the result


class KeysValues(NamedTuple):
    """Keys (normalised, rotated) and values of one context, each [rows, tokens, heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


def attend(queries: jax.Array, context: KeysValues) -> jax.Array:
    """softmax(q·kᵀ/√d)·v with float32 scores; all arrays [rows, tokens, heads, head_dim]."""
    rows, tokens, heads, dim = queries.shape
    blocks = -(-tokens // QUERY_BLOCK)
    if blocks == 1:
        return _attend_block(queries, context)
    padding = blocks * QUERY_BLOCK - tokens
    padded = jnp.pad(queries, ((0, 0), (0, padding), (0, 0), (0, 0)))
    split = padded.reshape(rows, blocks, QUERY_BLOCK, heads, dim).swapaxes(0, 1)
    done = jax.lax.map(lambda block: _attend_block(block, context), split)
    return done.swapaxes(0, 1).reshape(rows, blocks * QUERY_BLOCK, heads, dim)[:, :tokens]


def _attend_block(queries: jax.Array, context: KeysValues) -> jax.Array:
    # jax.nn.dot_product_attention is this, but does not compile in float16.
    scores = jnp.einsum("rqhd,rkhd->rhqk", queries, context.keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * queries.shape[-1] ** -0.5, axis=-1).astype(context.values.dtype)
    # Fused into each other, both products overflow the stack of libtpu 0.0.42's compiler for TPU v7x.
    weights = jax.lax.optimization_barrier(weights)
    return jnp.einsum("rhqk,rkhd->rqhd", weights, context.values)


class Attention(nnx.Module):
    """Attention with biases, RMS-normalised queries and keys over all heads jointly, and optional per-head gates."""

    def __init__(self, scope: Scope, dim: int, context_dim: int, heads: int, head_dim: int, gated: bool, eps: float):
        inner = heads * head_dim
        self.to_q = Linear(scope / "to_q", dim, inner, ("embed", "heads"))
        self.to_k = Linear(scope / "to_k", context_dim, inner, ("embed", "heads"))
        self.to_v = Linear(scope / "to_v", context_dim, inner, ("embed", "heads"))
        self.to_out = Linear(scope / "to_out" / 0, inner, dim, ("heads", "embed"))
        self.norm_q = (scope / "norm_q").weight("weight", (inner,), ("heads",))
        self.norm_k = (scope / "norm_k").weight("weight", (inner,), ("heads",))
        self.gate = Linear(scope / "to_gate_logits", dim, heads, ("embed", None)) if gated else None
        self.heads, self.eps = heads, eps

    def keys_values(self, context: jax.Array, rope: Rope | None = None) -> KeysValues:
        """Keys and values of `context` [rows, tokens, context_dim]."""
        keys = self._split(rms_norm(self.to_k(context), self.eps, self.norm_k[...]))
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
        queries = self._split(rms_norm(self.to_q(x), self.eps, self.norm_q[...]))
        heads = attend(queries if rope is None else rotate(queries, rope), context)
        if attending is not None:
            heads = jnp.where(attending[:, None, None, None], heads, context.values)
        if self.gate is not None:
            heads = heads * (2 * jax.nn.sigmoid(self.gate(x)))[..., None]
        return self.to_out(heads.reshape(*x.shape[:2], -1))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)
