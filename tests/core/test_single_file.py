"""The same weights as a folder and as a single file, under the names and with the config of the published ones."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from generations import LTX2, LTX2_3, other_text_encoder, random_folder
from ltx2_cli import load, read_spec, resolve, run
from ltx2_cli.core.run import make_latents
from ltx2_cli.models.arch import Arch
from ltx2_cli.models.folder import read_text_encoder
from ltx2_cli.models.original.names import RENAMINGS, video_vae_renaming
from ltx2_cli.models.single_file import open_single_file
from ltx2_cli.plan import Plan
from ltx2_cli.spec import SpecError
from program import run_program

TRANSFORMER = {
    "in_channels": 32,
    "out_channels": 32,
    "num_attention_heads": 4,
    "attention_head_dim": 32,
    "cross_attention_dim": 128,
    "audio_out_channels": 32,
    "audio_num_attention_heads": 4,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 64,
    "num_layers": 6,
    "caption_channels": 64,
    "activation_fn": "gelu-approximate",
    "attention_bias": True,
    "av_ca_timestep_scale_multiplier": 1000.0,
    "av_cross_ada_norm": True,
    "audio_positional_embedding_max_pos": [20],
    "causal_temporal_positioning": True,
    "connector_attention_head_dim": 32,
    "connector_norm_output": True,
    "connector_num_learnable_registers": 32,
    "connector_positional_embedding_max_pos": [4096],
    "frequencies_precision": "float64",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-06,
    "positional_embedding_max_pos": [20, 2048, 2048],
    "positional_embedding_theta": 10000.0,
    "positional_embedding_type": "rope",
    "qk_norm": "rms_norm",
    "rope_type": "split",
    "standardization_norm": "rms_norm",
    "timestep_scale_multiplier": 1000,
    "use_audio_video_cross_attention": True,
    "use_embeddings_connector": True,
    "use_middle_indices_grid": True,
}


def blocks(*between: tuple[str, dict[str, object]], counts: Sequence[int] = (1,) * 5) -> list[list[object]]:
    """The config of one direction of the video autoencoder: residual blocks at either end and between each two."""
    first, *others = (["res_x", {"num_layers": count}] for count in counts[: len(between) + 1])
    return [
        first,
        *(block for (kind, options), own in zip(between, others, strict=True) for block in ([kind, options], own)),
    ]


VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 32,
    "patch_size": 4,
    "encoder_base_channels": 32,
    "decoder_base_channels": 32,
    "norm_layer": "pixel_norm",
    "latent_log_var": "uniform",
    "causal_decoder": False,
    "timestep_conditioning": False,
}
ENCODER = [
    ("compress_space_res", {"multiplier": 1}),
    ("compress_time_res", {"multiplier": 2}),
    ("compress_all_res", {"multiplier": 1}),
]
AUDIO_VAE = {
    "model": {
        "params": {
            "sampling_rate": 16000,
            "ddconfig": {
                "ch": 32,
                "ch_mult": [1, 1, 2],
                "num_res_blocks": 1,
                "z_channels": 2,
                "in_channels": 2,
                "out_ch": 2,
                "mel_bins": 64,
                "double_z": True,
                "norm_type": "pixel",
                "causality_axis": "height",
                "mid_block_add_attention": False,
            },
        }
    },
    "preprocessing": {"stft": {"hop_length": 160}},
}
GENERATOR = {
    "resblock": "AMP1",
    "activation": "snakebeta",
    "stereo": True,
    "use_tanh_at_final": False,
    "use_bias_at_final": False,
}
CONFIG = {
    "transformer": {
        **TRANSFORMER,
        "apply_gated_attention": True,
        "cross_attention_adaln": True,
        "caption_proj_before_connector": True,
        "caption_proj_input_norm": False,
        "caption_projection_first_linear": False,
        "caption_projection_second_linear": False,
        "text_encoder_norm_type": "per_token_rms",
        "connector_apply_gated_attention": True,
        "connector_num_attention_heads": 4,
        "connector_num_layers": 2,
        "audio_connector_num_attention_heads": 4,
        "audio_connector_attention_head_dim": 16,
    },
    "vae": {
        **VAE,
        "encoder_blocks": blocks(*ENCODER, ("compress_all_res", {"multiplier": 2})),
        "decoder_blocks": blocks(
            ("compress_space", {"multiplier": 1}),
            ("compress_time", {"multiplier": 2}),
            ("compress_all", {"multiplier": 1}),
            ("compress_all", {"multiplier": 1}),
            counts=(1, 1, 3, 4, 4),
        ),
        "spatial_padding_mode": "zeros",
    },
    "audio_vae": AUDIO_VAE,
    "vocoder": {
        "vocoder": {
            **GENERATOR,
            "upsample_initial_channel": 128,
            "upsample_rates": [10, 4, 4],
            "upsample_kernel_sizes": [20, 8, 8],
            "resblock_kernel_sizes": [3, 7],
            "resblock_dilation_sizes": [[1], [1]],
        },
        "bwe": {
            **GENERATOR,
            "upsample_initial_channel": 64,
            "upsample_rates": [15, 16],
            "upsample_kernel_sizes": [31, 32],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1]],
            "apply_final_activation": False,
            "input_sampling_rate": 16000,
            "output_sampling_rate": 48000,
            "hop_length": 80,
            "n_fft": 512,
            "win_size": 512,
            "num_mels": 64,
        },
    },
}
OLDER = {
    "transformer": {**TRANSFORMER, "connector_num_attention_heads": 2, "connector_num_layers": 2},
    "vae": {
        **VAE,
        "encoder_blocks": blocks(*ENCODER, ("compress_all_res", {"multiplier": 1})),
        "decoder_base_channels": 8,
        "decoder_blocks": blocks(*[("compress_all", {"multiplier": 2, "residual": True})] * 3),
    },
    "audio_vae": AUDIO_VAE,
    "vocoder": {
        "resblock": "1",
        "upsample_initial_channel": 64,
        "upsample_rates": [6, 5, 2, 2, 2],
        "upsample_kernel_sizes": [16, 15, 8, 4, 4],
        "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5]] * 3,
        "stereo": True,
    },
}
Tensors = dict[str, np.ndarray]


class Twins(NamedTuple):
    """One model in both forms: its folder, and the tensors and metadata of its single file."""

    folder: Path
    tensors: Tensors
    config: Mapping[str, Any]
    version: str


def twins(arch: Arch, config: Mapping[str, Any], version: str, cache: Path) -> Twins:
    vae = video_vae_renaming(len(arch.video_vae.block_out_channels), len(arch.video_vae.decoder_block_out_channels))
    named = {}
    folder = random_folder(arch, cache)
    for network, renaming in {**RENAMINGS, "vae": vae}.items():
        declared = load_file(folder / network / "diffusion_pytorch_model.safetensors")
        named |= {theirs: declared[ours] for ours, theirs in renaming.originals(declared).items()}
    return Twins(folder, named, config, version)


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return twins(LTX2_3, CONFIG, "2.3", tmp_path_factory.mktemp("newer"))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Twins:
    return twins(LTX2, OLDER, "2.0.0", tmp_path_factory.mktemp("older"))


def single_file(tmp_path: Path, model: Twins) -> Path:
    path = tmp_path / "ltx-2-tiny.safetensors"
    save_file(model.tensors, path, {"config": json.dumps(model.config), "model_version": model.version})
    return path


def plan_of(model: Path, **keys: object) -> Plan:
    size = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 32}
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "stg_blocks": [1], "seed": 3}
    return resolve(read_spec({"model": str(model), "prompt": "rain", "negative_prompt": "", **size, **exact, **keys}))


@pytest.mark.parametrize("name", ["newer", "older"])
def test_a_single_file_gives_the_bytes_of_the_folder(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model: Twins = request.getfixturevalue(name)
    single = plan_of(single_file(tmp_path, model), text_encoder=str(model.folder))
    whole = plan_of(model.folder)
    assert single.spec.model_name == "ltx-2-tiny"
    assert single.arch == whole.arch
    for one, other in zip(make_latents(single, load(single)), make_latents(whole, load(whole)), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(jax.tree.leaves(single.networks), jax.tree.leaves(whole.networks), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("name", ["newer", "older"])
def test_info_says_the_same_of_both_forms(
    name: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """But for the text encoder, which the folder alone has."""
    model: Twins = request.getfixturevalue(name)
    places = [str(model.folder), str(single_file(tmp_path, model))]
    assert run_program(monkeypatch, "info", "--json", *places) == 0
    folder, file = json.loads(capsys.readouterr().out)
    assert [each["generation"] for each in (folder, file)] == [{"newer": "ltx2.3", "older": "ltx2"}[name]] * 2
    text, *others = folder["networks"]
    assert text["name"] == "text_encoder"
    assert sorted(others, key=str) == sorted(file["networks"], key=str)
    assert folder["parameters"] == file["parameters"] + text["parameters"]
    assert folder["bytes"] > 4 * folder["parameters"]  # float32 and headers


def in_eight_bits(
    tensors: Mapping[str, np.ndarray], scaled: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What an fp8 file holds, the matrices of the denoiser's layers in eight bits, and what that means."""
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not re.fullmatch(r"model\.diffusion_model\.transformer_blocks\..*\.weight", name) or tensor.ndim != 2:
            continue
        scale = np.float32(np.abs(tensor).max() / 448) if scaled else np.float32(1)
        stored[name] = (tensor / scale).astype(ml_dtypes.float8_e4m3fn)
        meant[name] = stored[name].astype(np.float32) * scale
        if scaled:
            layer = name.removesuffix(".weight")
            stored |= {f"{layer}.weight_scale": np.array(scale), f"{layer}.input_scale": np.array(7, np.float32)}
    return stored, meant


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "unscaled"])
def test_an_eight_bit_file_gives_the_bytes_of_what_it_means(newer: Twins, tmp_path: Path, scaled: bool) -> None:
    stored, meant = in_eight_bits(newer.tensors, scaled)
    latents, plain = [], plan_of(newer.folder)
    for name, tensors in (("stored", stored), ("meant", meant)):
        (tmp_path / name).mkdir()
        path = single_file(tmp_path / name, newer._replace(tensors=tensors))
        plan = plan_of(path, text_encoder=str(newer.folder))
        latents.append(make_latents(plan, load(plan)))
    eight_bits = sum(array.dtype == ml_dtypes.float8_e4m3fn for array in stored.values())
    assert eight_bits == 6 * 34  # linear layers with their gates, in six layers
    for one, other, exact in zip(*latents, make_latents(plain, load(plain)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.linalg.norm(one - exact) > 1e-3 * np.linalg.norm(exact)  # eight bits are not many


def test_what_an_untrained_model_makes_is_seen_and_heard(newer: Twins) -> None:
    plan = plan_of(newer.folder)
    (media,) = run(plan, load(plan))
    frames, sound = media.frames / 255, media.waveform
    assert frames.std(axis=(1, 2)).min() > 0.1  # in every frame and colour
    assert frames.std(axis=0).mean() > 0.05  # it moves
    assert np.isin(media.frames, (0, 255)).mean() < 0.3
    assert (media.sample_rate, sound.shape) == (48000, (round(plan.latent_shapes.audio[2] * 4 - 3) * 480, 2))
    assert (sound.std(axis=0) > 0.005).all()
    assert np.abs(sound).max() < 1


def test_what_no_network_knows_and_what_is_missing_are_named(newer: Twins, tmp_path: Path) -> None:
    changed = {**newer.tensors, "model.diffusion_model.novelty": np.zeros(1, np.float32)}
    del changed["vocoder.vocoder.conv_pre.bias"]
    path = single_file(tmp_path, newer._replace(tensors=changed))
    with pytest.raises(
        SpecError, match=r"transformer: 1 not known: model.diffusion_model.novelty.*missing: vocoder.conv_in.bias"
    ):
        plan_of(path, text_encoder=str(newer.folder))


@pytest.mark.parametrize("version", ["2.0.0", "2-0", "2", "2.2.9"])
def test_a_version_that_the_transformer_is_not_of(newer: Twins, tmp_path: Path, version: str) -> None:
    path = single_file(tmp_path, newer._replace(version=version))
    with pytest.raises(SpecError, match=f"model_version is '{version}', the transformer in it is of ltx2.3") as caught:
        open_single_file(path, read_text_encoder(newer.folder))
    assert "--model" in caught.value.hint


@pytest.mark.parametrize("version", ["2.3", "2-3", "2.3.1", "2.10", "3", "", "dev"])
def test_a_version_that_says_nothing_else(newer: Twins, tmp_path: Path, version: str) -> None:
    path = single_file(tmp_path, newer._replace(version=version))
    assert open_single_file(path, read_text_encoder(newer.folder)).arch == LTX2_3


def test_the_older_models_version(older: Twins, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"model_version is '2.3', the transformer in it is of ltx2$"):
        open_single_file(single_file(tmp_path, older._replace(version="2.3")), read_text_encoder(older.folder))


def test_networks_of_two_generations_in_one_file(newer: Twins, older: Twins, tmp_path: Path) -> None:
    mixed = {name: tensor for name, tensor in newer.tensors.items() if not name.startswith("vae.")}
    mixed |= {name: tensor for name, tensor in older.tensors.items() if name.startswith("vae.")}
    path = single_file(tmp_path, newer._replace(tensors=mixed, config={**CONFIG, "vae": OLDER["vae"]}))
    with pytest.raises(SpecError, match=r"different generations.*ltx2.3: transformer, connectors, vocoder; ltx2: vae"):
        open_single_file(path, read_text_encoder(newer.folder))


def test_everything_that_is_wrong_is_one_message(newer: Twins, tmp_path: Path) -> None:
    text = tmp_path / "text"
    other_text_encoder(text, hidden_size=96, num_hidden_layers=2)
    tensors = {**newer.tensors, "vocoder.novelty": np.zeros(1, np.float32)}
    del tensors["model.diffusion_model.proj_out.bias"]
    path = single_file(tmp_path, newer._replace(tensors=tensors, version="2.0"))
    with pytest.raises(SpecError) as caught:
        plan_of(path, text_encoder=str(text))
    for finding in (
        "tokenizer.json is missing",
        "model_version is '2.0'",
        "the text encoder's width and the connectors' caption_channels differ: 96 and 64",
        "the text encoder's states and the connectors' text_proj_in_factor differ: 3 and 4",
        "transformer: 1 missing: proj_out.bias",
        "transformer: 1 not known: vocoder.novelty",
    ):
        assert finding in str(caught.value)
    assert "--text-encoder FOLDER or REPO" in caught.value.hint
    assert "--model FOLDER" in caught.value.hint
    assert "\n" not in str(caught.value)


def test_every_section_that_is_wrong_is_named(newer: Twins, tmp_path: Path) -> None:
    """What depends on none of them is still judged."""
    wrong = {
        "transformer": {**CONFIG["transformer"], "rope_type": "interleaved"},
        "vae": {**CONFIG["vae"], "norm_layer": "group_norm"},
        "vocoder": {},
    }
    tensors = dict(newer.tensors)
    del tensors["audio_vae.decoder.conv_in.conv.bias"]
    path = single_file(tmp_path, newer._replace(tensors=tensors, config={**CONFIG, **wrong}))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SpecError) as caught:
        plan_of(path, text_encoder=str(tmp_path / "nothing"))
    for finding in (
        "transformer: this model is not implemented: rope_type is 'interleaved'",
        "vae: this model is not implemented: norm_layer is 'group_norm'",
        "vocoder: the config lacks upsample_initial_channel, ",
        "audio_vae: 1 missing: decoder.conv_in.conv.bias",
        "nothing/config.json is missing",
    ):
        assert finding in str(caught.value)
    assert "--text-encoder FOLDER or REPO" in caught.value.hint


def test_a_file_without_a_config(newer: Twins, tmp_path: Path) -> None:
    save_file(newer.tensors, tmp_path / "bare.safetensors")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(SpecError, match=r"has no config in its metadata.*nothing holds no weights"):
        plan_of(tmp_path / "bare.safetensors", text_encoder=str(tmp_path / "nothing"))


def test_a_file_that_is_none(newer: Twins, tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(single_file(tmp_path, newer).read_bytes()[:-1])
    with pytest.raises(SpecError, match=r"cut.safetensors is damaged or cut short") as caught:
        plan_of(tmp_path / "cut.safetensors", text_encoder=str(newer.folder))
    assert "download it again" in caught.value.hint


def test_the_text_encoder_must_be_somewhere(newer: Twins, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gemma-3-12b.* is not in the local cache"):
        plan_of(single_file(tmp_path, newer))
    with pytest.raises(SpecError, match="has a text encoder of its own"):
        plan_of(newer.folder, text_encoder=str(newer.folder))
