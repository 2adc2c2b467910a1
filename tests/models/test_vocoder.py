from copy import deepcopy
from dataclasses import asdict
from inspect import signature
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.pipelines.ltx2 import LTX2Vocoder
from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE
from flax import nnx

from ltx2_cli.errors import UsageError
from ltx2_cli.models.vocoder import (
    Vocoder,
    VocoderArch,
    VocoderWithBWE,
    VocoderWithBWEArch,
    build_vocoder,
    vocoder_arch,
)
from ltx2_cli.nn import conv1d, layers
from ltx2_cli.weights.declare import PLAIN, Scope, declared, weights
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
    "anti-aliased": {
        "in_channels": 16,
        "hidden_channels": 16,
        "upsample_kernel_sizes": (11, 4),
        "upsample_factors": (5, 2),
        "resnet_kernel_sizes": (3, 7),
        "resnet_dilations": ((1, 3), (1, 5)),
        "act_fn": "snakebeta",
        "antialias": True,
        "final_act_fn": None,
        "final_bias": False,
    },
    "anti-aliased, other numbers": {
        "in_channels": 6,
        "hidden_channels": 12,
        "out_channels": 3,
        "upsample_kernel_sizes": (7,),
        "upsample_factors": (3,),
        "resnet_kernel_sizes": (5, 3, 3),
        "resnet_dilations": ((2,), (1, 4), (3,)),
        "act_fn": "snakebeta",
        "antialias": True,
        "antialias_ratio": 3,
        "antialias_kernel_size": 13,
        "final_act_fn": "clamp",
    },
}
EXTENDED = {
    "anti-aliased twice": {
        "in_channels": 32,
        "hidden_channels": 16,
        "upsample_kernel_sizes": (11, 4),
        "upsample_factors": (5, 2),
        "resnet_kernel_sizes": (3, 7),
        "resnet_dilations": ((1, 3), (5,)),
        "bwe_in_channels": 16,
        "bwe_hidden_channels": 16,
        "bwe_upsample_kernel_sizes": (12, 11),
        "bwe_upsample_factors": (6, 5),
        "bwe_resnet_kernel_sizes": (3, 7),
        "bwe_resnet_dilations": ((1, 3), (5,)),
        "bwe_antialias_ratio": 3,
        "bwe_antialias_kernel_size": 14,
        "filter_length": 64,
        "window_length": 64,
        "hop_length": 10,
        "num_mel_channels": 8,
    },
    "other numbers": {  # no number of instants but a multiple of 4 makes whole hops
        "in_channels": 6,
        "hidden_channels": 12,
        "out_channels": 3,
        "upsample_kernel_sizes": (7,),
        "upsample_factors": (3,),
        "resnet_kernel_sizes": (5,),
        "resnet_dilations": ((2, 4),),
        "antialias_ratio": 3,
        "antialias_kernel_size": 13,
        "final_bias": True,
        "bwe_in_channels": 15,
        "bwe_hidden_channels": 20,
        "bwe_out_channels": 3,
        "bwe_upsample_kernel_sizes": (8, 6),
        "bwe_upsample_factors": (4, 2),
        "bwe_resnet_kernel_sizes": (3, 5),
        "bwe_resnet_dilations": ((1,), (3,)),
        "bwe_act_fn": "leaky_relu",
        "bwe_leaky_relu_negative_slope": 0.3,
        "bwe_antialias": False,
        "bwe_final_act_fn": "tanh",
        "bwe_final_bias": True,
        "filter_length": 12,
        "window_length": 13,
        "hop_length": 4,
        "num_mel_channels": 5,
        "input_sampling_rate": 8000,
        "output_sampling_rate": 16000,
    },
}

run = jax.jit(lambda vocoder, mel: vocoder(mel))


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=shape).astype(np.float32)


def heard(reference: torch.nn.Module, mel: np.ndarray) -> torch.Tensor:
    """What the reference makes of mel [batch, time, mel bins, channels]: [batch, channels, samples]."""
    with torch.no_grad():
        return reference(torch.from_numpy(np.ascontiguousarray(np.moveaxis(mel, -1, 1))))


def error(ours: nnx.Module, mel: np.ndarray, wanted: torch.Tensor) -> float:
    return relative_error(np.moveaxis(run(ours, mel), -1, 1), wanted)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[LTX2Vocoder, Vocoder, VocoderArch]:
    reference = randomise(LTX2Vocoder(**request.param), seed=3)
    arch = VocoderArch(**request.param)
    return reference, adopt(Vocoder(Scope(jnp.bfloat16), arch), reference.state_dict()), arch


