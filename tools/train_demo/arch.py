"""What the embedded model is made of: LTX-2.3's architecture, all of its parts, at the smallest size that works."""

from dataclasses import replace

from ltx2_cli.models.arch import Arch
from ltx2_cli.models.audio_vae import AudioVAEArch
from ltx2_cli.models.gemma import gemma_arch
from ltx2_cli.models.networks import PRESETS
from ltx2_cli.models.upsampler import LatentUpsamplerArch
from ltx2_cli.models.vocoder import VocoderWithBWEArch
from tools.train_demo.words import VOCABULARY

LTX2_3 = PRESETS["ltx2.3"]
HEADS = 4
VIDEO_WIDTH, AUDIO_WIDTH = 128, 64
TEXT_WIDTH, TEXT_LAYERS = 64, 3

TEXT_CONFIG = {
    "architectures": ["Gemma3TextModel"],
    "model_type": "gemma3_text",
    "vocab_size": len(VOCABULARY),
    "hidden_size": TEXT_WIDTH,
    "intermediate_size": 2 * TEXT_WIDTH,
    "num_hidden_layers": TEXT_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": TEXT_WIDTH // 2,
    "query_pre_attn_scalar": TEXT_WIDTH // 2,
    "sliding_window": 1024,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 1024,
}
ARCH = Arch(
    replace(
        LTX2_3.transformer,
        in_channels=32,
        out_channels=32,
        num_attention_heads=HEADS,
        attention_head_dim=VIDEO_WIDTH // HEADS,
        cross_attention_dim=VIDEO_WIDTH,
        audio_in_channels=32,
        audio_out_channels=32,
        audio_num_attention_heads=HEADS,
        audio_attention_head_dim=AUDIO_WIDTH // HEADS,
        audio_cross_attention_dim=AUDIO_WIDTH,
        num_layers=6,
        caption_channels=TEXT_WIDTH,
    ),
    replace(
        LTX2_3.connectors,
        caption_channels=TEXT_WIDTH,
        text_proj_in_factor=TEXT_LAYERS + 1,
        video_connector_num_attention_heads=HEADS,
        video_connector_attention_head_dim=VIDEO_WIDTH // HEADS,
        video_connector_num_layers=2,
        video_connector_num_learnable_registers=32,
        audio_connector_num_attention_heads=HEADS,
        audio_connector_attention_head_dim=AUDIO_WIDTH // HEADS,
        audio_connector_num_layers=2,
        audio_connector_num_learnable_registers=32,
        video_hidden_dim=VIDEO_WIDTH,
        audio_hidden_dim=AUDIO_WIDTH,
    ),
    replace(
        LTX2_3.vae,
        latent_channels=32,
        block_out_channels=(32, 64, 64, 128),
        decoder_block_out_channels=(32, 64, 64, 64),
        upsample_factor=(1, 2, 1, 1),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 3, 4, 4),
    ),
    # diffusers counts the statistics of latents by base_channels, so these are latent_channels · mel_bins / 4
    AudioVAEArch(base_channels=32, ch_mult=(1, 1, 2), num_res_blocks=1, latent_channels=2),
    VocoderWithBWEArch(
        hidden_channels=128,
        upsample_kernel_sizes=(20, 8, 8),
        upsample_factors=(10, 4, 4),
        resnet_kernel_sizes=(3, 7),
        resnet_dilations=((1,), (1,)),
        bwe_hidden_channels=64,
        bwe_upsample_kernel_sizes=(31, 32),
        bwe_upsample_factors=(15, 16),
        bwe_resnet_kernel_sizes=(3,),
        bwe_resnet_dilations=((1,),),
    ),
    LTX2_3.scheduler,
    gemma_arch(TEXT_CONFIG, "the embedded model"),
)
UPSAMPLER_ARCH = LatentUpsamplerArch(
    in_channels=32, mid_channels=64, num_blocks_per_stage=1, use_rational_resampler=False
)
