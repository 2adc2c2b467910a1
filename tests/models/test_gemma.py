import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma3TextModel,
    Gemma4UnifiedTextConfig,
    Gemma4UnifiedTextModel,
)

from gemmas import ALTERNATING, FOURTH, LISTED, config
from ltx2_cli.errors import UsageError
from ltx2_cli.models.gemma import Gemma, GemmaArch, gemma_arch, language_model
from ltx2_cli.models.gemma_torch import build_torch_module
from ltx2_cli.weights.checkpoint import Tensor, TensorFiles
from ltx2_cli.weights.declare import Scope, Shape, Weight, declared, map_weights
from parity import adopt, randomise, relative_error

TOKENS = 16  # more than either window, so that sliding and full layers differ
IDS = np.random.default_rng(0).integers(1, 40, (3, TOKENS)).astype(np.int32)
MASK = np.arange(TOKENS)[None] >= np.array([[0], [6], [15]])  # whole, padded on the left, a single token
IDS *= MASK

encode = jax.jit(Gemma.__call__)


CONFIGS = {"alternating": ALTERNATING, "listed": LISTED, "gemma-4": FOURTH}
one_of_each = pytest.mark.parametrize("pair", [ALTERNATING, FOURTH], ids=["alternating", "gemma-4"], indirect=True)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS)
def pair(request: pytest.FixtureRequest) -> tuple[Gemma3TextModel | Gemma4UnifiedTextModel, Gemma]:
    if "global_head_dim" in request.param:
        reference = randomise(Gemma4UnifiedTextModel(Gemma4UnifiedTextConfig(**request.param)), seed=1)
        arch = gemma_arch({"model_type": "gemma4_unified", "text_config": request.param}, "config.json")
    else:
        reference = randomise(Gemma3TextModel(Gemma3TextConfig(**request.param)), seed=1)
        arch = gemma_arch(config(request.param), "config.json")
    return reference, adopt(Gemma(Scope(jnp.float32), arch), reference.state_dict())


@pytest.fixture(scope="module")
def got(pair) -> np.ndarray:
    return np.asarray(encode(pair[1], IDS, MASK))


def of_prompts(states: jax.Array | np.ndarray) -> np.ndarray:
    """States of the prompts' tokens alone, those of the padding left out."""
    return np.moveaxis(np.asarray(states), 1, 2)[MASK]


def cast(gemma: Gemma, dtype: jnp.dtype) -> Gemma:
    return map_weights(lambda weight: weight.with_value(weight.get_value().astype(dtype)), gemma)


def test_every_hidden_state_equals_transformers(pair, got):
    reference, _ = pair
    inputs = {"input_ids": torch.from_numpy(IDS).long(), "attention_mask": torch.from_numpy(MASK).long()}
    with torch.no_grad():
        wanted = reference(**inputs, output_hidden_states=True).hidden_states
    rows, tokens = IDS.shape
    assert got.shape == (rows, reference.config.num_hidden_layers + 1, tokens, reference.config.hidden_size)
    for index, state in enumerate(wanted):
        assert relative_error(got[:, index][MASK], state[torch.from_numpy(MASK)]) < 2e-6


@one_of_each
def test_a_prompt_alone_equals_the_same_prompt_in_a_batch(pair, got):
    for row in range(len(IDS)):
        alone = encode(pair[1], IDS[row : row + 1], MASK[row : row + 1])
        np.testing.assert_allclose(alone[0], got[row], rtol=1e-4, atol=1e-4)


@one_of_each
def test_padding_changes_no_prompt(pair, got):
    other = encode(pair[1], np.where(MASK, IDS, 7), MASK.astype(np.int32))
    np.testing.assert_array_equal(of_prompts(other), of_prompts(got))


@pytest.mark.parametrize("pair", [ALTERNATING], ids=["alternating"], indirect=True)
def test_compilation_changes_nothing(pair, got):
    plain = pair[1](IDS, MASK)
    np.testing.assert_allclose(plain, got, rtol=1e-4, atol=1e-4)


@one_of_each
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_finite_even_in_the_padding_and_near_float32(pair, got, dtype):
    half = encode(cast(pair[1], dtype), IDS, MASK)
    assert half.dtype == dtype
    assert jnp.all(jnp.isfinite(half))
    near = of_prompts(half.astype(np.float32)) - of_prompts(got)
    assert np.linalg.norm(near) < 0.05 * np.linalg.norm(of_prompts(got))


