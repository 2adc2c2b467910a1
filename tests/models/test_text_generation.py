"""Text of a text encoder's language model, against transformers' own generation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from compilers import needs_libtpu
from gemmas import ALTERNATING, LISTED, config
from ltx2_cli.estimate.offline import topology
from ltx2_cli.models.gemma import Gemma, gemma_arch
from ltx2_cli.models.text_generation import Written, generate
from ltx2_cli.parallel.jit import jitted
from ltx2_cli.parallel.mesh import ShardingPlan
from ltx2_cli.weights.declare import Scope, Weight, map_weights
from ltx2_cli.weights.quantized_matrix import placed
from parity import adopt, randomise

MOST = 24
BUCKET = 16
SHORT, LONG = [2, 7, 31], [2, *range(5, 17)]  # the second is longer than the windows

program = jax.jit(generate, static_argnames=("most", "stops"))


@pytest.fixture(scope="module", params=[ALTERNATING, LISTED], ids=["alternating", "listed"])
def pair(request: pytest.FixtureRequest) -> tuple[Gemma3ForCausalLM, Gemma]:
    reference = randomise(Gemma3ForCausalLM(Gemma3TextConfig(**request.param)), seed=1, scale=0.6).eval()
    with torch.no_grad():
        reference.model.embed_tokens.weight *= 0.05  # the head is the same matrix: larger, a token would follow itself
    gemma = Gemma(Scope(jnp.float32), gemma_arch(config(request.param), "config.json"))
    return reference, adopt(gemma, reference.model.state_dict())


def padded(ids: list[int]) -> np.ndarray:
    return np.array(ids + [7] * (BUCKET - len(ids)), np.int32)


def write(
    gemma: Gemma, ids: list[int], stops: tuple[int, ...] = (), temperature: float = 0, seed: int = 0
) -> list[int]:
    key, length = jax.random.key(seed), jnp.int32(len(ids))
    written: Written = program(gemma, padded(ids), length, jnp.float32(temperature), key, most=MOST, stops=stops)
    return np.asarray(written.ids)[: int(written.number)].tolist()


def by_transformers(reference: Gemma3ForCausalLM, ids: list[int], stops: list[int]) -> list[int]:
    with torch.no_grad():
        whole = reference.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=MOST, eos_token_id=stops or None, pad_token_id=0
        )
    return whole[0, len(ids) :].tolist()


@pytest.mark.parametrize("ids", [SHORT, LONG], ids=["short", "long"])
def test_the_likeliest_tokens_are_those_of_transformers(pair, ids):
    reference, gemma = pair
    wanted = by_transformers(reference, ids, [])
    assert len({*wanted}) > 6  # a text that depends on what was written before
    assert write(gemma, ids) == wanted


@pytest.mark.parametrize("place", [0, 7])
def test_a_stop_ends_the_text(pair, place):
    reference, gemma = pair
    whole = by_transformers(reference, SHORT, [])
    wanted = by_transformers(reference, SHORT, [whole[place]])
    assert len(wanted) == whole.index(whole[place]) + 1
    assert write(gemma, SHORT, (whole[place], 1000)) == wanted


def test_at_a_temperature_a_seed_decides(pair):
    _, gemma = pair
    texts = [write(gemma, SHORT, (), 5.0, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_draws_follow_the_probabilities_of_the_likeliest(pair):
    """The first token of many seeds, beside the softmax of transformers' logits, cut at 95 %."""
    reference, gemma = pair
    temperature, draws = 3.0, 400
    with torch.no_grad():
        logits = reference(torch.tensor([SHORT])).logits[0, -1].double() / temperature
    best, tokens = torch.softmax(logits, 0).sort(descending=True)
    kept = best * (best.cumsum(0) - best < 0.95)
    assert 2 < (kept > 0).sum() < len(kept)
    wanted = np.zeros(len(kept))
    wanted[tokens.numpy()] = (kept / kept.sum()).numpy()
    many = jax.jit(jax.vmap(partial(generate, most=1, stops=()), in_axes=(None, None, None, None, 0)))
    keys = jax.vmap(jax.random.key)(jnp.arange(draws))
    drawn = np.asarray(many(gemma, padded(SHORT), jnp.int32(3), jnp.float32(temperature), keys).ids)[:, 0]
    found = np.bincount(drawn, minlength=len(kept)) / draws
    assert not found[wanted == 0].any()
    np.testing.assert_allclose(found, wanted, atol=4 * 0.5 / draws**0.5)


def test_devices_write_what_one_writes(pair):
    """Weights split as the profiles split them: heads and feed-forward over two devices, channels over two."""
    _, gemma = pair
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("heads", "embed"))
    split = {"heads": "heads", "mlp": "heads", "embed": "embed"}

    def place(weight: Weight) -> Weight:
        value = weight.get_value()
        names = [None] * (value.ndim - len(weight.axes)) + [split.get(name or "") for name in weight.axes]
        axes = [name if size % 2 == 0 else None for name, size in zip(names, value.shape, strict=True)]
        return weight.with_value(jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes))))

    assert write(map_weights(place, gemma), LONG) == write(gemma, LONG)


@needs_libtpu
def test_a_tpu_copies_no_stack_of_layers() -> None:
    """In the loop of tokens, within which is one of layers, matrices lie as they were placed."""
    text = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 8, "head_dim": 128, "vocab_size": 1024}
    arch = gemma_arch(config(text | {"layer_types": 8 * ["full_attention"]}), "config.json")
    plan = ShardingPlan(Mesh(np.asarray(topology("v6e:1x1")), ("device",)), (), (), input_major=True)
    gemma = map_weights(
        lambda weight: weight.with_value(placed(weight.get_value(), plan.place(weight))),
        Gemma(Scope("bfloat16"), arch),
    )
    others = ((BUCKET,), jnp.int32), ((), jnp.int32), ((), jnp.float32), ((), jax.random.key(0).dtype)
    abstract = (jax.ShapeDtypeStruct(shape, dtype, sharding=plan.replicated) for shape, dtype in others)
    function = jitted(generate, plan.replicated, plan, most=MOST, stops=(1,))
    memory = function.lower(gemma, *abstract).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.3 * memory.argument_size_in_bytes
