"""Text that a text encoder's language model writes, token by token, with its matrix of embeddings as the head. Takes
seconds to import."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from ltx2_cli.models.gemma import Gemma
from ltx2_cli.models.gemma_torch import GemmaWeights, KeyValues, LayerWeights, build_torch_module, further_states
from ltx2_cli.parallel.constrain import as_placed

ROWS = 8  # of a product: TPUs multiply one row by a matrix without their matrix units, in a layout of its own
CANDIDATES = 64  # the likeliest tokens, of which one is drawn, as Gemma's own settings say
CANDIDATES_PROBABILITY = 0.95  # of the likeliest together


class Written(NamedTuple):
    """The tokens that were written."""

    ids: Int32[Array, " most"]
    number: Int32[Array, ""]  # of them; the last is a stop unless there are as many as may be
    finite: Bool[Array, ""]  # whether all logits were


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
    arch, slots = gemma.arch, len(ids) + most + ROWS
    shapes = [
        (arch.num_hidden_layers // arch.period, 1, attention.key_value_heads, slots, attention.head_dim)
        for attention in arch.attention[: arch.period]
    ]
    empty = [KeyValues(*(jnp.zeros(shape, weights.embeddings.dtype) for _ in range(2))) for shape in shapes]

    def ordered(place: int, layer: LayerWeights) -> LayerWeights:
        return {name: as_placed(gemma.layers[place][name], matrix) for name, matrix in layer.items()}

    def following(states: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Token number `index` of the text, by the states [rows, channels] of the one before and of others; and whether
        its logits are finite."""
        logits = jnp.einsum("rc,vc->rv", states, weights.embeddings, preferred_element_type=jnp.float32)[0]
        return _choose(logits, temperature, jax.random.fold_in(key, index)), jnp.isfinite(logits).all()

    def unfinished(state: _State) -> jax.Array:
        written = state.written
        return written.finite & (written.number < most) & ~jnp.isin(state.token, jnp.asarray(stops))

    def turn(state: _State) -> _State:
        (written, number, _), token, caches = state
        # Behind the token are others: it does not see them, and the next ones take their places.
        ids = jnp.full((1, ROWS), token)
        states, caches = further_states(module, weights, ids, length + number - 1, caches, ordered)
        token, finite = following(states[0], number)
        return _State(Written(written.at[number].set(token), number + 1, finite), token, caches)

    states, caches = further_states(module, weights, ids[None], 0, empty, ordered)
    last = jax.lax.dynamic_slice_in_dim(jnp.pad(states[0], ((0, ROWS), (0, 0))), length - 1, ROWS)
    first, finite = following(last, jnp.int32(0))
    written = Written(jnp.zeros(most, jnp.int32).at[0].set(first), jnp.int32(1), finite)
    return jax.lax.while_loop(unfinished, turn, _State(written, first, caches)).written


def _choose(logits: Float[Array, " vocabulary"], temperature: Float[Array, ""], key: jax.Array) -> jax.Array:
    """The likeliest token, or at a temperature one of the likeliest by chance, int32 []."""
    best, tokens = jax.lax.top_k(logits, min(CANDIDATES, len(logits)))
    probabilities = jax.nn.softmax(best / jnp.maximum(temperature, 1e-3))
    before = jnp.cumsum(probabilities) - probabilities
    kept = jnp.where(before < CANDIDATES_PROBABILITY, jnp.log(probabilities), -jnp.inf)
    drawn = jax.random.categorical(key, kept)
    return tokens[jnp.where(temperature > 0, drawn, 0)]
