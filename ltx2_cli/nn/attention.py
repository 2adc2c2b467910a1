"""Multi-head attention as every LTX-2 transformer uses it (arXiv:2601.03233)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.nn.attend import WHOLE, KeysValues, Tokens, attend
from ltx2_cli.nn.basic import Linear, rms_norm
from ltx2_cli.nn.rope import Rope, rotate
from ltx2_cli.sharding import constrain
from ltx2_cli.weights.declare import Scope

NORM_EPS = 1e-6  # of queries and keys, whatever a model's other norms add


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
        self,
        x: jax.Array,
        context: KeysValues,
        rope: Rope | None = None,
        attending: jax.Array | np.ndarray | None = None,
        ours: Tokens = WHOLE,
        theirs: Tokens = WHOLE,
    ) -> jax.Array:
        """Attend from x [rows, tokens, dim], whose tokens are `ours`, to `context`, whose are `theirs`.

        `attending` (bool [rows]) is for self-attention: where false, a token's own value stands in for what it
        would have gathered — the perturbation of spatio-temporal guidance.
        """
        # Scaled by 1/√d before they are rounded to the run's dtype.
        scale = self.norm_q[...].astype(jnp.float32) * (self.norm_q.shape[-1] // self.heads) ** -0.5
        queries = self._split(rms_norm(self.to_q(x), NORM_EPS, scale))
        heads = attend(queries if rope is None else rotate(queries, rope), context, ours, theirs)
        if attending is not None:
            heads = jnp.where(attending[:, None, None, None], heads, context.values)
        if self.gate is not None:
            heads = heads * (2 * jax.nn.sigmoid(self.gate(x)))[..., None]
        return self.to_out(constrain(heads.reshape(*x.shape[:2], -1), ("rows", ours.axis, self.out_axis)))

    def _split(self, x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], self.heads, -1)
