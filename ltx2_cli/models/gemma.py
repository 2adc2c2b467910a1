"""The text encoder: prompts to token ids, and the config, weight names and shapes of Gemma-3's language model. What
computes it, in `gemma_torch`, takes seconds to import; that is left to the first call."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.weights.checkpoint import AGAIN, TensorFiles, read_json
from ltx2_cli.weights.declare import Axes, Scope, Shape
from ltx2_cli.weights.quantized_matrix import widen

# The language model's place in a checkpoint, the longest first, and what lies there.
PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.", "")
PARTS = ("embed_tokens.", "layers.", "norm.")
SWITCHES = ("attn_logit_softcapping", "use_bidirectional_attention")  # of the config: they change the arithmetic
OPTIONAL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")  # of a tokenizer


@dataclass(frozen=True)
class GemmaArch:
    """The sizes of a Gemma-3 language model, and its whole config; the defaults are transformers'."""

    vocab_size: int = 262208
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 131_072  # tokens that it was made for
    attention_bias: bool = False
    config: str = "{}"  # the object of all keys, as JSON
    where: str = field(default="", compare=False)  # the file that the config stands in, for errors

    @property
    def states(self) -> int:
        """The number of hidden states of a token: its embedding, and the state after each layer."""
        return self.num_hidden_layers + 1


def gemma_arch(config: dict[str, Any], where: str) -> GemmaArch:
    """The language model of a `config.json`, alone or as part of a vision model. `where` names the file in errors.
    Raises `UsageError` for another model, and for values that transformers would divide by or ignore;
    `build_torch_module` finds the rest."""
    kind = config.get("model_type")
    if kind not in ("gemma3", "gemma3_text"):
        raise UsageError(f"{where}: the text encoder is {kind!r}, only Gemma-3 is implemented", AGAIN)
    stated = config if kind == "gemma3_text" else config.get("text_config", {})
    if not isinstance(stated, dict):
        raise UsageError(f"{where}: text_config is {stated!r}, not an object", AGAIN)
    sizes = [field.name for field in fields(GemmaArch) if field.type is int]
    findings = [
        f"{key} is {stated[key]!r}, not a whole number above 0"
        for key in (*sizes, "query_pre_attn_scalar", "sliding_window", "sliding_window_pattern")
        if key in stated and not (type(stated[key]) is int and stated[key] > 0)
    ]
    findings += [f"{key} is not implemented" for key in SWITCHES if stated.get(key, False) not in (None, False)]
    if findings:
        raise UsageError(f"{where}: {'; '.join(findings)}", AGAIN)
    known = {key: stated[key] for key in (*sizes, "attention_bias") if key in stated}
    return GemmaArch(**known, config=json.dumps(stated, sort_keys=True), where=where)


class Gemma(nnx.Module):
    """Gemma-3's language model: weights under the names that transformers gives them."""

    def __init__(self, scope: Scope, arch: GemmaArch):
        self.arch = arch
        self.tensors = nnx.Dict(
            {
                name: (scope.matrix if name.endswith("_proj.weight") else scope.weight)(name, shape, axes)
                for name, shape, axes in _weights(arch)
            }
        )

    def __call__(self, ids: jax.Array, mask: jax.Array) -> jax.Array:
        """Hidden states [batch, states, tokens, channels] of ids int32 [batch, tokens], in the weights' dtype. mask
        [batch, tokens] is true or 1 at the prompt's tokens; at the others the result is finite and means nothing. The
        first state is the scaled embeddings, the last is taken behind the final norm."""
        from ltx2_cli.models.gemma_torch import build_torch_module, hidden_states

        dtype = self.tensors["embed_tokens.weight"].dtype
        weights = {name: widen(weight.get_value(), dtype) for name, weight in self.tensors.items()}
        return hidden_states(build_torch_module(self.arch.config, self.arch.where), weights, ids, mask)


def _weights(arch: GemmaArch) -> Iterator[tuple[str, Shape, Axes]]:
    """Name, shape and logical axes of each weight; matrices are (out, in), as torch keeps them."""
    hidden, inner, head = arch.hidden_size, arch.intermediate_size, arch.head_dim
    queries, keys = arch.num_attention_heads * head, arch.num_key_value_heads * head
    yield "embed_tokens.weight", (arch.vocab_size, hidden), ("vocab", "embed")
    for layer in range(arch.num_hidden_layers):
        attention, mlp = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        for name, width in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{attention}.{name}_proj.weight", (width, hidden), ("heads", "embed")
        yield f"{attention}.o_proj.weight", (hidden, queries), ("embed", "heads")
        if arch.attention_bias:
            for name, width in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
                yield f"{attention}.{name}_proj.bias", (width,), (None,)
        for name in ("q_norm", "k_norm"):
            yield f"{attention}.{name}.weight", (head,), (None,)
        for name in ("gate_proj", "up_proj"):
            yield f"{mlp}.{name}.weight", (inner, hidden), ("mlp", "embed")
        yield f"{mlp}.down_proj.weight", (hidden, inner), ("embed", "mlp")
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            yield f"layers.{layer}.{name}_layernorm.weight", (hidden,), (None,)
    yield "norm.weight", (hidden,), (None,)


def language_model(files: TensorFiles) -> TensorFiles:
    """The tensors of the language model, under the names that transformers gives them, without vision tower and head.
    Raises `UsageError` where there are no embeddings."""
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in files:
            inside = tuple(prefix + part for part in PARTS)
            return files.renamed({name.removeprefix(prefix): name for name in files if name.startswith(inside)})
    raise UsageError("the text encoder's files hold no `embed_tokens.weight`: this is not a Gemma-3", AGAIN)


class Tokens(NamedTuple):
    """Prompts as the text encoder reads them, padded on the left."""

    ids: np.ndarray  # int32 [prompts, tokens]
    mask: np.ndarray  # bool [prompts, tokens], true at the prompt's own tokens
    truncated: tuple[bool, ...]  # which prompts lost their end


def check_tokenizer(folder: Path) -> None:
    """Raise `UsageError` unless the files of a checkpoint's `tokenizer/` are there and JSON: that is cheap enough to
    find a broken one before a weight is read."""
    for path in [folder / "tokenizer.json", *filter(Path.exists, (folder / name for name in OPTIONAL_FILES))]:
        read_json(path)


def tokenise(folder: Path, prompts: Sequence[str], max_length: int) -> Tokens:
    """Token ids of `prompts`, without white space at their ends, cut and padded on the left to `max_length`. `folder`
    is a checkpoint's `tokenizer/`: its files say which special tokens stand around a prompt. Raises `UsageError` where
    transformers cannot read them."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    except Exception as error:  # what its parser in Rust raises is of this class itself
        reason = " ".join(str(error).split())
        raise UsageError(f"{folder} holds no tokenizer that transformers can read: {reason}", AGAIN) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = [prompt.strip() for prompt in prompts]
    truncated = tuple(len(ids) > max_length for ids in tokenizer(texts, verbose=False)["input_ids"])
    cut = tokenizer(texts, padding="max_length", truncation=True, max_length=max_length, return_tensors="np")
    return Tokens(cut["input_ids"].astype(np.int32), cut["attention_mask"].astype(bool), truncated)