@one_of_each
def test_weights_spread_over_eight_devices_give_the_same_states(pair, got):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("embed", "wide"))
    rules = {"vocab": "wide", "heads": "wide", "mlp": "wide", "embed": "embed"}

    def spread(weight: Weight) -> Weight:
        sharding = NamedSharding(mesh, PartitionSpec(*[rules.get(axis) for axis in weight.axes]))
        return weight.with_value(jax.device_put(weight.get_value(), sharding))

    gemma = map_weights(spread, pair[1])
    query = gemma.layers[0]["self_attn.q_proj.weight"][...]
    assert query.addressable_shards[0].data.size * 8 == query.size
    np.testing.assert_allclose(encode(gemma, IDS, MASK), got, rtol=1e-4, atol=1e-4)


def test_the_torch_module_keeps_no_memory_and_has_the_declared_weights(pair, got):
    parameters = build_torch_module(pair[1].arch.config, "").module.state_dict()
    assert all(tensor.is_meta for tensor in parameters.values())
    assert declared(pair[1]) == {name: tuple(tensor.shape) for name, tensor in parameters.items()}


def test_default_sizes_equal_those_of_transformers():
    usual, sizes = Gemma3TextConfig(), vars(GemmaArch()).keys() - {"generation", "attention", "config", "where"}
    assert {name: getattr(usual, name) for name in sizes} == {name: getattr(GemmaArch(), name) for name in sizes}


def test_a_language_model_alone_gives_the_same_network():
    alone = Gemma(Scope(jnp.float32), gemma_arch({"model_type": "gemma3_text", **LISTED}, "config.json"))
    inside = Gemma(Scope(jnp.float32), gemma_arch(config(LISTED), "config.json"))
    assert declared(alone) == declared(inside)


def headers(shapes: dict[str, Shape]) -> TensorFiles:
    files = TensorFiles()
    files.update({name: Tensor(shape, "F32", Path("model.safetensors"), 0) for name, shape in shapes.items()})
    return files


def test_names_are_those_of_the_model_without_vision_and_head():
    with torch.device("meta"):
        whole = Gemma3ForConditionalGeneration(Gemma3Config(text_config=ALTERNATING)).state_dict()
    ours = language_model(headers({name: tuple(tensor.shape) for name, tensor in whole.items()}))
    assert len(ours) < len(whole)
    arch = gemma_arch(config(ALTERNATING), "config.json")
    assert declared(Gemma(Scope(jnp.float32), arch)) == {name: tensor.shape for name, tensor in ours.items()}


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model", "language_model", "model", ""])
def test_the_prefix_is_that_of_the_embeddings(prefix):
    inside = ["embed_tokens.weight", "layers.47.mlp.up_proj.weight"]
    outside = [
        "language_model.lm_head.weight",
        "lm_head.weight",
        "vision_tower.layers.0.weight",
        "model.projector.weight",
    ]
    files = headers(dict.fromkeys([*outside, *(f"{prefix}.{name}".lstrip(".") for name in inside)], (2,)))
    assert list(language_model(files)) == inside


def test_a_checkpoint_without_embeddings_is_refused():
    with pytest.raises(UsageError, match="embed_tokens") as caught:
        language_model(headers({"encoder.block.0.weight": (2,)}))
    assert caught.value.hint


