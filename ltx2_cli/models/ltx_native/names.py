"""The published single files: under which names the networks' tensors stand there."""

from ltx2_cli.weights.checkpoint import Renaming

NORMS = (("norm_q", "q_norm"), ("norm_k", "k_norm"))
STATISTICS = (
    ("latents_mean", "per_channel_statistics.mean-of-means"),
    ("latents_std", "per_channel_statistics.std-of-means"),
)
CROSS = (
    ("av_cross_attn_video_scale_shift", "av_ca_video_scale_shift_adaln_single"),
    ("av_cross_attn_audio_scale_shift", "av_ca_audio_scale_shift_adaln_single"),
    ("av_cross_attn_video_a2v_gate", "av_ca_a2v_gate_adaln_single"),
    ("av_cross_attn_audio_v2a_gate", "av_ca_v2a_gate_adaln_single"),
    ("video_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_video"),
    ("audio_a2v_cross_attn_scale_shift_table", "scale_shift_table_a2v_ca_audio"),
)
RENAMINGS = {
    "transformer": Renaming(
        "model.diffusion_model.",
        (
            ("proj_in", "patchify_proj"),
            ("audio_proj_in", "audio_patchify_proj"),
            ("time_embed", "adaln_single"),
            ("audio_time_embed", "audio_adaln_single"),
            ("prompt_adaln", "prompt_adaln_single"),
            ("audio_prompt_adaln", "audio_prompt_adaln_single"),
            *CROSS,
            *NORMS,
        ),
    ),
    "connectors": Renaming(
        "",
        (
            ("video_connector", "model.diffusion_model.video_embeddings_connector"),
            ("audio_connector", "model.diffusion_model.audio_embeddings_connector"),
            ("text_proj_in", "text_embedding_projection.aggregate_embed"),
            ("video_text_proj_in", "text_embedding_projection.video_aggregate_embed"),
            ("audio_text_proj_in", "text_embedding_projection.audio_aggregate_embed"),
            ("transformer_blocks", "transformer_1d_blocks"),
            *NORMS,
        ),
    ),
    "audio_vae": Renaming("audio_vae.", STATISTICS),
    "vocoder": Renaming(
        "vocoder.",
        (
            ("conv_in", "conv_pre"),
            ("conv_out", "conv_post"),
            ("upsamplers", "ups"),
            ("resnets", "resblocks"),
            ("act_out", "act_post"),
            ("downsample", "downsample.lowpass"),
        ),
    ),
}


def video_vae_renaming(encoder_stages: int, decoder_stages: int) -> Renaming:
    """The video autoencoder's names: stages and what lies between them are counted through in a single file."""
    down, up = range(encoder_stages), range(decoder_stages)
    return Renaming(
        "vae.",
        (
            *STATISTICS,
            *((f"encoder.down_blocks.{i}.resnets", f"encoder.down_blocks.{2 * i}.res_blocks") for i in down),
            *((f"encoder.down_blocks.{i}.downsamplers.0", f"encoder.down_blocks.{2 * i + 1}") for i in down),
            ("encoder.mid_block.resnets", f"encoder.down_blocks.{2 * encoder_stages}.res_blocks"),
            ("decoder.mid_block.resnets", "decoder.up_blocks.0.res_blocks"),
            *((f"decoder.up_blocks.{i}.upsamplers.0", f"decoder.up_blocks.{2 * i + 1}") for i in up),
            *((f"decoder.up_blocks.{i}.resnets", f"decoder.up_blocks.{2 * i + 2}.res_blocks") for i in up),
        ),
    )
