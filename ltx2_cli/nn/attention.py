"""Multi-head attention as every LTX-2 transformer uses it (arXiv:2601.03233)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.nn.attend import KeysValues, attend
from ltx2_cli.nn.basic import Linear, rms_norm
from ltx2_cli.nn.rope import Rope, rotate
from ltx2_cli.sharding import constrain
from ltx2_cli.weights.declare import Scope

NORM_EPS = 1e-6  # of queries and keys, whatever a model's other norms add
BY_HEAD = ("rows", None, "heads", None)


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
