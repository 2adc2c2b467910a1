"""Text that a text encoder's language model writes, token by token, with its matrix of embeddings as the head. Takes
seconds to import."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.gemma_torch import GemmaWeights, KeyValues, build_torch_module, further_states

CANDIDATES = 64  # the likeliest tokens, of which one is drawn, as Gemma's own settings say
CANDIDATES_PROBABILITY = 0.95  # of the likeliest together


class Written(NamedTuple):
    """The tokens that were written."""

    ids: Int32[Array, " most"]
    number: Int32[Array, ""]  # of them; the last is a stop unless there are as many as may be


class _State(NamedTuple):
    written: Written
    token: jax.Array  # the last one, int32 []
    caches: Sequence[KeyValues]


def generate(
    gemma: Gemma,
    ids: Int32[Array, " tokens"],
    length: Int32[Array, ""],
    temperature: Float[Array, ""],
    key: jax.Array,
    *,
    most: int,
    stops: Sequence[int],
) -> Written:
    """The tokens that follow the first `length` of `ids`, until one of `stops` or `most` are written. Temperature 0
    takes the likeliest; above, one is drawn from the likeliest by `key`."""
    module, weights = build_torch_module(gemma.arch.config, gemma.arch.where), GemmaWeights(*gemma.weights)
    arch, slots = gemma.arch, len(ids) + most
    shapes = [
        (arch.num_hidden_layers // arch.period, 1, attention.key_value_heads, slots, attention.head_dim)
        for attention in arch.attention[: arch.period]
    ]
    empty = [KeyValues(*(jnp.zeros(shape, weights.embeddings.dtype) for _ in range(2))) for shape in shapes]

    def following(states: jax.Array, index: jax.Array) -> jax.Array:
        """Token number `index` of the text, by the state [channels] of the one before."""
        return _choose(_logits(weights, states), temperature, jax.random.fold_in(key, index))

    def unfinished(state: _State) -> jax.Array:
        return (state.written.number < most) & ~jnp.isin(state.token, jnp.asarray(stops))

    def turn(state: _State) -> _State:
        (written, number), token, caches = state
        states, caches = further_states(module, weights, token[None, None], length + number - 1, caches)
        token = following(states[0, 0], number)
        return _State(Written(written.at[number].set(token), number + 1), token, caches)

    states, caches = further_states(module, weights, ids[None], 0, empty)
    first = following(jax.lax.dynamic_index_in_dim(states[0], length - 1, keepdims=False), jnp.int32(0))
    written = Written(jnp.zeros(most, jnp.int32).at[0].set(first), jnp.int32(1))
    return jax.lax.while_loop(unfinished, turn, _State(written, first, caches)).written


def _logits(weights: GemmaWeights, state: Float[Array, " channels"]) -> Float[Array, " vocabulary"]:
    return jnp.einsum("vc,c->v", weights.embeddings, state, preferred_element_type=jnp.float32)


def _choose(logits: Float[Array, " vocabulary"], temperature: Float[Array, ""], key: jax.Array) -> jax.Array:
    """The likeliest token, or at a temperature one of the likeliest by chance, int32 []."""
    best, tokens = jax.lax.top_k(logits, min(CANDIDATES, len(logits)))
    probabilities = jax.nn.softmax(best / jnp.maximum(temperature, 1e-3))
    before = jnp.cumsum(probabilities) - probabilities
    kept = jnp.where(before < CANDIDATES_PROBABILITY, jnp.log(probabilities), -jnp.inf)
    drawn = jax.random.categorical(key, kept)
    return tokens[jnp.where(temperature > 0, drawn, 0)]
