import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors

from ltx2_cli.models.arch import ConnectorsArch
from ltx2_cli.models.connectors import TextConnectors, features_by_layer, features_by_token, fill_with_registers
from ltx2_cli.weights.declare import Scope, declared, map_weights
from parity import adopt, published, randomise, relative_error

CONFIGS = {
    "two layers": {
        "caption_channels": 24,
        "text_proj_in_factor": 3,
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": 12,
        "video_connector_num_layers": 2,
        "video_connector_num_learnable_registers": 4,
        "audio_connector_num_attention_heads": 4,
        "audio_connector_attention_head_dim": 6,
        "audio_connector_num_layers": 1,
        "audio_connector_num_learnable_registers": 8,
    },
    "other rope": {
        "caption_channels": 32,
        "text_proj_in_factor": 5,
        "video_connector_num_attention_heads": 4,
        "video_connector_attention_head_dim": 8,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 2,
        "audio_connector_num_attention_heads": 1,
        "audio_connector_attention_head_dim": 32,
        "audio_connector_num_layers": 3,
        "audio_connector_num_learnable_registers": 2,
        "connector_rope_base_seq_len": 64,
        "rope_theta": 700.0,
    },
    "projections by stream, gates": {
        "caption_channels": 20,
        "text_proj_in_factor": 3,
        "video_connector_num_attention_heads": 2,
        "video_connector_attention_head_dim": 12,
        "video_connector_num_layers": 2,
        "video_connector_num_learnable_registers": 4,
        "video_gated_attn": True,
        "audio_connector_num_attention_heads": 2,
        "audio_connector_attention_head_dim": 8,
        "audio_connector_num_layers": 2,
        "audio_connector_num_learnable_registers": 4,
        "audio_gated_attn": True,
        "per_modality_projections": True,
        "video_hidden_dim": 24,
        "audio_hidden_dim": 16,
        "proj_bias": True,
    },
}
TOKENS = 8

run = jax.jit(lambda connectors, states, mask: connectors(states, mask))


def padded(side: str) -> np.ndarray:
    """One row for every number of valid tokens, from a single one to all."""
    lengths, places = np.arange(1, TOKENS + 1)[:, None], np.arange(TOKENS)[None]
    return places < lengths if side == "right" else places >= TOKENS - lengths


def hidden_states(arch: ConnectorsArch, rows: int) -> np.ndarray:
    """Layers of very different size and offset, as a language model's are; padding holds noise like the rest."""
    shape = (rows, arch.text_proj_in_factor, TOKENS, arch.caption_channels)
    layers = np.arange(1, arch.text_proj_in_factor + 1)[:, None, None]
    return (np.random.default_rng(3).normal(size=shape) * 10.0**layers + layers).astype(np.float32)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[LTX2TextConnectors, TextConnectors, ConnectorsArch]:
    reference = randomise(LTX2TextConnectors(**request.param, rope_type="split"), seed=1)
    arch = ConnectorsArch(**request.param)
    return reference, adopt(TextConnectors(Scope(jnp.float32), arch), reference.state_dict()), arch


@pytest.mark.parametrize("side", ["left", "right"])
def test_both_streams_equal_the_reference_under_every_padding(pair, side):
    reference, ours, arch = pair
    mask = padded(side)
    states = hidden_states(arch, len(mask))
    with torch.no_grad():
        stacked_last = torch.from_numpy(states).permute(0, 2, 3, 1)
        wanted = reference(stacked_last, torch.from_numpy(mask).long(), padding_side=side)
    got = run(ours, states, mask)
    assert relative_error(got.video, wanted[0]) < 1e-5
    assert relative_error(got.audio, wanted[1]) < 1e-5


def test_the_padding_side_and_an_integer_mask_make_no_difference(pair):
    _, ours, arch = pair
    left, right = padded("left"), padded("right")
    states = hidden_states(arch, len(left))
    moved = np.stack([np.roll(row, mask.sum(), axis=1) for row, mask in zip(states, left, strict=True)])
    for one, other in zip(run(ours, states, left), run(ours, moved, right.astype(np.int32)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_padding_content_makes_no_difference(pair):
    _, ours, arch = pair
    mask = padded("left")
    states = hidden_states(arch, len(mask))
    noisy = np.where(mask[:, None, :, None], states, 1e6).astype(np.float32)
    for one, other in zip(run(ours, states, mask), run(ours, noisy, mask), strict=True):
        np.testing.assert_array_equal(one, other)


def test_bfloat16_stays_near_float32(pair):
    _, ours, arch = pair
    mask = padded("left")
    states = hidden_states(arch, len(mask))
    half = map_weights(lambda weight: weight.with_value(weight.get_value().astype(jnp.bfloat16)), ours)
    for got, wanted in zip(run(half, states.astype(jnp.bfloat16), mask), run(ours, states, mask), strict=True):
        assert got.dtype == jnp.bfloat16
        assert np.linalg.norm(got.astype(np.float32) - wanted) < 0.05 * np.linalg.norm(wanted)


@pytest.mark.parametrize("features_of", [features_by_layer, features_by_token])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_a_constant_layer_and_an_empty_prompt_have_finite_features(features_of, dtype):
    features = features_of(jnp.full((2, 2, 4, 6), 3.0, dtype), jnp.asarray([4 * [True], 4 * [False]]))
    assert jnp.all(jnp.isfinite(features.astype(dtype)))
    np.testing.assert_array_equal(features[1], 0)


def test_features_have_a_range_of_eight_around_their_mean():
    states = jnp.asarray([[[[9.0], [0.0], [1.0], [2.0]]]])  # four tokens, the first is padding
    features = features_by_layer(states, jnp.asarray([[False, True, True, True]]))
    np.testing.assert_allclose(features[0, 0, :, 0], [0, -4, 0, 4], atol=1e-5)


def test_the_features_of_half_precision_states_sum_in_float32():
    states = jnp.full((1, 1, 64, 64), 60.0, jnp.float16).at[0, 0, 0, 0].set(61.0)  # the sum is past float16's end
    features = features_by_layer(states, jnp.ones((1, 64), bool))
    np.testing.assert_allclose(features[0, 0, 0, 0], 8, rtol=1e-3)
    np.testing.assert_allclose(features[0, 0, 1, 0], -8 / 64**2, rtol=1e-1)


def test_registers_follow_the_prompt_by_position():
    x = jnp.asarray([[[0.0], [1.0], [0.0], [2.0], [3.0]]])
    mask = jnp.asarray([[False, True, False, True, True]])
    filled = fill_with_registers(x, mask, jnp.asarray([[10.0], [11.0]]))
    np.testing.assert_array_equal(filled[0, :, 0], [1, 2, 3, 11, 10])


LTX2_3 = {
    "video_connector_num_attention_heads": 32,
    "video_connector_num_layers": 8,
    "video_gated_attn": True,
    "audio_connector_num_attention_heads": 32,
    "audio_connector_attention_head_dim": 64,
    "audio_connector_num_layers": 8,
    "audio_gated_attn": True,
    "per_modality_projections": True,
    "proj_bias": True,
}


@pytest.mark.parametrize(("model", "config"), [("ltx2", {}), ("ltx2.3", LTX2_3)])
def test_names_and_shapes_equal_the_published_ones(model, config):
    assert declared(TextConnectors(Scope(jnp.bfloat16), ConnectorsArch(**config))) == published(
        f"{model}/connectors.tsv"
    )
