import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2Vocoder

from ltx2_cli.models.arch import VocoderArch
from ltx2_cli.models.vocoder import Vocoder
from ltx2_cli.weights.declare import Scope, declared, weights
from parity import adopt, published, randomise, relative_error

CONFIGS = {
    "as published, small": {"in_channels": 32, "hidden_channels": 32},
    "other numbers": {
        "in_channels": 18,
        "hidden_channels": 24,
        "out_channels": 3,
        "upsample_kernel_sizes": (9, 5, 4),
        "upsample_factors": (3, 4, 2),
        "resnet_kernel_sizes": (5, 3),
        "resnet_dilations": ((1, 4), (2, 3)),
        "leaky_relu_negative_slope": 0.3,
    },
}

run = jax.jit(lambda vocoder, mel: vocoder(mel))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[LTX2Vocoder, Vocoder, VocoderArch]:
    reference = randomise(LTX2Vocoder(**request.param), seed=3)
    arch = VocoderArch(**request.param)
    return reference, adopt(Vocoder(Scope(jnp.bfloat16), arch), reference.state_dict()), arch


@pytest.mark.parametrize("instants", [1, 9])
def test_the_wave_equals_the_reference(pair, instants):
    reference, ours, arch = pair
    mel = normal(2, instants, arch.in_channels // 2, 2)
    with torch.no_grad():
        wanted = reference(torch.from_numpy(np.ascontiguousarray(np.moveaxis(mel, -1, 1))))
    assert wanted.std(dim=-1).min() > 0.01  # a wave, neither silent ...
    assert wanted.abs().mean() < 0.9  # ... nor at its limits
    assert relative_error(np.moveaxis(run(ours, mel), -1, 1), wanted) < 1e-5


def test_weights_and_wave_are_float32_in_every_run():
    vocoder = Vocoder(Scope(jnp.bfloat16), VocoderArch())
    assert {weight.dtype for weight in weights(vocoder)} == {jnp.dtype(jnp.float32)}
    mel = jax.ShapeDtypeStruct((1, 5, 64, 2), jnp.bfloat16)
    assert jax.eval_shape(Vocoder.__call__, vocoder, mel) == jax.ShapeDtypeStruct((1, 1200, 2), jnp.float32)


def test_products_are_float32_where_the_default_is_less(pair):
    _, ours, arch = pair
    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(Vocoder.__call__)(ours, normal(1, 1, arch.in_channels // 2, 2))
    precisions = [eqn.params["precision"] for eqn in program.eqns if eqn.primitive.name == "conv_general_dilated"]
    assert len(precisions) == len(weights(ours)) // 2
    assert set(precisions) == {(jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)}


def test_names_and_shapes_are_the_published_ones():
    assert declared(Vocoder(Scope(jnp.bfloat16), VocoderArch())) == published("ltx2/vocoder.tsv")