def check(change: dict, usual: dict = ALTERNATING | {"model_type": "gemma3_text"}) -> None:
    arch = gemma_arch(usual | change, "te/config.json")
    build_torch_module(arch.config, arch.where)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "t5"}, "te/config.json: the text encoder is 't5'"),
        ({"num_hidden_layers": "many"}, "te/config.json: .*num_hidden_layers"),
        ({"hidden_size": 15}, "te/config.json: .*hidden size .15. is not"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not implemented"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not implemented"),
        ({"sliding_window": 0}, "sliding_window is 0, not a whole number above 0"),
        ({"sliding_window": None}, "sliding_window is None, not"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0, not"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, not"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, not"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not"),
        ({"vocab_size": 0}, "vocab_size is 0, not"),
        ({"head_dim": 0}, "head_dim is 0, not"),
        ({"hidden_size": 0}, "hidden_size is 0, not"),
        ({"intermediate_size": 0}, "intermediate_size is 0, not"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0, not"),
        ({"num_key_value_heads": 3}, "2 heads do not share 3 keys"),
        ({"hidden_activation": "nope"}, "hidden_activation is 'nope', which transformers does not know"),
        ({"pad_token_id": 64}, "pad_token_id is 64 in a vocabulary of 64"),
        ({"layer_types": 4 * ["chunked_attention"]}, "layers of type 'chunked_attention' are not implemented"),
        ({"rope_scaling": {"rope_type": "nope", "factor": 2.0}}, "rope_parameters of full_attention are .*'nope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "of full_attention are .*'dynamic'"),
        ({"rope_scaling": {"factor": 2.0}}, "of full_attention are .*'default', 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "of full_attention are .*'factor': '8'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "te/config.json: .*factor"),
        ({"rope_scaling": None, "rope_local_base_freq": 0}, "of sliding_attention are .*'rope_theta': 0"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": 3}}, "te/config.json: 'int'"),
        ({"dtype": "nope"}, "te/config.json: .*nope"),
        ({"model_type": "gemma3", "text_config": [1]}, r"text_config is \[1\], not an object"),
    ],
)
def test_another_model_is_refused(change, said):
    with pytest.raises(UsageError, match=said) as caught:
        check(change)
    assert str(caught.value).startswith("te/config.json: ")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gemma4_text"}, "'gemma4_text', only Gemma-3 and the Gemma-4 of LTX-2.5"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is not implemented"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is not implemented"),
        ({"enable_moe_block": True}, "enable_moe_block is not implemented"),
        ({"global_head_dim": 0}, "global_head_dim is 0, not"),
        ({"num_global_key_value_heads": 3}, "4 heads do not share 3 keys"),
        ({"layer_types": 4 * ["sliding_attention"]}, "layer_types are not 4 times .* the last full_attention"),
        ({"per_layer_config": {"3": {"head_dim": "8"}}}, "sizes of layer 3 are {'head_dim': '8'}, not whole numbers"),
        ({"per_layer_config": {"3": 8}}, "the sizes of layer 3 are 8, not"),
        ({"per_layer_config": {"3": {"window": 8}}}, "the sizes of layer 3 are {'window': 8}"),
        ({"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "te/config.json: "),
    ],
)
def test_another_gemma_4_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check(change, FOURTH | {"model_type": "gemma4_unified_text"})


def test_sizes_of_a_layer_have_two_spellings() -> None:
    """As published, and as transformers saves them."""
    saved = json.loads(Gemma4UnifiedTextConfig(**FOURTH).to_json_string())
    assert "global_head_dim" not in saved
    archs = [gemma_arch({"model_type": "gemma4_unified_text", **each}, "config.json") for each in (FOURTH, saved)]
    assert (
        archs[0].attention
        == archs[1].attention
        == 2
        * (
            ("sliding_attention", 8, 2, True),
            ("full_attention", 12, 1, False),
        )
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"head_dim": 0, "vocab_size": "many", "attn_logit_softcapping": 1.0}, "vocab_size is .*head_dim is .*soft"),
        ({"hidden_activation": "nope", "pad_token_id": 99, "num_key_value_heads": 3}, "nope.*3 keys.*pad_token_id"),
    ],
)
def test_all_faults_of_a_text_encoder_are_one_message(change, said):
    with pytest.raises(UsageError, match=said):
        check(change)


UNDISTURBED = """
import os
import jax, torch

def found():
    overloads = torch.ops.aten.prod.overloads(), hasattr(torch.ops.aten.prod, "dim_Dimname")
    fast_path = torch.backends.mha.get_fastpath_enabled()
    return dict(jax.config.values), fast_path, overloads, type(torch.ones(2) + 1), torch.get_default_dtype()

jax.config.update("jax_pjrt_client_create_options", "ml_framework_name:JAX")  # as on a TPU host
before = found()
from ltx2_cli.models.gemma_torch import build_torch_module
variables = dict(os.environ)
module = build_torch_module('{"vocab_size": 8, "hidden_size": 8, "num_hidden_layers": 1}', "")
assert found() == before
assert dict(os.environ) == variables
"""


@pytest.mark.slow
def test_torchax_leaves_torch_and_jax_unchanged():
    done = subprocess.run([sys.executable, "-c", UNDISTURBED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
