"""The same weights as a folder and as a single file, under the names and with the config of the published ones."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ltx2_cli import load, read_spec, resolve
from ltx2_cli.core.run import make_latents
from ltx2_cli.models.demo import ARCH, demo_checkpoint
from ltx2_cli.models.original import RENAMINGS, video_vae_renaming
from ltx2_cli.plan import Plan
from ltx2_cli.spec import SpecError

RESIDUAL = ["res_x", {"num_layers": 1}]
ENCODER = [("compress_space_res", 1), ("compress_time_res", 2), ("compress_all_res", 2), ("compress_all_res", 2)]
CONFIG = {
    "transformer": {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "cross_attention_dim": 128,
        "audio_out_channels": 32,
        "audio_num_attention_heads": 4,
        "audio_attention_head_dim": 16,
        "audio_cross_attention_dim": 64,
        "num_layers": 4,
        "caption_channels": 64,
        "activation_fn": "gelu-approximate",
        "attention_bias": True,
        "av_ca_timestep_scale_multiplier": 1000.0,
        "av_cross_ada_norm": True,
        "audio_positional_embedding_max_pos": [20],
        "causal_temporal_positioning": True,
        "connector_attention_head_dim": 32,
        "connector_norm_output": True,
        "connector_num_attention_heads": 2,
        "connector_num_layers": 2,
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
    },
    "vae": {
        "in_channels": 3,
        "out_channels": 3,
        "latent_channels": 16,
        "patch_size": 4,
        "encoder_base_channels": 16,
        "decoder_base_channels": 8,
        "encoder_blocks": [RESIDUAL]
        + [block for kind, wider in ENCODER for block in ([kind, {"multiplier": wider}], RESIDUAL)],
        "decoder_blocks": [RESIDUAL] + [["compress_all", {"multiplier": 2, "residual": True}], RESIDUAL] * 3,
        "norm_layer": "pixel_norm",
        "latent_log_var": "uniform",
        "causal_decoder": False,
        "timestep_conditioning": False,
    },
    "audio_vae": {
        "model": {
            "params": {
                "sampling_rate": 16000,
                "ddconfig": {
                    "ch": 16,
                    "ch_mult": [1, 2, 4],
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
    },
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return demo_checkpoint()


@pytest.fixture(scope="module")
def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor but the text encoder's, by its name in a single file."""
    named = {}
    for network, renaming in {**RENAMINGS, "vae": video_vae_renaming(4, 3)}.items():
        declared = load_file(folder / network / "model.safetensors")
        named |= {theirs: declared[ours] for ours, theirs in renaming.originals(declared).items()}
    return named


def single_file(tmp_path: Path, tensors: dict[str, np.ndarray], config: object = CONFIG) -> Path:
    path = tmp_path / "ltx-2-tiny.safetensors"
    save_file(tensors, path, metadata={"config": json.dumps(config), "model_version": "2.0.0"})
    return path


def plan_of(model: Path, **keys: object) -> Plan:
    size = {"height": 64, "width": 64, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 32}
    exact = {"dtype": "float32", "text_encoder_dtype": "float32", "stg_blocks": [1], "seed": 3}
    return resolve(read_spec({"model": str(model), "prompt": "rain", "negative_prompt": "", **size, **exact, **keys}))


def test_a_single_file_gives_the_bytes_of_the_folder(
    folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    single = plan_of(single_file(tmp_path, tensors), text_encoder=str(folder))
    whole = plan_of(folder)
    assert single.spec.model_name == "ltx-2-tiny"
    assert single.arch.video_vae == ARCH.video_vae
    for one, other in zip(make_latents(single, load(single)), make_latents(whole, load(whole)), strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(jax.tree.leaves(single.networks), jax.tree.leaves(whole.networks), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)


def test_what_no_network_knows_and_what_is_missing_are_named(
    folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path
) -> None:
    changed = {**tensors, "model.diffusion_model.novelty": np.zeros(1, np.float32)}
    del changed["vocoder.conv_pre.bias"]
    with pytest.raises(
        SpecError, match=r"transformer: 1 not known: model.diffusion_model.novelty.*missing: conv_in.bias"
    ):
        plan_of(single_file(tmp_path, changed), text_encoder=str(folder))


def test_a_file_without_a_config(folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "bare.safetensors")
    with pytest.raises(SpecError, match="has no config in its metadata"):
        plan_of(tmp_path / "bare.safetensors", text_encoder=str(folder))


def test_the_text_encoder_must_be_somewhere(folder: Path, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"gemma-3-12b.* is not in the local cache"):
        plan_of(single_file(tmp_path, tensors))
    with pytest.raises(SpecError, match="has a text encoder of its own"):
        plan_of(folder, text_encoder=str(folder))
