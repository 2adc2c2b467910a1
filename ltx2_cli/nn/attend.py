"""softmax(q·kᵀ)·v over a mesh: who holds which tokens and heads, and what the devices tell each other.

Where a context's tokens are split over devices, self-attention trades tokens for heads before and after (Ulysses,
arXiv:2309.14509); queries that lie whole attend to each part and the results are merged by their softmax's sums.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ltx2_cli.nn.kernels import attend_partly, attend_with
from ltx2_cli.sharding import ShardingPlan, active
from ltx2_cli.spec import Kernel

TOKENS, HEADS = 1, 2  # the dimensions of every array here


class KeysValues(NamedTuple):
    """Keys (normalised, rotated) and values of one context, each [rows, tokens, heads, head_dim]."""

    keys: jax.Array
    values: jax.Array


class Tokens(NamedTuple):
    """The logical axis along which tokens lie, and how many there are before those that fill the devices' parts."""

    axis: str | None = None
    number: int | None = None  # None: all


WHOLE = Tokens()


def attend(queries: jax.Array, context: KeysValues, ours: Tokens = WHOLE, theirs: Tokens = WHOLE) -> jax.Array:
    """softmax(q·kᵀ)·v with float32 scores; all arrays [rows, tokens, heads, head_dim], the queries already scaled.

    `ours` are the tokens of the queries, `theirs` those of the context.
    """
    plan = active()
    if plan is None or plan.mesh.size == 1:
        return attend_with(plan.attention if plan else Kernel.xla, queries, *context)
    split = plan.activation(("rows", ours.axis, "heads", None), queries.shape)
    whole = plan.activation(("rows", theirs.axis, "heads", None), context.keys.shape)
    local = partial(_attend_locally, plan, theirs.number or context.keys.shape[TOKENS], split, whole)
    return jax.shard_map(local, mesh=plan.mesh, in_specs=(split, whole, whole), out_specs=split, check_vma=False)(
        queries, *context
    )


def _attend_locally(
    plan: ShardingPlan,
    count: int,
    ours: PartitionSpec,
    theirs: PartitionSpec,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """On one device: its own queries, and the part of the context that it holds, `count` tokens in all."""
    along = theirs[TOKENS]
    if along is None:
        return attend_with(plan.attention, queries, keys, values)
    if ours[TOKENS] is None:
        return _merged(along, count, plan.attention, queries, keys, values)
    if queries.shape[HEADS] % plan.mesh.shape[along]:
        whole = (jax.lax.all_gather(x, along, axis=TOKENS, tiled=True)[:, :count] for x in (keys, values))
        return attend_with(plan.attention, queries, *whole)
    traded, *others = (jax.lax.all_to_all(x, along, HEADS, TOKENS, tiled=True) for x in (queries, keys, values))
    gathered = attend_with(plan.attention, traded, *(x[:, :count] for x in others))
    return jax.lax.all_to_all(gathered, along, TOKENS, HEADS, tiled=True)


def _merged(
    along: str, count: int, kernel: Kernel, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> jax.Array:
    """Whole queries over a context in parts: each part's result, weighted by its share of the softmax's sum."""
    here = keys.shape[TOKENS]
    valid = jnp.clip(count - here * jax.lax.axis_index(along), 0, here)
    part = attend_partly(kernel, queries, keys, values, valid)
    weight = jnp.exp(part.log_sum - jax.lax.pmax(part.log_sum, along))[..., None]
    total, gathered = jax.lax.psum((weight, weight * part.gathered), along)
    return (gathered / total).astype(values.dtype)
