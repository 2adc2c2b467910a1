"""Prompts to text contexts: every distinct prompt once, in one batch where the profile says so."""

from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from ltx2_cli.core.components import Components, abstract_network
from ltx2_cli.core.out_of_memory import CONNECT, ENCODE, memory_for
from ltx2_cli.core.programs import Program, abstract, results
from ltx2_cli.core.progress import Contexts
from ltx2_cli.core.report import Report
from ltx2_cli.hosts import place
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.tokenizer import Tokens, tokenise
from ltx2_cli.plan import Plan
from ltx2_cli.sharding import ShardingPlan, activate
from ltx2_cli.spec import AV, DType, NotFiniteError
from ltx2_cli.stages import CONNECTORS


def encode(plan: Plan, names: Iterable[str], components: Components, report: Report) -> Contexts:
    """By the names of connectors, the context of each stream for each of the plan's prompts, [prompts, tokens, width].

    The prompts are read once for all of them.
    """
    tokens = tokenise(plan.checkpoint.tokenizer, plan.prompts, plan.spec.max_sequence_length)
    for prompt, truncated in zip(plan.prompts, tokens.truncated, strict=True):
        if truncated:
            report.note(f"only the first {plan.spec.max_sequence_length} tokens are read of: {prompt[:40]}…")
    states = _hidden_states(tokens, plan, components, report)
    return {name: _connected(name, states, tokens, plan, components, report) for name in names}


def programs(plan: Plan, names: Iterable[str]) -> Iterator[Program]:
    """Those that `encode` runs. Raises `SpecError` for a text encoder that cannot be computed."""
    plan.networks.text_encoder.check()  # now, in this thread: others lower the programs
    return _programs(plan, names)


def _programs(plan: Plan, names: Iterable[str]) -> Iterator[Program]:
    if plan.spec.compile_text_encoder:
        yield Program("text encoder", "text_encoder", lambda: _trace_encoder(plan).lower())
    for name in names:
        yield Program(name.replace("_", " "), name, lambda: _trace_connectors(plan).lower())


def abstract_contexts(plan: Plan) -> AV[jax.ShapeDtypeStruct]:
    """What `encode` returns of any connectors, without its values."""
    contexts, _ = results(_trace_connectors(plan))
    return contexts


def _trace_encoder(plan: Plan) -> jax.stages.Traced:
    shape = (_batch(plan), plan.spec.max_sequence_length)
    tokens = abstract((np.empty(shape, np.int32), np.empty(shape, bool)), plan.sharding.replicated)
    return _encode.trace(abstract_network(plan, "text_encoder"), *tokens, plan.sharding)


def _trace_connectors(plan: Plan) -> jax.stages.Traced:
    text, dtype = plan.checkpoint.text_encoder, plan.spec.text_encoder_dtype.value
    shape = (len(plan.prompts), plan.spec.max_sequence_length)
    states = (_batch(plan), text.states, shape[1], text.hidden_size)
    part = jax.ShapeDtypeStruct(states, dtype, sharding=plan.sharding.replicated)
    mask = abstract(np.empty(shape, bool), plan.sharding.replicated)
    parts = [part] * (len(plan.prompts) // _batch(plan))
    return _connect.trace(abstract_network(plan, CONNECTORS), parts, mask, plan.sharding)


def _batch(plan: Plan) -> int:
    """How many prompts are encoded at once."""
    return len(plan.prompts) if plan.spec.sharding.use_batched_text_encoder else 1


def _hidden_states(tokens: Tokens, plan: Plan, components: Components, report: Report) -> list[jax.Array]:
    """Those of each batch of prompts."""
    run, batch = _encode if plan.spec.compile_text_encoder else _states, _batch(plan)
    batches = [slice(row, row + batch) for row in range(0, len(tokens.ids), batch)]
    with (
        memory_for(ENCODE, plan),
        components.use("text_encoder", report) as encoder,
        report.stage("encode text"),
    ):
        arrays = place([(tokens.ids[rows], tokens.mask[rows]) for rows in batches], plan.sharding.replicated)
        parts = [run(encoder, ids, mask, plan.sharding) for ids, mask in arrays]
        _check_finite([finite for _, finite in parts], "text encoder", plan.spec.text_encoder_dtype)
        return [states for states, _ in parts]


def _connected(
    name: str, states: list[jax.Array], tokens: Tokens, plan: Plan, components: Components, report: Report
) -> AV[jax.Array]:
    with memory_for(CONNECT, plan), components.use(name, report) as connectors, report.stage("connect text"):
        mask = place(tokens.mask, plan.sharding.replicated)
        contexts, finite = _connect(connectors, states, mask, plan.sharding)
        _check_finite([finite], "text connectors", plan.spec.dtype)
        return contexts


def _check_finite(finite: list[jax.Array], network: str, dtype: DType) -> None:
    if not all(map(bool, finite)):
        raise NotFiniteError(
            f"the {network} overflowed in {dtype.value}",
            "--text-encoder-dtype and --dtype: bfloat16 and float32 have the range it needs",
        )


def _states(encoder: Gemma, ids: jax.Array, mask: jax.Array, sharding: ShardingPlan) -> tuple[jax.Array, jax.Array]:
    """Hidden states, whole on every device, and whether they are finite."""
    states = jax.lax.with_sharding_constraint(encoder(ids, mask), sharding.replicated)
    return states, jnp.isfinite(states).all()


_encode = jax.jit(_states, static_argnames="sharding")


@partial(jax.jit, static_argnames="sharding")
def _connect(
    connectors: TextConnectors, states: list[jax.Array], mask: jax.Array, sharding: ShardingPlan
) -> tuple[AV[jax.Array], jax.Array]:
    """The contexts, whole on every device, and whether they are finite."""
    with activate(sharding):
        contexts = connectors(jnp.concatenate(states), mask)
    finite = jnp.isfinite(contexts.video).all() & jnp.isfinite(contexts.audio).all()
    return jax.lax.with_sharding_constraint(contexts, sharding.replicated), finite
