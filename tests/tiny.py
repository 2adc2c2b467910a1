"""Tiny LTX-2 pipelines of diffusers with random weights, and the folders that they save themselves to."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import LTX2Pipeline
from safetensors.torch import load_file, save_file

from benchmarks.pipeline import build
from benchmarks.spelling import BYTE_VOCABULARY
from parity import randomise

TEXT = {
    "vocab_size": BYTE_VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 8,
}
CONNECTORS = {
    "caption_channels": 16,
    "text_proj_in_factor": 3,
    "video_connector_num_attention_heads": 2,
    "video_connector_attention_head_dim": 8,
    "video_connector_num_layers": 2,
    "video_connector_num_learnable_registers": 8,
    "audio_connector_num_attention_heads": 2,
    "audio_connector_attention_head_dim": 8,
    "audio_connector_num_layers": 1,
    "audio_connector_num_learnable_registers": 4,
    "rope_type": "split",
}
TRANSFORMER = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "cross_attention_dim": 24,
    "audio_in_channels": 16,
    "audio_out_channels": 16,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 8,
    "audio_cross_attention_dim": 16,
    "num_layers": 3,
    "caption_channels": 16,
    "rope_type": "split",
    "perturbed_attn": True,
}
VAE = {
    "latent_channels": 8,
    "block_out_channels": (16, 32, 64, 128),
    "decoder_block_out_channels": (16, 32, 64),
    "layers_per_block": (1, 1, 1, 1, 1),
    "decoder_layers_per_block": (1, 1, 1, 1),
    "decoder_causal": False,
    "spatial_compression_ratio": 32,
    "temporal_compression_ratio": 8,
}
AUDIO_VAE = {"base_channels": 16, "ch_mult": (1, 2, 4), "latent_channels": 4, "resolution": 16, "mel_bins": 16}
VOCODER = {
    "in_channels": 32,
    "hidden_channels": 32,
    "resnet_kernel_sizes": (3, 7),
    "resnet_dilations": ((1, 3), (5,)),
}
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}

PARTS: dict[str, dict[str, Any]] = {
    "text_encoder": TEXT,
    "connectors": CONNECTORS,
    "transformer": TRANSFORMER,
    "vae": VAE,
    "audio_vae": AUDIO_VAE,
    "vocoder": VOCODER,
    "scheduler": SCHEDULER,
}
NETWORKS = tuple(name for name in PARTS if name != "scheduler")

# Another config for every network, in which nothing that a program could forget to read has its default.
UNUSUAL: dict[str, dict[str, Any]] = {
    "text_encoder": {
        "hidden_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "head_dim": 12,
        "query_pre_attn_scalar": 20,
        "sliding_window": 7,
        "sliding_window_pattern": 3,
        "rms_norm_eps": 1e-2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
        },
    },
    "connectors": {
        "caption_channels": 24,
        "text_proj_in_factor": 4,
        "video_connector_num_attention_heads": 3,
        "video_connector_num_layers": 1,
        "video_connector_num_learnable_registers": 16,
        "audio_connector_attention_head_dim": 12,
        "audio_connector_num_layers": 3,
        "audio_connector_num_learnable_registers": 32,
        "connector_rope_base_seq_len": 100,
        "rope_theta": 300.0,
    },
    "transformer": {
        "in_channels": 6,
        "out_channels": 6,
        "num_attention_heads": 3,
        "attention_head_dim": 20,
        "cross_attention_dim": 60,
        "pos_embed_max_pos": 13,
        "vae_scale_factors": (6, 20, 24),
        "base_height": 90,
        "base_width": 60,
        "audio_in_channels": 24,
        "audio_out_channels": 24,
        "audio_num_attention_heads": 3,
        "audio_attention_head_dim": 12,
        "audio_cross_attention_dim": 36,
        "audio_scale_factor": 3,
        "audio_pos_embed_max_pos": 9,
        "audio_sampling_rate": 22050,
        "audio_hop_length": 210,
        "num_layers": 5,
        "norm_eps": 1e-2,
        "caption_channels": 24,
        "rope_theta": 700.0,
        "causal_offset": 2,
        "timestep_scale_multiplier": 900,
        "cross_attn_timestep_scale_multiplier": 700,
    },
    "vae": {
        "latent_channels": 6,
        "block_out_channels": (16, 32, 64, 64),
        "decoder_block_out_channels": (16, 32, 32, 64),
        "decoder_layers_per_block": (1, 2, 1, 1, 2),
        "decoder_spatio_temporal_scaling": (True,) * 4,
        "decoder_inject_noise": (False,) * 5,
        "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        "upsample_residual": (False, True, False, False),
        "upsample_factor": (2, 2, 1, 2),
        "decoder_spatial_padding_mode": "zeros",
        "decoder_causal": True,
    },
    "audio_vae": {
        "base_channels": 24,  # diffusers makes as many statistics as this says
        "ch_mult": (1, 3, 2),
        "num_res_blocks": 1,
        "latent_channels": 6,
        "sample_rate": 22050,
        "mel_hop_length": 210,
    },
    "vocoder": {
        "hidden_channels": 24,
        "upsample_kernel_sizes": (11, 8, 7),
        "upsample_factors": (5, 4, 3),
        "resnet_kernel_sizes": (3, 5),
        "resnet_dilations": ((1, 4), (2, 3)),
        "leaky_relu_negative_slope": 0.3,
        "output_sampling_rate": 6300,
    },
    "scheduler": {
        "base_shift": 0.3,
        "max_shift": 1.4,
        "base_image_seq_len": 2,
        "max_image_seq_len": 20,
        "shift_terminal": 0.25,
    },
}

# The parts in which LTX-2.3 is another network than LTX-2, at a tiny size.
LTX2_3: dict[str, dict[str, Any]] = {
    "connectors": {
        "video_connector_attention_head_dim": 12,
        "video_connector_num_layers": 3,
        "audio_connector_num_layers": 3,
        "video_gated_attn": True,
        "audio_gated_attn": True,
        "per_modality_projections": True,
        "video_hidden_dim": 24,
        "audio_hidden_dim": 16,
        "proj_bias": True,
    },
    "transformer": {
        "gated_attn": True,
        "audio_gated_attn": True,
        "cross_attn_mod": True,
        "audio_cross_attn_mod": True,
        "use_prompt_embeddings": False,
    },
    "vae": {
        "block_out_channels": (16, 32, 64, 64),
        "decoder_block_out_channels": (16, 32, 32, 64),
        "decoder_layers_per_block": (1, 2, 1, 1, 2),
        "decoder_spatio_temporal_scaling": (True,) * 4,
        "decoder_inject_noise": (False,) * 5,
        "upsample_type": ("spatiotemporal", "spatiotemporal", "temporal", "spatial"),
        "upsample_residual": (False,) * 4,
        "upsample_factor": (2, 2, 1, 2),
        "decoder_spatial_padding_mode": "zeros",
    },
    "vocoder": {
        "hidden_channels": 64,
        "resnet_kernel_sizes": (3,),
        "resnet_dilations": ((3,),),
        "bwe_in_channels": 32,
        "bwe_hidden_channels": 32,
        "bwe_resnet_kernel_sizes": (7,),
        "bwe_resnet_dilations": ((1,),),
        "num_mel_channels": 16,
    },
}
# And those in which LTX-2.5 is another one than LTX-2.3.
LTX2_5 = LTX2_3 | {
    "text_encoder": {
        "global_head_dim": 12,
        "num_global_key_value_heads": 1,
        "num_key_value_heads": 2,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "transformer": LTX2_3["transformer"] | {"ff_bias": False, "use_keyframes_abs_pos_embedding": True},
}


def tiny_pipeline(
    folder: Path, seed: int = 0, changes: Mapping[str, Mapping[str, Any]] | None = None, halved: Collection[str] = ()
) -> LTX2Pipeline:
    """A pipeline with every weight random, also saved to `folder`.

    `changes` are to the configs of its parts, by name; the weights of the parts in `halved` are bfloat16 on disk.
    """

    configs = {name: {**usual, **(changes or {}).get(name, {})} for name, usual in PARTS.items()}
    pipeline = build(folder, configs)
    for number, name in enumerate(NETWORKS):
        randomise(getattr(pipeline, name), seed=seed + number)
    for name in halved:
        for tensor in getattr(pipeline, name).state_dict().values():
            tensor.copy_(_half(tensor))
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    for name in halved:
        (path,) = (folder / name).glob("*.safetensors")
        save_file({key: _half(tensor) for key, tensor in load_file(path).items()}, path)
    return pipeline


def _half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def draw_noise(
    pipeline: LTX2Pipeline, seed: int, num_frames: int, height: int, width: int, fps: float
) -> dict[str, torch.Tensor]:
    """What a pipeline begins a clip with, in the layout of a noise file."""
    generator, audio_vae = torch.Generator().manual_seed(seed), pipeline.audio_vae.config
    seconds_of_latent = 4 * audio_vae.mel_hop_length / audio_vae.sample_rate
    video = (1, pipeline.vae.config.latent_channels, (num_frames - 1) // 8 + 1, height // 32, width // 32)
    audio = (1, audio_vae.latent_channels, round(num_frames / fps / seconds_of_latent), audio_vae.mel_bins // 4)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("video", video), ("audio", audio))}
