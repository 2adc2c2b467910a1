"""The text encoder: transformers' Gemma-3, run by torchax on jax arrays.

The torch module is only a recipe: it is built without memory, and the parameters it runs on are our own weights,
declared under the names that it gives them. Importing this module takes seconds.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from huggingface_hub.errors import StrictDataclassError
from transformers import Gemma3TextConfig, Gemma3TextModel
from transformers.activations import ACT2FN

from ltx2_cli.spec import SpecError
from ltx2_cli.weights.checkpoint import AGAIN
from ltx2_cli.weights.declare import Axes, Scope, Shape

if TYPE_CHECKING:
    from torchax.tensor import Environment

# The language model's place in a checkpoint, the longest first, and what lies there.
PREFIXES = ("language_model.model", "model.language_model", "language_model", "model", "")
PARTS = ("embed_tokens", "layers", "norm")

# Of its matrices, (out, in) as torch keeps them.
MATRIX_AXES: dict[str, Axes] = {
    "embed_tokens": ("vocab", "embed"),
    "q_proj": ("heads", "embed"),
    "k_proj": ("heads", "embed"),
    "v_proj": ("heads", "embed"),
    "o_proj": ("embed", "heads"),
    "gate_proj": ("mlp", "embed"),
    "up_proj": ("mlp", "embed"),
    "down_proj": ("embed", "mlp"),
}

# Of its config: what counts something, what would change the arithmetic, and the rotary embeddings by their keys.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "query_pre_attn_scalar",
    "sliding_window",
    "sliding_window_pattern",
)
SWITCHES = ("attn_logit_softcapping", "use_bidirectional_attention")
ROPES = (("default", {"rope_type", "rope_theta"}), ("linear", {"rope_type", "rope_theta", "factor"}))


# Overloads by dimension name, by operator of torch.ops.aten: torchax 0.0.13 names them on import, torch 2.13 has none.
DROPPED_OVERLOADS = {
    "all": ("dimname", "dimname_out"),
    "index_add": ("dimname",),
    "index_copy": ("dimname",),
    "index_copy_": ("dimname",),
    "index_fill": ("Dimname_Scalar", "Dimname_Tensor"),
    "index_fill_": ("Dimname_Scalar", "Dimname_Tensor"),
    "norm": ("names_ScalarOpt_dim", "names_ScalarOpt_dim_dtype", "names_dtype_out", "names_out"),
    "prod": ("dim_Dimname",),
    "std": ("correction_names", "correction_names_out", "names_dim", "names_out"),
    "std_mean": ("correction_names", "names_dim"),
    "unbind": ("Dimname",),
}


class TextEncoder(Protocol):
    """What turns prompts into hidden states."""

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Hidden states [batch, states, tokens, channels] of ids int32 [batch, tokens].

        mask [batch, tokens] is true or 1 at the prompt's tokens; at the others the result is finite and means
        nothing. The first state is the scaled embeddings, the last is taken behind the final norm.
        """


@dataclass(frozen=True)
class Recipe:
    """How to compute: a torch module without memory, its buffers, its rotary embedding, which has memory, and the
    operators that run it on jax arrays.

    Recipes of one config are equal: a program compiled with one serves the others.
    """

    config: str
    module: torch.nn.Module = field(compare=False)
    buffers: dict[str, np.ndarray] = field(compare=False)
    rotary: torch.nn.Module = field(compare=False)
    environment: "Environment" = field(compare=False)


def gemma_recipe(config: dict[str, Any], where: str) -> Recipe:
    """The language model that a `config.json` describes, be it alone or part of a model that also sees.

    `where` names the file in errors. Raises `SpecError` for what is not a Gemma-3.
    """
    text = _text_config(config, where)
    with torch.device("meta"):
        module = Gemma3TextModel(text).eval()
    module.set_attn_implementation("sdpa")
    rotary = type(module.rotary_emb)(text)
    del module.rotary_emb
    module.rotary_emb = _table_of_kind
    # No weight but a constant, which a module without memory lacks.
    module.embed_tokens.embed_scale = torch.tensor(module.embed_tokens.scalar_embed_scale)
    buffers = {name: buffer.numpy() for name, buffer in module.named_buffers()}
    return Recipe(text.to_json_string(use_diff=False), module, buffers, rotary, _environment())


