"""The text encoder: transformers' Gemma-3 or Gemma-4, run by torchax on jax arrays, our weights. The torch module has
no memory of its own. Importing this module takes seconds."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import Gemma3TextConfig, Gemma3TextModel, Gemma4UnifiedTextConfig, Gemma4UnifiedTextModel
from transformers.activations import ACT2FN

from ltx2_cli.errors import UsageError
from ltx2_cli.nn.layer_loop import scan_periods
from ltx2_cli.weights.checkpoint import AGAIN
from ltx2_cli.weights.quantized_matrix import Matrix, widen

if TYPE_CHECKING:
    from torchax.tensor import Environment

MODELS: dict[str, tuple[Any, Any]] = {  # classes of configs and modules, by the type that a config states
    "gemma3_text": (Gemma3TextConfig, Gemma3TextModel),
    "gemma4_unified_text": (Gemma4UnifiedTextConfig, Gemma4UnifiedTextModel),
}
LayerWeights = Mapping[str, Matrix]  # by name
# What a theta goes with, by the kind of rotary embedding.
ROPES: dict[str | None, set[str]] = {"default": set(), "linear": {"factor"}, "proportional": {"partial_rotary_factor"}}

# Overloads by dimension name, behind operators of torch.ops.aten: torchax 0.0.13 names them on import, torch 2.13 has
# none of them.
DROPPED_OVERLOADS = """all dimname dimname_out / index_add dimname / index_copy dimname / index_copy_ dimname
/ index_fill Dimname_Scalar Dimname_Tensor / index_fill_ Dimname_Scalar Dimname_Tensor / prod dim_Dimname
/ norm names_ScalarOpt_dim names_ScalarOpt_dim_dtype names_dtype_out names_out / std_mean correction_names names_dim
/ std correction_names correction_names_out names_dim names_out / unbind Dimname"""


class TorchModule(NamedTuple):
    """A torch module without memory, its rotary embedding, which has memory, and the operators that run it on jax
    arrays."""

    module: torch.nn.Module
    rotary: torch.nn.Module
    environment: "Environment"


class GemmaWeights(NamedTuple):
    """The weights of a language model."""

    embeddings: jax.Array  # [vocabulary, channels]
    layers: Sequence[LayerWeights]  # stacks of those at each place of the period
    norm: jax.Array  # [channels]


class KeyValues(NamedTuple):
    """Keys and values of the tokens so far, each [layers, batch, heads, tokens, head_dim]."""

    keys: jax.Array
    values: jax.Array


@lru_cache(maxsize=4)
def build_torch_module(stated: str, where: str) -> TorchModule:
    """The module of the language model of a config, as JSON; `where` names its file in errors. Raises `UsageError` for
    a config that it cannot be built from."""
    try:
        values = json.loads(stated)
        config_class, model_class = MODELS[values.get("model_type", "gemma3_text")]
        config = config_class(**values)
        findings = "; ".join(_not_computed(config))
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{where}: {' '.join(str(error).split())}", AGAIN) from error
    if findings:
        raise UsageError(f"{where}: {findings}", AGAIN)
    with torch.device("meta"):
        module = model_class(config).eval()
    module.set_attn_implementation("sdpa")
    rotary = type(module.rotary_emb)(config)
    del module.rotary_emb
    return TorchModule(module, rotary, _environment())


def hidden_states(module: TorchModule, weights: GemmaWeights, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """The result of `Gemma`, by its weights."""
    masks, tables = _masks(module.module.config, mask), _rope_tables(module, ids.shape[1], weights.embeddings.dtype)

    def body(x: jax.Array, place: int, layer: LayerWeights) -> tuple[jax.Array, jax.Array]:
        x = _layer(module, place, layer, x, masks, tables)
        return x, x

    with _operators(module):
        first = _embedded(module, weights.embeddings, ids)
        last, states = scan_periods(weights.layers, body, first, jnp.stack)
        last = _call(module.environment, module.module.norm, {"weight": weights.norm}, last)
    between = states.reshape(-1, *first.shape)[:-1]
    return jnp.concatenate([first[:, None], jnp.moveaxis(between, 0, 1), last[:, None]], axis=1)


def further_states(
    module: TorchModule,
    weights: GemmaWeights,
    ids: jax.Array,
    place: jax.Array | int,
    caches: Sequence[KeyValues],
    ordered: Callable[[int, LayerWeights], LayerWeights],
) -> tuple[jax.Array, Sequence[KeyValues]]:
    """The states [batch, tokens, channels] behind the final norm of the tokens `ids` from `place` on, which see those
    before them in `caches`, one for each stack of layers; and the caches with them. `ordered` says how a layer at a
    place of the period lies in memory."""
    slots, places = caches[0].keys.shape[-2], place + jnp.arange(ids.shape[1])
    distance = places[:, None] - jnp.arange(slots)[None, :]
    masks = _masks_by_distance(module.module.config, distance, jnp.ones((1, slots), bool))
    tables = {
        kind: tuple(jax.lax.dynamic_slice_in_dim(table, place, len(places), axis=1) for table in both)
        for kind, both in _rope_tables(module, slots, weights.embeddings.dtype).items()
    }

    def body(x: jax.Array, number: int, scanned: tuple[LayerWeights, KeyValues]) -> tuple[jax.Array, KeyValues]:
        layer, before = scanned
        cache = _LayerCache(module.environment, before, place)
        return _layer(module, number, ordered(number, layer), x, masks, tables, cache), cache.new

    with _operators(module):
        layers = [*zip(weights.layers, caches, strict=True)]
        x, new = scan_periods(layers, body, _embedded(module, weights.embeddings, ids), list)
        x = _call(module.environment, module.module.norm, {"weight": weights.norm}, x)
    return x, jax.tree.map(partial(_put, place=place), caches, new)


def _put(cache: jax.Array, new: jax.Array, place: jax.Array | int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(cache, new.astype(cache.dtype), place, axis=cache.ndim - 2)


class _LayerCache:
    """A cache of transformers, as a layer's attention calls it."""

    def __init__(self, environment: "Environment", before: KeyValues, place: jax.Array | int):
        self.environment, self.before, self.place = environment, before, place
        self.new: KeyValues

    def update(self, keys: torch.Tensor, values: torch.Tensor, _: int) -> Sequence[torch.Tensor]:
        """The keys and values of all tokens, with those of the new ones."""
        self.new = KeyValues(*self.environment.t2j_iso((keys, values)))
        return self.environment.j2t_iso(tuple(map(partial(_put, place=self.place), self.before, self.new)))


