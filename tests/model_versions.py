"""The embedded model's architecture with random weights, and one like it of the model version before."""

import json
from dataclasses import replace
from pathlib import Path

from flax import nnx

from ltx2_cli.models.arch import Arch
from ltx2_cli.models.gemma import Gemma, gemma_arch
from ltx2_cli.models.networks import abstract_networks
from ltx2_cli.models.upsampler import LatentUpsampler
from ltx2_cli.models.video_vae import VideoVAEArch
from ltx2_cli.models.vocoder import VocoderArch
from ltx2_cli.request.spec import DType
from ltx2_cli.weights.declare import Scope
from ltx2_cli.weights.published import UPSAMPLER
from tools.train_demo.arch import ARCH as LTX2_3
from tools.train_demo.arch import TEXT_CONFIG, UPSAMPLER_ARCH
from tools.train_demo.ship import ship
from tools.weights import random_weights, save

SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
LTX2 = Arch(
    replace(
        LTX2_3.transformer,
        gated_attn=False,
        audio_gated_attn=False,
        cross_attn_mod=False,
        audio_cross_attn_mod=False,
        use_prompt_embeddings=True,
    ),
    replace(
        LTX2_3.connectors,
        video_connector_num_attention_heads=2,
        video_connector_num_layers=2,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=32,
        audio_connector_num_layers=2,
        video_gated_attn=False,
        audio_gated_attn=False,
        per_modality_projections=False,
        proj_bias=False,
    ),
    VideoVAEArch(
        latent_channels=32,
        block_out_channels=(32, 64, 64, 64),
        decoder_block_out_channels=(16, 32, 64),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1),
        decoder_causal=False,
    ),
    LTX2_3.audio_vae,
    VocoderArch(hidden_channels=64),
    LTX2_3.scheduler,
    LTX2_3.text_encoder,
)
GEMMA_4 = {  # as narrow and deep as the embedded model's text encoder
    "architectures": ["Gemma4UnifiedTextModel"],
    "model_type": "gemma4_unified_text",
    **{key: TEXT_CONFIG[key] for key in SHARED},
    "global_head_dim": 48,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
LTX2_5 = replace(
    LTX2_3,
    transformer=replace(LTX2_3.transformer, num_layers=2, ff_bias=False, use_keyframes_abs_pos_embedding=True),
    text_encoder=gemma_arch(GEMMA_4, "Gemma-4"),
)


def other_text_encoder(folder: Path, **changes: object) -> None:
    """A text encoder in itself sound, in a folder: the embedded model's with other values in its config."""
    config = TEXT_CONFIG | changes
    arch = gemma_arch(config, str(folder))
    save(random_weights(Gemma(Scope("float32"), arch), seed=0), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def random_networks(arch: Arch) -> dict[str, nnx.Module]:
    """All of a checkpoint's networks, by the names of their folders, with random weights in float32."""
    networks = abstract_networks(arch, DType.float32, DType.float32).present()
    networks |= {UPSAMPLER: LatentUpsampler(Scope("float32"), UPSAMPLER_ARCH)}
    return {name: random_weights(each, seed) for seed, (name, each) in enumerate(networks.items())}


def random_folder(arch: Arch, folder: Path) -> Path:
    """A checkpoint of this architecture with such weights, in `folder`."""
    ship(random_networks(arch), arch, folder)
    return folder