def _table_of_kind(x: torch.Tensor, tables: Mapping[str, Any], layer_type: str) -> Any:
    """In place of the module's rotary embedding: the table of a kind of layer, from all of them in place of positions.

    transformers asks for the tables in the order of a set of names, which differs from process to process. Computed
    there, they would make another program in each, and none would find what another compiled.
    """
    return tables[layer_type]


def _rope_tables(recipe: Recipe, tokens: int, dtype: jnp.dtype) -> dict[str, tuple[jax.Array, ...]]:
    """Cosine and sine [1, tokens, head_dim] for each kind of layer, computed in float32 on the host."""
    kinds = sorted(set(recipe.module.config.layer_types))
    inputs = torch.empty(0), torch.arange(tokens)[None]  # the first only gives the result its dtype
    return {kind: tuple(jnp.asarray(table.numpy(), dtype) for table in recipe.rotary(*inputs, kind)) for kind in kinds}


def _text_config(config: dict[str, Any], where: str) -> Gemma3TextConfig:
    kind = config.get("model_type")
    if kind not in ("gemma3", "gemma3_text"):
        raise SpecError(f"{where}: the text encoder is {kind!r}, only Gemma-3 is implemented", AGAIN)
    fields = config if kind == "gemma3_text" else config.get("text_config", {})
    if not isinstance(fields, dict):
        raise SpecError(f"{where}: text_config is {fields!r}, not an object", AGAIN)
    _refuse(_wrong_values(fields), where)
    try:
        text = Gemma3TextConfig(**fields)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise SpecError(f"{where}: {' '.join(str(error).split())}", AGAIN) from error
    _refuse(_not_computed(text), where)
    return text


def _refuse(findings: Iterable[str], where: str) -> None:
    if sentence := "; ".join(findings):
        raise SpecError(f"{where}: {sentence}", AGAIN)


def _wrong_values(fields: dict[str, Any]) -> Iterator[str]:
    """What transformers would divide by, or pass over without a word."""
    for key in SIZES:
        if key in fields and not (isinstance(fields[key], int) and fields[key] > 0):
            yield f"{key} is {fields[key]!r}, not a whole number above 0"
    for key in SWITCHES:
        if fields.get(key, False) not in (None, False):
            yield f"{key} is not implemented"


def _not_computed(text: Gemma3TextConfig) -> Iterator[str]:
    """What transformers takes for a config of Gemma-3 and then fails on."""
    if text.hidden_activation not in ACT2FN:
        yield f"hidden_activation is {text.hidden_activation!r}, which transformers does not know"
    if text.num_attention_heads % text.num_key_value_heads:
        yield f"{text.num_attention_heads} heads do not share {text.num_key_value_heads} keys and values equally"
    if not -text.vocab_size <= (text.pad_token_id or 0) < text.vocab_size:
        yield f"pad_token_id is {text.pad_token_id} in a vocabulary of {text.vocab_size}"
    for kind in sorted(set(text.layer_types) - {"full_attention", "sliding_attention"}):
        yield f"layers of type {kind!r} are not implemented"
    for kind, rope in text.rope_parameters.items():
        if not _is_rope(rope):
            yield f"rope_parameters of {kind} are {rope!r}, not a theta ('default') or a theta and a factor ('linear')"


def _is_rope(rope: Any) -> bool:
    if not isinstance(rope, dict) or (rope.get("rope_type"), set(rope)) not in ROPES:
        return False
    return all(isinstance(rope[key], int | float) and rope[key] > 0 for key in set(rope) - {"rope_type"})


