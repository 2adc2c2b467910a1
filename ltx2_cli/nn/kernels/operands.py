"""Operands and results of attention on one device, and the steps that several kernels share.

All kernels compute one definition, which tests hold them to in float64 at the same lengths: softmax(q·kᵀ)·v with
float32 scores that are never all in memory. The context is whole, or the part of it on this device. Of a part the first
`valid` keys count, and its weight is the logarithm of the sum of their exponentials.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ltx2_cli.nn.rope import rotate
from ltx2_cli.request.spec import DType

MASKED = -1e30  # a score that does not count, below all others: exp is 0, and no sum of such scores overflows


class Norm(NamedTuple):
    """Factors that normalise a projection."""

    scales: Any  # of the tokens, float32 [rows, tokens, 1]
    weights: Any  # of the channels, float32 [heads * head_dim]


class Operands(NamedTuple):
    """Arrays that attention reads on one device: projections [rows, tokens, heads * head_dim] with normalised keys; the
    norm of the queries, the rotation of both, and the gates of the results."""

    queries: Any
    keys: Any
    values: Any
    ropes: Any = None  # a `Rope` of the queries and one of the keys; None: neither is rotated
    gates: Any = None  # factors of the results, [rows, queries, heads]
    mask: Any = None  # bool [rows]; false: each token keeps its own value, of as many values as queries
    norm: Any = None  # a `Norm` of the queries; None: they are normalised
    key_weights: Any = None  # factor of each key's exponential, float32 [keys]; None: 1


class PartialAttention(NamedTuple):
    """Attention over a part of a context, and the weight of that part."""

    gathered: jax.Array  # [rows, queries, heads * head_dim]
    log_sum: Any  # float32 [rows, queries, heads]: log Σ exp(q·k) over the part's keys; of a whole context maybe None


class Workload(NamedTuple):
    """Facts that decide whether a kernel can run."""

    device: jax.Device
    dtype: DType
    head_sizes: Iterable[int]


Attend = Callable[[Operands, int, jax.Array | None], PartialAttention]  # operands, heads, valid keys (None: all)
Vector = jax.Array | None


def no_obstacle(_: Workload) -> str:
    """Empty: the kernel runs everywhere."""
    return ""


class Kernel(NamedTuple):
    """A way to attend, and its limits."""

    attend: Attend
    obstacle: Callable[[Workload], str] = no_obstacle  # the reason why it cannot run; empty if it can
    weighs_keys: bool = True
    for_tpus: bool = False  # interpreted on a CPU


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """[rows, tokens, heads * head_dim] to [rows, tokens, heads, head_dim]."""
    return x.reshape(*x.shape[:2], heads, -1)


def normalise_queries(operands: Operands) -> Operands:
    """Operands whose queries are normalised."""
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


def by_head(attend: Callable[..., PartialAttention]) -> Attend:
    """The whole attention from `attend`, a function of normalised, rotated queries, keys and values [rows, tokens,
    heads, head_dim], of `valid`, and of the keys' weights."""

    def attend_to(operands: Operands, heads: int, valid: jax.Array | None) -> PartialAttention:
        queries, keys, values = (split_heads(x, heads) for x in normalise_queries(operands)[:3])
        if operands.ropes:
            queries, keys = map(rotate, (queries, keys), operands.ropes)
        attended, log_sum = attend(queries, keys, values, valid, operands.key_weights)
        return PartialAttention(finish(operands, attended), log_sum)

    return attend_to


def key_bias(keys: int, valid: Vector, key_weights: Vector) -> Vector:
    """The bias of each key's scores, float32 [keys]; None: 0."""
    bias = None if key_weights is None else jnp.maximum(jnp.log(key_weights), MASKED)
    if valid is None:
        return bias
    return jnp.where(jnp.arange(keys) < valid, 0 if bias is None else bias, MASKED)


def pad_tokens(x: jax.Array, block: int, blocks: int | None = None) -> jax.Array:
    """x [rows, tokens, heads, head_dim], zero-padded to `blocks` blocks of tokens; None: to whole blocks."""
    missing = -x.shape[1] % block if blocks is None else block * blocks - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0)])
