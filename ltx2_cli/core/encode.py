"""Prompts to text contexts: every distinct prompt once, in one batch where the profile says so."""

from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp

from ltx2_cli.core.components import Components
from ltx2_cli.core.report import Report
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.tokenizer import Tokens, tokenise
from ltx2_cli.plan import Plan
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV, DType, NotFiniteError


def encode(plan: Plan, components: Components, report: Report) -> AV[jax.Array]:
    """The context of each stream for each of the plan's prompts, [prompts, tokens, width]."""
    tokens = tokenise(plan.checkpoint.tokenizer, plan.prompts, plan.spec.max_sequence_length)
    for prompt, truncated in zip(plan.prompts, tokens.truncated, strict=True):
        if truncated:
            report.note(f"only the first {plan.spec.max_sequence_length} tokens are read of: {prompt[:40]}…")
    return _connected(_hidden_states(tokens, plan, components, report), tokens, plan, components, report)


def _hidden_states(tokens: Tokens, plan: Plan, components: Components, report: Report) -> jax.Array:
    run = _encode if plan.spec.compile_text_encoder else Gemma.__call__
    batch = len(tokens.ids) if plan.spec.sharding.use_batched_text_encoder else 1
    with components.use("text_encoder", report) as encoder, report.stage("encode text"):
        parts = [
            run(encoder, jnp.asarray(tokens.ids[row : row + batch]), jnp.asarray(tokens.mask[row : row + batch]))
            for row in range(0, len(tokens.ids), batch)
        ]
        states = jax.block_until_ready(jnp.concatenate(parts))
        _check_finite([states], "text encoder", plan.spec.text_encoder_dtype)
        return states


def _connected(states: jax.Array, tokens: Tokens, plan: Plan, components: Components, report: Report) -> AV[jax.Array]:
    with components.use("connectors", report) as connectors, report.stage("connect text"):
        contexts = jax.block_until_ready(_connect(connectors, states, jnp.asarray(tokens.mask), plan.sharding))
        _check_finite(contexts, "text connectors", plan.spec.dtype)
        return contexts


def _check_finite(arrays: Iterable[jax.Array], network: str, dtype: DType) -> None:
    if not all(bool(jnp.isfinite(array).all()) for array in arrays):
        raise NotFiniteError(
            f"the {network} overflowed in {dtype.value}",
            "--text-encoder-dtype and --dtype: bfloat16 and float32 have the range it needs",
        )


_encode = jax.jit(Gemma.__call__)


@partial(jax.jit, static_argnames="sharding")
def _connect(connectors: TextConnectors, states: jax.Array, mask: jax.Array, sharding: ShardingPlan) -> AV[jax.Array]:
    with activate(sharding):
        return connectors(states, mask)