@pytest.fixture(scope="module", params=EXTENDED.values(), ids=EXTENDED.keys())
def extended(request: pytest.FixtureRequest) -> tuple[LTX2VocoderWithBWE, VocoderWithBWE, VocoderWithBWEArch]:
    """As `pair`, but every third mel bin is always under the floor, and both generators are soft enough that no
    limit is reached."""
    reference = randomise(LTX2VocoderWithBWE(**request.param), seed=3)
    state = reference.state_dict()
    state["mel_stft.mel_basis"].abs_()[::3].neg_()
    state["vocoder.conv_out.weight"].mul_(0.25)
    state["bwe_generator.conv_out.weight"].mul_(0.1)
    arch = VocoderWithBWEArch(**request.param)
    return reference, adopt(build_vocoder(Scope(jnp.bfloat16), arch), state), arch


def spectrograms(arch: VocoderArch, instants: int) -> np.ndarray:
    return normal(2, instants, arch.in_channels // arch.out_channels, arch.out_channels)


@pytest.mark.parametrize("instants", [1, 9])
def test_the_wave_equals_the_reference(pair, instants):
    reference, ours, arch = pair
    mel = spectrograms(arch, instants)
    wanted = heard(reference, mel)
    assert wanted.std(dim=-1).min() > 0.01  # a wave, neither silent ...
    assert wanted.abs().mean() < 0.9  # ... nor at its limits
    assert error(ours, mel, wanted) < 1e-5


@pytest.mark.parametrize("instants", [1, 9])
def test_the_extended_wave_equals_the_reference(extended, instants):
    reference, ours, arch = extended
    mel = spectrograms(arch, instants)
    first, wanted = heard(reference.vocoder, mel), heard(reference, mel)
    assert wanted.std(dim=-1).min() > 0.01
    assert max(first.abs().max(), wanted.abs().max()) < 1
    assert relative_error(wanted, reference.resampler(first)) > 0.1  # the second generator is heard
    assert error(ours, mel, wanted) < 1e-5


def test_the_first_wave_is_clipped_by_default(extended):
    reference, _, arch = extended
    loud = deepcopy(reference)
    loud.state_dict()["vocoder.conv_out.weight"].mul_(12)
    cut = deepcopy(loud)
    cut.vocoder.register_forward_hook(lambda module, inputs, wave: wave.clamp(-1, 1))
    mel = spectrograms(arch, 9)
    wanted = {(False,): heard(loud, mel), (): heard(cut, mel)}
    assert 0.05 < (heard(loud.vocoder, mel).abs() > 1).float().mean() < 0.7
    assert max((wave.abs() == 1).float().mean() for wave in wanted.values()) < 0.7
    assert relative_error(*wanted.values()) > 0.01
    for clamp, wave in wanted.items():
        ours = adopt(build_vocoder(Scope(jnp.bfloat16), arch, *clamp), loud.state_dict())
        assert error(ours, mel, wave) < 1e-5


def test_weights_and_wave_are_float32_in_every_run():
    vocoder = Vocoder(Scope(jnp.bfloat16), VocoderArch())
    assert {weight.dtype for weight in weights(vocoder)} == {jnp.dtype(jnp.float32)}
    mel = jax.ShapeDtypeStruct((1, 5, 64, 2), jnp.bfloat16)
    assert jax.eval_shape(Vocoder.__call__, vocoder, mel) == jax.ShapeDtypeStruct((1, 1200, 2), jnp.float32)


def test_the_extended_wave_is_float32_and_as_long_as_its_spectrogram(extended):
    _, ours, arch = extended
    assert {weight.dtype for weight in weights(ours)} == {jnp.dtype(jnp.float32)}
    mel = jax.ShapeDtypeStruct((1, 5, arch.in_channels // arch.out_channels, arch.out_channels), jnp.bfloat16)
    samples = {16000: 5 * 3 * 2, 48000: 5 * 10 * 3}[arch.output_sampling_rate]
    wave = jax.ShapeDtypeStruct((1, samples, arch.out_channels), jnp.float32)
    assert jax.eval_shape(VocoderWithBWE.__call__, ours, mel) == wave


def check_products(vocoder: nnx.Module, arch: VocoderArch) -> None:
    """Every convolution and matrix product of the program is of full precision where the default is lower."""
    with jax.default_matmul_precision("bfloat16"):
        program = run.lower(vocoder, spectrograms(arch, 1)).as_text().splitlines()
    products = [line for line in program if "stablehlo.convolution" in line or "stablehlo.dot_general" in line]
    factors = [w for w in weights(vocoder) if w.layout != PLAIN or w.source.endswith("mel_basis")]
    assert len(products) == len(factors) + isinstance(vocoder, VocoderWithBWE)  # whose resampler has no weights
    assert all(line.count("HIGHEST") == 2 for line in products)


def test_products_are_float32_where_the_default_is_less(pair):
    _, ours, arch = pair
    check_products(ours, arch)


def test_products_of_the_extended_vocoder_are_float32_too(extended):
    _, ours, arch = extended
    check_products(ours, arch)


def check_on_tpu(
    reference: torch.nn.Module, ours: nnx.Module, mel: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, every filter is a loop of products, and samples lie side by side."""
    for module in (layers, conv1d):
        monkeypatch.setattr(module, "device", lambda: SimpleNamespace(platform="tpu"))
    program = jax.jit(lambda vocoder, mel: vocoder(mel)).lower(ours, mel)
    assert "stablehlo.convolution" not in program.as_text()
    assert all(line.count("HIGHEST") == 2 for line in program.as_text().splitlines() if "dot_general" in line)
    wave = np.moveaxis(program.compile()(ours, mel), -1, 1)
    assert relative_error(wave, heard(reference, mel)) < 1e-5


def test_the_wave_is_as_exact_on_a_tpu(pair, monkeypatch: pytest.MonkeyPatch):
    reference, ours, arch = pair
    check_on_tpu(reference, ours, spectrograms(arch, 9), monkeypatch)


@pytest.mark.parametrize("extended", [EXTENDED["other numbers"]], ids=["other numbers"], indirect=True)
def test_the_extended_wave_is_as_exact_on_a_tpu(extended, monkeypatch: pytest.MonkeyPatch):
    reference, ours, arch = extended
    check_on_tpu(reference, ours, spectrograms(arch, 16), monkeypatch)


def test_names_and_shapes_equal_the_published_ones():
    assert declared(Vocoder(Scope(jnp.bfloat16), VocoderArch())) == published("ltx2/vocoder.tsv")
    extended = build_vocoder(Scope(jnp.bfloat16), VocoderWithBWEArch())
    assert declared(extended) == published("ltx2.3/vocoder.tsv")


def test_a_config_names_or_implies_its_class():
    assert vocoder_arch({}, "here") == VocoderArch()
    assert vocoder_arch({"_class_name": "LTX2VocoderWithBWE"}, "here") == VocoderWithBWEArch()
    assert vocoder_arch({"bwe_in_channels": 128}, "here") == VocoderWithBWEArch()
    assert vocoder_arch({"final_act_fn": None}, "here").final_act_fn is None
    with pytest.raises(UsageError, match=r"here: a vocoder of class 'Other' .*, only LTX2Vocoder, LTX2VocoderWithBWE"):
        vocoder_arch({"_class_name": "Other"}, "here")


@pytest.mark.parametrize("reference", [LTX2Vocoder, LTX2VocoderWithBWE])
def test_missing_keys_have_the_defaults_of_the_reference(reference):
    named = {"_class_name": reference.__name__}
    written_out = {key: value.default for key, value in signature(reference).parameters.items()}
    assert len(written_out) == len(asdict(vocoder_arch(named, "here")))
    assert vocoder_arch(named | written_out, "here") == vocoder_arch(named, "here")


REFUSED = {
    "act_fn is 'snake' with antialias True": {"act_fn": "snake", "antialias": True},
    "act_fn is 'snakebeta' with antialias False": {"bwe_in_channels": 128, "antialias": False},
    "final_act_fn is 'sigmoid'": {"final_act_fn": "sigmoid"},
    "less than twice antialias_ratio": {"antialias_kernel_size": 7, "antialias_ratio": 4},
    "of the second generator, act_fn is 'leaky_relu' with": {"bwe_in_channels": 128, "bwe_act_fn": "leaky_relu"},
    "no multiple": {"bwe_in_channels": 128, "input_sampling_rate": 44100},
    "makes 240 samples of a hop, which lasts 300": {"bwe_in_channels": 128, "hop_length": 100},
    "odd and its kernel": {"bwe_in_channels": 128, "bwe_upsample_kernel_sizes": [12, 10, 4, 4, 4]},
    "takes 64 channels, its spectrograms have 128": {"bwe_in_channels": 64},
    "out_channels and bwe_out_channels differ": {"bwe_in_channels": 128, "bwe_out_channels": 1},
    "more or fewer spectra than hops": {"bwe_in_channels": 128, "window_length": 400},
}


@pytest.mark.parametrize(("reason", "config"), REFUSED.items(), ids=REFUSED.keys())
def test_unsupported_values_are_refused(reason, config):
    with pytest.raises(UsageError, match=f"here: this model is not implemented: .*{reason}"):
        vocoder_arch(config, "here")
