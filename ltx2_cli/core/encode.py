"""Prompts to text contexts: every distinct prompt once, by the text encoder and the connectors, or from the cache."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import compress

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ltx2_cli.core.advice import CONNECT_TEXT, ENCODE_TEXT, memory_for
from ltx2_cli.core.components import Components, network_program
from ltx2_cli.core.context_cache import EncodedPrompts, keep_contexts, read_contexts
from ltx2_cli.core.exported import ExportedFunction, exported_function
from ltx2_cli.core.programs import Program, as_abstract
from ltx2_cli.core.report import Report
from ltx2_cli.errors import NotFiniteError
from ltx2_cli.models.connectors import TextConnectors
from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.tokenizer import Tokens, tokenise
from ltx2_cli.parallel.arrays import to_devices
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.plan.inputs import CONNECTORS
from ltx2_cli.plan.resolve import Plan
from ltx2_cli.request.spec import DType, Streams
from ltx2_cli.request.spelling import option_name


def encode(plan: Plan, names: Sequence[str], components: Components, report: Report) -> dict[str, Streams[jax.Array]]:
    """The contexts of the plan's prompts, of each stream [prompts, tokens, width], by the name of the connectors: from
    the cache, else encoded."""
    known = {name: found for name in names if (found := read_contexts(plan, name, report))}
    if missing := [name for name in names if name not in known]:
        known |= _encode(plan, missing, components, report)
    else:
        _note_truncated(plan, next(iter(known.values())).truncated, report)
    return {name: to_devices(known[name].contexts, plan.sharding.replicated) for name in names}


def _encode(plan: Plan, names: Sequence[str], components: Components, report: Report) -> dict[str, EncodedPrompts]:
    """The prompts, encoded and kept in the cache, by the name of the connectors."""
    tokens = tokenise(plan.checkpoint.tokenizer, plan.prompts, plan.text_tokens)
    truncated = tuple(compress(plan.prompts, tokens.truncated))
    _note_truncated(plan, truncated, report)
    states = _hidden_states(tokens, plan, components, report)
    contexts = {name: _contexts(name, tokens, states, plan, components, report) for name in names}
    encoded = {name: EncodedPrompts(context, truncated) for name, context in contexts.items()}
    for name, prompts in encoded.items():
        keep_contexts(plan, name, prompts)
    return encoded


def _note_truncated(plan: Plan, prompts: Sequence[str], report: Report) -> None:
    for prompt in prompts:
        report.note(f"only the first {plan.text_tokens} tokens are read of: {prompt[:40]}…")


def text_programs(plan: Plan, names: Sequence[str]) -> list[Program]:
    """The programs that encode the plan's prompts. Raises `UsageError` for a text encoder that cannot be computed."""
    if not names:
        return []
    encoder = [_encoder_program(plan)] if plan.compile_text_encoder else []
    if not any(isinstance(each.function, ExportedFunction) and each.function.is_known() for each in encoder):
        from ltx2_cli.models.gemma_torch import build_torch_module

        arch = plan.arch.text_encoder
        build_torch_module(arch.config, arch.where)  # now, in this thread: others lower the programs
    return [*encoder, *(_connector_program(plan, name) for name in names)]


def abstract_contexts(plan: Plan) -> Streams[jax.ShapeDtypeStruct]:
    """The contexts that `encode` returns of any connectors, without their values."""
    contexts, _ = _connector_program(plan, CONNECTORS).outputs()
    return contexts


def text_sharding(plan: Plan, axis: int) -> NamedSharding:
    """Sharding of an array whose `axis` is the text's tokens: split along every mesh axis but that of heads, or whole
    if their number does not divide."""
    mesh = plan.sharding.mesh
    axes = tuple(name for name, size in mesh.shape.items() if size > 1 and name != plan.sharding.mesh_axis("heads"))
    parts = math.prod(mesh.shape[name] for name in axes)
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, axes if plan.text_tokens % parts == 0 else None))