class Gemma(nnx.Module):
    """Gemma-3's language model, a `TextEncoder`: a recipe, and weights under the names of the recipe."""

    def __init__(self, scope: Scope, recipe: Recipe):
        self.recipe = recipe
        shapes = {name: tuple(tensor.shape) for name, tensor in recipe.module.named_parameters()}
        self.tensors = nnx.Dict({name: scope.weight(name, shape, _axes(name, shape)) for name, shape in shapes.items()})

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Hidden states as `TextEncoder` says, in the weights' dtype."""
        module, environment = self.recipe.module, self.recipe.environment
        arrays = {name: weight[...] for name, weight in self.tensors.items()}
        arrays |= {name: jnp.asarray(buffer) for name, buffer in self.recipe.buffers.items()}
        inputs = {
            "input_ids": jnp.asarray(ids),
            "attention_mask": _attention_masks(jnp.asarray(mask, bool), module.config.sliding_window),
            "position_ids": _rope_tables(self.recipe, ids.shape[1], arrays["embed_tokens.weight"].dtype),
        }
        arrays, inputs = environment.j2t_iso((arrays, inputs))
        inputs |= {"use_cache": False, "output_hidden_states": True}
        # Of float32, which the angles of the rotary embedding are in every dtype; products of 16 bit are the same.
        with environment, jax.default_matmul_precision("highest"):
            states = torch.func.functional_call(module, arrays, (), inputs).hidden_states
        return jnp.stack(environment.t2j_iso(states), axis=1)


def checkpoint_prefix(names: Collection[str]) -> str:
    """The path of the language model among a checkpoint's tensor names, by where its embeddings are."""
    for prefix in PREFIXES:
        if _below(prefix, "embed_tokens.weight") in names:
            return prefix
    raise SpecError("the text encoder's files hold no `embed_tokens.weight`: this is not a Gemma-3", AGAIN)


def in_language_model(name: str, prefix: str) -> bool:
    """Whether a checkpoint's tensor belongs to the language model at `prefix`; vision tower and head do not."""
    return any(name.startswith(_below(prefix, f"{part}.")) for part in PARTS)


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _axes(name: str, shape: Shape) -> Axes:
    """The logical axes of a parameter; a vector is whole everywhere."""
    return MATRIX_AXES[name.split(".")[-2]] if len(shape) == 2 else (None,)


def _attention_masks(valid: jax.Array, window: int) -> dict[str, jax.Array]:
    """Which token (a row) sees which (a column) in each kind of layer, bool [batch, 1, tokens, tokens]."""
    places = jnp.arange(valid.shape[1])
    distance = places[:, None] - places[None, :]
    causal = (distance >= 0) & valid[:, None, None, :]
    return {"full_attention": causal, "sliding_attention": causal & (distance < window)}


def _attend(
    environment: "Environment",
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float,
) -> torch.Tensor:
    """In place of torch's scaled_dot_product_attention, all [batch, heads, tokens, head_dim]: float32 scores.

    A masked score is finite, so that a token that may see nothing gathers something rather than NaN.
    """
    q, k, v, mask = environment.t2j_iso((query, key, value, attn_mask))
    scores = scale * jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask, scores, np.finfo(np.float32).min), axis=-1)
    return environment.j2t_iso(jnp.einsum("bhqk,bhkd->bhqd", weights.astype(v.dtype), v))


def _environment() -> "Environment":
    """torchax's operators, with attention of our own, switched on only inside `with`."""
    with _dropped_overloads(), _settings_as_found():
        from torchax.tensor import Environment

        environment = Environment()
    environment.override_op_definition(torch.nn.functional.scaled_dot_product_attention, partial(_attend, environment))
    return environment


@contextmanager
def _dropped_overloads() -> Iterator[None]:
    """Placeholders for the overloads that torchax names and torch has dropped."""
    missing = [(getattr(torch.ops.aten, of), name) for of, names in DROPPED_OVERLOADS.items() for name in names]
    for operator, name in missing:
        setattr(operator, name, f"{operator}.{name}")
    try:
        yield
    finally:
        for operator, name in missing:
            vars(operator).pop(name, None)  # two threads may be here at once


@contextmanager
def _settings_as_found() -> Iterator[None]:
    """Undo what importing torchax sets for the whole process, none of which it needs here."""
    settings: Any = jax.config  # its options are attributes without types
    options = settings.jax_pjrt_client_create_options
    fast_path = torch.backends.mha.get_fastpath_enabled()
    variables = set(os.environ)
    try:
        yield
    finally:
        jax.config.update("jax_pjrt_client_create_options", options)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for name in set(os.environ) - variables:
            del os.environ[name]