def _layer(
    module: TorchModule,
    place: int,
    weights: LayerWeights,
    x: jax.Array,
    masks: Mapping[str, jax.Array],
    tables: Mapping[str, tuple[jax.Array, ...]],
    cache: _LayerCache | None = None,
) -> jax.Array:
    """The state behind a layer at a place of the period."""
    layer, kind = module.module.layers[place], module.module.config.layer_types[place]
    wide = {name: widen(weight, x.dtype) for name, weight in weights.items()}
    named = {"attention_mask": masks[kind], "position_embeddings": tables[kind], "past_key_values": cache}
    return _call(module.environment, layer, wide, x, **named)


@contextmanager
def _operators(module: TorchModule) -> Iterator[None]:
    """torchax's operators, with products in float32, which the angles of the rotary embedding are in every dtype;
    products of 16 bit are the same."""
    with module.environment, jax.default_matmul_precision("highest"):
        yield


def _embedded(module: TorchModule, embeddings: jax.Array, ids: jax.Array) -> jax.Array:
    embed = module.module.embed_tokens
    # The scale is no weight but a constant, which a module without memory lacks.
    scaled = {"weight": embeddings, "embed_scale": jnp.float32(embed.scalar_embed_scale)}
    return _call(module.environment, embed, scaled, jnp.asarray(ids))


def _call(environment: "Environment", module: torch.nn.Module, *given: Any, **named: Any) -> Any:
    """A torch module of these weights, called with jax arrays."""
    weights, *arguments = environment.j2t_iso(given)
    with_names = environment.j2t_iso(named)
    return environment.t2j_iso(torch.func.functional_call(module, weights, tuple(arguments), with_names))


def _masks(config: Any, mask: jax.Array) -> dict[str, jax.Array]:
    """Which token (a row) sees which (a column) in each kind of layer, bool [batch, 1, tokens, tokens]."""
    places = jnp.arange(mask.shape[1])
    return _masks_by_distance(config, places[:, None] - places[None, :], jnp.asarray(mask, bool))


