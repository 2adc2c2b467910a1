"""A tiny LTX-2 pipeline of diffusers with random weights, and the folder that it saves itself to."""

from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTX2Audio,
    AutoencoderKLLTX2Video,
    FlowMatchEulerDiscreteScheduler,
    LTX2Pipeline,
    LTX2VideoTransformer3DModel,
)
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from transformers import AutoTokenizer, Gemma3Config, Gemma3ForConditionalGeneration

from ltx2_cli.models.tokenizer import BYTE_VOCABULARY, byte_tokenizer
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
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 14,
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
VOCODER = {"in_channels": 32, "hidden_channels": 32}
SCHEDULER = {
    "use_dynamic_shifting": True,
    "base_shift": 0.95,
    "max_shift": 2.05,
    "base_image_seq_len": 1024,
    "max_image_seq_len": 4096,
    "shift_terminal": 0.1,
}


def tiny_pipeline(folder: Path, seed: int = 0, **transformer: Any) -> LTX2Pipeline:
    """A pipeline with every weight random, also saved to `folder`; keywords change the transformer's config."""
    byte_tokenizer(folder / "tokenizer")
    config = Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=1)
    modules = {
        "text_encoder": Gemma3ForConditionalGeneration(config),
        "connectors": LTX2TextConnectors(**CONNECTORS),
        "transformer": LTX2VideoTransformer3DModel(**TRANSFORMER | transformer),
        "vae": AutoencoderKLLTX2Video(**VAE),
        "audio_vae": AutoencoderKLLTX2Audio(**AUDIO_VAE),
        "vocoder": LTX2Vocoder(**VOCODER),
    }
    for number, module in enumerate(modules.values()):
        randomise(module, seed=seed + number)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    pipeline = LTX2Pipeline(tokenizer=tokenizer, scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER), **modules)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return pipeline


def draw_noise(seed: int, num_frames: int, height: int, width: int, fps: float) -> dict[str, torch.Tensor]:
    """Noise for a clip of the tiny pipeline, in the layout of a noise file."""
    generator = torch.Generator().manual_seed(seed)
    video = (1, TRANSFORMER["in_channels"], (num_frames - 1) // 8 + 1, height // 32, width // 32)
    audio = (1, AUDIO_VAE["latent_channels"], round(num_frames / fps * 25), AUDIO_VAE["mel_bins"] // 4)
    return {name: torch.randn(shape, generator=generator) for name, shape in (("video", video), ("audio", audio))}