def _encoder_program(plan: Plan) -> Program:
    """Tokens and mask [prompts, tokens] to hidden states, and whether they are finite."""
    shape = plan.prompts_at_once, plan.text_tokens
    tokens = as_abstract((np.empty(shape, np.int32), np.empty(shape, bool)), text_sharding(plan, 1))
    out = text_sharding(plan, 2), plan.sharding.replicated
    function = jitted(_states, out, where=text_sharding(plan, 2))
    program = network_program(plan, "text encoder", ["text_encoder"], function, *tokens)
    return replace(program, function=exported_function(program, out, _encoder_facts(plan)) or function)


def _encoder_facts(plan: Plan) -> Iterator[object]:
    yield replace(plan.arch.text_encoder, where="")
    yield plan.checkpoint.matrices(plan.spec).text_encoder  # rotations are in the program, not in its arguments' shapes
    yield plan.sharding.mesh.devices.flat[0].client.platform_version


def _connector_program(plan: Plan, name: str) -> Program:
    """Hidden states of each batch of prompts and the mask of all to contexts, and whether they are finite."""
    encoder, where = plan.arch.text_encoder, plan.sharding.replicated
    shape = (plan.prompts_at_once, encoder.states, plan.text_tokens, encoder.hidden_size)
    part = jax.ShapeDtypeStruct(shape, plan.text_encoder_dtype.value, sharding=text_sharding(plan, 2))
    parts = [part] * (len(plan.prompts) // plan.prompts_at_once)
    mask = jax.ShapeDtypeStruct((len(plan.prompts), plan.text_tokens), bool, sharding=where)
    return network_program(plan, name.replace("_", " "), [name], jitted(_connect, where, plan.sharding), parts, mask)


def _hidden_states(tokens: Tokens, plan: Plan, components: Components, report: Report) -> list[jax.Array]:
    where, size = text_sharding(plan, 2), plan.prompts_at_once
    run = _encoder_program(plan) if plan.compile_text_encoder else partial(_states, where=where)
    if isinstance(run, Program) and isinstance(run.function, ExportedFunction) and run.function.damaged:
        with report.activity(f"trace again: {run.function.path} was damaged"):
            run.function.damaged = False
    batches = [slice(row, row + size) for row in range(0, len(tokens.ids), size)]
    with (
        memory_for(ENCODE_TEXT, plan),
        components.use("text_encoder", report) as encoder,
        report.activity("encode text"),
    ):
        arrays = to_devices([(tokens.ids[rows], tokens.mask[rows]) for rows in batches], text_sharding(plan, 1))
        parts = [run(encoder, ids, mask) for ids, mask in arrays]
        for _, finite in parts:
            check_text(finite, "text encoder", plan.text_encoder_dtype)
        return [states for states, _ in parts]


def _contexts(
    name: str, tokens: Tokens, states: list[jax.Array], plan: Plan, components: Components, report: Report
) -> Streams[jax.Array]:
    with memory_for(CONNECT_TEXT, plan), components.use(name, report) as connectors, report.activity("connect text"):
        mask = to_devices(tokens.mask, plan.sharding.replicated)
        contexts, finite = _connector_program(plan, name)(connectors, states, mask)
        check_text(finite, "text connectors", plan.dtype)
        return contexts


def check_text(finite: jax.Array, network: str, dtype: DType) -> None:
    """Raise `NotFiniteError` for a network of the text that overflowed."""
    if not bool(finite):
        names = f"{option_name('text_encoder_dtype')} and {option_name('dtype')}"
        hint = f"{names}: bfloat16 and float32 have the range it needs"
        raise NotFiniteError(f"the {network} overflowed in {dtype.value}", hint)


def _states(encoder: Gemma, ids: jax.Array, mask: jax.Array, where: Sharding) -> tuple[jax.Array, jax.Array]:
    states = jax.lax.with_sharding_constraint(encoder(ids, mask), where)  # also where it is not compiled
    return states, jnp.isfinite(states).all()


def _connect(
    connectors: TextConnectors, states: list[jax.Array], mask: jax.Array
) -> tuple[Streams[jax.Array], jax.Array]:
    contexts = connectors(jnp.concatenate(states), mask)
    return contexts, jnp.isfinite(contexts.video).all() & jnp.isfinite(contexts.audio).all()