def _masks_by_distance(config: Any, distance: jax.Array, valid: jax.Array) -> dict[str, jax.Array]:
    """Which token sees which, by the distance of a row from a column and the columns [batch, tokens] to be seen."""
    causal = (distance >= 0) & valid[:, None, None, :]
    return {"full_attention": causal, "sliding_attention": causal & (distance < config.sliding_window)}


def _rope_tables(module: TorchModule, tokens: int, dtype: jnp.dtype) -> dict[str, tuple[jax.Array, ...]]:
    """Cosine and sine [1, tokens, head_dim] for each kind of layer, computed in float32 on the host."""
    kinds = sorted(set(module.module.config.layer_types))
    inputs = torch.empty(0), torch.arange(tokens)[None]  # the first only gives the result its dtype
    return {kind: tuple(jnp.asarray(table.numpy(), dtype) for table in module.rotary(*inputs, kind)) for kind in kinds}


def _not_computed(text: Any) -> Iterator[str]:
    """Values that transformers accepts in a config and later fails on."""
    if text.hidden_activation not in ACT2FN:
        yield f"hidden_activation is {text.hidden_activation!r}, which transformers does not know"
    for shared in sorted({text.per_layer_config[layer].num_key_value_heads for layer in range(text.num_hidden_layers)}):
        if text.num_attention_heads % shared:
            yield f"{text.num_attention_heads} heads do not share {shared} keys and values equally"
    if not -text.vocab_size <= (text.pad_token_id or 0) < text.vocab_size:
        yield f"pad_token_id is {text.pad_token_id} in a vocabulary of {text.vocab_size}"
    for kind in sorted(set(text.layer_types) - {"full_attention", "sliding_attention"}):
        yield f"layers of type {kind!r} are not implemented"
    for kind, rope in text.rope_parameters.items():
        if not _is_rope(rope):
            known = "a theta ('default'), a theta and a factor ('linear'), or a part that turns ('proportional')"
            yield f"rope_parameters of {kind} are {rope!r}, not {known}"


def _is_rope(rope: Any) -> bool:
    if not isinstance(rope, dict) or (keys := ROPES.get(rope.get("rope_type"))) is None:
        return False
    return {*rope} == {"rope_type", "rope_theta", *keys} and all(
        isinstance(rope[key], int | float) and rope[key] > 0 for key in set(rope) - {"rope_type"}
    )


def _attend(environment: "Environment", *arrays: torch.Tensor, attn_mask: Any, scale: float, **_: Any) -> torch.Tensor:
    """In place of torch's scaled_dot_product_attention, all [batch, heads, tokens, head_dim]: float32 scores. A masked
    score is finite, so that a token that may see nothing gathers something rather than NaN."""
    q, k, v, mask = environment.t2j_iso((*arrays, attn_mask))
    scores = scale * jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, np.finfo(np.float32).min), axis=-1)
    return environment.j2t_iso(jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v))


def _environment() -> "Environment":
    """torchax's operators, with attention of our own, switched on only inside `with`."""
    with _torchax_imported_alone():
        from torchax.tensor import Environment

        with jax.ensure_compile_time_eval():  # it makes a random key, which is to be none of a trace
            environment = Environment()
    environment.override_op_definition(torch.nn.functional.scaled_dot_product_attention, partial(_attend, environment))
    return environment


@contextmanager
def _torchax_imported_alone() -> Iterator[None]:
    """Placeholders for the overloads that torchax names and torch has dropped; afterwards, all that its import sets for
    the whole process, and does not need here, is as it was."""
    rows = [row.split() for row in DROPPED_OVERLOADS.split("/")]
    missing = [(getattr(torch.ops.aten, operator), name) for operator, *names in rows for name in names]
    settings: Any = jax.config  # its options are attributes without types
    options = settings.jax_pjrt_client_create_options
    fast_path, variables = torch.backends.mha.get_fastpath_enabled(), set(os.environ)
    for operator, name in missing:
        setattr(operator, name, f"{operator}.{name}")
    try:
        yield
    finally:
        for operator, name in missing:
            vars(operator).pop(name, None)  # two threads may be here at once
        jax.config.update("jax_pjrt_client_create_options", options)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for name in set(os.environ) - variables:
            del os.environ[name]
