"""Multi-head attention as every LTX-2 transformer uses it (arXiv:2601.03233), on one device or over a mesh.

Where a context's tokens are split over devices, self-attention trades tokens for heads before and after (Ulysses,
arXiv:2309.14509); queries that lie whole attend to each part, and the results are merged by their softmax's sums.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ltx2_cli.nn.kernels import attend_partly, attend_with
from ltx2_cli.nn.layers import Linear, rms_norm
from ltx2_cli.request.spec import AttentionBackend
from ltx2_cli.sharding import active, constrain
from ltx2_cli.weights.declare import Scope

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
