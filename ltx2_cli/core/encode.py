"""Prompts to text contexts: every distinct prompt once, in one batch where the profile says so."""

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
from ltx2_cli.spec import AV, RunError


def encode(plan: Plan, components: Components, report: Report) -> AV[jax.Array]:
    """The context of each stream for each of the plan's prompts, [prompts, tokens, width]."""
    tokens = tokenise(plan.checkpoint.tokenizer, plan.prompts, plan.spec.max_sequence_length)
    for prompt, truncated in zip(plan.prompts, tokens.truncated, strict=True):
        if truncated:
            report.note(f"only the first {plan.spec.max_sequence_length} tokens are read of: {prompt[:40]}…")
    contexts = _connected(_hidden_states(tokens, plan, components, report), tokens, plan, components, report)
    if not all(bool(jnp.isfinite(context).all()) for context in contexts):
        raise RunError(
            f"the text encoder overflowed in {plan.spec.text_encoder_dtype.value}",
            "--text-encoder-dtype bfloat16 or float32 has the range it needs",
        )
    return contexts


def _hidden_states(tokens: Tokens, plan: Plan, components: Components, report: Report) -> jax.Array:
    run = _encode if plan.spec.compile_text_encoder else Gemma.__call__
    batch = len(tokens.ids) if plan.spec.sharding.use_batched_text_encoder else 1
    with components.use("text_encoder", report) as encoder, report.stage("encode text"):
        parts = [
            run(encoder, jnp.asarray(tokens.ids[row : row + batch]), jnp.asarray(tokens.mask[row : row + batch]))
            for row in range(0, len(tokens.ids), batch)
        ]
        return jax.block_until_ready(jnp.concatenate(parts))


def _connected(states: jax.Array, tokens: Tokens, plan: Plan, components: Components, report: Report) -> AV[jax.Array]:
    with components.use("connectors", report) as connectors, report.stage("connect text"):
        return jax.block_until_ready(_connect(connectors, states, jnp.asarray(tokens.mask), plan.sharding))


_encode = jax.jit(Gemma.__call__)


@partial(jax.jit, static_argnames="sharding")
def _connect(connectors: TextConnectors, states: jax.Array, mask: jax.Array, sharding: ShardingPlan) -> AV[jax.Array]:
    with activate(sharding):
        return connectors(states, mask)
