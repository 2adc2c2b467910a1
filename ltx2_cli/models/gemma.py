"""The text encoder: config, weight names and shapes of the language model, a Gemma-3 or the Gemma-4 of LTX-2.5. What
computes it, in `gemma_torch`, takes seconds to import; that is left to the first call."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import jax
from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles
from ltx2_cli.weights.declare import Axes, Scope, Shape

# The language model's place in a checkpoint, the longest first, and what lies there.
MODEL_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
TENSOR_PARTS = ("embed_tokens.", "layers.", "norm.")
GEMMA_3, GEMMA_4 = "Gemma-3", "Gemma-4"
# of the language model alone, and as part of a model with vision
MODEL_TYPES = {
    "gemma3_text": GEMMA_3,
    "gemma3": GEMMA_3,
    "gemma4_unified_text": GEMMA_4,
    "gemma4_unified": GEMMA_4,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    GEMMA_3: {},
    GEMMA_4: {"vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 262144},
}
# Keys that change the arithmetic, and their values that do not; of Gemma-4 "vision" is about images alone.
SWITCHES: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (None, False),
    "use_bidirectional_attention": (None, False, "vision"),
    "num_kv_shared_layers": (None, 0),
    "hidden_size_per_layer_input": (None, 0),
    "enable_moe_block": (None, False),
}
TIED_HEAD = "tie_word_embeddings"  # the key, true by default: the head of the language model is its embeddings
SLIDING, FULL = "sliding_attention", "full_attention"
FULL_EVERY = 6  # layers, where a config does not say so
SIZES = ("query_pre_attn_scalar", "sliding_window", "sliding_window_pattern", "global_head_dim")


class LayerAttention(NamedTuple):
    """The attention of one layer."""

    type: str
    head_dim: int
    key_value_heads: int
    values: bool = True  # have a matrix of their own; else they are the keys, before norm and rotation


@dataclass(frozen=True)
class GemmaArch:
    """The sizes of a language model, and its whole config; the defaults are transformers' for Gemma-3."""

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072  # tokens that it was made for
    attention_bias: bool = False
    generation: str = GEMMA_3
    attention: tuple[LayerAttention, ...] = ()  # of each layer
    config: str = "{}"  # the object of all keys, as JSON
    where: str = field(default="", compare=False)  # the file that the config stands in, for errors

    @property
    def states(self) -> int:
        """The number of hidden states of a token: its embedding, and the state after each layer."""
        return self.num_hidden_layers + 1

    @property
    def period(self) -> int:
        """The number of layers after which their attention repeats."""
        kinds, count = self.attention, self.num_hidden_layers
        return next(
            period
            for period in range(1, count + 1)
            if count % period == 0 and kinds == kinds[:period] * (count // period)
        )


def gemma_arch(config: dict[str, Any], where: str) -> GemmaArch:
    """The language model of a `config.json`, alone or as part of a vision model. `where` names the file in errors.
    Raises `UsageError` for another model, and for values that transformers would divide by or ignore;
    `build_torch_module` finds the rest."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        implemented = "only Gemma-3 and the Gemma-4 of LTX-2.5 ('gemma4_unified') are implemented"
        raise UsageError(f"{where}: the text encoder is {kind!r}, {implemented}", AGAIN)
    stated = config if kind.endswith("_text") else config.get("text_config", {})
    if not isinstance(stated, dict):
        raise UsageError(f"{where}: text_config is {stated!r}, not an object", AGAIN)
    sizes = [field.name for field in fields(GemmaArch) if field.type is int]
    findings = [
        f"{key} is {stated[key]!r}, not a whole number above 0"
        for key in (*sizes, *SIZES)
        if key in stated and not _is_count(stated[key])
    ]
    findings += [f"{key} is not implemented" for key, off in SWITCHES.items() if stated.get(key) not in off]
    generation, attention = MODEL_TYPES[kind], tuple[LayerAttention, ...]()
    known = DEFAULTS[generation] | {key: stated[key] for key in (*sizes, "attention_bias") if key in stated}
    if not findings:
        attend = _layers_attention if generation == GEMMA_4 else _alike_attention
        attention, findings = attend(stated, GemmaArch(**known))
    if findings:
        raise UsageError(f"{where}: {'; '.join(findings)}", AGAIN)
    untied = {TIED_HEAD: False} if not config.get(TIED_HEAD, True) else {}
    text = json.dumps(stated | untied | {"model_type": f"{kind.removesuffix('_text')}_text"}, sort_keys=True)
    return GemmaArch(**known, generation=generation, attention=attention, config=text, where=where)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _alike_attention(stated: dict[str, Any], sizes: GemmaArch) -> tuple[tuple[LayerAttention, ...], list[str]]:
    """The attention of each layer by a config of Gemma-3, all of one size. `build_torch_module` checks the types."""
    count, every = sizes.num_hidden_layers, stated.get("sliding_window_pattern", FULL_EVERY)
    types = stated.get("layer_types") or _usual_types(count, every)
    types = [str(kind) for kind in types] if isinstance(types, list) and len(types) == count else [FULL] * count
    return tuple(LayerAttention(kind, sizes.head_dim, sizes.num_key_value_heads) for kind in types), []


def _usual_types(count: int, every: int) -> list[str]:
    """The types of layers where a config does not list them."""
    return [SLIDING if (layer + 1) % every else FULL for layer in range(count)]


def _layers_attention(stated: dict[str, Any], sizes: GemmaArch) -> tuple[tuple[LayerAttention, ...], list[str]]:
    """The attention of each layer by a config of Gemma-4, and what is wrong with it. Layers of full attention have
    sizes of their own: in `per_layer_config`, as transformers writes it, or in keys that begin with `global_`."""
    count, shared = sizes.num_hidden_layers, bool(stated.get("attention_k_eq_v"))
    types = stated.get("layer_types") or _usual_types(count, FULL_EVERY)
    if not isinstance(types, list) or len(types) != count or not {*types} <= {SLIDING, FULL} or types[-1] != FULL:
        return (), [f"layer_types are not {count} times {SLIDING} or {FULL}, the last {FULL}"]
    heads = stated.get("num_global_key_value_heads") if shared else None
    of_full = {
        "head_dim": stated.get("global_head_dim", 512),
        "num_key_value_heads": heads or sizes.num_key_value_heads,
    }
    listed = stated.get("per_layer_config")
    if not isinstance(listed, dict):
        listed = {str(layer): of_full for layer, kind in enumerate(types) if kind == FULL}
    attention = []
    for layer, kind in enumerate(types):
        own = listed.get(str(layer), {})
        known: dict[str, Any] = {**vars(sizes), **own} if isinstance(own, dict) else {}
        numbers = [known[key] for key in of_full if _is_count(known.get(key))]
        if len(numbers) < len(of_full) or {*own} - {*of_full}:
            return (), [f"the sizes of layer {layer} are {own!r}, not whole numbers above 0: {', '.join(of_full)}"]
        attention.append(LayerAttention(kind, numbers[0], numbers[1], not (shared and kind == FULL)))
    return tuple(attention), []


class Gemma(nnx.Module):
    """The language model of a Gemma: weights under the names that transformers gives them. Layers of one kind are
    stacked: with a period of six, the first, the seventh, and so on."""

    def __init__(self, scope: Scope, arch: GemmaArch):
        self.arch = arch
        self.embeddings = scope.weight("embed_tokens.weight", (arch.vocab_size, arch.hidden_size), ("vocab", "embed"))
        self.layers: nnx.List[nnx.Dict[Any]] = nnx.List()
        for place, attention in enumerate(arch.attention[: arch.period]):
            alike = scope.stacked("layers", range(place, arch.num_hidden_layers, arch.period))
            self.layers.append(
                nnx.Dict(
                    {
                        name: (alike.matrix if name.endswith("_proj.weight") else alike.weight)(name, shape, axes)
                        for name, shape, axes in _weights_of_layer(arch, attention)
                    }
                )
            )
        self.norm = scope.weight("norm.weight", (arch.hidden_size,), (None,))

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Hidden states [batch, states, tokens, channels] of ids int32 [batch, tokens], in the weights' dtype. mask
        [batch, tokens] is true or 1 at the prompt's tokens; at the others the result is finite and means nothing. The
        first state is the scaled embeddings, the last is taken behind the final norm."""
        from ltx2_cli.models.gemma_torch import GemmaWeights, build_torch_module, hidden_states

        module = build_torch_module(self.arch.config, self.arch.where)
        return hidden_states(module, GemmaWeights(*self.weights), ids, mask)

    @property
    def weights(self) -> tuple[Any, list[dict[str, Any]], Any]:
        """The arrays: embeddings, stacks of layers at each place of the period by name, final norm."""
        layers = [{name: weight.get_value() for name, weight in layer.items()} for layer in self.layers]
        return self.embeddings.get_value(), layers, self.norm.get_value()


def _weights_of_layer(arch: GemmaArch, attention: LayerAttention) -> Iterator[tuple[str, Shape, Axes]]:
    """Name, shape and logical axes of each weight of a layer; matrices are (out, in), as torch keeps them."""
    hidden, inner, head = arch.hidden_size, arch.intermediate_size, attention.head_dim
    queries, keys = arch.num_attention_heads * head, attention.key_value_heads * head
    widths = {"q": queries, "k": keys} | ({"v": keys} if attention.values else {})
    for name, width in widths.items():
        yield f"self_attn.{name}_proj.weight", (width, hidden), ("heads", "embed")
    yield "self_attn.o_proj.weight", (hidden, queries), ("embed", "heads")
    if arch.attention_bias:
        for name, width in (widths | {"o": hidden}).items():
            yield f"self_attn.{name}_proj.bias", (width,), (None,)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", (head,), (None,)
    for name in ("gate_proj", "up_proj"):
        yield f"mlp.{name}.weight", (inner, hidden), ("mlp", "embed")
    yield "mlp.down_proj.weight", (hidden, inner), ("embed", "mlp")
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield f"{name}_layernorm.weight", (hidden,), (None,)
    if arch.generation == GEMMA_4:
        yield "layer_scalar", (1,), (None,)


def language_model(files: TensorFiles) -> TensorFiles:
    """The tensors of the language model, under the names that transformers gives them, without vision tower and head.
    Raises `UsageError` where there are no embeddings."""
    for prefix in MODEL_PREFIXES:
        if f"{prefix}embed_tokens.weight" in files:
            inside = tuple(prefix + part for part in TENSOR_PARTS)
            return files.renamed({name.removeprefix(prefix): name for name in files if name.startswith(inside)})
    raise UsageError("the text encoder's files hold no `embed_tokens.weight`: this is no Gemma", AGAIN)
